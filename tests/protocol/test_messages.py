"""Messages over the wire: they come back as they went, what is malformed is refused, and ranges are kept.

At the end their bytes, read and written by a msgpack library that knows nothing of ours.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import msgpack
import msgspec
import numpy as np
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
from mallee.protocol.errors import CodecError, InvalidParameter, UnknownCapsule, from_wire
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
    decode_leases,
    decode_snapshot,
    encode_leases,
    pack_hashes,
    unpack_hashes,
)
from mallee.protocol.messages import (
    Cancel,
    CapsuleReply,
    CapsuleStatus,
    Command,
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
    Release,
    Retained,
    RetainSpan,
    Sampling,
    Update,
    pack_tokens,
    unpack_tokens,
)
from mallee.protocol.parcels import Life, Parcel, Report, decode_parcels, decode_reports, pack
from support.examples import examples

u64 = st.integers(0, (1 << 64) - 1)
seqs = st.integers(0, (1 << 63) - 1)
counts = st.integers(0, (1 << 31) - 1)
names = st.text(max_size=12)
floats = st.floats(0, 1e6)

# Events
runs = st.lists(u64, max_size=5).map(lambda hashes: pack_hashes(np.array(hashes, dtype=np.uint64)))
capsules = st.builds(CapsuleStored, names, counts, runs)
events = st.one_of(
    st.builds(Stored, runs),
    st.builds(Removed, runs),
    st.builds(Cleared),
    capsules,
    st.builds(CapsuleReleased, names),
)
batches = st.builds(EventBatch, names, seqs, seqs, st.lists(events, max_size=4).map(tuple))
snapshots = st.builds(Snapshot, names, seqs, seqs, runs, st.lists(capsules, max_size=3).map(tuple))
loads = st.builds(Load, seqs, seqs, seqs, seqs)
leases = st.builds(
    Lease,
    *[names] + [seqs] + [names] * 3 + [seqs] * 5,
    is_leaving=st.booleans(),
    kv_events=st.booleans(),
    load=st.none() | loads,
    host=names,
)

# Bookings
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
booking_batches = st.builds(BookingBatch, names, seqs, seqs, st.lists(ops, max_size=4).map(tuple))
booking_snapshots = st.builds(
    BookingSnapshot, names, seqs, seqs, st.lists(booked, max_size=3).map(tuple)
)

# Commands
tokens = st.lists(st.integers(0, (1 << 32) - 1), max_size=6).map(pack_tokens)
sampling = st.builds(Sampling, floats, seqs, floats, u64)
grammars = st.none() | st.builds(Grammar, st.just("regex"), names, seqs)
limits = st.builds(Limits, seqs, st.lists(seqs, max_size=3).map(tuple), st.booleans())
commands = st.one_of(
    st.builds(Prefill, names, tokens, names, floats, grammar=grammars, capsule=names),
    st.builds(
        *(Generate, names, tokens, limits, sampling, seqs, names), grammar=grammars, drawn=seqs
    ),
    st.builds(Fork, names, names, st.lists(tokens, max_size=3).map(tuple), limits, sampling),
    st.builds(Cancel, names, st.none() | seqs),
    st.builds(Release, names),
)
parcels = st.builds(Parcel, names, seqs, st.lists(commands, max_size=4).map(tuple), st.booleans())

Decode = Callable[[bytes], Any]
MESSAGES: dict[Decode, st.SearchStrategy[Any]] = {
    decode_batch: batches,
    decode_snapshot: snapshots,
    decode_lease: leases,
    decode_bookings: booking_batches,
    decode_booking_snapshot: booking_snapshots,
    decode_parcels: st.lists(parcels, max_size=3).map(tuple),
}


@pytest.mark.parametrize("decode", MESSAGES)
@examples(50)
@given(st.data())
def test_messages_come_back_as_they_went_or_are_refused(
    decode: Decode, data: st.DataObject
) -> None:
    """K10, part. Cut ones are refused whole, flipped ones are read as another one or refused."""
    message = data.draw(MESSAGES[decode])
    raw = bytearray(encode(message))
    assert decode(bytes(raw)) == message
    place = data.draw(st.integers(0, len(raw) - 1))
    with pytest.raises(CodecError):
        decode(bytes(raw[:place]))
    raw[place] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(CodecError):
        assert isinstance(decode(bytes(raw)), type(message))


@examples(50)
@given(st.lists(leases, min_size=1, max_size=4))
def test_leases_of_a_host_share_a_message_and_one_goes_as_itself(some: list[Lease]) -> None:
    assert decode_leases(encode_leases(some)) == tuple(some)
    assert encode_leases(some[:1]) == encode(some[0])


def test_what_is_neither_a_lease_nor_several_is_refused() -> None:
    with pytest.raises(CodecError, match="not a lease"):
        decode_leases(b"\x91\x01")


@given(st.lists(u64, max_size=20))
def test_hash_runs_come_back_as_they_went(hashes: list[int]) -> None:
    raw = pack_hashes(np.array(hashes, dtype=np.uint64))
    assert len(raw) == 8 * len(hashes)
    assert unpack_hashes(raw).tolist() == hashes


@pytest.mark.parametrize(
    "event", [["s", b"12345"], ["s", b"12345", 1], ["r", b"12345"], ["k", "c", 4, b"12345"]]
)
def test_an_event_with_a_hash_run_of_broken_length_is_refused(event: list[object]) -> None:
    raw = msgspec.msgpack.encode(["w", 1, 0, [["c"], event]])
    with pytest.raises(CodecError, match="5 bytes"):
        decode_batch(raw)


@pytest.mark.parametrize("place", [3, 5, 6])
def test_a_snapshot_with_a_hash_run_of_broken_length_is_refused(place: int) -> None:
    fields: list[object] = ["w", 1, 9, b"", [], b"", b""]
    fields[place] = b"12345"
    with pytest.raises(CodecError, match="5 bytes"):
        decode_snapshot(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize("tier", [-1, 3])
def test_a_tier_that_does_not_exist_is_refused(tier: int) -> None:
    with pytest.raises(CodecError, match="not an event batch"):
        decode_batch(msgspec.msgpack.encode(["w", 1, 0, [["s", b"", tier]]]))


def test_a_lease_without_the_newer_fields_is_still_read() -> None:
    old = msgspec.msgpack.encode(["w", 1, "a", "m", "f", 16, 100, 8, 1024, 7, False])
    assert decode_lease(old) == Lease("w", 1, "a", "m", "f", 16, 100, 8, 1024, 7)


def one(**changes: object) -> Booked:
    booking = Booked("r", "w0", 1, bytes(16), WAYPOINT_STRIDE + 1, 1, 160, 1, 8)
    return msgspec.structs.replace(booking, **changes)  # type: ignore[arg-type]


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


lives = st.builds(Life, st.sampled_from(["w0", "w1"]), st.sampled_from([1, 2]))


@given(st.lists(st.tuples(lives, st.none() | commands), max_size=12))
def test_packing_keeps_the_order_of_each_life(items: list[tuple[Life, Command | None]]) -> None:
    packed = pack(items)
    for life in {life for life, _ in items}:
        got: list[Command | None] = []
        for parcel in packed:
            if (parcel.worker, parcel.incarnation) == life:
                got += [*parcel.commands, *([None] if parcel.is_end else [])]
        assert got == [command for of, command in items if of == life]


def test_an_error_crosses_in_an_update_with_its_type() -> None:
    sent = Report(
        "w", 1, Frame(0, (Update("r", -1, finish="error", error=UnknownCapsule("c").to_wire()),))
    )
    (got,) = decode_reports(encode([sent]))
    (update,) = got.frame.updates
    assert update.error is not None
    error = from_wire(update.error)
    assert isinstance(error, UnknownCapsule)
    assert error.fields == {"capsule": "c"}


def test_bottomless_nesting_is_refused_as_malformed() -> None:
    nested = b"\x81\xa1a" * 100_000 + b"\xc0"
    update = b"\x99\xa1r\x00\x90\xc0\x00\x00\xc0\x00\x93\xa1c\xa1m" + nested
    with pytest.raises(CodecError, match="not a run of reports"):
        decode_reports(b"\x91\x93\xa1w\x01\x92\x00\x91" + update)


def test_an_unknown_finish_reason_is_refused() -> None:
    raw = msgspec.msgpack.encode([["w", 1, [0, [["r", 0, [], "bored"]]]]])
    with pytest.raises(CodecError, match="not a run of reports"):
        decode_reports(raw)


@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=20))
def test_token_runs_come_back_as_they_went(values: list[int]) -> None:
    assert unpack_tokens(pack_tokens(values)).tolist() == values


def test_a_token_run_of_broken_length_is_refused() -> None:
    with pytest.raises(CodecError, match="5 bytes"):
        unpack_tokens(b"12345")


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": -0.1},
        {"temperature": 100.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": float("nan")},
        {"seed": -1},
        {"seed": 1 << 64},
    ],
)
def test_a_sampling_field_out_of_range_is_named(field: dict[str, float]) -> None:
    (name,) = field
    with pytest.raises(InvalidParameter, match=f"^{name}=") as caught:
        Sampling(**field).validate()  # type: ignore[arg-type]
    assert caught.value.fields["param"] == name


def test_sampling_in_range_is_returned_itself() -> None:
    for good in (Sampling(), Sampling(100.0, 5, 1.0, (1 << 64) - 1), Sampling(1.0, 0, 0.01)):
        assert good.validate() is good


def test_a_command_without_the_later_fields_is_read_as_before() -> None:
    raw = msgspec.msgpack.encode([["w", 1, [["generate", "r", b"", [4]], ["prefill", "p", b""]]]])
    (parcel,) = decode_parcels(raw)
    assert parcel.commands == (Generate("r", b"", Limits(4)), Prefill("p", b""))


def test_an_update_without_what_was_told_before() -> None:
    logprobs = tuple((-float(token), ()) for token in (5, 6, 7))
    update = Update("r", 0, (5, 6, 7), logprobs=logprobs, position=4)
    rest = update.after(6)
    assert rest is not None
    assert (rest.tokens, rest.logprobs, rest.position) == ((7,), logprobs[2:], 6)
    assert update.after(7) is None
    assert update.after(9) is None
    end = Update("r", 0, (5,), "length", boundary=9, position=4).after(5)
    assert end is not None
    assert (end.tokens, end.finish, end.boundary) == ((), "length", 9)


# The bytes of each message

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
        (CapsuleStored("r.0", 9, hashes(1)), ["k", "r.0", 9, hashes(1), "", False]),
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
    assert found == ["w0", 3, 17, hashes(1), [["k", "r.0", 4, b"", "", False]], hashes(2), b"", []]
    assert decode_snapshot(msgpack.packb(found)) == snapshot


def test_a_lease_is_its_fields_in_order() -> None:
    load = Load(1, 2, 3, 4)
    lease = Lease("w0", 3, "a0", "m", "f", 16, 99, 8, 4096, 5, load=load, device="GPU 0")
    found = msgpack.unpackb(encode(lease))
    head = ["w0", 3, "a0", "m", "f", 16, 99, 8, 4096, 5]
    weights = [0, "base", "", ""]
    rest = [False, True, [1, 2, 3, 4, None, None, 0, 0], False, [], "", False, weights, None, []]
    rest += ["", None, None, "", "GPU 0", False, []]
    assert found == [*head, *rest]
    assert decode_lease(msgpack.packb(found)) == lease


def test_a_lease_of_an_older_worker_is_read_without_its_counters() -> None:
    """It had an engine's use, loans and memory, and no `block_nbytes`."""
    use = [100, 40, 30, 20, 9, 2, 7, 5, 3, 0, 0, [1024, 7, 3, 20]]
    load = [1, 2, 3, 4, use, [1e-3, *[0.0] * 6]]
    lending, memory = [[0] * 5 + [0.5]] * 2, [7000, 2000, 1000, 500]
    old = ["w0", 3, "a0", "m", "f", 16, 99, 8, 4096, 5, False, True, load, False, [], "", False]
    old += [[0, "base", "", ""], None, [], "at", lending, memory, "10.0.0.1:9400", "GPU 0"]
    (found,) = decode_leases(msgpack.packb(old))
    assert found.load is not None
    assert (found.load.rows, found.load.prefill_tokens, found.load.block_nbytes) == (1, 4, 0)
    assert (found.serves_kv, found.metrics_at, found.device) == (False, "10.0.0.1:9400", "GPU 0")


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
                *([["w1", 3, "tcp:127.0.0.1:9", 8, "c.1"]], "", []),
            ],
        ),
        (
            Generate(
                *("r", pack_tokens([1]), Limits(3, (2,)), Sampling(0.5, seed=7), 2),
                retain=(RetainSpan(8, 50, 9.0),),
                trace="00-a-b-01",
                places=(48,),
            ),
            [
                *("generate", "r", b"\1\0\0\0", LIMITS, SAMPLING, 2, "", 0, SHARE, None, 0, None),
                *([[8, 50, 9.0]], [], "00-a-b-01", [48], -1),
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
    last = msgspec.structs.replace(last, retained=Retained(64, 32), drafts=(5, 3))
    reports = [Report("w0", 3, Frame(12, (last,))), Report("w1", 0, Frame(1, ()), "gone")]
    found = msgpack.unpackb(encode(reports))
    told = ["r", 1, [5, 6], "stop", 3, 2, "r.1", 7, None, [[-0.5, [[5, -0.5]]]], 4, ""]
    told += [[64, 32], [5, 3], "", None, [], False]
    assert found == [["w0", 3, [12, [told], []], None], ["w1", 0, [1, [], []], "gone"]]
    assert decode_reports(msgpack.packb(found)) == tuple(reports)


def test_replies_about_capsules_travel_in_frames() -> None:
    status = CapsuleStatus("c.0", 9, 640, 128, True, 30.0, 4, computed=5)
    refused = UnknownCapsule("c").to_wire()
    frame = Frame(3, (), (CapsuleReply("a", status), CapsuleReply("b", error=refused)))
    reports = [Report("w0", 3, frame)]
    found = msgpack.unpackb(encode(reports))
    told = ["c.0", 9, 640, 128, True, 30.0, 4, "device", 5, 0]
    assert found[0][2] == [3, [], [["a", told, None], ["b", None, list(refused)]]]
    assert decode_reports(msgpack.packb(found)) == tuple(reports)


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
