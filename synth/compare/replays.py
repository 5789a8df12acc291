"""Whether two traces load a fleet alike: times to first token, hit rates, and which policy wins.

The caller passes a `Replayer`. The fleet is made for the source: loaded but not saturated, with caches
that hold a part of what it asks for, and the same for all that is compared with it.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from mallee.synth.compare.distances import relative
from mallee.synth.compare.gates import Gate, Value
from mallee.traces.trace import Trace
from mallee.traces.workload import Workload

POLICIES: Final = ("cost", "round_robin", "least_loaded", "random", "prefix_only")
GATED: Final = ("cost", "round_robin")  # policies whose figures have bars; all are ranked
MAX_REQUESTS: Final = 20_000  # the first of a trace; more say the same and take longer
PILOT: Final = 2000  # requests by which a fleet is chosen
SLOWER: Final = 2.0
SIZES: Final = (64, 32, 16, 8, 4, 2)  # engines
CACHE_SHARE: Final = 0.075  # of the source's distinct blocks that all engines hold together
LARGE: Final = 4  # times that in the large cache
LEAST_BAND: Final = (
    0.05  # policies whose p50 differ by less are not ranked, however little noise there is
)


class Fleet(NamedTuple):
    """`kv_tokens` of each engine. `keeps_order`: requests wait for those that they depend on."""

    engines: int
    kv_tokens: int
    block_size: int
    keeps_order: bool
    requests: int


class Figures(NamedTuple):
    """Of one replay. Times are infinite where so many requests failed; `busy` is the engines' mean share."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    hit_rate: float
    busy: float
    failed: int

    def as_data(self) -> dict[str, float | None]:
        """Null for times that never came."""
        return {k: v if math.isfinite(v) else None for k, v in self._asdict().items()}


class Replayer(Protocol):
    """Runs a workload on a fleet under a policy. Deterministic."""

    def __call__(self, workload: Workload, fleet: Fleet, policy: str) -> Figures: ...


class Replays(NamedTuple):
    """Figures by policy, at the small and at the large cache."""

    small: dict[str, Figures]
    large: dict[str, Figures]

    def as_data(self) -> dict[str, dict[str, Any]]:
        """Plain data, by cache and policy."""
        return {
            cache: {policy: figures.as_data() for policy, figures in by_policy.items()}
            for cache, by_policy in self._asdict().items()
        }


