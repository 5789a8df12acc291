"""Mocked engines go on where others were cut off, with the very tokens that those would have drawn."""

from typing import Any

import pytest
from msgspec import structs

from mallee.mocker.engine import MockedEngine
from mallee.mocker.passes import mock_spec
from mallee.mocker.timing import Fixed, Timing
from mallee.protocol.messages import Command, Fork, Generate, Limits, Sampling, pack_tokens
from support.conforming import make_mocked
from support.cutting import Ended, continuation

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
