"""Mocked engines go on where others were cut off, with the very tokens that those would have drawn."""

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from mallee.actors.mock.fleet import MockPlan
from mallee.mocker.engine import MockedEngine
from mallee.mocker.passes import mock_spec
from mallee.mocker.texts import Texts
from mallee.mocker.timing import Fixed, Timing
from mallee.mocker.updates import CountedUpdate
from mallee.protocol.ids import Incarnation, WorkerId, branch_seed
from mallee.protocol.messages import Command, Fork, Generate, Limits, Prefill, Sampling, pack_tokens
from mallee.worker.kv.paths import path_tokens
from support.conforming import make_mocked
from support.cutting import Ended, continuation
from support.mock_scene import make_folder, mock_config

SIZE = 16
TIMING = Timing(Fixed(0.001, 0.001))
TEXT = [i * 7 % 300 for i in range(40)]
WAYS = {
    "greedy": Sampling(),
    "sampled": Sampling(1.0, seed=9, top_p=0.9),
    "penalised": Sampling(1.0, seed=9, frequency_penalty=0.3, logprobs=2),
}


def make(worker: str, **more: Any) -> MockedEngine:
    fixed: dict[str, Any] = {"num_blocks": 200, "timing": TIMING, "block_size": SIZE}
    return make_mocked(lambda: 0.0, worker=worker, **fixed, **{"max_multi_step": 1 << 20, **more})


def play(mocked: MockedEngine, *commands: Command) -> dict[tuple[str, int], Ended]:
    """Run to idle: the updates of engines that tell tokens."""
    for command in commands:
        mocked.submit(command)
    found: dict[tuple[str, int], Ended] = {}
    while (end := mocked.start(0.0)) is not None:
        assert end >= 0.0
        for frame in mocked.finish_raw().frames.values():
            for update in frame.updates:
                ended = found.setdefault((update.request, update.branch), Ended())
                ended.tokens += update.tokens
                ended.logprobs += update.logprobs
                ended.last = update
        mocked.check()
    return found


def count(mocked: MockedEngine, *commands: Command) -> dict[tuple[str, int], list[CountedUpdate]]:
    """Run to idle: the updates of engines that count tokens."""
    for command in commands:
        mocked.submit(command)
    found: dict[tuple[str, int], list[CountedUpdate]] = {}
    while mocked.start(0.0) is not None:
        for update in mocked.finish().updates:
            found.setdefault((update.request, update.branch), []).append(update)
        mocked.check()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("max_multi_step", [1, 1 << 20])
@pytest.mark.parametrize("way", WAYS)
def test_a_mocked_answer_goes_on_as_if_uncut(way: str, max_multi_step: int) -> None:
    """X4, part, K28, part: after any token, in single steps or many at once; so do forks of its state."""
    config: dict[str, Any] = {"spec": mock_spec(vocab_size=300), "max_multi_step": max_multi_step}
    whole = Generate("r", pack_tokens(TEXT), Limits(50), WAYS[way], 3)
    first = make("w0", **config)
    answers = play(first, whole)
    fork = Fork("f", "", (b"", pack_tokens([1, 2])), Limits(5), WAYS[way])
    for branch in range(3):
        ended = answers["r", branch]
        own = structs.replace(whole, n=1, first_branch=branch)
        for k in range(50):
            other = make("w1", seed=5, **config)
            again = continuation(own, TEXT, ended.tokens[:k])
            (rest,) = play(other, again).values()
            assert rest.tokens == ended.tokens[k:]
            assert rest.logprobs == ended.logprobs[k:]
            assert (rest.last.finish, rest.last.boundary) == ("length", 90)
        forks = [
            play(engine, structs.replace(fork, request=f"f{branch}", capsule=capsule))
            for engine, capsule in ((first, f"r.{branch}"), (other, f"{again.request}.0"))
        ]
        assert [e.tokens for e in forks[0].values()] == [e.tokens for e in forks[1].values()]


def test_the_engines_of_a_live_fleet_draw_alike(tmp_path: Path) -> None:
    """X4, part, K28, part: whatever their names, pace and jitter, in the words of the model."""
    plan = MockPlan.of(mock_config(make_folder(tmp_path), mock__jitter=0.5, mock__speedup=1.0))
    first, other = (plan.engine(WorkerId(name), Incarnation(i)) for i, name in enumerate("ab"))
    whole = Generate("r", pack_tokens(TEXT), Limits(40), Sampling(0.8, seed=3), first_branch=2)
    ended = play(first, whole)["r", 0]
    assert set(ended.tokens) <= set(plan.words)
    (rest,) = play(other, continuation(whole, TEXT, ended.tokens[:13])).values()
    assert rest.tokens == ended.tokens[13:]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=4)])
@pytest.mark.parametrize("reports_progress", [True, False])
def test_run_length_answers_go_on_too(sampling: Sampling, reports_progress: bool) -> None:
    """X4, part: the text of a cut answer is named, counted, and hashed as the one that was drawn."""
    texts = Texts(SIZE)

    def engine(name: str) -> MockedEngine:
        return make(name, texts=texts, reports_progress=reports_progress)

    raw = texts.prompt([3, 4, 5], 70, 32)
    whole = Generate("r", raw, Limits(60), sampling, 2)
    first = engine("w0")
    updates = count(first, whole)
    for branch in range(2):
        assert sum(update.num_tokens for update in updates["r", branch]) == 60
        seed = branch_seed(sampling.seed, branch) if sampling.temperature else 0
        for k in (0, 1, 20, 59):
            again = structs.replace(
                whole,
                request=f"again {branch} {k}",
                tokens=texts.answered(raw, seed, k),
                n=1,
                first_branch=branch,
                drawn=k,
            )
            other = engine("w1")
            for where in (other, first):
                (rest,) = count(where, again).values()
                assert sum(update.num_tokens for update in rest) == 60 - k
                assert (rest[-1].finish, rest[-1].boundary) == ("length", 130)
                assert rest[-1].cached_tokens == (0 if where is other else (69 + k) // SIZE * SIZE)
            assert text_of(other, f"{again.request}.0") == text_of(first, f"r.{branch}")


def test_a_mocked_capsule_is_built_again_under_its_id() -> None:
    """X4, part: from run-length text; its forks go on at the same positions."""
    texts = Texts(SIZE)
    raw = texts.prompt([3, 4, 5], 70, 32)
    first, other = make("w0", texts=texts), make("w1", texts=texts)
    count(first, Generate("r", raw, Limits(10), WAYS["sampled"]))
    whole = texts.answered(raw, WAYS["sampled"].seed, 10)
    count(other, Prefill("again", whole, capsule="r.0", replaceable=True))
    fork = Fork("f", "r.0", (b"", texts.suffix(1, 4)), Limits(9), WAYS["sampled"])
    for mocked in (first, other):
        count(mocked, fork)
        assert mocked.engine.stats().capsules.replaceable == 3
    for capsule in ("r.0", "f.0", "f.1"):
        assert text_of(first, capsule) == text_of(other, capsule)


def text_of(mocked: MockedEngine, capsule: str) -> list[int]:
    found = mocked.engine._capsules.get(capsule)
    return [*path_tokens(found.node), *found.pending]
