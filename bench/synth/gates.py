"""Agreement of generated traces with their sources: every gate, on real traces, for both models.

    python -m bench.synth.gates [--traces mooncake,fleet,..] [--models tree,session] [--seeds 8]
                                [--no-replay] [--processes 2] [--out FILE]

A model is fitted once to each trace and makes as many requests as the trace has, with each seed. Values
are medians over the seeds; `mallee.synth.compare.gates` says how each is computed. Beside them is noise:
"starts" is the source against itself with recorded sessions begun at other times (Mooncake: at other places
inside the 3 s ticks), "halves" half of its sessions against the other half. Where noise alone is above a bar,
a miss says little. Columns "of half" are models that learned half of the sessions, against the other half: to
be read beside the noise of halves. The last line is one JSON object.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench import TRACES as RECORDED
from mallee.cli.synth.replays import replay
from mallee.synth.compare.fits import (
    DEALS,
    Reading,
    compare_model,
    conditions,
    held_out,
    noises,
    source_of,
)
from mallee.synth.compare.gates import Outcome, Value, outcomes
from mallee.synth.compare.report import ALL_GATES, GateTable, as_data, counts, shown
from mallee.synth.fit import fit
from mallee.traces.read import read_workload
from mallee.traces.workload import Workload

MODELS: Final = ("tree", "session")
HELD: Final = " of half"  # of columns: learned from half of the sessions, compared with the others
TRACES: Final[dict[str, tuple[str, int | None]]] = {
    "fleet": ("claude_code_sessions.jsonl.gz", 512),
    "mooncake": ("mooncake_conversation.jsonl.gz", 512),
    "mini_swe": ("miniswe_swebench_blk64.jsonl.gz", 64),
    "game24": ("tot_game24_trees.jsonl.gz", 16),
    "crosswords": ("tot_crosswords_dfs.jsonl.gz", 16),
    "azure_code": ("azure2023_code.csv.gz", None),
    "azure_conv": ("azure2023_conv.csv.gz", None),
}
"""File and tokens of a block, the longest runs first."""


class Found(NamedTuple):
    """All that came of a trace: values by seed of each model and of each kind of noise."""

    conditions: dict[str, Any]
    models: dict[str, list[dict[str, Value]]]
    noise: dict[str, list[dict[str, Value]]]
    details: dict[str, dict[str, Any]]  # by model
    source_replays: dict[str, Any] | None


def measured(trace: str, given: argparse.Namespace) -> Found:
    """Models fitted to a trace and compared with it; the first seeds are replayed, too."""
    file, block_size = TRACES[trace]
    reading = Reading(partial(_read, RECORDED / file, given.limit), block_size)
    replayer = None if given.no_replay else replay
    source = source_of(reading, replayer, requests=given.replay_requests)
    unreplayed = replace(source, stage=None)
    columns: dict[str, list[dict[str, Value]]] = {}
    details: dict[str, dict[str, Any]] = {}
    for name in given.models:
        begun = time.process_time()
        model = fit(source.trace, name)
        fit_s = time.process_time() - begun
        samples = [
            compare_model(source, model, seed)
            if seed <= given.replay_seeds
            else compare_model(unreplayed, model, seed, with_lengths=False)
            for seed in range(1, given.seeds + 1)
        ]
        columns[name] = [each.values for each in samples]
        details[name] = {
            "fit_cpu_s": round(fit_s, 3),
            "hit_rates_at_1x_4x_16x": [each.hit_rates for each in samples],
            "replays": [each.replays.as_data() for each in samples if each.replays is not None],
        }
    for name in () if given.no_held_out else given.models:
        held = [held_out(source, partial(fit, kind=name), deal) for deal in DEALS]
        columns[name + HELD] = [each for each in held if each is not None]
    return Found(
        conditions(source),
        columns,
        noises(source),
        details,
        None if source.stage is None else source.stage.source.as_data(),
    )


def _read(path: Path, limit: int | None, seed: int) -> Workload:
    return read_workload(path, seed=seed, limit=limit)


def judged(columns: dict[str, list[dict[str, Value]]]) -> dict[str, list[Outcome]]:
    return {name: outcomes(values, ALL_GATES) for name, values in columns.items() if values}


def tables(found: dict[str, Found]) -> Iterator[str]:
    """Markdown, trace by trace."""
    for trace, each in found.items():
        about = each.conditions
        yield f"### {trace}: {about['requests']:,} requests, {about['block_size']}-token blocks"
        yield ""
        yield from GateTable(judged(each.models), judged(each.noise)).markdown()
        yield ""


def summary(found: dict[str, Found]) -> Iterator[str]:
    """Markdown: how many gates each model passes on each trace, and which it fails."""
    yield "| trace | model | passes | fails |"
    yield "|---|---|---|---|"
    for trace, each in found.items():
        for model, gates in judged(each.models).items():
            count = counts(gates)
            fails = [f"{g.gate.name} {shown(g.value)}" for g in gates if g.verdict == "FAIL"]
            of = count["pass"] + count["fail"]
            yield f"| {trace} | {model} | {count['pass']} of {of} | {', '.join(fails)} |"
    yield ""


def as_json(found: dict[str, Found]) -> dict[str, Any]:
    return {
        trace: {
            "conditions": each.conditions,
            "noise": {name: as_data(gates) for name, gates in judged(each.noise).items()},
            "source_replays": each.source_replays,
            "models": {
                name: {
                    "counts": counts(gates),
                    **each.details.get(name, {}),
                    "gates": as_data(gates),
                }
                for name, gates in judged(each.models).items()
            },
        }
        for trace, each in found.items()
    }


def main(args: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", type=_names, default=list(TRACES))
    parser.add_argument("--models", type=_names, default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument(
        "--replay-seeds",
        type=int,
        default=2,
        help="replayed, and followed at 4 and 16 times the length",
    )
    parser.add_argument("--replay-requests", type=int, default=6000, help="the first of each trace")
    parser.add_argument("--no-replay", action="store_true")
    parser.add_argument("--no-held-out", action="store_true")
    parser.add_argument("--limit", type=int, help="only so many requests of each trace")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the JSON here; what it has stays")
    given = parser.parse_args(args)
    begun = time.perf_counter()
    done: dict[str, Found] = {}
    with ProcessPoolExecutor(given.processes, get_context("spawn"), max_tasks_per_child=1) as pool:
        running = {
            pool.submit(measured, trace, given): trace for trace in TRACES if trace in given.traces
        }
        for future in as_completed(running):
            done[running[future]] = future.result()
            sys.stderr.write(f"{time.perf_counter() - begun:6.0f} s  {running[future]}\n")
    found = {trace: done[trace] for trace in running.values()}
    print("\n".join([*summary(found), *tables(found)]))
    data = as_json(found)
    if given.out is not None:
        _merge(given.out, data)
    print(json.dumps(data, allow_nan=False))


def _merge(path: Path, data: dict[str, Any]) -> None:
    """Traces and models that were not run keep what the file has of them."""
    whole = json.loads(path.read_text()) if path.exists() else {}
    for trace, parts in data.items():
        before = whole.get(trace, {"noise": {}, "models": {}})
        whole[trace] = {
            "conditions": parts["conditions"],
            "noise": before["noise"] | parts["noise"],
            "source_replays": parts["source_replays"],
            "models": before["models"] | parts["models"],
        }
    lines = (f' "{trace}": {json.dumps(parts, allow_nan=False)}' for trace, parts in whole.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _names(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    main(sys.argv[1:])
