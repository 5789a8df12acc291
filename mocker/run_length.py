"""Texts of which no token is read: runs of consecutive tokens instead of lists of them.

A replayed prompt of 100,000 tokens is a handful of runs, an answer is one, so cutting, joining and
growing texts costs the same at any length. `RunLengthTokens` behaves like the list it stands
for; its tokens are 64-bit numbers, which say where they come from:

    blocks of a trace   id * tokens per id + offset, below 2**62
    answers             a key of their branch, + position
    other text          a key of its own, + offset
"""

import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Final, overload

import numpy as np
import numpy.typing as npt
import xxhash

from mallee.protocol.errors import InvalidParameter
from mallee.protocol.hashing import NO_HASHES, SEED, Hashes
from mallee.protocol.ids import splitmix64
from mallee.worker.kv.text import Text

ANSWER: Final = 1 << 62
OTHER: Final = 1 << 63
_POSITION_BITS: Final = 24
_KEY_MASK: Final = ((1 << 62) - 1) >> _POSITION_BITS << _POSITION_BITS


def answer_start(seed: int) -> int:
    """Token 0 of what the branch with this seed draws; position p is p further on."""
    return ANSWER | (mixed(seed) & _KEY_MASK)


def other_start(key: int) -> int:
    """The first token of the text that only `key` has."""
    return OTHER | (mixed(key) & _KEY_MASK)


def mixed(value: int) -> int:
    """64 bits that look random; `block_names` does the same to arrays."""
    return splitmix64(value, 1)


class RunLengthTokens:
    """A list of 64-bit tokens as runs of consecutive ones. O(runs), most operations O(log runs)."""

    __slots__ = ("_ends", "_firsts", "_known", "_num", "_num_known")

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._ends: list[int] = []  # position after each run
        self._num = 0
        self._known = NO_HASHES  # chain hashes of leading blocks, if this text begins at the root
        self._num_known = 0  # tokens whose blocks they are

    @classmethod
    def of_run(cls, first: int, num: int) -> "RunLengthTokens":
        """`num` tokens from `first` on."""
        text = cls()
        if num:
            text._firsts.append(first)
            text._ends.append(num)
            text._num = num
        return text

    @classmethod
    def of_runs(cls, firsts: list[int], ends: list[int], num: int) -> "RunLengthTokens":
        """Runs, none continuing the one before, by first token and end; no more than `num` tokens."""
        text = cls()
        if firsts and num:
            text._firsts, text._ends, text._num = firsts, ends, ends[-1]
            del text[num:]
        return text

    def __len__(self) -> int:
        return self._num

    def __repr__(self) -> str:
        return f"RunLengthTokens({list(self.runs())})"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RunLengthTokens):
            return self._firsts == other._firsts and self._ends == other._ends
        return isinstance(other, list) and list(self) == other

    __hash__ = None  # type: ignore[assignment] # it changes

    def runs(self) -> Iterator[tuple[int, int]]:
        """(first token, how many) of each run."""
        begin = 0
        for first, end in zip(self._firsts, self._ends, strict=True):
            yield first, end - begin
            begin = end

    def __iter__(self) -> Iterator[int]:
        for first, num in self.runs():
            yield from range(first, first + num)

    @overload
    def __getitem__(self, key: int, /) -> int: ...

    @overload
    def __getitem__(self, key: slice, /) -> "RunLengthTokens": ...

    def __getitem__(self, key: int | slice, /) -> "int | RunLengthTokens":
        if isinstance(key, slice):
            begin, end, step = key.indices(self._num)
            assert step == 1, "texts are cut, not thinned"
            return self._cut(begin, end)
        if key == -1 and self._num:  # the token that a decode computes
            ends = self._ends
            return self._firsts[-1] + self._num - 1 - (ends[-2] if len(ends) > 1 else 0)
        if key < 0:
            key += self._num
        if not 0 <= key < self._num:
            raise IndexError("token index out of range")
        run = bisect_right(self._ends, key)
        return self._firsts[run] + key - (self._ends[run - 1] if run else 0)

    def __delitem__(self, key: slice, /) -> None:
        begin, end, step = key.indices(self._num)
        assert step == 1, "texts are cut, not thinned"
        assert end == self._num or begin >= end, "texts are cut at their end"
        if begin >= end:
            return
        keep = bisect_right(self._ends, begin)
        is_cut = begin > (self._ends[keep - 1] if keep else 0)
        del self._firsts[keep + is_cut :]
        del self._ends[keep + is_cut :]
        if is_cut:
            self._ends[keep] = begin
        self._num = begin
        self._num_known = min(self._num_known, begin)

    def know(self, hashes: Hashes) -> None:
        """Remember `hashes` of the full blocks of the text as it is, which begins at the root."""
        self._known, self._num_known = hashes, self._num

    def known(self, block_size: int) -> Hashes | None:
        """Chain hashes of the full blocks, if known; blocks are of that size."""
        num = self._num // block_size
        return self._known[:num] if num * block_size <= self._num_known else None

    def append(self, token: int, /) -> None:
        self._grow(token, 1)

    def extend(self, tokens: Iterable[int], /) -> None:
        if isinstance(tokens, RunLengthTokens):
            if len(tokens._ends) == 1:  # what a branch draws
                self._grow(tokens._firsts[0], tokens._num)
                return
            begin = 0
            for first, end in zip(tokens._firsts, tokens._ends, strict=True):
                self._grow(first, end - begin)
                begin = end
            return
        ends = self._ends
        for token in tokens:
            if ends and token == self._firsts[-1] + ends[-1] - (ends[-2] if len(ends) > 1 else 0):
                self._num = ends[-1] = ends[-1] + 1  # as `_grow`, for the token of a decode
            else:
                self._grow(token, 1)

    def _grow(self, first: int, num: int) -> None:
        ends = self._ends
        if ends:
            begun = ends[-2] if len(ends) > 1 else 0
            if self._firsts[-1] + ends[-1] - begun == first:
                self._num = ends[-1] = ends[-1] + num
                return
        self._firsts.append(first)
        self._num += num
        ends.append(self._num)

    def _cut(self, begin: int, end: int) -> "RunLengthTokens":
        text = RunLengthTokens()
        num = end - begin
        if num <= 0:
            return text
        text._num = num
        ends, firsts = self._ends, self._firsts
        if begin == 0:
            text._known, text._num_known = self._known, min(self._num_known, end)
            if end == self._num:
                text._firsts, text._ends = firsts[:], ends[:]
                return text
        last = len(ends) - 1
        low = last if not last or begin >= ends[-2] else bisect_right(ends, begin)
        first = firsts[low] + begin - (ends[low - 1] if low else 0)
        if ends[low] >= end:  # most cuts are inside a run
            text._firsts.append(first)
            text._ends.append(num)
            return text
        high = last if end == self._num else bisect_right(ends, end - 1, low)
        text._firsts = firsts[low : high + 1]
        text._firsts[0] = first
        text._ends = [e - begin for e in ends[low:high]]
        text._ends.append(num)
        return text


