"""Many fleets on one workload, and those that none dominates.

A fleet costs engines and the KV memory that each has. It is worth its time to
first token that 90 of 100 requests don't exceed, and its goodput: requests a second (virtual) that meet
both limits of the service level. A fleet is *dominated* if another one, of the same timing and load, costs no
more of either, is no worse in either, and better in one of the four. What is left is the frontier, without
fleets on which one of ten requests never began: they are cheap, and too small.

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
from mallee.mocker.sweeps.trials import Trials
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
    "gpu_hours": lambda run: run.conditions["gpus"] * run.summary["duration_s"] / 3600,
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
    """Values whose combinations are tried with each base; `kv_tokens` of each engine, () for the base's.

    `bisects`: of the engines, which increase, only those that find the fewest that are enough.
    """

    engines: Sequence[int]
    policies: Sequence[str]
    kv_tokens: Sequence[int] = ()
    bisects: bool = False

    def configs(self, bases: Sequence[ReplayConfig], id_tokens: int) -> list[list[ReplayConfig]]:
        """A list over the engines for each combination, KV memory fastest. Raises ConfigError."""
        for name in ("engines", "policies"):
            if not getattr(self, name):
                raise ConfigError(f"{name}: give at least one")
        combinations = itertools.product(
            bases, dict.fromkeys(self.policies), dict.fromkeys(self.kv_tokens or (0,))
        )
        found = [
            [
                replace(
                    base, engines=engines, policy=policy, kv_tokens=kv_tokens or base.kv_tokens
                ).validate()
                for engines in dict.fromkeys(self.engines)
            ]
            for base, policy, kv_tokens in combinations
        ]
        for config in itertools.chain(*found):
            config.num_blocks(config.block_tokens(id_tokens))
        return found

    @property
    def most_replays(self) -> int:
        """For each combination and seed, at most."""
        num = len(dict.fromkeys(self.engines))
        return num.bit_length() if self.bisects else num


@dataclass(frozen=True, slots=True)
class Fleet:
    """One combination and its runs by seed; none after a failure, of which `error` is the reason."""

    engines: int
    policy: str
    kv_tokens: int
    runs: dict[int, Run]
    error: str = ""
    on_frontier: bool = False
    timing: str = ""
    speedup: float = 1.0

    @property
    def load(self) -> tuple[str, float]:
        """Timing and speedup: fleets that differ in one of them don't compete."""
        return self.timing, self.speedup

    @property
    def rivals(self) -> tuple[str, float, str, int]:
        """All but the engines."""
        return (*self.load, self.policy, self.kv_tokens)

    def is_enough(self, good_share: float) -> bool:
        """Whether `good_share` of the requests are in time, also at the low end of several seeds."""
        return bool(self.runs) and self.spread("slo_share").low >= good_share

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
            "timing": self.timing,
            "speedup": self.speedup,
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
    def loads(self) -> list[tuple[str, float]]:
        """Timings and speedups, in the order of the grid."""
        return list(dict.fromkeys(fleet.load for fleet in self.fleets))

    def smallest_good(self, load: tuple[str, float]) -> Fleet | None:
        """The cheapest fleet of `load` that keeps `good_share` of the requests within the service level."""
        good = [f for f in self.fleets if f.load == load and f.is_enough(self.good_share)]
        return min(good, key=lambda f: (f.engines, f.kv_tokens, f.worth[0]), default=None)

    def most_too_few(self, best: Fleet) -> int:
        """The most engines that were tried, all else as of `best`, and are not enough; 0: none."""
        fewer = (f for f in self.fleets if f.rivals == best.rivals and f.engines < best.engines)
        return max((f.engines for f in fewer if not f.is_enough(self.good_share)), default=0)

    @property
    def leaves_nothing_to_chance(self) -> bool:
        """Whether several seeds made no difference on any fleet."""
        digests = [{run.summary["digest"] for run in f.runs.values()} for f in self.fleets]
        return len(self.seeds) > 1 and all(len(each) <= 1 for each in digests)

    def trials(self) -> list[dict[str, Any]]:
        """A row for each replay; `is_best` of those of the smallest good fleet."""
        best = [self.smallest_good(load) for load in self.loads]
        return [
            row | {"is_best": any(fleet is each for each in best)}
            for fleet in self.fleets
            for row in fleet.rows()
        ]

    def as_json(self) -> dict[str, Any]:
        """One JSON object: conditions, points, which of them are the frontier, a trial for each replay."""
        best = [each for load in self.loads if (each := self.smallest_good(load)) is not None]
        return {
            "conditions": self.conditions,
            "seeds": self.seeds,
            "confidence": interval_of(len(self.seeds))[1] if len(self.seeds) > 1 else None,
            "origin": None if self.origin is None else self.origin._asdict(),
            "points": [fleet.row() for fleet in self.fleets],
            "frontier": [fleet.row() for fleet in self.frontier],
            "smallest_good": best[0].row() if best else None,
            "smallest_goods": [fleet.row() for fleet in best],
            "trials": self.trials(),
            "good_share": self.good_share,
            "failed": sum(not fleet.runs for fleet in self.fleets),
        }


