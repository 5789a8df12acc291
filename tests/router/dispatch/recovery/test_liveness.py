"""Workers that make no progress are found, and slow ones are not taken for them for long."""

import pytest

from mallee.protocol.ids import WorkerId
from mallee.router.dispatch.recovery.liveness import Liveness

W = WorkerId("w0")


def busy(patience_s: float = 3.0, pause_s: float = 0.1) -> Liveness:
    """One busy worker, whose steps took `pause_s` so far; it is 100 o'clock."""
    liveness = Liveness(patience_s)
    liveness.watch(W, 100.0 - 2 * pause_s)
    liveness.heard(W, 7, 100.0 - pause_s, has_updates=True)
    liveness.heard(W, 8, 100.0, has_updates=True)
    return liveness


def look(
    liveness: Liveness,
    end: float,
    *,
    begin: float = 100.0,
    step: int | None = 8,
    is_tried: bool = False,
) -> float | None:
    """The time at which the worker was found, looked at each half second until `end`.

    Its host beats each time with `step`; None: not at all.
    """
    now, found = begin, None
    while now <= end:
        if step is not None:
            liveness.heard(W, step, now, has_updates=False)
        if liveness.stalled(now, {W} if is_tried else ()):
            assert found is None, "it was told twice"
            liveness.suspect(W)
            found = now
        now += 0.5
    return found


def test_heartbeats_of_a_worker_that_hangs_are_no_progress() -> None:
    """X4, part: the step's number stands still; it is found once, after three seconds."""
    assert look(busy(), 110.0) == 103.5


@pytest.mark.parametrize("has_updates", [True, False])
def test_steps_are_progress_with_and_without_updates(has_updates: bool) -> None:
    liveness = busy()
    for second in range(1, 60):
        liveness.heard(W, 8 + second, 100.0 + second, has_updates=has_updates)
        assert not liveness.stalled(100.0 + second)


def test_a_worker_with_long_steps_may_take_four_times_the_longest() -> None:
    assert look(busy(pause_s=5.0), 130.0) == 120.5


def test_a_worker_that_is_silent_is_found_however_long_its_steps_are() -> None:
    """X4, part: its process has stopped; while it hangs it would beat."""
    assert look(busy(pause_s=5.0), 130.0, step=None) == 103.5


def test_a_worker_that_was_suspected_wrongly_may_take_half_as_long_again() -> None:
    liveness = busy()
    assert look(liveness, 130.0) == 103.5
    liveness.heard(W, 9, 130.0, has_updates=False)
    assert look(liveness, 200.0, begin=130.5, step=9) == 175.5


def test_a_worker_of_which_no_step_is_known_has_more_time() -> None:
    liveness = Liveness(3.0)
    liveness.watch(W, 100.0)
    assert look(liveness, 140.0, step=5) == 130.5  # it had done five before


def test_a_worker_that_nothing_was_heard_of_yet_may_be_being_connected() -> None:
    liveness = Liveness(3.0)
    liveness.watch(W, 100.0)
    assert look(liveness, 140.0, step=None) == 130.5


def test_a_late_look_proves_nothing() -> None:
    """The gateway was held up itself: what the worker said meanwhile is yet to be read."""
    liveness = busy()
    assert look(liveness, 101.0) is None
    assert not liveness.stalled(106.0)
    liveness.heard(W, 9, 106.1, has_updates=True)
    assert look(liveness, 109.0, begin=106.5, step=9) is None


def test_an_idle_worker_is_never_suspect_and_a_new_life_is_not_judged_by_the_last() -> None:
    liveness = busy(pause_s=5.0)
    liveness.unwatch(W)
    assert liveness.next_time() is None
    assert look(liveness, 1000.0) is None
    liveness.forget(W)
    liveness.watch(W, 1000.0)
    liveness.heard(W, 1, 1000.1, has_updates=True)
    assert look(liveness, 1010.0, begin=1000.5, step=1) == 1003.5


def test_a_worker_that_a_suspect_is_tried_on_has_more_time() -> None:
    """A request that held up one worker may be long, and no poison."""
    assert look(busy(), 140.0, is_tried=True) == 130.5