class RunLengthNotation:
    """Texts as runs; commands name them by their keys in `texts`."""

    def __init__(self) -> None:
        self.texts: dict[bytes, RunLengthTokens] = {}

    def empty(self) -> Text:
        return RunLengthTokens()

    def read(self, raw: bytes) -> Text:
        text = self.texts.get(raw)
        if text is None:
            raise InvalidParameter("tokens", raw.hex(), "no text of this name; make it first")
        return text[:]

    def dump(self, text: Text) -> bytes:
        assert isinstance(text, RunLengthTokens)
        tokens = [np.arange(num, dtype=np.uint64) + np.uint64(first) for first, num in text.runs()]
        names = block_names(np.concatenate(tokens), "") if tokens else NO_HASHES
        return names.astype(np.uint32).tobytes()

    def compact(self, text: Text) -> Text:
        return text  # runs are few

    def hashes(
        self, text: Text, block_size: int, *, salt: str, parent: int | None = None
    ) -> Hashes:
        assert isinstance(text, RunLengthTokens)
        if parent is None and (known := text.known(block_size)) is not None:
            return known
        return run_length_hashes(text, block_size, salt=salt, parent=parent)


def run_length_hashes(
    text: RunLengthTokens, block_size: int, *, salt: str, parent: int | None = None
) -> Hashes:
    """Chain hashes of the full blocks of `text`.

    Ids of a trace are chained themselves: equal ids have equal texts before them. So a block of nothing
    but named blocks is known by its last token, for any `parent`.
    """
    num_blocks = len(text) // block_size
    if not num_blocks:
        return NO_HASHES
    if num_blocks == 1:  # an answer fills one at a time
        block = text[:block_size]
        if max(block._firsts) >= ANSWER:
            return np.array([_block_hash(block, salt, parent)], dtype=np.uint64)
    last, is_named = _last_tokens(text, block_size, num_blocks)
    hashes = block_names(last, salt)
    if is_named.all():
        return hashes
    chain = parent
    for i in range(num_blocks):
        if not is_named[i]:
            hashes[i] = _block_hash(text[i * block_size : (i + 1) * block_size], salt, chain)
        chain = int(hashes[i])
    return hashes


def _block_hash(block: RunLengthTokens, salt: str, parent: int | None) -> int:
    """Of a block that has more than blocks of a trace in it; of what is above it, and of its runs."""
    parts = [] if parent is None else [parent]
    for run in block.runs():
        parts += run
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(parts)}Q", *parts), int(_seed(salt)))


def _last_tokens(
    text: RunLengthTokens, block_size: int, num_blocks: int
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
    """The last token of each block, and whether nothing but blocks of a trace is in it."""
    ends = np.array(text._ends, dtype=np.int64)
    firsts = np.array(text._firsts, dtype=np.uint64)
    at = np.arange(1, num_blocks + 1, dtype=np.int64) * block_size - 1
    run = np.searchsorted(ends, at, side="right")
    begins = np.concatenate(([0], ends[:-1]))
    last = firsts[run] + (at - begins[run]).astype(np.uint64)
    # A block is named if no run in it is tagged: tagged runs are counted up to its first and last.
    tagged = np.concatenate(([0], np.cumsum(firsts >= np.uint64(ANSWER))))
    first_run = np.searchsorted(ends, at - block_size + 1, side="right")
    return last, tagged[run + 1] == tagged[first_run]


def block_names(last: npt.NDArray[np.uint64], salt: str) -> Hashes:
    """Hashes of blocks of a trace, by their last tokens."""
    z = last ^ _seed(salt)
    z += _ADD
    z = (z ^ (z >> _30)) * _TIMES1
    z = (z ^ (z >> _27)) * _TIMES2
    z ^= z >> _31
    return z


@cache
def _seed(salt: str) -> np.uint64:
    return np.uint64(xxhash.xxh3_64_intdigest(salt.encode(), seed=SEED))


# As numpy scalars, made once: that is half of the cost for short texts.
_ADD, _TIMES1, _TIMES2 = map(
    np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_30, _27, _31 = map(np.uint64, (30, 27, 31))
