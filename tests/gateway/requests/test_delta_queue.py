"""Deltas wait merged, in order, and not without bound."""

import asyncio
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mallee.gateway.requests.deltas import MAX_MERGED, PATIENCE_S, Delta, DeltaQueue
from mallee.protocol.errors import SlowReader
from mallee.protocol.ids import CapsuleId
from support.examples import examples


def delta(branch: int, *tokens: int, **more: Any) -> Delta:
    return Delta(branch, tokens, None, 0, 0, None, 0, None)._replace(**more)


def test_what_waits_of_a_branch_comes_out_as_one_delta() -> None:
    queue = DeltaQueue()
    queue.put(delta(0, 1, cached_tokens=7, logprobs=((-1.0, ()),)), 0.0)
    queue.put(delta(1, 9), 0.0)
    queue.put(delta(0, 2, 3, logprobs=((-2.0, ()), (-3.0, ((5, -3.0),)))), 0.0)
    queue.put(
        delta(0, 4, finish="stop", capsule=CapsuleId("c"), boundary=12, prefill_tokens=5), 0.0
    )
    first = queue.take()
    assert first is not None
    assert first.tokens == (1, 2, 3, 4)
    assert first.logprobs == ((-1.0, ()), (-2.0, ()), (-3.0, ((5, -3.0),)))
    assert (first.finish, first.capsule, first.boundary) == ("stop", "c", 12)
    assert (first.cached_tokens, first.prefill_tokens) == (7, 5)
    assert queue.take() == delta(1, 9)
    assert queue.take() is None


@examples(100)
@example([0] * 9)  # more than one delta of a branch
@given(st.lists(st.one_of(st.integers(0, 3), st.none()), max_size=60))
def test_each_branch_gets_its_tokens_in_order(turns: list[int | None]) -> None:
    """A number puts tokens of that branch, None takes what waits: never so much that it stops the loop."""
    queue, size = DeltaQueue(), MAX_MERGED // 3
    put: dict[int, list[int]] = {}
    got: dict[int, list[int]] = {}

    def take() -> bool:
        found = queue.take()
        if found is not None:
            assert len(found.tokens) < MAX_MERGED + size
            got.setdefault(found.branch, []).extend(found.tokens)
        return found is not None

    for i, branch in enumerate(turns):
        if branch is None:
            take()
        else:
            tokens = range(i * size, (i + 1) * size)
            queue.put(delta(branch, *tokens), 0.0)
            put.setdefault(branch, []).extend(tokens)
    while take():
        pass
    assert got == put


async def test_a_reader_waits_for_the_next_or_for_the_end() -> None:
    queue = DeltaQueue()
    reader = asyncio.create_task(anext(queue, None))
    await asyncio.sleep(0)
    queue.put(delta(0, 1), 0.0)
    assert await reader == delta(0, 1)
    reader = asyncio.create_task(anext(queue, None))
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    queue.put(delta(0, 2), 0.0)
    queue.end()
    assert await anext(queue, None) == delta(0, 2)
    assert await anext(queue, None) is None
    assert await anext(queue, None) is None


async def test_a_reader_that_reads_nothing_loses_its_answer_and_nothing_grows() -> None:
    queue = DeltaQueue(limit=10, burst=100)
    chances = ((-1.0, ((1, -1.0), (2, -2.0))),)
    assert queue.put(delta(0, 1, logprobs=chances), 5.0)  # 1 token, 3 log-probabilities
    assert queue.put(delta(1, *range(6)), 5.0 + PATIENCE_S)
    assert queue.put(delta(0, 2), 5.0 + PATIENCE_S)  # too much, not yet too long
    assert not queue.put(delta(0, 2), 5.1 + PATIENCE_S)
    assert not queue.put(delta(2, 3), 5.1 + PATIENCE_S)
    assert queue.take() is None
    with pytest.raises(SlowReader, match="12 tokens"):
        await anext(queue, None)
    queue = DeltaQueue(limit=10, burst=100)  # what waits is bounded however soon it came
    assert queue.put(delta(0, *range(100)), 1.0)
    assert not queue.put(delta(1, 1), 1.0)


def test_a_reader_that_goes_on_reading_is_not_given_up_while_it_is_behind() -> None:
    queue = DeltaQueue(limit=10, burst=100)
    for second in range(45):
        assert queue.put(delta(second, 0, 1), float(second))
        if second % 9 == 8:
            assert queue.take() is not None  # far from all of it
