"""Compiled block hashes against the portable ones, which are the definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol import hashing as portable
from mallee.router.index.hashing import block_hashes, compile_hashing

compile_hashing()

parents = st.none() | st.just(0) | st.integers(0, (1 << 64) - 1)


@given(st.data(), st.integers(1, 60), st.text(max_size=8), parents)
def test_every_block_size_hashes_as_the_definition_says(
    data: st.DataObject, size: int, salt: str, parent: int | None
) -> None:
    """Blocks of 4 to 240 bytes, under any seed, at the root and further down."""
    raw = data.draw(st.binary(min_size=0, max_size=16 * size + 3))
    tokens = np.frombuffer(raw[: len(raw) // 4 * 4], dtype="<u4")
    have = block_hashes(tokens, size, salt=salt, parent=parent)
    want = portable.block_hashes(tokens, size, salt=salt, parent=parent)
    assert have.dtype == np.uint64
    assert have.tolist() == want.tolist()


def test_any_memory_that_tokens_come_in_hashes_the_same() -> None:
    """Read-only, unaligned, strided and wider arrays, lists, tuples and ranges."""
    want = portable.block_hashes(range(64)).tolist()
    tokens = np.arange(64, dtype=np.uint32)
    unaligned = np.frombuffer(b"x" + tokens.tobytes(), dtype="<u4", offset=1)
    assert not unaligned.flags.aligned
    assert not unaligned.flags.writeable
    ways = [
        unaligned,
        np.frombuffer(tokens.tobytes(), dtype="<u4"),
        np.arange(128, dtype=np.uint32)[::2] // 2,
        tokens.astype(np.int64),
        tokens.tolist(),
        tuple(tokens.tolist()),
        range(64),
    ]
    assert [block_hashes(way).tolist() for way in ways] == [want] * len(ways)


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size=0"):
        block_hashes([1], 0)