def sweep(
    makes: Mapping[int, Callable[[], Workload]],
    bases: Sequence[ReplayConfig],
    grid: Grid,
    *,
    processes: int,
    good_share: float = 0.95,
    on_done: Callable[[int, Done], None] = lambda index, done: None,
    trials: Trials | None = None,
) -> Sweep:
    """Replay the workload on every fleet of the grid, with each seed of `makes`.

    `bases` have the rest, one for each timing and speedup. Replays that are in `trials` are taken from there,
    others are added. Raises ConfigError.
    """
    if not 0.0 < good_share <= 1.0:
        raise ConfigError(f"good_share={good_share}: give a share above 0, at most 1")
    rows = grid.configs(bases, next(iter(makes.values()))().id_tokens)

    def play(configs: Sequence[ReplayConfig]) -> list[Fleet]:
        jobs = [Job(make, replace(c, seed=seed)) for c in configs for seed, make in makes.items()]
        outcomes = iter(_outcomes(jobs, processes, on_done, trials))
        return [_fleet(c, dict(zip(makes, outcomes, strict=False))) for c in configs]

    if grid.bisects:
        fleets = _bisected(rows, play, good_share)
    else:
        fleets = play(list(itertools.chain(*zip(*rows, strict=True))))  # engines slowest
    known = next((run for fleet in fleets for run in fleet.runs.values()), None)
    conditions = dict(known.conditions) if known is not None else {}
    for name in ("engines", "gpus", "policy", "kv_tokens", "seed"):
        conditions.pop(name, None)
    for name in ("timing", "speedup"):
        values = list(dict.fromkeys(getattr(base, name) for base in bases))
        conditions[name] = values[0] if len(values) == 1 else ", ".join(map(str, values))
    conditions["requests"] = 0
    if known is not None:
        conditions["requests"] = known.summary["requests"] + known.summary["lost"]
    return Sweep(mark_frontier(fleets), conditions, good_share, tuple(makes))


def _outcomes(
    jobs: Sequence[Job],
    processes: int,
    on_done: Callable[[int, Done], None],
    trials: Trials | None,
) -> list[Done]:
    """The outcomes of `jobs` in order, of `trials` where they are there."""
    if trials is None:
        return run_jobs(jobs, processes=processes, on_done=on_done)
    found: dict[int, Done] = {}
    for index, job in enumerate(jobs):
        if (run := trials.find(job.config)) is not None:
            found[index] = run
            on_done(index, run)
    left = [index for index in range(len(jobs)) if index not in found]

    def note(index: int, done: Done) -> None:
        if isinstance(done, Run):
            trials.add(jobs[left[index]].config, done)
        on_done(left[index], done)

    outcomes = run_jobs([jobs[index] for index in left], processes=processes, on_done=note)
    found |= dict(zip(left, outcomes, strict=True))
    return [found[index] for index in range(len(jobs))]


def _bisected(
    rows: Sequence[Sequence[ReplayConfig]],
    play: Callable[[Sequence[ReplayConfig]], list[Fleet]],
    good_share: float,
) -> list[Fleet]:
    """Fleets of each row, by engines: the first that is enough, the last that is not, and those on the way.

    More engines are taken to be no worse. All rows go on at the same time, a replay of each.
    """
    tried: list[dict[int, Fleet]] = [{} for _ in rows]
    bounds = [(-1, len(row)) for row in rows]  # of each: not enough, and enough
    while True:
        places = {
            index: (low + high) // 2 for index, (low, high) in enumerate(bounds) if high - low > 1
        }
        if not places:
            return [found[at] for found in tried for at in sorted(found)]
        fleets = play([rows[index][at] for index, at in places.items()])
        for (index, at), fleet in zip(places.items(), fleets, strict=True):
            tried[index][at] = fleet
            low, high = bounds[index]
            bounds[index] = (low, at) if fleet.is_enough(good_share) else (at, high)


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
    """Whether a costs no more than b under the same load, is no worse, and better in something."""
    ours = (a.engines, a.kv_tokens, a.worth[0], -a.worth[1])
    theirs = (b.engines, b.kv_tokens, b.worth[0], -b.worth[1])
    return (
        a.load == b.load
        and ours != theirs
        and all(x <= y for x, y in zip(ours, theirs, strict=True))
    )


def _fleet(config: ReplayConfig, done: dict[int, Done]) -> Fleet:
    fleet = Fleet(
        config.engines,
        config.policy,
        config.kv_tokens,
        {seed: run for seed, run in done.items() if isinstance(run, Run)},
        timing=str(config.timing),
        speedup=config.speedup,
    )
    failed = next((each.error for each in done.values() if isinstance(each, Failed)), None)
    return fleet if failed is None else replace(fleet, runs={}, error=failed)
