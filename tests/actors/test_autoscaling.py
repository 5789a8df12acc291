"""The autoscaler's policy under simulated loads."""

import random
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.actors.autoscaling import Fleet, Policy, Report

ROWS = 100
BLOCKS = 1000
TICK_S = 10.0


def make(*, least: int = 1, most: int = 20, after_s: float = 60.0) -> Policy:
    return Policy(min_workers=least, max_workers=most, target_rows=0.7, lower_after_s=after_s)


class Simulated:
    """A fleet whose new workers take `start_ticks` decisions to come; those that go, go at once."""

    def __init__(self, policy: Policy, workers: int = 1, start_ticks: int = 1) -> None:
        self.policy = policy
        self.target = self.running = workers
        self.state: dict[str, Any] = {}
        self.now = 0.0
        self.decisions: list[int] = []
        self._start_ticks = start_ticks
        self._due: list[float] = []

    def step(self, rows: float, blocks: float = 0.0) -> int:
        """Decide once about a load of so many branches, which need so many blocks in all."""
        self.running += sum(due <= self.now for due in self._due)
        self._due = [due for due in self._due if due > self.now]
        each = min(rows / self.running, ROWS)
        report = Report(each, 0, ROWS, blocks / self.running, BLOCKS, rows - each * self.running)
        fleet = Fleet(self.target, self.running, [report] * self.running)
        target, self.state = self.policy.decide(fleet, self.state, self.now)
        started = target - self.running - len(self._due)
        if started > 0:
            self._due += [self.now + self._start_ticks * TICK_S] * started
        self.running = min(self.running, target)
        self.target = target
        self.decisions.append(target)
        self.now += TICK_S
        return target

    def run(self, rows: Callable[[int], float], ticks: int) -> list[int]:
        return [self.step(rows(i)) for i in range(ticks)]


@given(rows=st.integers(0, 1400), workers=st.integers(1, 20), start=st.integers(1, 5))
def test_a_steady_load_settles_within_its_targets_and_stays(
    rows: int, workers: int, start: int
) -> None:
    fleet = Simulated(make(), workers, start)
    fleet.run(lambda _: rows, 40)
    settled = fleet.target
    assert rows <= 0.7 * ROWS * settled + 1e-6
    assert set(fleet.run(lambda _: rows, 60)) == {settled}
    ups = [b - a for a, b in pairwise(fleet.decisions) if b != a]
    assert len({up > 0 for up in ups}) <= 1  # one way only
    assert settled == 1 or rows > 0.7 * 0.85 * ROWS * (settled - 1) - 1e-6


def test_pressure_brings_workers_at_once_and_more_in_steps() -> None:
    """Those that do not come are not asked for again and again; KV memory alone brings some."""
    assert Simulated(make()).run(lambda _: 1000, 3) == [5, 10, 15]
    fleet = Simulated(make(), start_ticks=1000)
    assert fleet.run(lambda i: 1000 + 100 * i, 20) == [5] * 20
    fleet = Simulated(make())
    assert [fleet.step(10, blocks=blocks) for blocks in (840, 1800)] == [1, 3]


def test_waiting_requests_count_wherever_they_wait() -> None:
    def needed(**load: float) -> int:
        empty = Report(0, 0, ROWS, 0, BLOCKS, 0)
        return make().decide(Fleet(2, 2, [empty, empty._replace(**load)]), {}, 0.0)[0]

    assert needed(rows=100) == 2
    assert needed(rows=100, waiting=50) == 3
    assert needed(rows=100, queued=100) == 3


def test_fewer_workers_stay_only_after_a_calm_and_as_many_as_it_needed() -> None:
    fleet = Simulated(make(), 10)
    loads = [100, 300, 100, 100, 100, 100]
    assert fleet.run(lambda i: loads[i], 6) == [10] * 6
    assert fleet.step(100) == 6  # for the 300
    # A busy moment ends a calm.
    fleet = Simulated(make(), 10)
    assert set(fleet.run(lambda i: 650 if i % 6 == 5 else 100, 60)) == {10}


@pytest.mark.parametrize("seed", range(5))
def test_noise_makes_no_flapping(seed: int) -> None:
    draw = random.Random(seed)
    fleet = Simulated(make(after_s=300.0))
    seen = fleet.run(lambda _: max(0.0, draw.gauss(450, 40)), 500)
    changes = sum(a != b for a, b in pairwise(seen[20:]))
    assert changes <= 2
    assert 7 <= seen[-1] <= 9


def test_a_day_is_followed_within_bounds() -> None:
    fleet = Simulated(make(least=2, most=8), 2)
    day = [50.0] * 30 + [2000.0] * 30 + [0.0] * 30
    seen = fleet.run(lambda i: day[i], len(day))
    assert (min(seen), max(seen), seen[-1]) == (2, 8, 2)
    assert seen[33] == 8


def test_nothing_changes_without_reports_or_below_target_while_workers_start() -> None:
    policy, idle = make(after_s=0.0), Report(0, 0, ROWS, 0, BLOCKS, 0)
    assert policy.decide(Fleet(3, 0, []), {}, 0.0) == (3, {})
    assert policy.decide(Fleet(3, 2, [idle, idle]), {}, 0.0) == (3, {})
    assert policy.decide(Fleet(3, 3, [idle, idle]), {}, 0.0) == (3, {})
    failed = idle._replace(max_rows=0)
    assert policy.decide(Fleet(3, 3, [failed] * 3), {}, 0.0) == (3, {})
    assert policy.decide(Fleet(3, 3, [idle] * 3), {}, 0.0) == (1, {})


def test_the_metrics_of_a_context_are_read_by_replica() -> None:
    full = Report(90, 30, ROWS, 10, BLOCKS, 5)
    names = {name: {"a": value, "b": value} for name, value in full._asdict().items()}
    context = SimpleNamespace(
        aggregated_metrics=names,
        target_num_replicas=2,
        current_num_replicas=2,
        policy_state={},
        current_time=0.0,
    )
    assert make()(context) == (4, {})
    context.aggregated_metrics = None
    assert make()(context) == (2, {})
