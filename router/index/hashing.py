"""Block hashes at the speed of memory: `protocol.hashing.block_hashes`, compiled.

A chain can't be hashed block by block from Python: each link waits for the one before it, and one call
of python-xxhash a link costs more than all else in routing a long prompt. So the two paths of XXH3-64
that a block takes are written out here: 9 to 16 bytes (a link of the chain; blocks of 3 or 4 tokens)
and 17 to 128 bytes (blocks of 5 to 32 tokens). Other sizes go to `protocol.hashing`, the oracle.

Source: the xxHash specification, "XXH3 algorithm overview", small and medium inputs.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mallee.protocol import hashing
from mallee.protocol.hashing import BLOCK_SIZE, NO_HASHES, Hashes, Tokens, as_tokens, salted_seed
from mallee.router.jit import kernel

MIN_COMPILED: Final = 3  # tokens a block
MAX_COMPILED: Final = 32

# The first 128 bytes of XXH3's default secret, as little-endian words.
_SECRET: Final[npt.NDArray[np.uint64]] = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
        "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
        "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    ),
    dtype="<u8",
).astype(np.uint64)
# Typed, because numba makes a float of a signed and an unsigned integer.
_PRIME_1: Final = np.uint64(0x9E3779B185EBCA87)
_PRIME_MIX: Final = np.uint64(0x165667919E3779F9)
_LOW: Final = np.uint64(0xFFFFFFFF)
_EVEN_BYTES: Final = np.uint64(0x00FF00FF00FF00FF)
_EVEN_PAIRS: Final = np.uint64(0x0000FFFF0000FFFF)
_1: Final = np.uint64(1)
_8: Final = np.uint64(8)
_16: Final = np.uint64(16)
_32: Final = np.uint64(32)
_37: Final = np.uint64(37)


@kernel
def _swapped(x: Any) -> Any:
    """Bytes in the other order."""
    x = ((x & _EVEN_BYTES) << _8) | ((x >> _8) & _EVEN_BYTES)
    x = ((x & _EVEN_PAIRS) << _16) | ((x >> _16) & _EVEN_PAIRS)
    return (x << _32) | (x >> _32)


@kernel
def _fold(a: Any, b: Any) -> Any:
    """Low and high half of the 128-bit product, combined. (LLVM makes one multiplication of it.)"""
    a_low, a_high = a & _LOW, a >> _32
    b_low, b_high = b & _LOW, b >> _32
    cross = a_low * b_high
    middle = ((a_low * b_low) >> _32) + (cross & _LOW) + a_high * b_low
    return (a * b) ^ ((middle >> _32) + (cross >> _32) + a_high * b_high)


@kernel
def _avalanche(x: Any) -> Any:
    x = (x ^ (x >> _37)) * _PRIME_MIX
    return x ^ (x >> _32)


@kernel
def _short(first: Any, last: Any, nbytes: Any, seed: Any) -> Any:
    """XXH3-64 of 9 to 16 bytes, given their first and last eight."""
    low = first ^ ((_SECRET[3] ^ _SECRET[4]) + seed)
    high = last ^ ((_SECRET[5] ^ _SECRET[6]) - seed)
    return _avalanche(nbytes + _swapped(low) + high + _fold(low, high))


@kernel
def _word(tokens: Tokens, at: int) -> Any:
    here = np.uint64(at)  # unsigned: no test for a negative index, which is half of the whole time
    return np.uint64(tokens[here]) | (np.uint64(tokens[here + _1]) << _32)


@kernel
def _mix(tokens: Tokens, at: int, secret: int, seed: Any) -> Any:
    """Sixteen bytes from token `at`, with two words of the secret."""
    low = _word(tokens, at) ^ (_SECRET[secret] + seed)
    high = _word(tokens, at + 2) ^ (_SECRET[secret + 1] - seed)
    return _fold(low, high)


@kernel
def _local(tokens: Tokens, at: int, size: int, seed: Any) -> Any:
    """XXH3-64 of `size` tokens from `at`: 3 to 32 of them."""
    if size <= 4:
        return _short(_word(tokens, at), _word(tokens, at + size - 2), np.uint64(4 * size), seed)
    mixed = np.uint64(4 * size) * _PRIME_1
    for i in range((size + 7) // 8):
        mixed += _mix(tokens, at + 4 * i, 4 * i, seed)
        mixed += _mix(tokens, at + size - 4 * (i + 1), 4 * i + 2, seed)
    return _avalanche(mixed)


@kernel
def _links(
    tokens: Tokens, size: int, seed: Any, parent: Any, has_parent: bool, out: Hashes
) -> None:
    for block in range(len(out)):
        link = _local(tokens, block * size, size, seed)
        if has_parent or block > 0:
            link = _short(parent, link, _16, seed)
        out[block] = link
        parent = link


@kernel
def _chain(
    tokens: Tokens, size: int, seed: Any, parent: Any, has_parent: bool, out: Hashes
) -> None:
    """`out` holds the chain hashes of its number of blocks."""
    if size == BLOCK_SIZE:  # a constant size lets the inner loop unroll: three times as fast
        _links(tokens, BLOCK_SIZE, seed, parent, has_parent, out)
    else:
        _links(tokens, size, seed, parent, has_parent, out)


def block_hashes(
    tokens: Sequence[int] | Tokens,
    block_size: int = BLOCK_SIZE,
    *,
    salt: str = "",
    parent: int | None = None,
) -> Hashes:
    """As `protocol.hashing.block_hashes`, to the bit. Compiles at the first call: `compile_hashing`."""
    if not MIN_COMPILED <= block_size <= MAX_COMPILED:
        return hashing.block_hashes(tokens, block_size, salt=salt, parent=parent)
    array = as_tokens(tokens)
    num_full = len(array) // block_size
    if not num_full:
        return NO_HASHES
    if not array.flags.behaved:  # read-only or unaligned: else that is a second type to compile for
        array = array.copy()
    out = np.empty(num_full, dtype=np.uint64)
    seed = np.uint64(salted_seed(salt))
    _chain(array, block_size, seed, np.uint64(parent or 0), parent is not None, out)
    return out


def compile_hashing() -> None:
    """Compile `block_hashes`, or read it from the cache, before the first request."""
    block_hashes(np.zeros(MIN_COMPILED, dtype="<u4"), MIN_COMPILED)
