"""K16, K17: the mocked engine decides, tells and publishes what a real one does, at the same times."""

from collections import deque
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from mallee.mocker.engine import MockedEngine
from mallee.mocker.passes import mock_spec
from mallee.mocker.texts import Texts
from mallee.mocker.timing import Timing
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.testing.forward import MockForward
from mallee.testing.random_model import random_model
from mallee.worker.engine import Engine
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from support.asking import SIZE, Ask, Scene, TokenWriter, command, random_scene
from support.conforming import (
    TIMING,
    Story,
    assert_same,
    assert_same_but_for_strides,
    flat,
    play_real,
    play_scene,
    renamed,
)
from support.examples import examples

SPEC = mock_spec(vocab_size=1 << 31)  # an answer never happens to go on like somebody's prompt
MODEL = random_model("llama", 3)
QUICK = (Phase.explicit, Phase.reuse, Phase.generate)  # a scene that fails is told by its seed
SEEDS = st.integers(0, 1 << 32)


def content(scene: Scene, timing: Timing = TIMING) -> Story:
    """On a real engine whose pass notes in every slot what was written there."""
    forward = MockForward(SPEC, num_blocks=scene.num_blocks, block_size=SIZE)
    return play_real(scene, forward, timing)


def mocked(scene: Scene, **more: Any) -> Story:
    return play_scene(scene, SPEC, **more)


@settings(examples(50), phases=QUICK)
@given(SEEDS)
def test_a_mocked_engine_does_what_one_over_content_does(seed: int) -> None:
    """K16, K17: step for step the same plans, admissions, preemptions, news, events and times."""
    scene = random_scene(seed)
    assert_same(mocked(scene), content(scene))


@settings(examples(12), phases=QUICK)
@given(SEEDS)
def test_a_mocked_engine_does_what_one_over_a_model_does(one_thread: None, seed: int) -> None:
    """K16, K17: the model computes every row; who is admitted, cut, preempted and told is the same."""
    scene = random_scene(seed, num_asks=8)
    forward = MODEL.forward(num_blocks=scene.num_blocks, block_size=SIZE)
    expected = play_real(scene, forward)
    assert_same(play_scene(scene, forward.spec), expected)
    assert_same_but_for_strides(play_scene(scene, forward.spec, max_multi_step=99), expected)


@settings(examples(50), phases=QUICK)
@given(SEEDS, st.sampled_from([2, 5, 1 << 20]))
def test_strides_are_steps(seed: int, max_multi_step: int) -> None:
    """K16, K21, part: many steps planned at once: the same choices, news, events and times."""
    scene = random_scene(seed)
    assert_same_but_for_strides(mocked(scene, max_multi_step=max_multi_step), mocked(scene))


@settings(examples(20), phases=QUICK)
@given(SEEDS)
def test_what_rows_share_is_read_once_if_the_attention_can(seed: int) -> None:
    """K16: tree attention: a step's time follows from the distinct slots that its rows read."""
    scene, timing = random_scene(seed), replace(TIMING, shares_reads=True)
    expected = content(scene, timing)
    assert_same(mocked(scene, timing=timing), expected)
    assert_same_but_for_strides(mocked(scene, timing=timing, max_multi_step=99), expected)


@settings(examples(40), phases=QUICK)
@given(SEEDS)
def test_outlines_are_texts(seed: int) -> None:
    """K16: prompts without tokens: the same steps, and events that differ in the names of blocks alone."""
    scene = random_scene(seed)
    found, expected = mocked(scene, texts=Texts(SIZE)), mocked(scene)
    assert found.decisions == expected.decisions
    assert [step.news for step in found.steps] == [step.news for step in expected.steps]
    assert renamed(found.events) == renamed(expected.events)
    assert [step.ended for step in found.steps] == [step.ended for step in expected.steps]
    assert (len(found.held), found.next_seq) == (len(expected.held), expected.next_seq)


class Ticks(NamedTuple):
    """The story of an engine that is driven by counting its steps."""

    tokens: dict[tuple[str, int], list[int]]
    last: dict[tuple[str, int], Any]
    events: list[Any]
    num_calls: int


def play_ticks(scene: Scene, *, max_multi_step: int) -> Ticks:
    """Over content, a command every few steps; strides end where one comes."""
    engine = Engine(
        MockForward(SPEC, num_blocks=scene.num_blocks, block_size=SIZE),
        config=scene.config,
        clock=lambda: 0.0,
        worker=WorkerId("w0"),
        incarnation=Incarnation(1),
    )
    found = Ticks({}, {}, [], 0)
    coming = deque((int(ask.at_s * 200), ask) for ask in scene.asks)
    tick = 0
    while coming or engine.has_work:
        if not engine.has_work:
            tick = max(tick, coming[0][0])
        while coming and coming[0][0] <= tick:
            engine.submit(command(coming.popleft()[1], TokenWriter()), "g")
        if not engine.has_work:
            continue
        until = coming[0][0] - tick if coming else max_multi_step
        num_steps = (
            min(engine.multi_step_limit(), until, max_multi_step) if max_multi_step > 1 else 1
        )
        result = engine.multi_step(num_steps) if num_steps > 1 else engine.step()
        tick += max(1, num_steps)
        engine.check()
        for frame in result.frames.values():
            for update in frame.updates:
                key = (update.request, update.branch)
                found.tokens.setdefault(key, []).extend(update.tokens)
                # The last update of a stride begins earlier than that of a step.
                found.last[key] = msgspec.structs.replace(update, tokens=(), position=-1)
        found.events.extend(flat(result.events.events) if result.events else ())
        found = found._replace(num_calls=found.num_calls + 1)
    return found


