"""Many fleets on one workload, and those that none dominates.

A fleet costs engines (one GPU each) and the KV memory that each has. It is worth its time to
first token that 90 of 100 requests don't exceed, and its goodput: requests a second (virtual) that meet
both limits of the service level. A fleet is *dominated* if another one costs no more of either, is
no worse in either, and better in one of the four. What is left is the frontier, without fleets on which
one of ten requests never began: they are cheap, and too small.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.report.pool import Done, Failed, Job, Run, run_jobs
from mallee.protocol.errors import ConfigError
from mallee.traces.workload import Workload

COLUMNS: Final = (
    *("engines", "policy", "kv_tokens", "ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms"),
    *("itl_p50_ms", "itl_p99_ms", "goodput_per_s", "slo_share", "requests_per_s", "hit_rate"),
    *("prefix_copies", "utilisation", "failed_requests", "digest", "on_frontier", "error"),
)


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
    """One combination and its run. `run` is None after a failure; `error` is the reason."""

    engines: int
    policy: str
    kv_tokens: int
    run: Run | None
    error: str = ""
    on_frontier: bool = False

    @property
    def ttft_p90_ms(self) -> float:
        return self.run.ttft_at(0.9) if self.run is not None else float("inf")

    @property
    def goodput_per_s(self) -> float:
        return float(self.run.summary["goodput_per_s"]) if self.run is not None else 0.0

    @property
    def slo_share(self) -> float:
        return float(self.run.summary["slo_share"] or 0.0) if self.run is not None else 0.0

    def row(self) -> dict[str, Any]:
        """Values by `COLUMNS`; None for what there is not."""
        row: dict[str, Any] = dict.fromkeys(COLUMNS)
        row |= {"engines": self.engines, "policy": self.policy, "kv_tokens": self.kv_tokens}
        row |= {"on_frontier": self.on_frontier, "error": self.error}
        if self.run is None:
            return row
        summary = self.run.summary
        for share in (50, 90, 99):
            at = self.run.ttft_at(share / 100)
            row[f"ttft_p{share}_ms"] = at if at < float("inf") else None
        return row | {
            "itl_p50_ms": summary["itl_ms"]["p50"],
            "itl_p99_ms": summary["itl_ms"]["p99"],
            "goodput_per_s": summary["goodput_per_s"],
            "slo_share": summary["slo_share"],
            "requests_per_s": summary["virtual_requests_per_s"],
            "hit_rate": summary["hit_rate"],
            "prefix_copies": summary["prefix_copies"],
            "utilisation": summary["utilisation"]["mean"],
            "failed_requests": sum(summary["errors"].values()),
            "digest": summary["digest"],
        }


@dataclass(frozen=True, slots=True)
class Sweep:
    """All fleets in the order of the grid, and what they were asked."""

    fleets: tuple[Fleet, ...]
    conditions: dict[str, Any]
    good_share: float  # of requests within the service level, for a fleet that is big enough

    @property
    def frontier(self) -> list[Fleet]:
        """By engines, then TTFT."""
        found = [fleet for fleet in self.fleets if fleet.on_frontier]
        return sorted(found, key=lambda fleet: (fleet.engines, fleet.ttft_p90_ms))

    @property
    def smallest_good(self) -> Fleet | None:
        """The cheapest fleet that keeps `good_share` of the requests within the service level."""
        good = [fleet for fleet in self.fleets if fleet.slo_share >= self.good_share]
        return min(good, key=lambda f: (f.engines, f.kv_tokens, f.ttft_p90_ms), default=None)

    def as_json(self) -> dict[str, Any]:
        """One JSON object: conditions, points, and which of them are the frontier."""
        best = self.smallest_good
        return {
            "conditions": self.conditions,
            "points": [fleet.row() for fleet in self.fleets],
            "frontier": [fleet.row() for fleet in self.frontier],
            "smallest_good": None if best is None else best.row(),
            "good_share": self.good_share,
            "failed": sum(fleet.run is None for fleet in self.fleets),
        }


def sweep(
    make: Callable[[], Workload],
    base: ReplayConfig,
    grid: Grid,
    *,
    processes: int,
    good_share: float = 0.95,
    on_done: Callable[[int, Done], None] = lambda index, done: None,
) -> Sweep:
    """Replay the workload on every fleet of the grid. `base` has the rest. Raises ConfigError."""
    if not 0.0 < good_share <= 1.0:
        raise ConfigError(f"good_share={good_share}: give a share above 0, at most 1")
    block_size = base.block_tokens(make().id_tokens)
    configs = grid.configs(base, block_size)
    outcomes = run_jobs([Job(make, c) for c in configs], processes=processes, on_done=on_done)
    fleets = [_fleet(c, done) for c, done in zip(configs, outcomes, strict=True)]
    known = next((fleet.run for fleet in fleets if fleet.run is not None), None)
    conditions = dict(known.conditions) if known is not None else {}
    for name in ("engines", "policy", "kv_tokens"):
        conditions.pop(name, None)
    conditions["requests"] = known.summary["requests"] if known is not None else 0
    return Sweep(mark_frontier(fleets), conditions, good_share)


def mark_frontier(fleets: Sequence[Fleet]) -> tuple[Fleet, ...]:
    """The same, each marked if no other one dominates it."""
    return tuple(
        replace(
            fleet,
            on_frontier=fleet.ttft_p90_ms < float("inf")
            and not any(dominates(other, fleet) for other in fleets if other.run is not None),
        )
        for fleet in fleets
    )


def dominates(a: Fleet, b: Fleet) -> bool:
    """Whether a costs no more than b, is no worse, and better in something."""
    ours = (a.engines, a.kv_tokens, a.ttft_p90_ms, -a.goodput_per_s)
    theirs = (b.engines, b.kv_tokens, b.ttft_p90_ms, -b.goodput_per_s)
    return ours != theirs and all(x <= y for x, y in zip(ours, theirs, strict=True))


def _fleet(config: ReplayConfig, done: Done) -> Fleet:
    run, error = (None, done.error) if isinstance(done, Failed) else (done, "")
    return Fleet(config.engines, config.policy, config.kv_tokens, run, error)
