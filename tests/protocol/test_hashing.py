"""Block hashes, portable and compiled, against constants of python-xxhash and the written definition."""

from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.hashing import as_tokens, block_hashes, salted_seed
from mallee.router.index import hashing as compiled

compiled.compile_hashing()
both = pytest.mark.parametrize("block_hashes", [block_hashes, compiled.block_hashes])
token_lists = st.lists(st.integers(0, (1 << 32) - 1), max_size=60)


def test_hashes_equal_the_known_vectors() -> None:
    """Tokens 0..39 in blocks of 16: the first hash is the local one, the second chains to it."""
    assert block_hashes(range(40)).tolist() == [0xD47A8F41C833328A, 0xBF15DFFB16447F38]
    assert block_hashes([1, 2, 3, 4], 4).tolist() == [0xCB38E4D7FB2DCA5C]
    assert block_hashes(range(16), salt="tenant-a").tolist() == [0xCF148C3D76953E3D]
    assert salted_seed("") == 1337
    assert salted_seed("tenant-a") == 0xB8B180C3EDDF6496


parents = st.none() | st.just(0) | st.integers(0, (1 << 64) - 1)


@both
@given(token_lists, st.integers(1, 9) | st.integers(10, 60), st.text(max_size=8), parents)
def test_hashes_follow_the_written_definition(
    block_hashes: Any, tokens: list[int], size: int, salt: str, parent: int | None
) -> None:
    """Blocks of 4 to 240 bytes, under any seed, at the root and further down."""
    seed = salted_seed(salt)
    chain = [] if parent is None else [parent]
    for start in range(0, len(tokens) // size * size, size):
        raw = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + size])
        local = xxhash.xxh3_64_intdigest(raw, seed=seed)
        if chain:
            pair = chain[-1].to_bytes(8, "little") + local.to_bytes(8, "little")
            local = xxhash.xxh3_64_intdigest(pair, seed=seed)
        chain.append(local)
    have = block_hashes(tokens, size, salt=salt, parent=parent)
    assert have.dtype == np.uint64
    assert have.tolist() == chain[parent is not None :]


@both
def test_any_memory_that_tokens_come_in_hashes_the_same(block_hashes: Any) -> None:
    """Read-only, unaligned, strided and wider arrays, lists, tuples and ranges."""
    want = block_hashes(range(64)).tolist()
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
    ]
    assert [block_hashes(way).tolist() for way in ways] == [want] * len(ways)


def test_tokens_are_not_copied_when_they_are_right_already() -> None:
    tokens = np.arange(4, dtype="<u4")
    assert as_tokens(tokens) is tokens


@pytest.mark.parametrize(
    ("ids", "error"),
    [([1, -1], OverflowError), ([1 << 32], OverflowError), ([1.5], TypeError), (["1"], TypeError)],
)
def test_a_list_of_anything_but_ids_of_32_bits_is_refused(
    ids: list[int], error: type[Exception]
) -> None:
    with pytest.raises(error):
        as_tokens(ids)


@both
def test_a_block_size_below_one_is_refused(block_hashes: Any) -> None:
    with pytest.raises(ValueError, match="block_size=0"):
        block_hashes([1], 0)
