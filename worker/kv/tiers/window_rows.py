"""Names and places of window blocks below the device.

There all blocks are rows of one size, that of a block of the full group. A window block has more layers (in
Gemma 3 five times as many): it is several rows, the last one filled up with zeros. Rows are numbered after
the full group's blocks, and have keys made from the chain hash of their tokens, so that one space of numbers
and one of keys hold all there is.
"""

from collections.abc import Sequence
from typing import NamedTuple

from mallee.protocol.model import GroupSpec

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class RowSpan(NamedTuple):
    """The rows of a window group: block b has `per_block` from `first + b * per_block` on."""

    group: int  # 1 or more
    first: int
    per_block: int

    def rows(self, block: int) -> range:
        """The rows of `block`."""
        begin = self.first + block * self.per_block
        return range(begin, begin + self.per_block)

    def keys(self, key: int) -> list[int]:
        """The keys of the rows of the block whose chain hash is `key`."""
        return [_mixed(key, self.group << 16 | part) for part in range(self.per_block)]


def row_spans(groups: Sequence[GroupSpec], num_blocks: int, block_size: int) -> list[RowSpan]:
    """The rows of each of `groups` but the first, which is the full one and has `num_blocks`."""
    spans = []
    first = num_blocks
    for number, group in enumerate(groups[1:], start=1):
        per_block = -(-group.nbytes_per_token // groups[0].nbytes_per_token)
        spans.append(RowSpan(number, first, per_block))
        first += per_block * group.num_blocks(num_blocks, block_size)
    return spans


def _mixed(key: int, number: int) -> int:
    """A key of its own for each number (the finalizer of SplitMix64: no two keys become one)."""
    value = (key + (number + 1) * _GOLDEN) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31
