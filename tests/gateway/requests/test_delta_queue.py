"""Deltas wait merged, in order, and not without bound."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.gateway.requests.deltas import MAX_MERGED, PATIENCE_S, Delta, DeltaQueue
from mallee.gateway.requests.lives import RequestLife
from mallee.gateway.requests.request import RunningRequest
from mallee.gateway.requests.verdict import Comparison
from mallee.protocol.errors import SlowReader
from mallee.protocol.hashing import as_tokens
from mallee.protocol.ids import CapsuleId, RequestId, WorkerId
from mallee.protocol.messages import FinishReason, Limits, Update
from mallee.protocol.model import BASE_WEIGHTS
from mallee.router.dispatch.effects import Deliver
from mallee.router.dispatch.jobs import GenerateJob
from mallee.router.dispatch.verdicts import Asked
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


def test_a_delta_is_not_merged_beyond_its_limit() -> None:
    """To write one down must not stop the loop for long."""
    queue = DeltaQueue()
    for i in range(3 * MAX_MERGED):
        queue.put(delta(0, i), 0.0)
    queue.put(delta(1, 7), 0.0)
    whole = [queue.take() for _ in range(4)]
    tokens = [t for found in whole[:3] if found is not None for t in found.tokens]
    assert tokens == list(range(3 * MAX_MERGED))
    assert all(found is not None and len(found.tokens) == MAX_MERGED for found in whole[:3])
    assert whole[3] == delta(1, 7)
    assert queue.take() is None


@examples(100)
@given(st.lists(st.one_of(st.integers(0, 3), st.none()), max_size=60))
def test_each_branch_gets_its_tokens_in_order(turns: list[int | None]) -> None:
    """A number puts a token of that branch, None takes what waits."""
    queue = DeltaQueue()
    put: dict[int, list[int]] = {}
    got: dict[int, list[int]] = {}

    def take() -> bool:
        found = queue.take()
        if found is not None:
            got.setdefault(found.branch, []).extend(found.tokens)
        return found is not None

    for token, branch in enumerate(turns):
        if branch is None:
            take()
        else:
            queue.put(delta(branch, token), 0.0)
            put.setdefault(branch, []).append(token)
    while take():
        pass
    assert got == put


async def test_a_reader_waits_for_the_next_or_for_the_end() -> None:
    queue = DeltaQueue()
    reader = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.put(delta(0, 1), 0.0)
    assert await reader == delta(0, 1)
    reader = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    queue.put(delta(0, 2), 0.0)
    queue.end()
    assert await queue.get() == delta(0, 2)
    assert await queue.get() is None
    assert await queue.get() is None


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
        await queue.get()
    queue = DeltaQueue(limit=10, burst=100)  # what waits is bounded however soon it came
    assert queue.put(delta(0, *range(100)), 1.0)
    assert not queue.put(delta(1, 1), 1.0)


def test_a_reader_that_goes_on_reading_is_not_given_up_while_it_is_behind() -> None:
    queue = DeltaQueue(limit=10, burst=100)
    for second in range(45):
        assert queue.put(delta(second, 0, 1), float(second))
        if second % 9 == 8:
            assert queue.take() is not None  # far from all of it


def said(row: int, tokens: tuple[int, ...], finish: FinishReason | None = None) -> Deliver:
    shard: Any = SimpleNamespace(worker=WorkerId("w"), weights=BASE_WEIGHTS)
    return Deliver(RequestId("r"), row, shard, Update("r", row, tokens, finish), (0, 0))


async def test_an_answer_that_is_not_read_is_cancelled_on_its_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One branch of three has ended; the other two are given up together, once."""
    told: list[tuple[str, int | None]] = []
    owner: Any = SimpleNamespace(cancel=lambda *what: told.append(what))
    job = GenerateJob(as_tokens([1]), Limits(1))
    answer = RunningRequest(
        RequestId("r"),
        owner=owner,
        life=RequestLife(3, 0.0),
        comparison=Comparison(job, Asked(as_tokens([1]), job.salt), None, block_size=4),
        observers=(),
        trace=None,
        clock=lambda: 0.0,
    )
    answer.deliver(said(2, (1,), "stop"), 0.0)
    for second in range(66):
        answer.deliver(said(0, tuple(range(1000))), float(second))
    await asyncio.sleep(0)
    assert told == [("r", None)]
    await answer.aclose()
    assert told == [("r", None)]
    assert answer.num_open == 0
    assert [record.message for record in caplog.records] == [
        "r: its client does not read, it is given up"
    ]
    with pytest.raises(SlowReader):
        await anext(answer)
