"""K16, K17: the mocked engine decides, tells and publishes what a real one does, at the same times."""

from dataclasses import replace
from typing import Any, Literal

import msgspec.structs as structs
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from bench.doubles.forward import MockForward
from bench.doubles.random_model import random_model
from mallee.mocker.engine import MockedEngine
from mallee.mocker.passes import mock_spec
from mallee.mocker.texts import Texts
from mallee.mocker.timing import Timing
from mallee.protocol.model import GroupSpec
from support.asking import SIZE, Scene, random_scene
from support.conforming import (
    TIMING,
    Story,
    assert_same,
    assert_same_but_for_strides,
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
@given(SEEDS, st.booleans(), st.sampled_from([2, 5, 1 << 20]))
def test_a_mocked_engine_does_what_one_over_content_does(
    seed: int, shares_reads: bool, max_multi_step: int
) -> None:
    """K16, K17, K21, part: step for step the same plans, admissions, preemptions, news, events and times.

    In frames for gateways, too; and with many steps planned at once the same choices, news, events and times.
    Under tree attention a step's time follows from the distinct slots that its rows read.
    """
    scene, timing = random_scene(seed), replace(TIMING, shares_reads=shares_reads)
    expected = content(scene, timing)
    counted = mocked(scene, timing=timing)
    assert_same(counted, expected)
    raw = mocked(scene, timing=timing, is_raw=True)
    assert [step.news for step in raw.steps] == [step.news for step in counted.steps]
    assert raw.events == counted.events
    strides = mocked(scene, timing=timing, max_multi_step=max_multi_step)
    assert_same_but_for_strides(strides, expected)


@settings(examples(12), phases=QUICK)
@given(SEEDS)
def test_a_mocked_engine_does_what_one_over_a_model_does(one_thread: None, seed: int) -> None:
    """K16, K17: the model computes every row; who is admitted, cut, preempted and told is the same."""
    scene = random_scene(seed, num_asks=8)
    forward = MODEL.forward(num_blocks=scene.num_blocks, block_size=SIZE)
    expected = play_real(scene, forward)
    assert_same(play_scene(scene, forward.spec), expected)
    assert_same_but_for_strides(play_scene(scene, forward.spec, max_multi_step=99), expected)


@settings(examples(20), phases=QUICK)
@given(SEEDS, st.sampled_from([3, 99]), st.sampled_from(["window", "state"]))
def test_steps_at_once_are_single_ones_over_side_groups_too(
    seed: int, max_multi_step: int, kind: Literal["window", "state"]
) -> None:
    """K16, K17, part: blocks leave a window, and states are left behind, in the same steps."""
    window = 2 * SIZE if kind == "window" else None
    groups = (
        GroupSpec(kind="full", layers=(0,), nbytes=4),
        GroupSpec(kind=kind, layers=(1,), nbytes=4, window=window),
    )
    scene, spec = random_scene(seed), structs.replace(SPEC, num_layers=2, groups=groups)
    strides = play_scene(scene, spec, max_multi_step=max_multi_step)
    assert_same_but_for_strides(strides, play_scene(scene, spec))


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


def test_the_same_seed_gives_the_same_story_to_the_bit() -> None:
    """K21, part, K26: with jitter too; another seed gives other times and the same decisions' kinds."""
    scene = random_scene(11)
    jittery = replace(TIMING, jitter=0.3)
    stories = [mocked(scene, max_multi_step=99, timing=jittery, seed=seed) for seed in (3, 3, 4)]
    assert stories[0] == stories[1]
    assert stories[0] != stories[2]
    single = mocked(scene, timing=jittery, seed=3)
    assert_same_but_for_strides(stories[0], single)
