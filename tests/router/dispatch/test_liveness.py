"""Workers that make no progress are found, and slow ones are not taken for them for long."""

import pytest

from mallee.protocol.ids import WorkerId
from mallee.router.dispatch.liveness import Liveness

W = WorkerId("w0")


def busy(patience_s: float = 3.0, pause_s: float = 0.1) -> Liveness:
    """One busy worker, whose steps took `pause_s` so far; it is 100 o'clock."""
    liveness = Liveness(patience_s)
    liveness.watch(W, 100.0 - 2 * pause_s)
    liveness.heard(W, 7, 100.0 - pause_s, has_updates=True)
    liveness.heard(W, 8, 100.0, has_updates=True)
    return liveness


def test_heartbeats_of_a_worker_that_hangs_are_no_progress() -> None:
    """X4, part: the step's number stands still; it is found once, after three seconds."""
    liveness = busy()
    found = []
    for second in range(1, 10):
        liveness.heard(W, 8, 100.0 + second, has_updates=False)
        found.append(liveness.stalled(100.0 + second))
    assert found == [[]] * 3 + [[W]] + [[]] * 5


@pytest.mark.parametrize("has_updates", [True, False])
def test_steps_are_progress_with_and_without_updates(has_updates: bool) -> None:
    liveness = busy()
    for second in range(1, 60):
        liveness.heard(W, 8 + second, 100.0 + second, has_updates=has_updates)
        assert not liveness.stalled(100.0 + second)


def test_a_worker_with_long_steps_may_take_four_times_the_longest() -> None:
    liveness = busy(pause_s=5.0)
    assert not liveness.stalled(119.0)
    assert liveness.stalled(121.0) == [W]


def test_a_worker_that_was_suspected_wrongly_may_take_half_as_long_again() -> None:
    liveness = busy()
    assert liveness.stalled(104.0) == [W]
    liveness.heard(W, 9, 130.0, has_updates=False)
    assert not liveness.stalled(174.0)
    assert liveness.stalled(176.0) == [W]


def test_a_worker_of_which_no_step_is_known_has_more_time() -> None:
    liveness = Liveness(3.0)
    liveness.watch(W, 100.0)
    liveness.heard(W, 5, 101.0, has_updates=False)  # it had done five before
    assert not liveness.stalled(129.0)
    assert liveness.stalled(131.0) == [W]


def test_an_idle_worker_is_never_suspect_and_a_new_life_is_not_judged_by_the_last() -> None:
    liveness = busy(pause_s=5.0)
    liveness.unwatch(W)
    assert liveness.next_time() is None
    assert not liveness.stalled(1000.0)
    liveness.forget(W)
    liveness.watch(W, 1000.0)
    liveness.heard(W, 1, 1000.1, has_updates=True)
    assert liveness.stalled(1004.0) == [W]


def test_a_worker_that_a_suspect_is_tried_on_has_more_time() -> None:
    """A request that held up one worker may be long, and no poison."""
    liveness = busy()
    assert not liveness.stalled(129.0, {W})
    assert liveness.stalled(131.0, {W}) == [W]
