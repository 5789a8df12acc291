"""Capsules as streams: what comes out of the reader is what went in, or an error that names the place."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.errors import CorruptExport, IncompatibleCapsule
from mallee.worker.storage.export import (
    Block,
    ExportReader,
    RecordHeader,
    export_nbytes,
    pack_record,
    write_export,
)
from mallee.worker.storage.format import Identity, checksum, with_block_nbytes
from support.disks import BLOCK, IDENTITY, row, rows
from support.examples import examples

KEYS = [5, 9, 1 << 63, 7, 8]


def batches(keys: Sequence[int], size: int) -> Iterator[Any]:
    return (rows(keys[i : i + size]) for i in range(0, len(keys), size))


def stream(keys: Sequence[int] = KEYS, batch: int = 2, payload: bytes = b"state") -> bytes:
    pieces = write_export(
        IDENTITY, BLOCK, capsule="c", payload=payload, keys=keys, rows=batches(keys, batch)
    )
    return b"".join(bytes(piece) for piece in pieces)


def reader(**changed: str) -> ExportReader:
    return ExportReader({**IDENTITY, **changed}, BLOCK, max_payload_nbytes=1000, max_blocks=9)


def read_all(data: bytes, size: int = 1 << 20) -> tuple[ExportReader, list[Block]]:
    found = reader()
    blocks: list[Block] = []
    for i in range(0, len(data), size):
        blocks += found.feed(data[i : i + size])
    found.finish()
    return found, blocks


@examples(60)
@given(
    st.lists(st.integers(0, 2**64 - 1), unique=True, max_size=9),
    st.integers(1, 9),
    st.binary(max_size=100),
    st.integers(1, 300),
)
def test_an_export_is_read_in_pieces_of_any_size(
    keys: list[int], batch: int, payload: bytes, size: int
) -> None:
    data = stream(keys, batch, payload)
    found, blocks = read_all(data, size)
    assert (found.capsule, found.payload, found.keys) == ("c", payload, keys)
    assert blocks == [Block(key, row(key)) for key in keys]
    assert len(data) == export_nbytes(
        IDENTITY, BLOCK, capsule="c", payload=payload, num_blocks=len(keys), batch=batch
    )


def test_blocks_come_as_soon_as_they_are_whole() -> None:
    data = stream(batch=5)
    found = reader()
    num = 0
    for i in range(len(data)):
        num += len(found.feed(data[i : i + 1]))
        assert num == max(0, 5 - (len(data) - i - 1 + BLOCK - 1) // BLOCK)


def test_no_cut_export_is_accepted() -> None:
    """F24, part: at every length."""
    data = stream()
    for length in range(len(data)):
        with pytest.raises(CorruptExport, match="cut after"):
            read_all(data[:length])


def test_no_flipped_byte_of_an_export_is_accepted() -> None:
    """F24, part: at every byte, also if more bytes follow."""
    data = stream()
    for i in range(len(data)):
        flipped = data[:i] + bytes([data[i] ^ (1 << i % 8)]) + data[i + 1 :]
        with pytest.raises((CorruptExport, IncompatibleCapsule)):
            read_all(flipped)


def with_cut_keys() -> bytes:
    fields = Identity(with_block_nbytes(IDENTITY, BLOCK)).fields
    header = RecordHeader("c", "", True, fields, bytes(13), checksum(b""))
    return b"".join(pack_record(header, b""))


def with_another_run() -> bytes:
    data = stream(KEYS)
    begin = data.index(b"state") + len(b"state")
    return data[:begin] + stream([5, 10, 1 << 63, 7, 8])[begin:]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (stream() + b"x", "1 bytes more"),
        (stream([]) + b"xyz", "3 bytes more"),
        (stream(payload=bytes(1001))[:-1000], "1001 of at most 1000"),
        (stream(list(range(10))), "10 of at most 9 blocks"),
        (stream(list(range(9000)))[:100], "a header of"),
        (with_cut_keys(), "1 of at most"),
        (with_another_run(), "a run of another capsule"),
    ],
)
def test_what_is_too_much_or_odd_is_refused_before_it_is_held(data: bytes, says: str) -> None:
    with pytest.raises(CorruptExport, match=says):
        read_all(data)
