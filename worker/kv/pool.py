"""The block pool: which of the worker's KV blocks are free.

Reference counts live on tree nodes, not here (design decision 1): a block has exactly one owner from
`alloc` to `free`, so the pool is a stack of free ids and one byte of state per block. Ids that were
never handed out are not on the stack: a thousand mocked pools would be mostly that.

A transfer may still read a block that its owner gives up: the block is *leaving* until that has ended, and
free only then.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mallee.protocol.errors import PoolExhausted
from mallee.worker.kv.watch import BlockWatch


class PoolStats(NamedTuple):
    """Counts of blocks; of `total` that may be handed out, `used` ever were. `num_*` only grow."""

    total: int
    free: int
    num_allocs: int
    num_frees: int
    used: int


class BlocksLeaving(Exception):
    """Enough blocks will be free, but transfers still read some of them."""


class BlockPool:
    """Blocks of one KV memory, by id; alloc and free are O(1) a block.

    Of `num_blocks` blocks of memory all are handed out, or, if `watch` keeps guards, every second one:
    `num_blocks` is then what is left. `watch` sees every block that changes hands.
    """

    __slots__ = (
        *("_free", "_fresh", "_is_free", "_leaving", "_num_allocs", "_num_frees", "_readers"),
        *("num_blocks", "num_free", "watch"),
    )

    def __init__(self, num_blocks: int, watch: BlockWatch | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks}: a pool needs at least one block")
        ids = range(num_blocks) if watch is None else watch.usable
        self.num_blocks = len(ids)
        self.watch = watch
        self.num_free = len(ids)
        self._free: list[int] = []  # that were in use before
        self._fresh = ids  # that never were; the lowest first: stable, readable ids
        self._is_free = bytearray(b"\1" if watch is None else b"\0") * num_blocks
        if watch is not None:
            for block in ids:
                self._is_free[block] = 1
        self._num_allocs = 0
        self._num_frees = 0
        self._readers: dict[int, int] = {}  # transfers under way, by block
        self._leaving: dict[int, object] = {}  # by block, those who gave them up

    @property
    def num_coming(self) -> int:
        """Blocks that are free, or will be without anything done for it."""
        return self.num_free + len(self._leaving)

    def alloc(self, n: int, owner: object = None) -> list[int]:
        """Take n blocks. Raises PoolExhausted, having taken none. `owner` is for the watch's story."""
        if n > self.num_free:
            raise PoolExhausted(n, self.num_free, self.num_blocks)
        if n == 0:
            return []
        taken = self._free[-n:]
        taken.reverse()
        num_fresh = n - len(taken)
        taken += self._fresh[:num_fresh]
        if self.watch is not None:
            self.watch.allocated(taken, owner)
        del self._free[-n:]
        self._fresh = self._fresh[num_fresh:]
        is_free = self._is_free
        for block in taken:
            is_free[block] = 0
        self.num_free -= n
        self._num_allocs += n
        return taken

    def free(self, blocks: Sequence[int], owner: object = None) -> None:
        """Give blocks back. A block that is already free is our bug: AssertionError, naming it."""
        if self._readers:
            self._leaving.update((b, owner) for b in blocks if b in self._readers)
            blocks = [block for block in blocks if block not in self._readers]
            if not blocks:
                return
        for block in blocks:
            assert not self._is_free[block], f"block {block} freed twice{self._story(block)}"
            self._is_free[block] = 1
            self._free.append(block)
        self.num_free += len(blocks)
        self._num_frees += len(blocks)
        if self.watch is not None:
            self.watch.freed(blocks, owner)

    def begin_read(self, blocks: Sequence[int]) -> None:
        """A transfer reads `blocks`: if they are given up meanwhile, they are free after `end_read`."""
        for block in blocks:
            self._readers[block] = self._readers.get(block, 0) + 1

    def end_read(self, blocks: Sequence[int]) -> None:
        """The transfer has ended."""
        for block in blocks:
            self._readers[block] -= 1
            if not self._readers[block]:
                del self._readers[block]
        for block in reversed(blocks):
            if block in self._leaving and block not in self._readers:
                self.free((block,), self._leaving.pop(block))

    def is_free(self, block: int) -> bool:
        return bool(self._is_free[block])

    def used_blocks(self) -> set[int]:
        """Every block that has an owner. O(blocks)."""
        usable = range(self.num_blocks) if self.watch is None else self.watch.usable
        return {b for b in usable if not self._is_free[b] and b not in self._leaving}

    def check(self) -> None:
        """Raise AssertionError unless the free list and the state bytes agree."""
        free = {*self._free, *self._fresh}
        assert len(free) == len(self._free) + len(self._fresh), "a block is twice on the free list"
        assert sum(self._is_free) == len(free) == self.num_free, "list and state bytes disagree"
        assert all(self._is_free[b] for b in free), "a used block is on the free list"
        assert self._num_allocs - self._num_frees == self.num_blocks - self.num_free, "leak"
        assert set(self._leaving) <= set(self._readers), "a block leaves for ever"

    def stats(self) -> PoolStats:
        used = self.num_blocks - len(self._fresh)
        return PoolStats(self.num_blocks, self.num_free, self._num_allocs, self._num_frees, used)

    def _story(self, block: int) -> str:
        return "" if self.watch is None else f" ({self.watch.story(block)})"


def runs(ids: Sequence[int], most: int | None = None) -> Iterator[slice]:
    """Slices of `ids`, each of which counts up one by one, of at most `most` ids; in order."""
    begin = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or ids[i] != ids[i - 1] + 1 or i - begin == most:
            yield slice(begin, i)
            begin = i
