"""Mocked engines that speculate: the same tokens, in fewer steps, each of which takes what it computes."""

from dataclasses import replace
from typing import Any

import pytest

from mallee.mocker.engine import MockedEngine
from mallee.mocker.texts import Texts
from mallee.mocker.timing import ClosedForm, Plane, Timing
from mallee.protocol.errors import ConfigError
from mallee.protocol.messages import Generate, Limits, pack_tokens
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.speculation.speculator import SpeculationConfig, SpeculationName
from support.conforming import make_mocked

TIMING = Timing(ClosedForm(1e-3, 1e-5, 1e-7, 1e-6, (Plane(2e-3, 1e-4, 1e-6),)), 5e-4)
CONFIG = EngineConfig(SchedulerConfig(64, 16))


def make(drafters: SpeculationName, timing: Timing = TIMING, **more: Any) -> MockedEngine:
    config = replace(CONFIG, speculation=SpeculationConfig(drafters))
    return make_mocked(lambda: 0.0, config, num_blocks=200, timing=timing, **more)


def play(mocked: MockedEngine) -> tuple[list[int], float, int]:
    """Tokens of an answer that another gave before, the time that it took, and its steps."""
    tokens: list[int] = []
    now, num_steps, begun = 0.0, 0, 0.0
    for name in ("first", "again"):
        limits = Limits(40, ignore_eos=True)
        mocked.submit(Generate(name, pack_tokens([1, 2, 3, 4, 5]), limits))
        begun, num_steps = now, 0
        while (end := mocked.start(now)) is not None:
            now, num_steps = end, num_steps + 1
            result = mocked.finish_raw()
            for frame in result.frames.values():
                tokens += [t for u in frame.updates if u.request == "again" for t in u.tokens]
            mocked.check()
    return tokens, now - begun, num_steps


def test_an_answer_that_was_given_before_takes_fewer_steps_and_less_time() -> None:
    """X23, part: each drafted position takes the time of a row."""
    plain, plain_s, plain_steps = play(make("off"))
    mocked = make("sibling")
    tokens, seconds, num_steps = play(mocked)
    assert tokens == plain
    assert num_steps < 0.4 * plain_steps
    stats = mocked.engine.stats().speculation
    assert stats.num_accepted > 25
    assert seconds < 0.6 * plain_s
    mocked = make("sibling", Timing(ClosedForm(0.0, 0.0, 0.0, 0.0, (Plane(0.0, 1.0, 0.0),))))
    _, seconds, num_steps = play(mocked)
    drafted = mocked.engine.stats().speculation.num_drafted
    assert seconds == pytest.approx(num_steps - 1 + drafted), "of rows, after the prompt's step"


def test_texts_of_run_lengths_have_nothing_to_draft() -> None:
    """X23, part: refused with the remedy, instead of an acceptance that nobody measured."""
    with pytest.raises(ConfigError, match="set speculation to off"):
        make("auto", texts=Texts(4))
