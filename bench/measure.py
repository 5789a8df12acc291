"""Timing that is fair to both sides: cases take turns, samples are kept, modes are told apart."""

import asyncio
import gc
import json
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from bench import ROOT

T = TypeVar("T")

MODE_RATIO = 2.0  # rounds further apart than this are two modes, not noise


class Times(NamedTuple):
    """Microseconds per call. `slow_us` is set where rounds fell into two modes: p50 is the fast one's."""

    p50_us: float
    p99_us: float
    slow_us: float | None = None


@contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection inside, as servers arrange it for their hot path; one before."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def sample_us(call: Callable[[Any], object], inputs: Sequence[Any]) -> list[float]:
    """One call per input, each timed on its own, after one that isn't."""
    clock = time.perf_counter_ns
    samples: list[float] = []
    with quiet():
        call(inputs[-1])
        for each in inputs:
            begin = clock()
            call(each)
            samples.append((clock() - begin) / 1000)
    return samples


def times_of(rounds: Sequence[Sequence[float]]) -> Times:
    """Times of rounds of samples. The first round warms up and is left out if there are others."""
    kept = list(rounds[1:] or rounds)
    medians = [statistics.median(samples) for samples in kept]
    fastest, slowest = min(medians), max(medians)
    slow_us = None
    if slowest > MODE_RATIO * fastest:
        border = (fastest * slowest) ** 0.5
        slow_us = statistics.median(m for m in medians if m >= border)
        kept = [samples for samples, m in zip(kept, medians, strict=True) if m < border]
    together = sorted(us for samples in kept for us in samples)
    p50 = statistics.median(together)
    return Times(p50, together[min(len(together) - 1, len(together) * 99 // 100)], slow_us)


def take_turns(
    cases: Mapping[str, Callable[[Any], object]],
    inputs: Mapping[str, Sequence[Any]],
    rounds: int,
) -> dict[str, Times]:
    """Times of each case over its inputs; in every round all have their turn."""
    samples: dict[str, list[list[float]]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, call in cases.items():
            samples[name].append(sample_us(call, inputs[name]))
    return {name: times_of(each) for name, each in samples.items()}


def seconds(work: Callable[[], object]) -> float:
    """Seconds that `work` takes, once."""
    with quiet():
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin


def rss_nbytes() -> int:
    """Resident memory of this process. Linux."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def peak_rss_nbytes() -> int:
    """The most this process ever had resident. Linux."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each figure, over the runs."""
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def machine() -> dict[str, str]:
    """Hardware, Python and commit of the figures."""
    told = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    named = re.search(r"^model name\s*: (.+)$", told, re.MULTILINE)
    amx = "with AMX" if "amx_tile" in told else "without AMX"
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    git = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    return {
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "processor": f"{named[1] if named else platform.processor()} {amx}",
        "commit": git.stdout.strip() or "of no checkout",
    }


def conclude(result: Any, out: Path | None, *, is_part: bool = False) -> None:
    """Print a result as the last line, one JSON object, and write it to `out`, if that is given.

    `is_part`: what else the file has already stays.
    """
    if is_part and out is not None and out.exists():
        result = json.loads(out.read_text()) | result
    text = json.dumps(rounded(result))
    if out is not None:
        out.write_text(text + "\n")
    print(text)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


def last_line(command: Sequence[str]) -> dict[str, Any]:
    """The JSON object that ends a command's stdout. Raises CalledProcessError if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def rounded(value: Any) -> Any:
    """`value` with its floats cut to four significant digits, for printing."""
    match value:
        case float():
            return float(f"{value:.4g}")
        case dict():
            return {key: rounded(each) for key, each in value.items()}
        case _:
            return value


def ratios(ours: Any, peer: Any, *, lower_is_better: bool) -> Any:
    """Ratios in our favour, in the shape of what both have."""
    if isinstance(ours, dict) and isinstance(peer, dict):
        both = [key for key in ours if key in peer]
        return {key: ratios(ours[key], peer[key], lower_is_better=lower_is_better) for key in both}
    if not ours or not peer:
        return None
    return peer / ours if lower_is_better else ours / peer
