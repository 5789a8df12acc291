"""The number of workers that the load needs: up at once, down after a calm. Pure; Ray Serve calls it.

Serve asks several times a second, with means of what the replicas reported lately
(`record_autoscaling_stats`). It hands its policies over by value, so nothing of ours is imported here.
"""

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

KV_SHARE: Final = 0.85  # of KV memory that is needed, at most
CALM_SHARE: Final = 0.85  # of the targets, under which the workers that stay have to be
_FEW: Final = 4  # workers that may start at once in any case; else as many again
_ROUNDING: Final = 1e-9


class Report(NamedTuple):
    """Load and size of one worker replica, all its engines together. The names are those of its metrics."""

    rows: float  # branches that run
    waiting: float  # branches that wait here
    max_rows: float  # that gateways let run here
    needed_blocks: float  # KV blocks, without what would give way
    num_blocks: float
    queued: float  # requests that wait in gateways, in all of them


class Fleet(NamedTuple):
    """The replicas as Serve sees them; those that have just started may not have reported."""

    target: int
    running: int
    reports: Sequence[Report]


class Policy:
    """Target tracking: so many workers that `target_rows` of their rows are in use.

    More are started at once. Fewer stay only when the load would have left those that stay a margin
    for `lower_after_s` seconds on end: as many as it needed at its highest.
    """

    def __init__(
        self, *, min_workers: int, max_workers: int, target_rows: float, lower_after_s: float
    ) -> None:
        self._min = min_workers
        self._max = max_workers
        self._target_rows = target_rows
        self._lower_after_s = lower_after_s

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The decision for Serve's `AutoscalingContext`, and the state for the next."""
        metrics = context.aggregated_metrics or {}
        reports = [
            Report(*(metrics.get(name, {}).get(replica, 0.0) for name in Report._fields))
            for replica in metrics.get("max_rows", ())
        ]
        fleet = Fleet(context.target_num_replicas, context.current_num_replicas, reports)
        return self.decide(fleet, context.policy_state, context.current_time)

    def decide(self, fleet: Fleet, state: dict[str, Any], now: float) -> tuple[int, dict[str, Any]]:
        """The number of workers from now on, and the calm so far; `now` in seconds."""
        reports = [report for report in fleet.reports if report.max_rows and report.num_blocks]
        if not reports:
            return self._bounded(fleet.target), {}
        needed = self._needed(reports, 1.0)
        if needed > fleet.target:
            # What waits while workers start grows: their number follows it by steps.
            most = max(2 * fleet.running, fleet.running + _FEW, fleet.target)
            return self._bounded(min(needed, most)), {}
        enough = self._needed(reports, CALM_SHARE)
        is_settled = fleet.running == fleet.target == len(reports)
        if enough >= fleet.target or not is_settled:
            return self._bounded(fleet.target), {}
        since = state.get("calm_since", now)
        highest = max(enough, state.get("highest", 1))
        if now - since < self._lower_after_s:
            return self._bounded(fleet.target), {"calm_since": since, "highest": highest}
        return self._bounded(highest), {}

    def _needed(self, reports: Sequence[Report], share: float) -> int:
        """Workers on which the load takes `share` of its targets at most."""
        rows = sum(r.rows + r.waiting for r in reports) + max(r.queued for r in reports)
        rows_each = sum(r.max_rows for r in reports) / len(reports) * self._target_rows
        blocks = sum(r.needed_blocks for r in reports)
        blocks_each = sum(r.num_blocks for r in reports) / len(reports) * KV_SHARE
        return math.ceil(max(rows / rows_each, blocks / blocks_each) / share - _ROUNDING)

    def _bounded(self, workers: int) -> int:
        return max(self._min, min(self._max, workers))