def fleet_for(trace: Trace, workload: Workload, replayer: Replayer, requests: int) -> Fleet:
    """The smallest of `SIZES` that the source doesn't saturate, tried with its first requests.

    Saturated is one on which half of the requests wait `SLOWER` times as long for their first token as on the
    largest, under any of `GATED`. (Busy shares don't tell: an engine that decodes one answer is busy.)
    By recorded times (open loop), since a trace without dependencies has nothing else; but search trees
    have no times inside a tree, and keep their order.
    """
    requests = min(len(trace), requests)
    distinct = int(trace.blocks[: int(trace.starts[requests])].max(initial=-1)) + 1
    tokens = trace.input_tokens + trace.output_tokens * trace.branches
    longest = -(-int(tokens[:requests].max(initial=1)) // trace.block_size)
    found: Fleet | None = None
    limits_ms: dict[str, float] = {}
    for engines in SIZES:
        blocks = max(math.ceil(CACHE_SHARE * distinct / engines), math.ceil(1.25 * longest) + 8)
        kv_tokens = blocks * trace.block_size
        fleet = Fleet(engines, kv_tokens, trace.block_size, trace.has_forks, requests)
        pilot = fleet._replace(requests=min(requests, PILOT))
        for policy in GATED:
            figures = replayer(workload, pilot, policy)
            limit_ms = limits_ms.setdefault(policy, SLOWER * figures.ttft_p50_ms)
            if found is not None and (figures.failed or figures.ttft_p50_ms > limit_ms):
                return found
        found = fleet
    assert found is not None
    return found


def replay_all(workload: Workload, fleet: Fleet, replayer: Replayer) -> Replays:
    """Every policy at both sizes of cache."""
    fleets = fleet, fleet._replace(kv_tokens=LARGE * fleet.kv_tokens)
    found = ({policy: replayer(workload, each, policy) for policy in POLICIES} for each in fleets)
    return Replays(*found)


def noise_band(source: Replays, again: Replays) -> float:
    """The widest relative difference of a policy's p50 when the source begins at other times."""
    return max(
        LEAST_BAND,
        *(
            abs(relative(one[policy].ttft_p50_ms, other[policy].ttft_p50_ms))
            for one, other in zip(source, again, strict=True)
            for policy in one
        ),
    )


@dataclass(frozen=True, slots=True)
class Stage:
    """A fleet, what the source comes to on it, and what noise to expect there."""

    replayer: Replayer
    fleet: Fleet
    source: Replays
    noise: dict[str, Value] | None  # the source begun at other times against itself
    band: float

    def against(self, workload: Workload) -> tuple[dict[str, Value], Replays]:
        """Values by name of the gate, and the replays that they are from."""
        replays = replay_all(workload, self.fleet, self.replayer)
        return dict(_compared(self.source, replays, self.band)), replays


def stage_for(
    trace: Trace, workload: Workload, again: Workload | None, replayer: Replayer, requests: int
) -> Stage:
    """For the first `requests`. `again`: the source begun at other times, if that makes a difference."""
    fleet = fleet_for(trace, workload, replayer, requests)
    source = replay_all(workload, fleet, replayer)
    if again is None:
        return Stage(replayer, fleet, source, None, LEAST_BAND)
    other = replay_all(again, fleet, replayer)
    band = noise_band(source, other)
    return Stage(replayer, fleet, source, dict(_compared(source, other, band)), band)


def _compared(source: Replays, other: Replays, band: float) -> Iterator[tuple[str, Value]]:
    for cache, a, b in zip(Replays._fields, source, other, strict=True):
        for policy in GATED:
            for figure in _FIGURES:
                one, two = (getattr(each[policy], figure.field) for each in (a, b))
                value = relative(one, two) if figure.is_relative else two - one
                yield f"{figure.name}, {policy}, {cache}", Value(value)
        swapped = list(_swapped(a, b, band))
        why = ", ".join(f"{one} and {two}" for one, two in swapped)
        yield f"ranking, {cache}", Value(float(len(swapped)), why)


def _swapped(
    source: Mapping[str, Figures], other: Mapping[str, Figures], band: float
) -> Iterator[tuple[str, str]]:
    """Pairs of policies whose p50 are in other orders, and apart by more than `band` in both traces."""
    for one, two in itertools.combinations(source, 2):
        order = [_order(each[one], each[two], band) for each in (source, other)]
        if order[0] * order[1] < 0:
            yield one, two


def _order(one: Figures, two: Figures, band: float) -> int:
    """-1: first tokens of `one` are sooner, 1: those of `two` are, 0: within the band."""
    times = one.ttft_p50_ms, two.ttft_p50_ms
    if times[0] == times[1] or abs(times[0] - times[1]) <= band * min(times):
        return 0
    return -1 if times[0] < times[1] else 1


class _Figure(NamedTuple):
    """A figure of a replay that has a bar."""

    name: str
    field: str
    is_relative: bool
    bar: float


_FIGURES: Final = (
    _Figure("TTFT p50", "ttft_p50_ms", True, 0.10),
    _Figure("TTFT p99", "ttft_p99_ms", True, 0.20),
    _Figure("hit rate", "hit_rate", False, 0.02),
)


def _gates() -> Iterator[Gate]:
    for cache in Replays._fields:
        for policy in GATED:
            for figure in _FIGURES:
                statistic = "relative difference" if figure.is_relative else "difference"
                yield Gate(f"{figure.name}, {policy}, {cache}", "replay", statistic, figure.bar)
        statistic = "pairs of policies in other order by TTFT p50, of those clearly apart in both"
        yield Gate(f"ranking, {cache}", "replay", statistic, 0.0)


REPLAY_GATES: Final = tuple(_gates())
