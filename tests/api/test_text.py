"""Deltas to pieces of text."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.api.deltas import BranchText, TextStream
from mallee.api.jobs import Plan
from mallee.api.text.answers import Reading
from mallee.api.text.tokenizer import Tokenizer
from mallee.api.text.tools.formats import FORMATS
from mallee.gateway.requests.deltas import Delta
from mallee.protocol.errors import InternalError
from mallee.protocol.hashing import Tokens, as_tokens
from mallee.protocol.messages import Limits
from mallee.router.dispatch.jobs import GenerateJob
from support.examples import examples
from support.tokenizers_made import byte_level

EOS = 256


class Scripted:
    """A branch stream that plays a list."""

    request = "req_0"
    worker = "w0"

    def __init__(self, deltas: list[Delta]) -> None:
        self._deltas = deltas
        self.cancelled: list[int] = []
        self.num_closes = 0

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for delta in self._deltas:
            await asyncio.sleep(0)
            if delta.branch not in self.cancelled:
                yield delta

    def take(self) -> None:
        """Nothing waits."""

    def cancel(self, branch: int) -> None:
        self.cancelled.append(branch)

    def cut(self, branch: int, at: int, residue: Tokens, end: str = "stop") -> None:
        self.cancelled.append(branch)

    async def aclose(self) -> None:
        self.num_closes += 1


def delta(branch: int, tokens: Any, finish: Any = None, error: Any = None) -> Delta:
    return Delta(branch, tuple(tokens), finish, 0, 0, None, 0, error)


def plan(
    branches: int,
    num_jobs: int = 1,
    stops: tuple[str, ...] = (),
    stop_id: int = EOS,
    **more: Any,
) -> Plan:
    job = GenerateJob(as_tokens([1]), Limits(9))
    starts = (1,) * num_jobs * branches
    ends = frozenset((stop_id,))
    return Plan((job,) * num_jobs, branches, 1, stops, ends, False, False, starts=starts, **more)


@pytest.fixture
def tokenizer(call: Any) -> Any:
    return call.tokenizer


async def collect(stream: TextStream, n: int) -> list[tuple[str, int]]:
    """Text and number of tokens of each choice, with the stream's invariants checked at every piece."""

    texts, nums = [""] * n, [0] * n
    async for piece in stream:
        stream.check()
        texts[piece.index] += piece.text
        nums[piece.index] += piece.num_tokens
        assert piece.completion_tokens == nums[piece.index]
    await stream.aclose()
    return list(zip(texts, nums, strict=True))


_SPLIT = st.lists(st.integers(1, 4), max_size=12)


@examples(150)
@given(
    st.lists(st.tuples(st.text("abéX", max_size=10), _SPLIT), min_size=1, max_size=4),
    st.lists(st.text("abéX", min_size=1, max_size=3), max_size=1),
    st.integers(0, 6),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_every_choice_is_its_text_up_to_the_first_stop(
    tokenizer: Any,
    branches: list[tuple[str, list[int]]],
    stops: list[str],
    min_tokens: int,
    keeps_stop: bool,
    rng: Any,
) -> None:
    """I5: however the text arrives. Stop strings count from `min_tokens` on, and may be kept."""
    queues = [_deltas(branch, text, split) for branch, (text, split) in enumerate(branches)]
    mixed: list[Delta] = []
    while any(queues):
        mixed.append(rng.choice([q for q in queues if q]).pop(0))
    source: Any = Scripted(mixed)
    more: dict[str, Any] = {"keeps_stop": keeps_stop, "min_tokens": min_tokens}
    stream = TextStream([source], plan(len(branches), stops=tuple(stops), **more), tokenizer)
    want = []
    for text, _ in branches:
        raw, stop = text.encode(), "".join(stops)
        early = raw[:min_tokens].decode(errors="ignore")  # a character is there with its last byte
        at = text.find(stop, len(early)) if stop else -1
        if at < 0:
            want.append((text, len(raw) + 1))
        else:  # tokens behind the stop string don't count
            end = at + len(stop)
            want.append((text[: end if keeps_stop else at], len(text[:end].encode())))
    assert asyncio.run(collect(stream, len(branches))) == want
    stream.check()
    assert source.num_closes == 1


def _deltas(branch: int, text: str, split: list[int]) -> list[Delta]:
    raw, out = text.encode(), []
    for size in split:
        out.append(delta(branch, raw[:size]))
        raw = raw[size:]
    return [*out, delta(branch, [*raw, EOS], "stop")]


def test_the_stop_token_is_not_text_but_counts(tokenizer: Any) -> None:
    for finish, found in (("stop", "hi"), ("length", "hi!")):
        text = BranchText(tokenizer, plan(1, stop_id=ord("!")))
        assert text.push(delta(0, b"hi!", finish)) == (found, finish)


async def test_streams_of_several_jobs_are_closed_together(tokenizer: Any) -> None:
    sources: Any = [Scripted([delta(0, b"a", "stop")]), Scripted([delta(0, b"b")])]
    stream = TextStream(sources, plan(1, num_jobs=2), tokenizer)
    with pytest.raises(InternalError, match="1 branches unfinished"):
        await collect(stream, 2)
    await stream.aclose()
    assert [source.num_closes for source in sources] == [1, 1]


def test_a_cut_behind_a_call_counts_the_marks_that_the_text_shows() -> None:
    """F28, part: marks that are special tokens are characters of the text, and tokens of its capsule."""
    inner = byte_level()
    inner.add_special_tokens(["<tool_call>", "</tool_call>"])
    made = Tokenizer(inner)
    reading = Reading(form=FORMATS["hermes"])
    text = BranchText(made, plan(1, stops=("END",), reading=reading))
    kept = made.encode("<tool_call>x</tool_call> ok")
    tokens = [*kept, *made.encode("END</tool_call>")]
    assert text.push(delta(0, tokens)) == ("<tool_call>x</tool_call> ok", "stop")
    cut = text.find_cut(made, "")
    assert cut is not None
    assert (cut.num_tokens, cut.residue) == (len(kept), [])
