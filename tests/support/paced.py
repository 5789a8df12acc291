"""Mocked engines at the pace of a clock, beside those in virtual time."""

import asyncio
from collections.abc import Callable
from itertools import groupby
from math import inf
from typing import Any

from mallee.actors.mock.pacer import Pacer
from mallee.actors.mock.runner import MockRunner
from mallee.mocker.passes import mock_spec
from mallee.mocker.tiers import TierConfig
from mallee.mocker.timing import Timing
from mallee.protocol.messages import Command
from mallee.worker.records import StepResult
from support.asking import Scene, TokenWriter, command
from support.conforming import (
    Done,
    Spy,
    Story,
    Time,
    make_mocked,
    news_of,
    play_mocked,
    published,
    story_of,
)

SPEC = mock_spec(vocab_size=1 << 31)


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
    pause_s: float = 0.005,
) -> Story:
    """The scene's commands at their times on the loop's clock, until nothing is left to do."""
    player = Player(scene, clock, timing, max_multi_step, pacer(clock), tiers)
    begin = clock()
    writer = TokenWriter()
    for at_s, asks in groupby(scene.asks, key=lambda ask: ask.at_s):
        wait = begin + at_s - clock()
        if wait > 0:
            await asyncio.sleep(wait)
        player.submit([command(ask, writer) for ask in asks])
    while player.mocked.is_busy or player.mocked.next_due < inf:  # noqa: ASYNC110 - on a clock of its own
        await asyncio.sleep(pause_s)
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
