"""Bookings on their way out of one gateway."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.bookings import Booked, BookingBatch, Freed, PrefillDone
from mallee.protocol.ids import Incarnation, RequestId
from mallee.router.sync.outbox import Outbox
from support.examples import examples

A, B = RequestId("a"), RequestId("b")


def booking(request: str, *, prefill_tokens: int = 32, waypoints: bytes = bytes(8)) -> Booked:
    return Booked(request, "w0", 1, waypoints, 2, 1, prefill_tokens, 1, 8)


def outbox(**options: int) -> Outbox:
    return Outbox("g0", Incarnation(1), **options)


def test_what_is_not_live_is_not_told() -> None:
    box = outbox()
    assert not box.freed(A)
    assert not box.prefill_done(A)
    box.booked(booking("a", prefill_tokens=0))
    assert not box.prefill_done(A)
    with pytest.raises(ValueError, match="booked already"):
        box.booked(booking("a"))
    assert len(box) == 1


def test_a_full_outbox_gives_up_the_oldest_and_leaves_a_gap_in_the_numbers() -> None:
    box = outbox(max_pending=2)
    for name in ("a", "b", "c"):
        box.booked(booking(name))
        box.check()
    assert box.take() == BookingBatch("g0", 1, 1, (booking("b"), booking("c")))
    assert len(box.snapshot().bookings) == 3


def test_a_batch_is_bounded_in_bytes_but_never_empty() -> None:
    box = outbox()
    for name in ("a", "b", "c"):
        box.booked(booking(name, waypoints=bytes(800)))
    assert [len(box.take(max_nbytes=n).ops) for n in (10, 1700)] == [1, 2]  # type: ignore[union-attr]


def test_a_snapshot_too_large_for_a_message_counts_shared_blocks_as_own() -> None:
    box = outbox()
    box.booked(booking("a", waypoints=bytes(800)))
    assert box.snapshot(800).bookings == (booking("a", waypoints=bytes(800)),)
    assert box.snapshot(799).bookings == (Booked("a", "w0", 1, b"", 0, 3, 32, 1, 8),)


def test_whoever_empties_it_is_called_when_it_begins_to_fill() -> None:
    box, calls = outbox(), []
    box.on_filled = lambda: calls.append(len(box))
    box.booked(booking("a"))
    box.booked(booking("b"))
    box.take()
    box.freed(A)
    assert calls == [1, 1]


verbs = st.lists(st.tuples(st.sampled_from("bpft"), st.integers(0, 3)), max_size=60)


@examples(100)
@given(verbs)
def test_what_was_taken_replays_to_the_snapshot(script: list[tuple[str, int]]) -> None:
    """K10: the operations told and the bookings told are the same story."""
    box = outbox(max_pending=200)
    told: dict[str, Booked] = {}
    for verb, number in [*script, ("t", 99)]:
        request = RequestId(f"r{number}")
        if verb == "b" and request not in {b.request for b in box.snapshot().bookings}:
            box.booked(booking(request))
        elif verb == "p":
            box.prefill_done(request)
        elif verb == "f":
            box.freed(request)
        elif verb == "t":
            while (batch := box.take(1 + number)) is not None:
                for op in batch.ops:
                    match op:
                        case Booked():
                            told[op.request] = op
                        case PrefillDone():
                            told[op.request] = booking(op.request, prefill_tokens=0)
                        case Freed():
                            del told[op.request]
        box.check()
    assert told == {b.request: b for b in box.snapshot().bookings}
    assert box.heartbeat().next_seq == box.snapshot().next_seq
