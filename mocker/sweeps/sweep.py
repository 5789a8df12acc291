"""Many fleets on one workload, and those that none dominates.

A fleet costs engines (one GPU each) and the KV memory that each has. It is worth its time to
first token that 90 of 100 requests don't exceed, and its goodput: requests a second (virtual) that meet
both limits of the service level. A fleet is *dominated* if another one costs no more of either, is
no worse in either, and better in one of the four. What is left is the frontier, without fleets on which
one of ten requests never began: they are cheap, and too small.

Each fleet runs once for each seed: other arrivals (where the trace leaves them to chance) and other draws.
Its figures are medians of the seeds, and intervals in which the median of all seeds lies.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb, inf, isfinite, nan
from typing import Any, Final, NamedTuple

from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.sweeps.pool import Done, Failed, Job, Run, run_jobs
from mallee.protocol.errors import ConfigError
from mallee.traces.workload import Workload

FIGURES: Final[dict[str, Callable[[Run], float | None]]] = {
    "ttft_p50_ms": lambda run: run.ttft_at(0.5),
    "ttft_p90_ms": lambda run: run.ttft_at(0.9),
    "ttft_p99_ms": lambda run: run.ttft_at(0.99),
    "itl_p50_ms": lambda run: run.summary["itl_ms"]["p50"],
    "itl_p99_ms": lambda run: run.summary["itl_ms"]["p99"],
    "goodput_per_s": lambda run: run.summary["goodput_per_s"],
    "slo_share": lambda run: run.summary["slo_share"],
    "requests_per_s": lambda run: run.summary["virtual_requests_per_s"],
    "hit_rate": lambda run: run.summary["hit_rate"],
    "prefix_copies": lambda run: run.summary["prefix_copies"],
    "utilisation": lambda run: run.summary["utilisation"]["mean"],
    "failed_requests": lambda run: sum(run.summary["errors"].values()) + run.summary["lost"],
}
_CONFIDENCE: Final = 0.95


class Spread(NamedTuple):
    """A figure of a fleet over the seeds: their median, and the interval of `interval_of`."""

    median: float
    low: float
    high: float


def interval_of(num: int) -> tuple[int, float]:
    """The number of `num` sorted values to leave out at either end; how surely the rest holds the median.

    The narrowest interval that holds the median of all seeds 95 times of 100, whatever the distribution: so
    many seeds fall below it as heads in `num` throws of a coin. Fewer than six can't be so sure.
    """
    outside, left_out = 2 * 0.5**num, 0
    while (more := outside + 2 * comb(num, left_out + 1) * 0.5**num) <= 1 - _CONFIDENCE:
        outside, left_out = more, left_out + 1
    return left_out, max(0.0, 1 - outside)


def spread_of(values: Sequence[float]) -> Spread:
    """The spread of a figure; NaN counts as not measured."""
    known = sorted(value for value in values if value == value)
    if not known:
        return Spread(nan, nan, nan)
    left_out, _ = interval_of(len(known))
    middle = known[(len(known) - 1) // 2], known[len(known) // 2]
    median = middle[0] if middle[0] == middle[1] else sum(middle) / 2
    return Spread(median, known[left_out], known[-1 - left_out])


class Grid(NamedTuple):
    """Values whose combinations are tried; `kv_tokens` of each engine."""

    engines: Sequence[int]
    policies: Sequence[str]
    kv_tokens: Sequence[int]

    def configs(self, base: ReplayConfig, block_size: int) -> list[ReplayConfig]:
        """In the order of the values as given, KV memory fastest. Raises ConfigError."""
        for name, values in zip(self._fields, self, strict=True):
            if not values:
                raise ConfigError(f"{name}: give at least one")
        combinations = itertools.product(
            dict.fromkeys(self.engines), dict.fromkeys(self.policies), dict.fromkeys(self.kv_tokens)
        )
        found = [
            replace(base, engines=engines, policy=policy, kv_tokens=kv_tokens).validate()
            for engines, policy, kv_tokens in combinations
        ]
        for config in found:
            config.num_blocks(block_size)
        return found


@dataclass(frozen=True, slots=True)
class Fleet:
    """One combination and its runs by seed; none after a failure, of which `error` is the reason."""

    engines: int
    policy: str
    kv_tokens: int
    runs: dict[int, Run]
    error: str = ""
    on_frontier: bool = False

    def spread(self, name: str) -> Spread:
        """One of `FIGURES` over the seeds."""
        found = [FIGURES[name](run) for run in self.runs.values()]
        return spread_of([nan if value is None else value for value in found])

    @property
    def worth(self) -> tuple[float, float]:
        """TTFT p90 and goodput."""
        if not self.runs:
            return inf, 0.0
        return self.spread("ttft_p90_ms").median, self.spread("goodput_per_s").median

    def row(self) -> dict[str, Any]:
        """Medians by name, None where nothing was measured; `intervals` [low, high] of several seeds."""
        spreads = {name: self.spread(name) for name in FIGURES}
        return {
            **self._named(),
            **{name: _finite(each.median) for name, each in spreads.items()},
            "intervals": {
                name: [_finite(each.low), _finite(each.high)] for name, each in spreads.items()
            }
            if len(self.runs) > 1
            else {},
            "digests": {str(seed): run.summary["digest"] for seed, run in self.runs.items()},
        }

    def rows(self) -> list[dict[str, Any]]:
        """A row for each seed, or one with the error."""
        return [
            {
                **self._named(),
                "seed": seed,
                **{name: _finite(figure(run)) for name, figure in FIGURES.items()},
                "digest": run.summary["digest"],
            }
            for seed, run in self.runs.items()
        ] or [self._named()]

    def _named(self) -> dict[str, Any]:
        return {
            "engines": self.engines,
            "policy": self.policy,
            "kv_tokens": self.kv_tokens,
            "on_frontier": self.on_frontier,
            "error": self.error,
        }


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


class Origin(NamedTuple):
    """The command that made a sweep, and what has to be the same for the same digests."""

    command: str
    trace_sha256: str
    versions: Mapping[str, str]  # by package


@dataclass(frozen=True, slots=True)
class Sweep:
    """All fleets in the order of the grid, and what they were asked."""

    fleets: tuple[Fleet, ...]
    conditions: dict[str, Any]
    good_share: float  # of requests within the service level, for a fleet that is big enough
    seeds: tuple[int, ...] = (0,)
    origin: Origin | None = None

    @property
    def frontier(self) -> list[Fleet]:
        """By engines, then TTFT."""
        found = [fleet for fleet in self.fleets if fleet.on_frontier]
        return sorted(found, key=lambda fleet: (fleet.engines, fleet.worth[0]))

    @property
    def smallest_good(self) -> Fleet | None:
        """The cheapest fleet that keeps `good_share` of the requests within the service level.

        With several seeds also at the low end of the interval.
        """
        good = [f for f in self.fleets if f.runs and f.spread("slo_share").low >= self.good_share]
        return min(good, key=lambda f: (f.engines, f.kv_tokens, f.worth[0]), default=None)

    @property
    def leaves_nothing_to_chance(self) -> bool:
        """Whether several seeds made no difference on any fleet."""
        digests = [{run.summary["digest"] for run in f.runs.values()} for f in self.fleets]
        return len(self.seeds) > 1 and all(len(each) <= 1 for each in digests)

    def trials(self) -> list[dict[str, Any]]:
        """A row for each replay; `is_best` of those of the smallest good fleet."""
        best = self.smallest_good
        return [row | {"is_best": fleet is best} for fleet in self.fleets for row in fleet.rows()]

    def as_json(self) -> dict[str, Any]:
        """One JSON object: conditions, points, which of them are the frontier, a trial for each replay."""
        best = self.smallest_good
        return {
            "conditions": self.conditions,
            "seeds": self.seeds,
            "confidence": interval_of(len(self.seeds))[1] if len(self.seeds) > 1 else None,
            "origin": None if self.origin is None else self.origin._asdict(),
            "points": [fleet.row() for fleet in self.fleets],
            "frontier": [fleet.row() for fleet in self.frontier],
            "smallest_good": None if best is None else best.row(),
            "trials": self.trials(),
            "good_share": self.good_share,
            "failed": sum(not fleet.runs for fleet in self.fleets),
        }


def sweep(
    makes: Mapping[int, Callable[[], Workload]],
    base: ReplayConfig,
    grid: Grid,
    *,
    processes: int,
    good_share: float = 0.95,
    on_done: Callable[[int, Done], None] = lambda index, done: None,
) -> Sweep:
    """Replay the workload on every fleet of the grid, with each seed of `makes`.

    `base` has the rest. Raises ConfigError.
    """
    if not 0.0 < good_share <= 1.0:
        raise ConfigError(f"good_share={good_share}: give a share above 0, at most 1")
    block_size = base.block_tokens(next(iter(makes.values()))().id_tokens)
    configs = grid.configs(base, block_size)
    jobs = [Job(make, replace(c, seed=seed)) for c in configs for seed, make in makes.items()]
    outcomes = iter(run_jobs(jobs, processes=processes, on_done=on_done))
    fleets = [_fleet(c, dict(zip(makes, outcomes, strict=False))) for c in configs]
    known = next((run for fleet in fleets for run in fleet.runs.values()), None)
    conditions = dict(known.conditions) if known is not None else {}
    for name in ("engines", "policy", "kv_tokens", "seed"):
        conditions.pop(name, None)
    conditions["requests"] = 0
    if known is not None:
        conditions["requests"] = known.summary["requests"] + known.summary["lost"]
    return Sweep(mark_frontier(fleets), conditions, good_share, tuple(makes))


def mark_frontier(fleets: Sequence[Fleet]) -> tuple[Fleet, ...]:
    """The same, each marked if no other one dominates it."""
    return tuple(
        replace(
            fleet,
            on_frontier=fleet.worth[0] < inf
            and not any(dominates(other, fleet) for other in fleets if other.runs),
        )
        for fleet in fleets
    )


def dominates(a: Fleet, b: Fleet) -> bool:
    """Whether a costs no more than b, is no worse, and better in something."""
    ours = (a.engines, a.kv_tokens, a.worth[0], -a.worth[1])
    theirs = (b.engines, b.kv_tokens, b.worth[0], -b.worth[1])
    return ours != theirs and all(x <= y for x, y in zip(ours, theirs, strict=True))


def _fleet(config: ReplayConfig, done: dict[int, Done]) -> Fleet:
    named = config.engines, config.policy, config.kv_tokens
    for each in done.values():
        if isinstance(each, Failed):
            return Fleet(*named, {}, each.error)
    return Fleet(*named, {seed: run for seed, run in done.items() if isinstance(run, Run)})
