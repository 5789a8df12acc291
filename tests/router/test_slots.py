"""Bookings: shared blocks count once, and everything returns to where it was."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mallee.protocol.ids import RequestId
from mallee.router.slots import SlotTracker


def run(*blocks: int) -> np.ndarray:
    return np.array(blocks, dtype=np.uint64)


def load(slots: SlotTracker, worker: int) -> tuple[int, int, int]:
    loads = slots.loads
    return (
        int(loads.prefill_tokens[worker]),
        int(loads.rows[worker]),
        int(loads.active_blocks[worker]),
    )


def test_a_hundred_branches_count_their_prefix_once() -> None:
    """K4: 100 branches over one 128-block prefix count 128 blocks and their own tails."""
    slots = SlotTracker(2)
    prefix = list(range(1000, 1128))
    for i in range(100):
        slots.book(RequestId(f"r{i}"), 1, run(*prefix, i), own_blocks=2, prefill_tokens=16, rows=1)
    assert load(slots, 1) == (1600, 100, 128 + 100 + 200)
    assert slots.active_overlap(run(*prefix, 7, 9999)).tolist() == [0, 129]
    for i in range(100):
        slots.free(RequestId(f"r{i}"))
    assert load(slots, 1) == (0, 0, 0)
    slots.check()


def test_a_request_leaves_the_state_as_it_found_it() -> None:
    """K5: after route, first token and end the loads equal those before; repeats are counted."""
    slots = SlotTracker(1)
    slots.book(RequestId("a"), 0, run(1, 2), own_blocks=1, prefill_tokens=32, rows=1)
    before = load(slots, 0)
    slots.book(RequestId("b"), 0, run(1, 2, 3), own_blocks=4, prefill_tokens=16, rows=4)
    assert load(slots, 0) == (48, 5, 8)
    assert slots.prefill_done(RequestId("b"))
    assert load(slots, 0) == (32, 5, 8)
    assert slots.free(RequestId("b"))
    assert load(slots, 0) == before
    assert not slots.free(RequestId("b"))
    assert not slots.free(RequestId("never"))
    assert not slots.prefill_done(RequestId("b"))
    assert load(slots, 0) == before
    assert (slots.stats().unknown_frees, slots.stats().unknown_prefills) == (2, 1)


def test_first_token_twice_drops_the_prefill_once() -> None:
    slots = SlotTracker(1)
    slots.book(RequestId("a"), 0, run(), own_blocks=1, prefill_tokens=5, rows=1)
    slots.prefill_done(RequestId("a"))
    slots.prefill_done(RequestId("a"))
    assert load(slots, 0) == (0, 1, 1)


def test_booking_the_same_request_again_is_refused() -> None:
    slots = SlotTracker(1)
    slots.book(RequestId("a"), 0, run(1), own_blocks=0, prefill_tokens=1, rows=1)
    with pytest.raises(ValueError, match="booked already"):
        slots.book(RequestId("a"), 0, run(2), own_blocks=0, prefill_tokens=1, rows=1)
    slots.check()


def test_a_dropped_worker_returns_its_requests_and_weighs_nothing() -> None:
    slots = SlotTracker(2)
    for name, worker in (("b", 0), ("a", 0), ("c", 1)):
        slots.book(RequestId(name), worker, run(1), own_blocks=1, prefill_tokens=1, rows=1)
    assert slots.drop_worker(0) == ["a", "b"]
    assert load(slots, 0) == (0, 0, 0)
    assert load(slots, 1) == (1, 1, 2)
    assert not slots.free(RequestId("a"))
    slots.check()


def test_a_block_is_confirmed_only_while_a_booking_uses_it() -> None:
    slots = SlotTracker(1)
    slots.confirm(0, [1])
    assert not slots.is_confirmed(0, 1)
    slots.book(RequestId("a"), 0, run(1, 2), own_blocks=0, prefill_tokens=1, rows=1)
    slots.confirm(0, [1, 9])
    assert slots.is_confirmed(0, 1)
    assert not slots.is_confirmed(0, 9)
    slots.free(RequestId("a"))
    assert not slots.is_confirmed(0, 1)


def chain(choices: list[int]) -> list[int]:
    """Block hashes of a path in a binary tree: equal hash, equal path, as real chains have it."""
    return [int("1" + "".join(map(str, choices[: i + 1])), 2) for i in range(len(choices))]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["book", "book", "prefill", "free", "drop"]),
            st.integers(0, 6),
            st.integers(0, 2),
            st.lists(st.integers(0, 1), max_size=4).map(chain),
        ),
        max_size=50,
    )
)
def test_loads_equal_a_recount_after_any_stream(
    stream: list[tuple[str, int, int, list[int]]],
) -> None:
    """K4: unique blocks per worker equal a recount over the live bookings."""
    slots = SlotTracker(3)
    live: dict[RequestId, tuple[int, list[int]]] = {}
    for verb, number, worker, hashes in stream:
        request = RequestId(f"r{number}")
        if verb == "book" and request not in live:
            slots.book(request, worker, run(*hashes), own_blocks=1, prefill_tokens=3, rows=2)
            live[request] = (worker, hashes)
        elif verb == "prefill":
            assert slots.prefill_done(request) == (request in live)
        elif verb == "free":
            assert slots.free(request) == (live.pop(request, None) is not None)
        elif verb == "drop":
            gone = slots.drop_worker(worker)
            assert gone == sorted(r for r, (w, _) in live.items() if w == worker)
            live = {r: booked for r, booked in live.items() if booked[0] != worker}
        slots.check()
        for each in range(3):
            mine = [blocks for w, blocks in live.values() if w == each]
            assert load(slots, each)[1:] == (2 * len(mine), len(set().union(*mine)) + len(mine))
