"""K13, K16, K21: a mocked engine at the pace of a clock does what it does in virtual time.

The live runner is played on a loop whose time is made up, so that any scene can be compared event for
event.
"""

import asyncio
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mallee.actors.mock.pacer import GRAIN_S, Pacer
from mallee.mocker.tiers import TierConfig
from mallee.mocker.timing import ClosedForm, Plane, Timing
from support.asking import Scene, random_scene
from support.conforming import Story, assert_same_but_for_strides
from support.examples import examples
from support.paced import assert_same_order, play_live, virtual
from support.virtual.loop import START, VirtualLoop

QUICK = (Phase.explicit, Phase.reuse, Phase.generate)  # a scene that fails is told by its seed
LIVE_BOUND_S = 2 * GRAIN_S
"""A step is told so much later than in virtual time at most, where nothing else keeps the loop."""

# Hours: what comes within the timer's grain of a step's end may be in time or late for the next step.
SLOW = Timing(ClosedForm(200.0, 2.0, 0.02, 0.2, (Plane(400.0, 20.0, 0.2),)), 100.0)
SCALE = 2e5


class LazyPacer(Pacer):
    """Wants to be woken as rarely as can be: whole strides are told at once."""

    @property
    def pace_s(self) -> float:
        return 1e9


def slowed(scene: Scene) -> Scene:
    """The same at SLOW's pace. No two commands come at almost the same time."""
    asks = [ask._replace(at_s=ask.at_s * SCALE, ttl_s=ask.ttl_s * SCALE) for ask in scene.asks]
    return scene._replace(asks=tuple(asks))


def play_made_up(
    scene: Scene, max_multi_step: int, pacer: type[Pacer] = Pacer, **more: Any
) -> Story:
    """On a loop in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        time = runner.get_loop().time
        playing = play_live(
            scene,
            lambda: time() - START,
            SLOW,
            max_multi_step=max_multi_step,
            pacer=pacer,
            pause_s=1.0,
            **more,
        )
        return runner.run(playing)


@settings(examples(15), phases=QUICK)
@given(st.integers(0, 1 << 32))
def test_a_live_engine_agrees_event_for_event_with_a_virtual_one(seed: int) -> None:
    """K16, K21, part: step for step the same, later by the timer's grain at most."""
    scene = slowed(random_scene(seed))
    found, expected = play_made_up(scene, 1), virtual(scene, SLOW)
    assert_same_order(found, expected)
    for ours, theirs in zip(found.steps, expected.steps, strict=True):
        assert ours.ended - theirs.ended == pytest.approx(0.0, abs=LIVE_BOUND_S)


@pytest.mark.slow
@pytest.mark.parametrize("pacer", [Pacer, LazyPacer])
@settings(examples(10), phases=QUICK)
@given(st.integers(0, 1 << 32))
def test_live_strides_are_virtual_steps(pacer: type[Pacer], seed: int) -> None:
    """K16, K21, part: however many steps the loop takes at once, the same events at the same times."""
    scene = slowed(random_scene(seed))
    found = play_made_up(scene, 99, pacer)
    assert_same_but_for_strides(found, virtual(scene, SLOW), abs_s=LIVE_BOUND_S)


@pytest.mark.slow
@settings(examples(10), phases=QUICK)
@given(st.integers(0, 1 << 32))
def test_a_live_engine_with_tiers_agrees_with_a_virtual_one(seed: int) -> None:
    """K15, part, K16, K21, part: it is woken when a move ends, and does the same."""
    tiers = TierConfig(40, 80, 400.0, 100.0, 20.0, 100.0, token_nbytes=1000)
    scene = slowed(random_scene(seed))
    found, expected = play_made_up(scene, 99, tiers=tiers), virtual(scene, SLOW, tiers)
    assert_same_but_for_strides(found, expected, abs_s=1.0)


def test_a_lazy_loop_is_woken_less_often() -> None:
    """K21, part: the strides that are compared above are some."""
    scene = slowed(random_scene(9))
    assert len(play_made_up(scene, 99, LazyPacer).steps) < len(virtual(scene, SLOW).steps)
