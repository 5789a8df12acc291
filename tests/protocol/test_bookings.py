"""Bookings over the wire."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.bookings import (
    WAYPOINT_STRIDE,
    Booked,
    BookingBatch,
    BookingSnapshot,
    Freed,
    PrefillDone,
    decode_booking_snapshot,
    decode_bookings,
)
from mallee.protocol.codec import encode
from mallee.protocol.errors import CodecError
from support.examples import examples

names = st.text(max_size=12)
seqs = st.integers(0, (1 << 63) - 1)
counts = st.integers(0, (1 << 31) - 1)
num_blocks = st.integers(0, 5 * WAYPOINT_STRIDE)


@st.composite
def bookings(draw: st.DrawFn) -> Booked:
    blocks = draw(num_blocks)
    waypoints = draw(st.binary(min_size=8, max_size=8)) * -(-blocks // WAYPOINT_STRIDE)
    return Booked(
        draw(names), draw(names), draw(seqs), waypoints, blocks, *(draw(counts) for _ in "abcd")
    )


booked = bookings()
ops = st.one_of(booked, st.builds(PrefillDone, names), st.builds(Freed, names))
batches = st.builds(BookingBatch, names, seqs, seqs, st.lists(ops, max_size=4).map(tuple))
snapshots = st.builds(BookingSnapshot, names, seqs, seqs, st.lists(booked, max_size=3).map(tuple))


def one(**changes: object) -> Booked:
    booking = Booked("r", "w0", 1, bytes(16), WAYPOINT_STRIDE + 1, 1, 160, 1, 8)
    return msgspec.structs.replace(booking, **changes)  # type: ignore[arg-type]


@examples(50)
@given(batches, snapshots)
def test_messages_come_back_as_they_went(batch: BookingBatch, snapshot: BookingSnapshot) -> None:
    """K10: what a gateway booked reaches the others as it was."""
    assert decode_bookings(encode(batch)) == batch
    assert decode_booking_snapshot(encode(snapshot)) == snapshot


def test_next_seq_counts_the_operations() -> None:
    assert BookingBatch("g", 1, 5, (Freed("a"), PrefillDone("b"))).next_seq == 7
    assert BookingBatch("g", 1, 5, ()).next_seq == 5


@pytest.mark.parametrize(
    "changes",
    [{"waypoints": bytes(15)}, {"rows": -1}, {"num_blocks": 1 << 31}, {"incarnation": -1}],
)
def test_a_booking_that_no_gateway_makes_is_refused(changes: dict[str, object]) -> None:
    bad = one(**changes)
    with pytest.raises(CodecError):
        decode_bookings(encode(BookingBatch("g", 1, 0, (bad,))))
    with pytest.raises(CodecError):
        decode_booking_snapshot(encode(BookingSnapshot("g", 1, 0, (bad,))))


@pytest.mark.parametrize("waypoints", [b"", bytes(8), bytes(24)])
def test_a_booking_with_too_few_or_too_many_marks_is_refused(waypoints: bytes) -> None:
    """Gateways that name prompts in another way would count each other's load wrongly."""
    batch = BookingBatch("g", 1, 0, (one(waypoints=waypoints),))
    with pytest.raises(CodecError, match=f"waypoints for {WAYPOINT_STRIDE + 1} blocks"):
        decode_bookings(encode(batch))
    with pytest.raises(CodecError, match="waypoints"):
        decode_booking_snapshot(encode(BookingSnapshot("g", 1, 0, (one(waypoints=waypoints),))))
