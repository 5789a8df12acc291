"""Workers that make no progress are found, and slow ones are not taken for them for long."""

import pytest

from mallee.protocol.ids import Incarnation, WorkerId
from mallee.router.dispatch.recovery.suspects import Suspects

W = WorkerId("w0")


def busy(patience_s: float = 3.0, pause_s: float = 0.1) -> Suspects:
    """One busy worker, whose steps took `pause_s` so far; it is 100 o'clock."""
    suspects = Suspects(patience_s)
    suspects.watch(W, 100.0 - 2 * pause_s)
    suspects.heard(W, 7, 100.0 - pause_s, has_updates=True)
    suspects.heard(W, 8, 100.0, has_updates=True)
    return suspects


def look(
    suspects: Suspects,
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
            suspects.heard(W, step, now, has_updates=False)
        if suspects.stalled(now, {W} if is_tried else ()):
            assert found is None, "it was told twice"
            suspects.add(W, Incarnation(1))
            found = now
        now += 0.5
    return found


@pytest.mark.parametrize(
    ("pause_s", "step", "is_tried", "found"),
    [
        (0.1, 8, False, 103.5),  # heartbeats while the step's number stands still are no progress
        (5.0, 8, False, 120.5),  # with long steps it may take four times the longest
        (5.0, None, False, 103.5),  # silent: its process has stopped; while it hangs it would beat
        (0.1, 8, True, 130.5),  # what held up one worker may be long, and no poison
    ],
)
def test_a_worker_without_progress_is_found_once(
    pause_s: float, step: int | None, is_tried: bool, found: float
) -> None:
    """X4, part: after three seconds, unless its steps are long or a suspect is tried on it."""
    assert look(busy(pause_s=pause_s), 140.0, step=step, is_tried=is_tried) == found


@pytest.mark.parametrize("has_updates", [True, False])
def test_steps_are_progress_with_and_without_updates(has_updates: bool) -> None:
    suspects = busy()
    for second in range(1, 60):
        suspects.heard(W, 8 + second, 100.0 + second, has_updates=has_updates)
        assert not suspects.stalled(100.0 + second)


def test_a_worker_that_was_suspected_wrongly_may_take_half_as_long_again() -> None:
    suspects = busy()
    assert look(suspects, 130.0) == 103.5
    suspects.heard(W, 9, 130.0, has_updates=False)
    assert look(suspects, 200.0, begin=130.5, step=9) == 175.5


@pytest.mark.parametrize("step", [5, None])
def test_a_worker_of_which_no_step_or_nothing_is_known_has_more_time(step: int | None) -> None:
    """It had done five before, or it may be being connected."""
    suspects = Suspects(3.0)
    suspects.watch(W, 100.0)
    assert look(suspects, 140.0, step=step) == 130.5


def test_a_late_look_proves_nothing() -> None:
    """The gateway was held up itself: what the worker said meanwhile is yet to be read."""
    suspects = busy()
    assert look(suspects, 101.0) is None
    assert not suspects.stalled(106.0)
    suspects.heard(W, 9, 106.1, has_updates=True)
    assert look(suspects, 109.0, begin=106.5, step=9) is None


def test_an_idle_worker_is_never_suspect_and_a_new_life_is_not_judged_by_the_last() -> None:
    suspects = busy(pause_s=5.0)
    suspects.unwatch(W)
    assert suspects.next_time() is None
    assert look(suspects, 1000.0) is None
    suspects.forget(W)
    suspects.watch(W, 1000.0)
    suspects.heard(W, 1, 1000.1, has_updates=True)
    assert look(suspects, 1010.0, begin=1000.5, step=1) == 1003.5
