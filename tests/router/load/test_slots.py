"""Bookings: shared blocks count once, and everything returns to where it was."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.hashing import NO_HASHES
from mallee.protocol.ids import RequestId
from mallee.router.config import CostModel, RouterConfig
from mallee.router.load import layout
from mallee.router.load.slots import SlotTracker
from mallee.router.placement.kernels import score
from mallee.router.placement.pricing import Demand, Offers, Pricer
from support.index_contents import waypoints_of

TOKEN_S = 0.001


def run(*blocks: int) -> np.ndarray:
    return np.array(blocks, dtype=np.uint64)


def load(slots: SlotTracker, worker: int) -> tuple[int, int, int]:
    """Prefill tokens, rows and active blocks."""
    rows = (layout.LOAD_PREFILL, layout.LOAD_ROWS, layout.LOAD_BLOCKS)
    return tuple(int(slots.loads[row, worker]) for row in rows)


def book(
    slots: SlotTracker,
    name: str,
    worker: int,
    blocks: list[int],
    *,
    own: int = 0,
    prefill: int = 0,
    rows: int = 1,
    now: float = 0.0,
) -> None:
    slots.book(
        RequestId(name),
        worker,
        waypoints_of(run(*blocks), slots.paths.stride),
        num_blocks=len(blocks),
        own_blocks=own,
        prefill_tokens=prefill,
        rows=rows,
        now=now,
    )


@pytest.mark.parametrize("stride", [1, 8])
def test_a_hundred_branches_count_their_prefix_once(stride: int) -> None:
    """K4: 100 branches over one 128-block prefix count 128 blocks and their own tails."""
    slots = SlotTracker(2, stride=stride)
    prefix = list(range(1000, 1128))
    for i in range(100):
        book(slots, f"r{i}", 1, [*prefix, i + 1], own=2, prefill=16)
        slots.check()
    assert load(slots, 1) == (1600, 100, 128 + 100 + 200)
    path = run(*prefix, 7, 9999)
    counts = np.empty(2, dtype=np.int32)
    slots.paths.match_into(waypoints_of(path[:129], stride), 129, counts)
    assert counts.tolist() == [0, 129]
    slots.paths.match_into(waypoints_of(path, stride), 130, counts)
    assert counts.tolist()[1] in (128, 129)
    for i in range(100):
        slots.free(RequestId(f"r{i}"), 0.0)
    assert load(slots, 1) == (0, 0, 0)
    slots.check()


def test_booking_the_same_request_again_is_refused() -> None:
    """K5"""
    slots = SlotTracker(1)
    book(slots, "a", 0, [1], prefill=1)
    with pytest.raises(ValueError, match="booked already"):
        book(slots, "a", 0, [2], prefill=1)
    slots.check()
    assert load(slots, 0) == (1, 1, 1)


def test_only_what_a_worker_reports_beyond_its_bookings_is_added() -> None:
    """K10: until its next report; less than is booked means nothing."""
    slots = SlotTracker(2)
    book(slots, "a", 1, [1, 2], prefill=100, rows=3)
    slots.report(1, rows=5, prefill_tokens=40, active_blocks=10)
    assert [slots.loads[row, 1] for row in layout.LOADS_REPORTED] == [2.0, 8.0, 0.0]
    assert load(slots, 1) == (100, 3, 2)
    slots.free(RequestId("a"), 0.0)
    assert [slots.loads[row, 1] for row in layout.LOADS_REPORTED] == [2.0, 8.0, 0.0]
    slots.report(1, rows=0, prefill_tokens=0, active_blocks=0)
    assert not slots.loads.any()
    slots.check()


def queued_s(slots: SlotTracker, now: float) -> list[float]:
    """The queues of both workers as prices see them."""
    config = RouterConfig(cost=CostModel(prefill_token_s=TOKEN_S))
    slots.loads[layout.LOAD_ROOM, :2] = 1000
    nothing = np.zeros((1, slots.loads.shape[1]), dtype=np.int32)
    choice = Pricer(config, slots.loads, lambda: 0.5).choose(
        Demand(1, 0, 1, 1, 1, 1), Offers(NO_HASHES, nothing, nothing[0]), now=now, width=2
    )
    assert choice is not None
    return choice.terms[score.TERM_QUEUED, :2].tolist()


def test_outstanding_prefill_shrinks_as_it_is_computed_to_a_quarter() -> None:
    """K5, K11: queued one behind the other; a worker that has stalled does not look idle."""
    slots = SlotTracker(2, prefill_token_s=TOKEN_S)
    book(slots, "a", 0, [], prefill=1000, now=10.0)
    book(slots, "b", 0, [], prefill=3000, now=10.0)
    assert queued_s(slots, 10.0) == pytest.approx([4.0, 0.0])
    assert queued_s(slots, 12.5) == pytest.approx([1.5, 0.0])
    assert queued_s(slots, 13.5) == pytest.approx([1.0, 0.0])
    assert queued_s(slots, 99.0) == pytest.approx([1.0, 0.0])
    slots.prefill_done(RequestId("a"), 13.0)  # late: the rest of the queue takes its 3 s from here
    assert queued_s(slots, 13.0) == pytest.approx([1.0, 0.0])
    slots.prefill_done(RequestId("b"), 13.5)
    assert queued_s(slots, 13.5) == [0.0, 0.0]
    book(slots, "c", 0, [], prefill=500, now=20.0)
    assert queued_s(slots, 20.0) == pytest.approx([0.5, 0.0])


def test_a_prefill_that_ends_early_brings_the_queue_forward() -> None:
    """K5"""
    slots = SlotTracker(2, prefill_token_s=TOKEN_S)
    book(slots, "a", 1, [], prefill=5000, now=0.0)
    book(slots, "b", 1, [], prefill=1000, now=0.0)
    slots.prefill_done(RequestId("a"), 1.0)
    assert queued_s(slots, 1.0) == pytest.approx([0.0, 1.0])
    assert queued_s(slots, 1.5) == pytest.approx([0.0, 0.5])
    slots.free(RequestId("b"), 1.5)
    assert queued_s(slots, 1.5) == [0.0, 0.0]


def test_a_prefill_that_is_given_up_leaves_the_others_their_time() -> None:
    """K5: it may have been the one that was computed, and the other has not begun."""
    slots = SlotTracker(2, prefill_token_s=TOKEN_S)
    book(slots, "a", 0, [], prefill=10_000, now=0.0)
    book(slots, "b", 0, [], prefill=10_000, now=0.0)
    slots.free(RequestId("a"), 9.0)
    assert queued_s(slots, 9.0) == pytest.approx([10.0, 0.0])
    assert queued_s(slots, 12.0) == pytest.approx([7.0, 0.0])


def chain(choices: list[int]) -> list[int]:
    """Block hashes of a path in a binary tree: equal hash, equal path, as real chains have it."""
    return [int("1" + "".join(map(str, choices[: i + 1])), 2) for i in range(len(choices))]


operations = st.lists(
    st.tuples(
        st.sampled_from(["book", "book", "book", "prefill", "free", "drop", "report", "expire"]),
        st.integers(0, 6),
        st.integers(0, 2),
        st.lists(st.integers(0, 1), max_size=11).map(chain),
        st.sampled_from([0.0, 0.5, 4.0]),
    ),
    max_size=40,
)


@given(st.sampled_from([1, 8]), operations)
def test_loads_equal_a_recount_after_any_stream(
    stride: int, stream: list[tuple[str, int, int, list[int], float]]
) -> None:
    """K4, K5: rows, tokens and unique blocks equal a recount over the live bookings."""
    slots = SlotTracker(3, stride=stride, booking_s=9.0)
    live: dict[RequestId, tuple[int, list[int], int]] = {}
    touched: dict[RequestId, float] = {}
    now = 0.0
    for verb, number, worker, blocks, passed in stream:
        request = RequestId(f"r{number}")
        now += passed
        if verb == "book" and request not in live:
            book(slots, request, worker, blocks, own=1, prefill=number, rows=2, now=now)
            live[request], touched[request] = (worker, blocks, number), now
        elif verb == "prefill":
            assert slots.prefill_done(request, now) == (request in live)
            if request in live:
                live[request], touched[request] = (*live[request][:2], 0), now
        elif verb == "free":
            assert slots.free(request, now) == (live.pop(request, None) is not None)
        elif verb == "drop":
            gone = slots.drop_worker(worker)
            assert gone == sorted(r for r, booked in live.items() if booked[0] == worker)
            live = {r: booked for r, booked in live.items() if booked[0] != worker}
        elif verb == "report":
            slots.report(worker, rows=number, prefill_tokens=number, active_blocks=number)
        elif verb == "expire":
            gone = slots.expire(now)
            assert set(gone) == {r for r in live if touched[r] + 9.0 <= now}
            live = {r: booked for r, booked in live.items() if r not in gone}
        slots.check()
        assert len(slots.bookings) == len(live)
        for each in range(3):
            mine = [booked for booked in live.values() if booked[0] == each]
            unique = len(set().union(*(blocks for _, blocks, _ in mine))) + len(mine)
            prefill, rows, active = load(slots, each)
            assert (prefill, rows) == (sum(booked[2] for booked in mine), 2 * len(mine))
            assert unique <= active <= unique + (stride - 1) * len(mine)
            assert slots.requests(each) == {r for r, booked in live.items() if booked[0] == each}
