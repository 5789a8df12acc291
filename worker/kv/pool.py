"""The block pool: which of the worker's KV blocks are free.

Reference counts live on tree nodes, not here (design decision 1): a block has exactly one owner from
`alloc` to `free`, so the pool is a stack of free ids and one byte of state per block.
"""

from collections.abc import Sequence
from typing import NamedTuple

from mallee.protocol.errors import PoolExhausted


class PoolStats(NamedTuple):
    """Counts of blocks; `num_allocs` and `num_frees` only grow."""

    total: int
    free: int
    num_allocs: int
    num_frees: int


class BlockPool:
    """`num_blocks` blocks with ids 0 .. num_blocks - 1; alloc and free are O(1) a block."""

    __slots__ = ("_free", "_is_free", "_num_allocs", "_num_frees", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks}: a pool needs at least one block")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # lowest id on top: stable, readable ids
        self._is_free = bytearray(b"\x01") * num_blocks
        self._num_allocs = 0
        self._num_frees = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def alloc(self, n: int) -> list[int]:
        """Take n blocks. Raises PoolExhausted, having taken none."""
        if n > len(self._free):
            raise PoolExhausted(n, len(self._free), self.num_blocks)
        if n == 0:
            return []
        taken = self._free[-n:]
        del self._free[-n:]
        taken.reverse()
        for block in taken:
            self._is_free[block] = 0
        self._num_allocs += n
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back. A block that is already free is our bug: AssertionError, naming it."""
        for block in blocks:
            assert not self._is_free[block], f"block {block} freed twice"
            self._is_free[block] = 1
            self._free.append(block)
        self._num_frees += len(blocks)

    def is_free(self, block: int) -> bool:
        return bool(self._is_free[block])

    def check(self) -> None:
        """Raise AssertionError unless the free list and the state bytes agree."""
        assert len(set(self._free)) == len(self._free), "a block is twice on the free list"
        assert sum(self._is_free) == len(self._free), "free list and state bytes disagree"
        assert all(self._is_free[b] for b in self._free), "a used block is on the free list"
        assert self._num_allocs - self._num_frees == self.num_blocks - len(self._free), "leak"

    def stats(self) -> PoolStats:
        return PoolStats(self.num_blocks, len(self._free), self._num_allocs, self._num_frees)
