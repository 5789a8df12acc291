"""Worth of each feature of the engine: workloads over configurations, each with one feature more.

    python -m bench.engine.matrix [--workloads W1,W2,...] [--orders W2,W3] [--rounds N] [--out FILE]
    python -m bench.engine.matrix --model smollm2        on the torch engine, in real time

    static      a batch is filled, run until its last answer ends, and only then filled again; every
                sequence has memory of the longest length (contiguous)
    continuous  requests join and leave at every step
    paged       memory by the block
    chunked     long prompts run in pieces, beside those that decode
    prefix      blocks are found by their content
    fork        clients fork capsules instead of sending texts again
    tree        what rows share is read once

Orders of the scheduler are compared on the `--orders` workloads, with all features and so little room in
a step (64 tokens, 4 decode rows) that they matter.

All configurations have the same memory. Without --model the model is mocked and time is virtual
(`bench/engine/timing.py`): equal runs give equal figures. Every configuration must give the same answers.
Metrics are explained in `play.Metrics`. Medians over rounds, after one that warms up (in real time). The
last line is one JSON object.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from bench.engine.play import Metrics, measure
from bench.engine.timing import TimedForward, Timing, VirtualClock
from bench.engine.workloads import SPECS, Client
from bench.measure import rounded
from bench.mocker.policies import ORDERS, Fcfs
from mallee.mocker.passes import mock_spec
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.worker.engine import Engine
from mallee.worker.forward import Forward
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig

MAX_MODEL_LEN = 2048
MEMORY_TOKENS = 16 * MAX_MODEL_LEN
BLOCK_SIZE = 16
SEED = 11


class Setup(NamedTuple):
    """One configuration."""

    engine: EngineConfig
    forks: bool
    paged: bool = True  # else a block holds a whole sequence
    tree_attention: bool = True

    @property
    def block_size(self) -> int:
        return BLOCK_SIZE if self.paged else MAX_MODEL_LEN


def setups() -> dict[str, Setup]:
    """The configurations, from the plainest on; each has one feature more than the one before."""
    scheduler = SchedulerConfig(
        max_step_tokens=MEMORY_TOKENS, chunked=False, continuous=False, order=Fcfs(), gang=False
    )
    plain = EngineConfig(scheduler, max_answer_capsules=0, prefix_cache=False)
    continuous = replace(plain, scheduler=replace(scheduler, continuous=True))
    chunked = replace(continuous, scheduler=SchedulerConfig(order=Fcfs(), gang=False))
    prefix = replace(chunked, prefix_cache=True)
    fork = replace(prefix, max_answer_capsules=EngineConfig().max_answer_capsules)
    tree = replace(fork, scheduler=SchedulerConfig())
    flat: dict[str, bool] = {"forks": False, "tree_attention": False}
    return {
        "static": Setup(plain, **flat, paged=False),
        "continuous": Setup(continuous, **flat, paged=False),
        "paged": Setup(continuous, **flat),
        "chunked": Setup(chunked, **flat),
        "prefix": Setup(prefix, **flat),
        "fork": Setup(fork, forks=True, tree_attention=False),
        "tree": Setup(tree, forks=True),
    }


def orders() -> dict[str, Setup]:
    """One configuration for each order of a scheduler."""
    return {
        name: Setup(
            EngineConfig(SchedulerConfig(order=order(), max_step_tokens=64, max_decodes=4)),
            forks=False,
        )
        for name, order in ORDERS.items()
    }


def on_mock(workload: str, setup: Setup, seed: int) -> Metrics:
    """In virtual time."""
    clock = VirtualClock()
    forward = TimedForward(
        mock_spec(vocab_size=4096, max_model_len=MAX_MODEL_LEN),
        clock,
        Timing(),
        num_blocks=MEMORY_TOKENS // setup.block_size,
        block_size=setup.block_size,
        shares_reads=setup.tree_attention,
    )
    return on_engine(workload, setup, forward, clock, seed)


_loaded: dict[int, Any] = {}
"""Models by block size: loading takes longer than many a round."""


def on_model(workload: str, setup: Setup, seed: int, model: Path, threads: int) -> Metrics:
    """In real time, on this machine."""
    from mallee.worker.model.runner import load

    forward = _loaded.get(setup.block_size)
    if forward is None:
        forward = _loaded[setup.block_size] = load(
            model,
            num_blocks=MEMORY_TOKENS // setup.block_size,
            block_size=setup.block_size,
            threads=threads,
            max_model_len=MAX_MODEL_LEN,
        )
    forward.shares_reads = setup.tree_attention
    return on_engine(workload, setup, forward, time.perf_counter, seed)


def on_engine(
    workload: str, setup: Setup, forward: Forward, clock: Callable[[], float], seed: int
) -> Metrics:
    """`workload` on an engine of its own over `forward`."""
    engine = Engine(
        forward,
        config=setup.engine,
        clock=clock,
        worker=WorkerId("w0"),
        incarnation=Incarnation(0),
    )
    client = Client(SPECS[workload], forward.spec.vocab_size, seed, setup.forks)
    return measure(engine, client, clock, forward.spec.kv_bytes_per_token)


def median(rounds: Sequence[Metrics]) -> dict[str, Any]:
    """Field by field."""

    def of(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {key: of([value[key] for value in values]) for key in values[0]}
        return values[0] if isinstance(values[0], str) else statistics.median(values)

    return {key: rounded(value) for key, value in of([asdict(m) for m in rounds]).items()}


def conditions(args: argparse.Namespace) -> dict[str, Any]:
    """All that a figure depends on. After the runs: then the model is loaded."""
    spec = next(iter(_loaded.values())).spec if args.model else mock_spec()
    return {
        "model": args.model or "mock",
        "fingerprint": spec.fingerprint,  # of config and weights, whatever a revision is called
        "dtype": {1: "mock", 2: "bfloat16", 4: "float32"}[spec.dtype_nbytes],
        "timing": None if args.model else Timing()._asdict(),
        "threads": args.threads if args.model else None,
        "seed": SEED,
        "rounds": args.rounds if args.model else 1,
        "warmup_rounds": 1 if args.model else 0,
        "memory_tokens": MEMORY_TOKENS,
        "max_model_len": MAX_MODEL_LEN,
        "workloads": {name: SPECS[name]._asdict() for name in args.workloads},
        "configs": {name: _settings(setup) for name, setup in setups().items()},
        "order_configs": {name: _settings(setup) for name, setup in orders().items()},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: _version(name) for name in ("mallee", "numpy", "torch")}
        | {"python": platform.python_version()},
    }


def _settings(setup: Setup) -> dict[str, Any]:
    engine = asdict(setup.engine)
    engine |= {"paged": setup.paged, "tree_attention": setup.tree_attention}
    engine["scheduler"]["order"] = type(setup.engine.scheduler.order).__name__
    return {**engine, "block_size": setup.block_size, "forks": setup.forks}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def row(name: str, metrics: dict[str, Any]) -> str:
    """A line for people."""
    return (
        f"  {name:<18} {metrics['total_s']:>8.4g} s {metrics['throughput_tok_s']:>7.4g} tok/s"
        f"  ttft {metrics['ttft_ms']['p50']:>7.4g} / {metrics['ttft_ms']['p99']:<7.4g}"
        f" itl {metrics['itl_ms']['p50']:>6.4g} / {metrics['itl_ms']['p99']:<7.4g}"
        f" prefill {metrics['prefill_tokens']:>6} blocks {metrics['peak_blocks']:>5}"
        f" shared {metrics['share_ratio']:.2f} starved {metrics['starved']}"
    )


def _names(text: str) -> list[str]:
    return text.split(",") if text else []


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", type=_names, default=list(SPECS))
    parser.add_argument("--configs", type=_names, default=list(setups()))
    parser.add_argument("--orders", type=_names, default=["W2", "W3"])
    parser.add_argument("--model", help="a checkpoint; without it the model is mocked")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3, help="with --model")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    chosen = {name: setup for name, setup in setups().items() if name in args.configs}
    results = {name: compared(name, chosen, args) for name in args.workloads}
    by_order = {name: compared(name, orders(), args) for name in args.orders}
    report = json.dumps({**conditions(args), "results": results, "orders": by_order})
    if args.out is not None:
        args.out.write_text(report + "\n")
    print(report)
    return 0


def compared(
    workload: str, setups: Mapping[str, Setup], args: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Prints a line for each of `setups`. Raises RuntimeError if a mocked model answered differently."""
    print(workload)
    found: dict[str, dict[str, Any]] = {}
    for name, setup in setups.items():
        found[name] = median(rounds_of(workload, setup, args))
        print(row(name, found[name]), flush=True)
    answers = {each["answers"] for each in found.values()}
    if len(answers) > 1 and not args.model:
        raise RuntimeError(f"{workload}: configurations gave different answers: {answers}")
    return found


def rounds_of(workload: str, setup: Setup, args: argparse.Namespace) -> list[Metrics]:
    """One round of the mock is as good as many; of a model the first one warms up."""
    if not args.model:
        return [on_mock(workload, setup, SEED)]
    from mallee.worker.model.loading.source import resolve_model

    model = resolve_model(args.model)
    rounds = [on_model(workload, setup, SEED, model, args.threads) for _ in range(args.rounds + 1)]
    return rounds[1:]


if __name__ == "__main__":
    sys.exit(main())
