"""K13, K16, K21: a mocked engine at the pace of a clock does what it does in virtual time.

The live runner is played on a loop whose time is made up, so that any scene can be compared event for
event.
"""

import asyncio
from collections.abc import Callable
from itertools import groupby
from math import inf
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from mallee.actors.mock.pacer import GRAIN_S, Pacer
from mallee.actors.mock.runner import MockRunner
from mallee.mocker.passes import mock_spec
from mallee.mocker.tiers import TierConfig
from mallee.mocker.timing import ClosedForm, Plane, Timing
from mallee.protocol.messages import Command
from mallee.worker.records import StepResult
from support.asking import Scene, TokenWriter, command, random_scene
from support.conforming import (
    Done,
    Spy,
    Story,
    Time,
    assert_same_but_for_strides,
    make_mocked,
    news_of,
    play_mocked,
    published,
    story_of,
)
from support.examples import examples
from support.virtual.loop import START, VirtualLoop
from support.waiting import elapse

SPEC = mock_spec(vocab_size=1 << 31)
QUICK = (Phase.explicit, Phase.reuse, Phase.generate)  # a scene that fails is told by its seed
LIVE_BOUND_S = 2 * GRAIN_S + 1e-9  # for rounding: a timer's clock may read one bit before its time
"""A step is told so much later than in virtual time at most, where nothing else keeps the loop."""

# Hours: what comes within the timer's grain of a step's end may be in time or late for the next step.
SLOW = Timing(ClosedForm(200.0, 2.0, 0.02, 0.2, (Plane(400.0, 20.0, 0.2),)), 100.0)
SCALE = 2e5


class Player:
    """One runner, its commands at their times, and what it did."""

    def __init__(
        self,
        scene: Scene,
        clock: Callable[[], float],
        timing: Timing,
        max_multi_step: int,
        pacer: Pacer,
        tiers: TierConfig | None,
    ) -> None:
        self.mocked = make_mocked(
            Time(clock),
            scene.config,
            num_blocks=scene.num_blocks,
            max_multi_step=max_multi_step,
            spec=SPEC,
            timing=timing,
            tiers=tiers,
        )
        self.spy = Spy(self.mocked.engine, timing)
        self.clock = clock
        self.steps: list[Done] = []
        self.failures: list[str] = []
        self.runner = MockRunner(self.mocked, pacer, self, clock=clock)
        self.runner.start()

    def submit(self, commands: list[Command]) -> None:
        self.runner.submit("g", commands)
        self.runner.check()

    def dropped(self, gateway: str) -> None:
        pass

    def fail(self, reason: str) -> None:
        self.failures.append(reason)

    def deliver(self, result: StepResult, next_seq: int) -> None:
        self.mocked.engine.check()
        updates = [u for frame in result.frames.values() for u in frame.updates]
        events = result.events
        before = next_seq - len(events.events) if events is not None else next_seq
        told = news_of(updates, lambda u: len(u.tokens))
        self.steps.append(Done(0.0, self.clock(), self.spy.take(), told, published(events, before)))

    def story(self) -> Story:
        assert not self.failures
        return story_of(self.mocked.engine, self.steps)


async def play_live(
    scene: Scene,
    clock: Callable[[], float],
    timing: Timing,
    *,
    max_multi_step: int,
    pacer: type[Pacer] = Pacer,
    tiers: TierConfig | None = None,
) -> Story:
    """The scene's commands at their times on the loop's clock, until nothing is left to do."""
    player = Player(scene, clock, timing, max_multi_step, pacer(clock), tiers)
    begin = clock()
    writer = TokenWriter()
    for at_s, asks in groupby(scene.asks, key=lambda ask: ask.at_s):
        wait = begin + at_s - clock()
        if wait > 0:
            await elapse(wait)
        player.submit([command(ask, writer) for ask in asks])
    while player.mocked.is_busy or player.mocked.next_due < inf:
        await elapse(1.0)
    player.runner.check()
    return player.story()


def virtual(scene: Scene, timing: Timing, tiers: TierConfig | None = None) -> Story:
    """In virtual time, step by step."""

    def make(clock: Time) -> Any:
        return make_mocked(
            clock, scene.config, num_blocks=scene.num_blocks, spec=SPEC, timing=timing, tiers=tiers
        )

    return play_mocked(make, scene.asks, TokenWriter())


def assert_same_order(found: Story, expected: Story) -> None:
    """All the same, but for times."""
    assert found.decisions == expected.decisions
    assert [step.news for step in found.steps] == [step.news for step in expected.steps]
    assert [event[1:] for event in found.events] == [event[1:] for event in expected.events]
    assert found[1:] == expected[1:]


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
@example(2048)  # a timer rings one bit early, and again two grains later
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
