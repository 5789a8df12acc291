"""Speed and memory of learning, generating, writing and measuring traces.

    python -m bench.synth [--only generate,memory,learn,curve] [--requests 1000000] [--out FILE]

    generate  requests a minute of each model, learned from Mooncake conversation (24 blocks deep):
              generation alone, and written as rows of its format
    memory    the most a process ever had while it generated and wrote 12 k, 100 k and 1 M requests, and
              bytes a request between the last two
    learn     the fleet of recorded agent sessions (40 k requests, 9.7 M block references): seconds to read
              and to learn it, and the most memory
    curve     exact LRU hit rates at all cache sizes from ten million block references

Every case has a process of its own and one core; kernels are compiled before (the first run on a machine
takes longer, and says so on stderr). Processor time is what counts where a machine is shared; wall time is
beside it. The last line is one JSON object.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench import TRACES
from bench.measure import peak_rss_nbytes, rounded
from mallee.synth.analysis.analysis import analyze
from mallee.synth.analysis.stack import miss_curve
from mallee.synth.fit import fit
from mallee.traces.read import read_workload
from mallee.traces.trace import Trace, trace_of
from mallee.traces.workload import Workload
from mallee.traces.write import write_workload

MOONCAKE: Final = TRACES / "mooncake_conversation.jsonl.gz"
FLEET: Final = TRACES / "claude_code_sessions.jsonl.gz"
FORMATS: Final = {"tree": "mooncake", "session": "agentic"}
SIZES: Final = (12_031, 100_000, 1_000_000)
REFERENCES: Final = 10_000_000
BARS: Final = {
    "requests_per_min": 1e6,
    "learn_s": 20.0,
    "learn_peak_mb": 600.0,
    "curve_s": 10.0,
}


class Clock:
    """Processor and wall time since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def took(self) -> dict[str, float]:
        return {
            "cpu_s": time.process_time() - self._cpu,
            "wall_s": time.perf_counter() - self._wall,
        }


def mooncake() -> Trace:
    return trace_of(read_workload(MOONCAKE, seed=1))


def drain(workload: Workload) -> tuple[int, int]:
    """Requests and ids that came."""
    num = ids = 0
    for request in workload:
        num += 1
        ids += len(request.ids)
    return num, ids


def generate(model: str, requests: int) -> dict[str, Any]:
    """Generation alone, then with writing."""
    learned = fit(mooncake(), model)
    drain(learned.generate(requests=2000, seed=1))
    clock = Clock()
    num, ids = drain(learned.generate(requests=requests, seed=2))
    alone = clock.took()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "made.jsonl"
        clock = Clock()
        write_workload(learned.generate(requests=requests, seed=2), path, format=FORMATS[model])
        written = clock.took()
        size = path.stat().st_size
    return {
        "requests": num,
        "ids_a_request": ids / num,
        "alone": alone | {"requests_per_min": 60 * num / alone["cpu_s"]},
        "written": written | {"requests_per_min": 60 * num / written["cpu_s"], "mb": size / 1e6},
    }


def memory(model: str, requests: int) -> dict[str, Any]:
    """Of one process that learns, generates and writes."""
    learned = fit(mooncake(), model)
    drain(learned.generate(requests=2000, seed=1))
    before = peak_rss_nbytes()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "made.jsonl"
        write_workload(learned.generate(requests=requests, seed=2), path, format=FORMATS[model])
    return {"requests": requests, "learned_mb": before / 1e6, "peak_mb": peak_rss_nbytes() / 1e6}


def learn(model: str) -> dict[str, Any]:
    """The whole fleet, at blocks of 512 tokens; "" for the analysis alone."""
    clock = Clock()
    trace = trace_of(read_workload(FLEET, seed=1), block_size=512)
    read = clock.took()
    clock = Clock()
    if model:
        fit(trace, model)
    else:
        analyze(trace)
    learned = clock.took()
    return {
        "requests": len(trace),
        "references": len(trace.blocks),
        "read": read,
        "learn": learned,
        "cpu_s": read["cpu_s"] + learned["cpu_s"],
        "peak_mb": peak_rss_nbytes() / 1e6,
    }


def curve() -> dict[str, Any]:
    """The fleet's references, again from the start until there are ten million."""
    trace = trace_of(read_workload(FLEET, seed=1), block_size=512)
    clock = Clock()
    found = miss_curve(_repeated(trace, REFERENCES))
    return {"references": found.num_references, "blocks": found.num_blocks, **clock.took()}


def _repeated(trace: Trace, references: int) -> Trace:
    from dataclasses import replace

    times = -(-references // len(trace.blocks))
    depth = np.tile(trace.depth, times)
    num = int(np.searchsorted(np.cumsum(depth), references)) + 1
    starts = np.concatenate([[0], np.cumsum(depth[:num])]).astype(np.int64)
    blocks = np.tile(trace.blocks, times)[: starts[-1]]
    return replace(trace, starts=starts, blocks=blocks, arrival_s=np.arange(num, dtype=np.float64))


def alone(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """`work` in a fresh process, so that its memory is its own."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(work)


def warm_up() -> dict[str, Any]:
    """Compiles what is compiled when first used."""
    clock = Clock()
    trace = trace_of(read_workload(MOONCAKE, seed=1, limit=500))
    analyze(trace)
    for model in FORMATS:
        drain(fit(trace, model).generate(requests=500, seed=1))
    return clock.took()


def memories(model: str) -> dict[str, Any]:
    found = [alone(partial(memory, model, size)) for size in SIZES]
    more = found[-1]["requests"] - found[-2]["requests"]
    slope = 1e6 * (found[-1]["peak_mb"] - found[-2]["peak_mb"]) / more
    return {"sizes": found, "bytes_a_request": slope}


def main(args: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(CASES))
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(args)
    sys.stderr.write(f"warmed up in {alone(warm_up)['wall_s']:.1f} s\n")
    found: dict[str, Any] = {"bars": BARS}
    for name in given.only:
        begun = time.perf_counter()
        found[name] = rounded(CASES[name](given.requests))
        sys.stderr.write(f"{name}: {time.perf_counter() - begun:.0f} s\n")
    text = json.dumps(found)
    if given.out is not None:
        given.out.write_text(text + "\n")
    print(text)


CASES: Final[dict[str, Callable[[int], dict[str, Any]]]] = {
    "generate": lambda n: {model: alone(partial(generate, model, n)) for model in FORMATS},
    "memory": lambda n: {model: memories(model) for model in FORMATS},
    "learn": lambda n: {
        model or "analysis": alone(partial(learn, model)) for model in (*FORMATS, "")
    },
    "curve": lambda n: alone(curve),
}


if __name__ == "__main__":
    main(sys.argv[1:])
