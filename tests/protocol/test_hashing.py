"""Block hashes against constants computed with python-xxhash, and the properties of chains."""

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.hashing import as_tokens, block_hashes, salted_seed

token_lists = st.lists(st.integers(0, (1 << 32) - 1), max_size=60)


def test_hashes_equal_the_known_vectors() -> None:
    """Tokens 0..39 in blocks of 16: the first hash is the local one, the second chains to it."""
    assert block_hashes(range(40)).tolist() == [0xD47A8F41C833328A, 0xBF15DFFB16447F38]
    assert block_hashes([1, 2, 3, 4], 4).tolist() == [0xCB38E4D7FB2DCA5C]
    assert block_hashes(range(16), salt="tenant-a").tolist() == [0xCF148C3D76953E3D]
    assert salted_seed("") == 1337
    assert salted_seed("tenant-a") == 0xB8B180C3EDDF6496


@given(token_lists, st.integers(1, 9), st.sampled_from(["", "tenant"]))
def test_hashes_follow_the_written_definition(tokens: list[int], size: int, salt: str) -> None:
    seed = salted_seed(salt)
    want: list[int] = []
    for start in range(0, len(tokens) // size * size, size):
        raw = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + size])
        local = xxhash.xxh3_64_intdigest(raw, seed=seed)
        if want:
            pair = want[-1].to_bytes(8, "little") + local.to_bytes(8, "little")
            local = xxhash.xxh3_64_intdigest(pair, seed=seed)
        want.append(local)
    have = block_hashes(tokens, size, salt=salt)
    assert have.dtype == np.uint64
    assert have.tolist() == want


@given(token_lists, st.integers(1, 5), st.data())
def test_hashing_in_pieces_equals_hashing_at_once(
    tokens: list[int], size: int, data: st.DataObject
) -> None:
    whole = block_hashes(tokens, size)
    cut = data.draw(st.integers(0, len(tokens) // size))
    head = block_hashes(tokens[: cut * size], size)
    parent = int(head[-1]) if cut else None
    tail = block_hashes(tokens[cut * size :], size, parent=parent)
    assert np.concatenate([head, tail]).tolist() == whole.tolist()


def test_salts_share_no_hash() -> None:
    tokens = np.arange(160, dtype=np.uint32)
    seen = [set(block_hashes(tokens, salt=salt).tolist()) for salt in ("", "a", "b")]
    assert len(set.union(*seen)) == 30


def test_any_integer_array_hashes_as_its_tokens_do() -> None:
    want = block_hashes(range(32)).tolist()
    assert block_hashes(np.arange(32, dtype=np.int64)).tolist() == want
    assert block_hashes(np.arange(64, dtype=np.uint32)[::2] // 2).tolist() == want
    frozen = np.arange(32, dtype=np.uint32)
    frozen.flags.writeable = False
    assert block_hashes(frozen).tolist() == want


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


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size=0"):
        block_hashes([1], 0)
