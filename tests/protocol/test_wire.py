"""Bytes on the wire, read and written by a msgpack library that knows nothing of ours."""

import contextlib
from collections.abc import Callable
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from mallee.protocol.bookings import decode_booking_snapshot, decode_bookings
from mallee.protocol.codec import encode
from mallee.protocol.errors import CodecError, UnknownCapsule
from mallee.protocol.events import (
    CapsuleReleased,
    CapsuleStored,
    Cleared,
    EventBatch,
    Lease,
    Load,
    Removed,
    Snapshot,
    Stored,
    decode_batch,
    decode_lease,
    decode_snapshot,
)
from mallee.protocol.messages import (
    Cancel,
    CapsuleReply,
    CapsuleStatus,
    Cut,
    Fork,
    Frame,
    Generate,
    Grammar,
    Holder,
    Inject,
    Inspect,
    Limits,
    Prefill,
    Retained,
    RetainSpan,
    Sampling,
    Update,
    pack_tokens,
)
from mallee.protocol.parcels import Parcel, Report, decode_parcels, decode_reports

SAMPLING = [0.5, 0, 1.0, 7, 0.0, 1.0, 0.0, 0.0, [], -1]
LIMITS = [3, [2], False, 0, None]
SHARE = ["", 1.0, 0.0, "", 1.0]


def hashes(*values: int) -> bytes:
    """u64, little-endian, one after the other."""
    return b"".join(value.to_bytes(8, "little") for value in values)


@pytest.mark.parametrize(
    ("event", "layout"),
    [
        (Stored(hashes(1, 2)), ["s", hashes(1, 2), 0, 0]),
        (Stored(hashes(1), group=1), ["s", hashes(1), 0, 1]),
        (Removed(hashes(3), 2), ["r", hashes(3), 2, 0]),
        (Cleared(), ["c"]),
        (CapsuleStored("r.0", 9, hashes(1)), ["k", "r.0", 9, hashes(1), ""]),
        (CapsuleReleased("r.0"), ["d", "r.0"]),
    ],
)
def test_a_batch_is_an_array_of_tagged_arrays(event: Any, layout: list[Any]) -> None:
    """K7, part, X29, part: events as any subscriber reads them."""
    batch = EventBatch("w0", 3, 17, (event, event))
    found = msgpack.unpackb(encode(batch))
    assert found == ["w0", 3, 17, [layout, layout]]
    assert decode_batch(msgpack.packb(found)) == batch


def test_a_snapshot_is_hashes_by_tier_and_capsules() -> None:
    snapshot = Snapshot("w0", 3, 17, hashes(1), (CapsuleStored("r.0", 4, b""),), hashes(2))
    found = msgpack.unpackb(encode(snapshot))
    assert found == ["w0", 3, 17, hashes(1), [["k", "r.0", 4, b"", ""]], hashes(2), b"", []]
    assert decode_snapshot(msgpack.packb(found)) == snapshot


def test_a_lease_is_its_fields_in_order() -> None:
    load = Load(1, 2, 3, 4)
    lease = Lease("w0", 3, "a0", "m", "f", 16, 99, 8, 4096, 5, load=load, device="GPU 0")
    found = msgpack.unpackb(encode(lease))
    head = ["w0", 3, "a0", "m", "f", 16, 99, 8, 4096, 5]
    weights = [0, "base", "", ""]
    rest = [False, True, [1, 2, 3, 4, None, None], False, [], "", False, weights, None, []]
    rest += ["", None, None, "", "GPU 0"]
    assert found == [*head, *rest]
    assert decode_lease(msgpack.packb(found)) == lease


@pytest.mark.parametrize(
    ("command", "layout"),
    [
        (
            Prefill(
                *("r", pack_tokens([1])),
                grammar=Grammar("regex", "a", 1),
                capsule="c.2",
                holders=(Holder("w1", 3, "tcp:127.0.0.1:9", 8, "c.1"),),
            ),
            [
                *("prefill", "r", b"\1\0\0\0", "", 0.0, SHARE),
                *(["regex", "a", 1], "c.2", False, None, []),
                *([["w1", 3, "tcp:127.0.0.1:9", 8, "c.1"]], ""),
            ],
        ),
        (
            Generate(
                *("r", pack_tokens([1]), Limits(3, (2,)), Sampling(0.5, seed=7), 2),
                retain=(RetainSpan(8, 50, 9.0),),
                trace="00-a-b-01",
            ),
            [
                *("generate", "r", b"\1\0\0\0", LIMITS, SAMPLING, 2, "", 0, SHARE, None, 0, None),
                *([[8, 50, 9.0]], [], "00-a-b-01"),
            ],
        ),
        (
            Fork("r", "c", (pack_tokens([5]), b""), Limits(3, (2,)), Sampling(0.5, seed=7), at=8),
            [
                *("fork", "r", "c", [b"\5\0\0\0", b""], LIMITS, SAMPLING, 0, SHARE, None, 8),
                *(False, None, [], 0, ""),
            ],
        ),
        (Inspect("i", "r.0"), ["inspect", "i", "r.0"]),
        (Cut("r", 2, 40, pack_tokens([7])), ["cut", "r", 2, 40, b"\7\0\0\0"]),
        (Cancel("r", 1), ["cancel", "r", 1]),
        (
            Inject("i", "r", 1, pack_tokens([7]), replaces=True),
            ["inject", "i", "r", 1, b"\7\0\0\0", True],
        ),
    ],
)
def test_commands_travel_in_parcels(command: Any, layout: list[Any]) -> None:
    parcels = (Parcel("w0", 3, (command,)), Parcel("w1", 0, (), is_end=True))
    found = msgpack.unpackb(encode(parcels))
    assert found == [["w0", 3, [layout], False], ["w1", 0, [], True]]
    assert decode_parcels(msgpack.packb(found)) == parcels


