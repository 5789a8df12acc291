"""Events, snapshots and leases over the wire."""

import contextlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.codec import encode
from mallee.protocol.errors import CodecError
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
from support.examples import examples

u64 = st.integers(0, (1 << 64) - 1)
counts = st.integers(0, (1 << 63) - 1)
runs = st.lists(u64, max_size=5).map(lambda hashes: pack_hashes(np.array(hashes, dtype=np.uint64)))
names = st.text(max_size=12)
capsules = st.builds(CapsuleStored, names, counts, runs)
events = st.one_of(
    st.builds(Stored, runs),
    st.builds(Removed, runs),
    st.builds(Cleared),
    capsules,
    st.builds(CapsuleReleased, names),
)
batches = st.builds(EventBatch, names, counts, counts, st.lists(events, max_size=4).map(tuple))
snapshots = st.builds(
    Snapshot, names, counts, counts, runs, st.lists(capsules, max_size=3).map(tuple)
)
loads = st.builds(Load, counts, counts, counts, counts)
leases = st.builds(
    Lease,
    *[names] + [counts] + [names] * 3 + [counts] * 5,
    is_leaving=st.booleans(),
    kv_events=st.booleans(),
    load=st.none() | loads,
    host=names,
)


@examples(50)
@given(batches, snapshots, leases)
def test_messages_come_back_as_they_went(batch: EventBatch, snap: Snapshot, lease: Lease) -> None:
    assert decode_batch(encode(batch)) == batch
    assert decode_snapshot(encode(snap)) == snap
    assert decode_lease(encode(lease)) == lease


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


def test_a_hash_run_is_little_endian() -> None:
    assert pack_hashes(np.array([1], dtype=np.uint64)) == b"\x01" + bytes(7)


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


def test_next_seq_counts_the_events() -> None:
    assert EventBatch("w", 1, 5, (Cleared(), Cleared())).next_seq == 7


@examples(50)
@given(batches, st.data())
def test_a_cut_or_flipped_message_decodes_or_raises_our_error(
    batch: EventBatch, data: st.DataObject
) -> None:
    raw = bytearray(encode(batch))
    place = data.draw(st.integers(0, len(raw) - 1))
    with pytest.raises(CodecError):
        decode_batch(bytes(raw[:place]))
    raw[place] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(CodecError):
        assert isinstance(decode_batch(bytes(raw)), EventBatch)


def test_a_lease_without_the_newer_fields_is_still_read() -> None:
    old = msgspec.msgpack.encode(["w", 1, "a", "m", "f", 16, 100, 8, 1024, 7, False])
    assert decode_lease(old) == Lease("w", 1, "a", "m", "f", 16, 100, 8, 1024, 7)
