"""Fidelity of the mocked engine to real ones.

    python -m bench.mocker.fidelity [--model smollm2] [--threads N] [--rates R ...] [--seeds S ...]
        a real engine on this CPU: its passes are profiled, then workloads with forks run on it in
        real time and, under that profile, on the mocked engine in virtual time. Wants a quiet machine;
        on a busy one --cpu-time lets one thread's CPU seconds pass for time, in the profile too.

The last line is one JSON object, by clock and threads; a FILE that is there keeps its others.
"""

import argparse
import gc
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.measure import conclude, machine
from bench.mocker.fidelity_engine import Shape, Workload, compare, foretell, holds, play
from mallee.mocker.timing.files import GridData, TimingFile, read_timing
from mallee.mocker.timing.grid import Decodes, Prefills
from mallee.protocol.errors import ConfigError
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.worker.engine import Engine
from mallee.worker.records import EngineConfig

MEMORY_TOKENS = 49152
BLOCK_SIZE = 16


class CpuClock:
    """CPU seconds of this thread and the time it waited, without other processes' work."""

    def __init__(self) -> None:
        self._waited = 0.0

    def __call__(self) -> float:
        return time.thread_time() + self._waited

    def wait(self, seconds: float) -> None:
        self._waited += seconds


def of_engine(args: argparse.Namespace) -> dict[str, Any]:
    """Profile, run, predict, compare."""
    from mallee.mocker.measure import Profiler, Sweep, warm_up
    from mallee.worker.model.loading.source import resolve_model
    from mallee.worker.model.runner import load

    forward = load(
        resolve_model(args.model),
        num_blocks=MEMORY_TOKENS // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        threads=args.threads,
    )
    warm_up(forward)
    gc.collect()
    gc.freeze()  # as workers do: a full collection would fall into a step
    cpu = CpuClock()
    clock, wait = (cpu, cpu.wait) if args.cpu_time else (time.perf_counter, time.sleep)
    if args.cpu_time and args.threads != 1:
        raise ConfigError(f"--cpu-time with --threads {args.threads}: counts one thread")
    full = Sweep.quick() if args.quick else replace(Sweep(), repeats=2, steps=4)
    sweep = full.fitted_to(forward.spec.max_model_len, forward.num_blocks, BLOCK_SIZE)
    profiler = Profiler(forward, sweep, clock=clock)
    before = read_timing(args.profile) if args.profile is not None else profiler.measure({})
    config = EngineConfig()
    runs = []
    for rate in args.rates:
        for seed in args.seeds:
            shape = Shape(seconds=args.seconds, rate=rate)
            arrivals = Workload(shape, forward.spec.vocab_size, seed).arrivals()
            engine = Engine(
                forward,
                config=config,
                clock=time.monotonic,
                worker=WorkerId("w0"),
                incarnation=Incarnation(1),
            )
            runs.append(
                (f"{rate:g} a second, seed {seed}", arrivals, play(engine, arrivals, clock, wait))
            )
            engine.close()
    # Before and after: a machine is not equally fast for minutes.
    after = before if args.profile is not None else profiler.measure({})
    measured = averaged(before, after)
    if args.save is not None:
        measured.save(args.save)
    timing = measured.timing()
    apart = replace(timing, shares_reads=False)
    reports: dict[str, Any] = {}
    for name, arrivals, real in runs:
        report = compare(real, foretell(timing, arrivals, forward, config))
        report["holds"] = holds(report)
        other = compare(real, foretell(apart, arrivals, forward, config))
        report["reads_not_shared"] = {n: other[n]["p50"]["off"] for n in ("ttft", "itl")}
        reports[name] = report
        for figure in ("ttft", "itl", "e2e"):
            offs = ", ".join(f"{p} {100 * r['off']:+.1f} %" for p, r in report[figure].items())
            print(f"  {name}, {figure}: {offs}")
    return {
        "model": args.model,
        "threads": args.threads,
        "quick": args.quick,
        "cpu_time": args.cpu_time,
        "shape": Shape(seconds=args.seconds)._asdict(),
        "drift": drift(before, after),
        "jitter": measured.jitter,
        "noise": profiler.spreads.noise,
        **machine(),
        "runs": reports,
    }


def averaged(one: TimingFile, other: TimingFile) -> TimingFile:
    """The profile with the geometric mean of both in every cell, and the mean of what a request takes."""
    a, b = one.model, other.model
    assert isinstance(a, GridData)
    assert isinstance(b, GridData)

    def cells(x: Any, y: Any) -> Any:
        return tuple(map(tuple, np.sqrt(np.array(x) * np.array(y)).tolist()))

    prefill = Prefills(a.prefill.new, a.prefill.prefix, cells(a.prefill.seconds, b.prefill.seconds))
    decode = Decodes(a.decode.rows, a.decode.context, cells(a.decode.seconds, b.decode.seconds))
    request_s = (one.request_s + other.request_s) / 2
    return msgspec.structs.replace(one, request_s=request_s, model=GridData(prefill, decode))


def drift(before: TimingFile, after: TimingFile) -> dict[str, float]:
    """By how much cells changed between the two, as shares: in the median, and nine in ten by less."""
    a, b = before.model, after.model
    assert isinstance(a, GridData)
    assert isinstance(b, GridData)
    pairs = ((a.prefill.seconds, b.prefill.seconds), (a.decode.seconds, b.decode.seconds))
    change = np.concatenate([(np.array(y) / np.array(x) - 1).ravel() for x, y in pairs])
    return {"median": float(np.median(change)), "p90": float(np.quantile(np.abs(change), 0.9))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[0.5, 1.0], help="requests a second"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[5, 6])
    parser.add_argument("--quick", action="store_true", help="a coarse profile")
    parser.add_argument("--profile", type=Path, help="take this one, don't measure")
    parser.add_argument("--save", type=Path, help="write the measured profile")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    clock, plural = "cpu_time" if args.cpu_time else "wall", "s" if args.threads > 1 else ""
    report = {f"{clock}_{args.threads}_thread{plural}": of_engine(args)}
    conclude(report, args.out, is_part=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