def test_frames_travel_in_reports() -> None:
    last = Update("r", 1, (5, 6), "stop", 3, 2, "r.1", 7, None, ((-0.5, ((5, -0.5),)),), 4)
    last = structs.replace(last, retained=Retained(64, 32), drafts=(5, 3))
    reports = [Report("w0", 3, Frame(12, (last,))), Report("w1", 0, Frame(1, ()), "gone")]
    found = msgpack.unpackb(encode(reports))
    told = ["r", 1, [5, 6], "stop", 3, 2, "r.1", 7, None, [[-0.5, [[5, -0.5]]]], 4, ""]
    told += [[64, 32], [5, 3], ""]
    assert found == [["w0", 3, [12, [told], []], None], ["w1", 0, [1, [], []], "gone"]]
    assert decode_reports(msgpack.packb(found)) == tuple(reports)


def test_replies_about_capsules_travel_in_frames() -> None:
    status = CapsuleStatus("c.0", 9, 640, 128, True, 30.0, 4, computed=5)
    refused = UnknownCapsule("c").to_wire()
    frame = Frame(3, (), (CapsuleReply("a", status), CapsuleReply("b", error=refused)))
    reports = [Report("w0", 3, frame)]
    found = msgpack.unpackb(encode(reports))
    told = ["c.0", 9, 640, 128, True, 30.0, 4, "device", 5]
    assert found[0][2] == [3, [], [["a", told, None], ["b", None, list(refused)]]]
    assert decode_reports(msgpack.packb(found)) == tuple(reports)


Decode = Callable[[bytes], Any]
# The kind of message that each decoder reads, and one whose text is not UTF-8.
DECODERS: dict[Decode, tuple[str, bytes]] = {
    decode_batch: ("an event batch", b"\x94\xa2\xc3\x28\x00\x00\x90"),
    decode_snapshot: ("a snapshot", b"\x95\xa2\xc3\x28\x00\x00\xc4\x00\x90"),
    decode_lease: ("a lease", b"\x9a\xa2\xc3\x28" + b"\x00" * 9),
    decode_bookings: ("a batch of bookings", b"\x94\xa2\xc3\x28\x00\x00\x90"),
    decode_booking_snapshot: ("a snapshot of bookings", b"\x94\xa2\xc3\x28\x00\x00\x90"),
    decode_parcels: ("a batch of commands", b"\x91\x93\xa1w\x01\x91\x92\xa7release\xa2\xc3\x28"),
    decode_reports: ("a run of reports", b"\x91\x93\xa1w\x01\x92\x00\x91\x92\xa2\xc3\x28\x00"),
}


@pytest.mark.parametrize("decode", DECODERS, ids=lambda decode: DECODERS[decode][0])
@given(raw=st.binary(max_size=60))
def test_arbitrary_bytes_decode_or_raise_our_error(decode: Decode, raw: bytes) -> None:
    with contextlib.suppress(CodecError):
        message = decode(raw)
        assert decode(msgspec.msgpack.encode(message)) == message


@pytest.mark.parametrize("decode", DECODERS, ids=lambda decode: DECODERS[decode][0])
def test_text_that_is_not_utf8_and_another_kind_of_message_are_refused(decode: Decode) -> None:
    what, malformed = DECODERS[decode]
    for raw in (malformed, encode(Load(1, 2, 3, 4))):
        with pytest.raises(CodecError, match=f"not {what}"):
            decode(raw)


RUNS = st.binary(max_size=64).map(lambda raw: raw * 8)  # of whole hashes


@given(st.integers(0, (1 << 64) - 1), st.integers(-1, 1 << 31), st.text(), RUNS)
def test_numbers_and_texts_of_every_size_are_read(
    big: int, branch: int, text: str, raw: bytes
) -> None:
    batch = EventBatch(text, big, 0, (Stored(raw),))
    assert msgpack.unpackb(encode(batch)) == [text, big, 0, [["s", raw, 0, 0]]]
    update = Update(text, branch, (big,))
    row = msgpack.unpackb(msgspec.msgpack.encode(update))
    assert row[:3] == [text, branch, [big]]