@settings(examples(40), phases=QUICK)
@given(SEEDS, st.sampled_from([2, 3, 99]))
def test_a_stride_computes_what_its_steps_would(seed: int, max_multi_step: int) -> None:
    """K16: over content, where a wrong slot changes every token after it."""
    scene = random_scene(seed)
    found, expected = (
        play_ticks(scene, max_multi_step=max_multi_step),
        play_ticks(scene, max_multi_step=1),
    )
    assert found.tokens == expected.tokens
    assert found.last == expected.last
    assert found.events == expected.events
    assert found.num_calls <= expected.num_calls


def test_strides_save_steps_and_a_command_cuts_them() -> None:
    """K21, part: the comparisons above are of strides; a late command is heard as soon as after a step."""
    config = EngineConfig(SchedulerConfig(max_step_tokens=64, max_rows=8))
    long = [Ask(0.0, "generate", "a", (1,), 8, 200), Ask(0.0, "generate", "b", (2,), 6, 150)]
    alone = Scene(config, 400, tuple(long))
    assert len(mocked(alone, max_multi_step=99).steps) < len(mocked(alone).steps) / 2
    late = Scene(config, 400, (*long, Ask(0.2503, "cancel", "a")))
    story = mocked(late, max_multi_step=99)
    (end,) = (s.ended for s in story.steps if any(n.finish == "cancelled" for n in s.news))
    assert 0.2503 <= end < 0.2503 + 0.005
    assert_same_but_for_strides(story, mocked(late))


@settings(examples(30), phases=QUICK)
@given(SEEDS)
def test_progress_that_is_not_told_is_told_at_the_end(seed: int) -> None:
    """K16: with a first token and an end for each branch alone, sums and ends are the same."""
    scene = random_scene(seed)
    brief = mocked(scene, texts=Texts(SIZE), max_multi_step=99, reports_progress=False)
    whole = mocked(scene, texts=Texts(SIZE), max_multi_step=99)
    assert brief.choices == whole.choices
    assert brief.events == whole.events
    told, expected = brief.told(), whole.told()
    assert told.keys() == expected.keys()
    for branch, news in told.items():
        assert news[0] == expected[branch][0]
        assert news[-1] == expected[branch][-1]


@settings(examples(40), phases=QUICK)
@given(SEEDS, st.floats(0.0, 1.0))
@example(seed=1, share=0.9921875)  # a branch has ended in the step that the crash interrupts
def test_a_crash_takes_along_no_token_that_was_there_before(seed: int, share: float) -> None:
    """K28, part: what was told by then and what is unreported are what single steps would have told."""
    scene = random_scene(seed, is_varied=False)
    steps = mocked(scene, texts=Texts(SIZE))
    until = share * steps.steps[-1].ended + 1e-7  # never at the very end of a step
    expected = {
        branch: max(total for at, total, _ in news if at <= until)
        for branch, news in steps.told().items()
        if news[0][0] <= until
    }
    engines: list[MockedEngine] = []
    brief = mocked(
        scene,
        texts=Texts(SIZE),
        max_multi_step=99,
        reports_progress=False,
        until=until,
        watch=engines.append,
    )
    found = {branch: news[-1][1] for branch, news in brief.told().items()}
    for news in engines[0].unreported(until):
        found[news.request, news.branch] += news.num_tokens
    assert found == expected


def test_frames_and_counts_tell_the_same() -> None:
    """K16: what goes to gateways and what a replay counts."""
    scene = random_scene(5)
    raw, counted = mocked(scene, is_raw=True), mocked(scene)
    assert [step.news for step in raw.steps] == [step.news for step in counted.steps]
    assert raw.events == counted.events


def test_the_same_seed_gives_the_same_story_to_the_bit() -> None:
    """K21, part, K26: with jitter too; another seed gives other times and the same decisions' kinds."""
    scene = random_scene(11)
    jittery = replace(TIMING, jitter=0.3)
    stories = [mocked(scene, max_multi_step=99, timing=jittery, seed=seed) for seed in (3, 3, 4)]
    assert stories[0] == stories[1]
    assert stories[0] != stories[2]
    single = mocked(scene, timing=jittery, seed=3)
    assert_same_but_for_strides(stories[0], single)
