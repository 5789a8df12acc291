"""One engine twice: as it runs, and as the mocked engine predicts it. For `bench.mocker.fidelity`.

The same commands arrive at the same times (open loop). What branches wait for their first token and
between tokens is compared; how steps are made up must agree for that, so it is compared too.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from mallee.mocker.engine import MockedEngine
from mallee.mocker.timing.model import Timing
from mallee.protocol.ids import Incarnation, RequestId, WorkerId, capsule_id
from mallee.protocol.messages import (
    Command,
    Fork,
    Generate,
    Limits,
    Prefill,
    Release,
    Sampling,
    pack_tokens,
)
from mallee.worker.engine import Engine
from mallee.worker.forward import Forward
from mallee.worker.records import EngineConfig

_TICK_S = 1e-5  # the least that is waited: less may not move a clock


class Arrival(NamedTuple):
    """A command at its time; `num_branches` of its branches answer."""

    at: float
    command: Command
    num_branches: int


class Shape(NamedTuple):
    """A workload: requests a second for so many seconds, and sizes in tokens (from, to).

    `fork_share` of them compute a prompt and fork it soon after; `shared_share` begin with one of
    `num_shared` texts of `shared_tokens`. `width` is branches of a fork.
    """

    seconds: float = 60.0
    rate: float = 1.0
    prompt: tuple[int, int] = (40, 600)
    answer: tuple[int, int] = (8, 64)
    suffix: tuple[int, int] = (4, 32)
    width: tuple[int, int] = (2, 8)
    fork_share: float = 0.3
    shared_share: float = 0.4
    num_shared: int = 3
    shared_tokens: int = 192


class Workload:
    """Draws arrivals. Same seed, same arrivals."""

    def __init__(self, shape: Shape, vocab_size: int, seed: int) -> None:
        self._shape = shape
        self._vocab_size = vocab_size
        self._drawn = random.Random(seed)
        self._shared = [self._tokens(shape.shared_tokens) for _ in range(shape.num_shared)]

    def arrivals(self) -> list[Arrival]:
        shape, drawn = self._shape, self._drawn
        found: list[Arrival] = []
        at, number = drawn.expovariate(shape.rate), 0
        while at < shape.seconds:
            number += 1
            found += self._request(at, RequestId(f"q{number}"))
            at += drawn.expovariate(shape.rate)
        return sorted(found, key=lambda arrival: arrival.at)

    def _request(self, at: float, name: RequestId) -> list[Arrival]:
        shape, drawn = self._shape, self._drawn
        tokens = self._tokens(self._size(shape.prompt))
        if drawn.random() < shape.shared_share:
            tokens = drawn.choice(self._shared) + tokens
        sampling = Sampling(temperature=1.0, seed=drawn.randrange(1 << 32))
        limits = Limits(self._size(shape.answer), ignore_eos=True)
        if drawn.random() >= shape.fork_share:
            return [Arrival(at, Generate(name, pack_tokens(tokens), limits, sampling), 1)]
        width = self._size(shape.width)
        suffixes = tuple(pack_tokens(self._tokens(self._size(shape.suffix))) for _ in range(width))
        capsule = capsule_id(name, 0)
        soon = at + drawn.uniform(0.0, 1.0)
        fork = Fork(f"{name}-f", capsule, suffixes, limits, sampling)
        return [
            Arrival(at, Prefill(name, pack_tokens(tokens)), 0),
            Arrival(soon, fork, width),
            Arrival(soon + 5.0, Release(capsule), 0),
        ]

    def _size(self, between: tuple[int, int]) -> int:
        """Small ones are likelier: even on a logarithmic scale."""
        low, high = np.log(between)
        return round(float(np.exp(self._drawn.uniform(low, high))))

    def _tokens(self, num: int) -> list[int]:
        return [self._drawn.randrange(self._vocab_size) for _ in range(num)]


@dataclass(slots=True)
class Life:
    """One branch: when it was asked for, and each of its tokens. Seconds."""

    sent: float
    tokens: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.tokens[0] - self.sent

    @property
    def itl_s(self) -> list[float]:
        return [b - a for a, b in zip(self.tokens, self.tokens[1:], strict=False)]


class Played(NamedTuple):
    """The life of each branch, and how often a step had so many rows."""

    lives: dict[tuple[str, int], Life]
    steps: Counter[int]
    seconds: float


def play(
    engine: Engine,
    arrivals: Sequence[Arrival],
    clock: Callable[[], float],
    wait: Callable[[float], None],
) -> Played:
    """The engine as it runs: each command is submitted at its time, or when the step then is over."""
    lives = _lives(arrivals)
    steps: Counter[int] = Counter()
    begun, i = clock(), 0
    while i < len(arrivals) or engine.has_work:
        now = clock() - begun
        while i < len(arrivals) and arrivals[i].at <= now:
            engine.submit(arrivals[i].command, "bench")
            i += 1
        if not engine.has_work:
            if i < len(arrivals):
                wait(max(_TICK_S, arrivals[i].at - (clock() - begun)))
            continue
        frames = engine.step().frames
        now = clock() - begun
        rows = 0
        for frame in frames.values():
            for update in frame.updates:
                if update.error is not None:
                    raise RuntimeError(f"{update.request}: {update.error}")
                life = lives.get((update.request, update.branch))
                if life is not None:
                    rows += bool(update.tokens)
                    life.tokens += [now] * len(update.tokens)
        steps[rows] += 1
    return Played(lives, steps, clock() - begun)


def foretell(
    timing: Timing, arrivals: Sequence[Arrival], forward: Forward, config: EngineConfig
) -> Played:
    """The same under `timing`, in virtual time, on an engine of the same memory and model.

    Commands reach it `request_s` after they are sent. The tokens of a multi-step come at even distances.
    """
    now, i = 0.0, 0
    lives = _lives(arrivals)
    engine = MockedEngine(
        timing=timing,
        num_blocks=forward.num_blocks,
        block_size=forward.block_size,
        worker=WorkerId("w0"),
        incarnation=Incarnation(1),
        clock=lambda: now,
        config=config,
        spec=forward.spec,
    )
    due = [arrival.at + timing.request_s for arrival in arrivals] + [inf]
    while True:
        while due[i] <= now:
            engine.submit(arrivals[i].command)
            i += 1
        end = engine.start(now)
        if end is None:
            if due[i] == inf:
                return Played(lives, Counter(), now)
            now = due[i]
            continue
        now = engine.cut(due[i]) if due[i] < end else end
        outcome = engine.finish()
        step_s = (outcome.ended - outcome.begun) / outcome.num_steps
        for update in outcome.updates:
            if update.error is not None:
                raise RuntimeError(f"{update.request}: {update.error}")
            life = lives.get((update.request, update.branch))
            if life is not None:
                first = outcome.num_steps - update.num_tokens + 1
                steps = range(first, first + update.num_tokens)
                life.tokens += [outcome.begun + step_s * step for step in steps]


def _lives(arrivals: Sequence[Arrival]) -> dict[tuple[str, int], Life]:
    """A life for each branch that answers."""
    return {
        (getattr(command, "request", ""), branch): Life(at)
        for at, command, num_branches in arrivals
        for branch in range(num_branches)
    }


def compare(real: Played, told: Played) -> dict[str, Any]:
    """Percentiles of both, milliseconds, and by how much the prediction is off, as shares."""
    assert real.lives.keys() == told.lives.keys(), "both answer the same branches"
    report: dict[str, Any] = {"branches": len(real.lives)}
    for name in ("ttft", "itl", "e2e"):
        measured, predicted = _times(real, name), _times(told, name)
        report[name] = {}
        for p in (50, 90, 99):
            a, b = _rank(measured, p), _rank(predicted, p)
            report[name][f"p{p}"] = {"real_ms": 1000 * a, "told_ms": 1000 * b, "off": b / a - 1}
    report["seconds"] = {
        "real": real.seconds,
        "told": told.seconds,
        "off": told.seconds / real.seconds - 1,
    }
    report["rows_a_step"] = fmean(real.steps.elements()) if real.steps else None
    return report


def holds(report: dict[str, Any], *, p50: float = 0.10, p90: float = 0.20) -> bool:
    """Whether TTFT and ITL are as near as they have to be."""
    return all(
        abs(report[name]["p50"]["off"]) <= p50 and abs(report[name]["p90"]["off"]) <= p90
        for name in ("ttft", "itl")
    )


def _times(played: Played, name: str) -> list[float]:
    lives = played.lives.values()
    match name:
        case "ttft":
            return [life.ttft_s for life in lives]
        case "itl":
            return [gap for life in lives for gap in life.itl_s]
        case _:
            return [life.tokens[-1] - life.sent for life in lives]


def _rank(values: Sequence[float], p: int) -> float:
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * p // 100) - 1)]
