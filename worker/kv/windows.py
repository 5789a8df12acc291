"""The blocks of sliding window layers: beside each node's own, the part of them that is still read.

A token of a window group reads the last `window` tokens, so a holder that goes on after position p reads no
block before `reach(p)`. Holders hold the ends of nodes: all that the holders below a node still read of
it is the end of its run, from `reach` of the nearest of them on. So a node keeps a *suffix* of its blocks
in each window group (`WindowBlocks`), and one number says which part of it is needed: `low`, the least
end of all held nodes at or below it, in blocks. It is kept up by the changes of children, counted like votes
(`num_low` children have the least), so that a thousand siblings in lockstep cost a step each.

Blocks before that are *idle*: cache, by which a prompt can still begin inside the text. They are given up
from the front when the group's pool needs room, those of the node that has had idle ones for longest first;
the full group's blocks stay. So a prefix may be held and yet be no place to go on from: `can_resume` is the
only judge of that, for prompts, capsules, forks inside a text, and events alike.

With tiers below, blocks that are evicted with the full group's go down with them, and of those that are given
up before the ones that whoever goes on from the end of the node would read. Other idle ones are dropped.

Below the device all blocks are rows of one size, that of a block of the full group. A window block has more
layers (in Gemma 3 five times as many): it is several rows, the last one filled up with zeros. Rows are
numbered after the full group's blocks, and have keys made from the chain hash of their tokens, so that one
space of numbers and one of keys hold all there is.

Rejected: giving blocks up at once (a prompt could go on only from where another one ended: of a system
prompt that many share, nothing would be found again); a table of present blocks per node (suffixes are
all that ever occurs).
"""

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from mallee.protocol.errors import ConfigError, PoolExhausted
from mallee.protocol.hashing import Hashes
from mallee.protocol.model import GroupSpec
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.node import Node, WindowBlocks
from mallee.worker.kv.paths import flatten_windows
from mallee.worker.kv.pool import BlockPool, BlocksLeaving

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
NO_HOLDER: Final = 1 << 60
"""The `low` of a node that is dead."""

Offload: TypeAlias = Callable[[Sequence[int], Sequence[int], Callable[[], None]], None]
"""Takes keys and blocks of cache that is about to be evicted, the first of a text first, and a function that
it calls when their bytes are needed no longer."""


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


class WindowGroup(NamedTuple):
    """Layers that read `window` tokens, the pool of their blocks, and the rows that these are for tiers."""

    window: int
    pool: BlockPool
    span: RowSpan = RowSpan(1, 0, 1)


def window_groups(
    groups: Sequence[GroupSpec], num_blocks: int, block_size: int
) -> list[WindowGroup]:
    """An empty pool for each of `groups` but the first, which has `num_blocks`. Raises ConfigError."""
    found = []
    for group, span in zip(groups[1:], row_spans(groups, num_blocks, block_size), strict=True):
        if group.kind != "window" or group.window is None:
            raise ConfigError(f"layers with KV of kind {group.kind!r} can't be kept yet")
        pool = BlockPool(group.num_blocks(num_blocks, block_size))
        found.append(WindowGroup(group.window, pool, span))
    return found


class Windows:
    """All nodes' blocks in the window groups. `NodeStore` and `BranchTree` tell it every change of a node."""

    __slots__ = (
        "_block_size",
        "_idle_nodes",
        "_journal",
        "_num_idle",
        "_offload",
        "_with_block",
        "groups",
        "version",
    )

    def __init__(
        self,
        groups: Sequence[WindowGroup],
        block_size: int,
        journal: Journal,
        offload: Offload | None = None,
    ) -> None:
        """`offload` takes rows."""
        self.groups = tuple(groups)
        self._offload = offload
        self.version = 0  # grows whenever blocks are given up
        self._block_size = block_size
        self._journal = journal
        self._num_idle = [0] * len(self.groups)
        # By group: nodes with idle blocks, those that have had them for longest first; and for each
        # hash the nodes that have its block.
        self._idle_nodes: list[dict[Node, None]] = [{} for _ in self.groups]
        self._with_block: list[dict[int, int]] = [{} for _ in self.groups]

    # The one question

    def can_resume(self, node: Node, num_tokens: int) -> bool:
        """Whether every group has all that is read after the first `num_tokens` tokens on the path."""
        return all(
            self._first_present(node, g, -(-num_tokens // self._block_size))
            <= self._first_read(g, num_tokens)
            for g in range(len(self.groups))
        )

    def resume_point(self, node: Node, num_tokens: int) -> int:
        """The most tokens, up to `num_tokens`, after which the path can go on: these, or whole blocks."""
        size = self._block_size
        while num_tokens > 0 and not self.can_resume(node, num_tokens):
            num_tokens = (num_tokens - 1) // size * size
        return num_tokens

    def _first_present(self, node: Node, g: int, end: int) -> int:
        """The first of the path's blocks, in group g, from which on none is missing before block `end`."""
        walk: Node | None = node
        while walk is not None:
            base = walk.base // self._block_size
            if end > base:
                gone = walk.windows[g].num_gone
                if gone:
                    return min(base + gone, end)
                end = base
            walk = walk.parent
        return 0

    # Room

    @property
    def num_free(self) -> int:
        """Blocks without an owner, in the group that has the fewest."""
        return min(group.pool.num_free for group in self.groups)

    def available(self, g: int) -> int:
        return self.groups[g].pool.num_coming + self._num_idle[g]

    def in_use(self, g: int) -> int:
        """Blocks that holders still read."""
        return self.groups[g].pool.num_blocks - self.available(g)

    def make_room(self, num_blocks: int, unread: Sequence[int] = ()) -> None:
        """Have so many more blocks free in each group, but for its `unread` ones.

        Raises PoolExhausted before it gives up any, BlocksLeaving after it.
        """
        nums = [num_blocks - (unread[g] if unread else 0) for g in range(len(self.groups))]
        for g, num in enumerate(nums):
            if num > self.available(g):
                raise PoolExhausted(num, self.available(g), self.groups[g].pool.num_blocks)
        for g, num in enumerate(nums):
            self._evict(g, num)
        if any(num > self.groups[g].pool.num_free for g, num in enumerate(nums)):
            raise BlocksLeaving

    def evict(self, num_blocks: int) -> None:
        """Give up idle blocks until `num_blocks` of each group are free or leaving, as far as they go."""
        for g in range(len(self.groups)):
            self._evict(g, min(num_blocks, self.available(g)))

    def has_room(self, num_blocks: int, num_texts: int, num_computed: int) -> bool:
        """Whether texts that take `num_blocks` in all have room; a step computes `num_computed` of them."""
        return all(
            min(num_blocks, num_texts * self._num_read(group) + num_computed) <= self.available(g)
            for g, group in enumerate(self.groups)
        )

    def share(self, num_blocks: int, num_full: int) -> int:
        """The largest share of a group that a held text of `num_blocks` takes, in blocks of `num_full`."""
        read = [
            -(-min(num_blocks, self._num_read(group)) * num_full // group.pool.num_blocks)
            for group in self.groups
        ]
        return max(num_blocks, *read)

    def _num_read(self, group: WindowGroup) -> int:
        """Blocks that a text needs to go on, at most."""
        return -(-group.window // self._block_size) + 2

    # Blocks

    def begin(self, node: Node) -> None:
        """`node` is new, without blocks."""
        node.windows = tuple(WindowBlocks() for _ in self.groups)
        node.low, node.num_low = NO_HOLDER, 0
        node.window_flats = None

    def extend(self, node: Node, num_blocks: int, unread: Sequence[int] = ()) -> None:
        """`node` has so many more blocks; `make_room` has passed.

        `unread`: as many of them, by group, are gone from the beginning on, in a node that has no others.
        """
        for g, own in enumerate(node.windows):
            own.num_gone += unread[g] if unread else 0
            num = num_blocks - own.num_gone if unread else num_blocks
            own.blocks += self.groups[g].pool.alloc(num, node)
        node.window_flats = None

    def _evict(self, g: int, num_blocks: int) -> None:
        pool, nodes = self.groups[g].pool, self._idle_nodes[g]
        while pool.num_coming < num_blocks:
            victim = next(iter(nodes))
            self._give_up(victim, g, min(victim.windows[g].idle, num_blocks - pool.num_coming))
            if not victim.windows[g].idle:
                del nodes[victim]

    def _give_up(self, node: Node, g: int, num_blocks: int) -> None:
        """The first `num_blocks`, which are idle."""
        own = node.windows[g]
        begin = own.num_gone
        if self._offload is not None:
            end = node.base + len(node.hashes) * self._block_size
            read = self._first_read(g, end) - node.base // self._block_size
            self._offload_blocks(node, g, max(begin, read), begin + num_blocks)
        self._removed(g, node.hashes[begin : begin + num_blocks])
        self.groups[g].pool.free(own.blocks[:num_blocks], node)
        del own.blocks[:num_blocks]
        own.num_gone += num_blocks
        own.idle -= num_blocks
        self._num_idle[g] -= num_blocks
        self.version += 1

    def cut(self, node: Node, num_blocks: int) -> None:
        """`node`, whose hashes are still there, keeps its first `num_blocks` blocks."""
        for g, own in enumerate(node.windows):
            kept = max(0, num_blocks - own.num_gone)
            extra = own.blocks[kept:]
            if extra:
                self._removed(g, node.hashes[own.num_gone + kept :])
                extra.reverse()
                self.groups[g].pool.free(extra, node)
                del own.blocks[kept:]
                self.version += 1
            own.num_gone = min(own.num_gone, num_blocks)
        node.window_flats = None
        self._count_idle(node)

    def copies(self, parent: Node, child: Node) -> tuple[tuple[int, int], ...]:
        """(source, target) by group of the block of `parent` in which `child` begins."""
        at = (child.base - parent.base) // self._block_size
        return tuple(
            (above.blocks[at - above.num_gone], below.blocks[0])
            for above, below in zip(parent.windows, child.windows, strict=True)
        )

    def sealed(self, node: Node, values: list[int]) -> None:
        """The blocks of `values`, the last of the hashes of `node`, are full."""
        begin = len(node.hashes) - len(values)
        for g, known in enumerate(self._with_block):
            present = values[max(0, node.windows[g].num_gone - begin) :]
            new = [value for value in present if value not in known]
            for value in present:
                known[value] = known.get(value, 0) + 1
            if new:
                self._journal.stored(new, g + 1)

    def _removed(self, g: int, values: list[int]) -> None:
        known = self._with_block[g]
        for value in reversed(values):
            known[value] -= 1
            if not known[value]:
                del known[value]
                self._journal.removed(value, g + 1)

    # Below the device

    def unread(self, begin: int, num_tokens: int) -> tuple[int, ...]:
        """By group the blocks from block `begin` on that nothing reads after `num_tokens` tokens."""
        every = range(len(self.groups))
        return tuple(max(0, self._first_read(g, num_tokens) - begin) for g in every)

    def keys_after(
        self, keys: Hashes | Sequence[int], num_tokens: int, begin: int = 0
    ) -> Iterator[int]:
        """Keys of the rows, of blocks from `begin` on, that are read after `num_tokens` of a text.

        `keys` are those of the text's blocks. The last block of each group comes first.
        """
        for g, i in self._read_after(num_tokens, begin):
            yield from self.groups[g].span.keys(int(keys[i]))

    def last_rows_after(self, num_tokens: int) -> Iterator[tuple[int, int, int]]:
        """Those of the last block among the rows that are read after `num_tokens`: place, group, part."""
        last, place = (num_tokens - 1) // self._block_size, 0
        for g, i in self._read_after(num_tokens, 0):
            span = self.groups[g].span
            if i == last:
                yield from ((place + part, span.group, part) for part in range(span.per_block))
            place += span.per_block

    def rows_after(self, node: Node, num_tokens: int, begin: int = 0) -> list[int]:
        """The rows themselves, on the path of `node`."""
        tables = flatten_windows(node, self._block_size)
        return [
            row
            for g, i in self._read_after(num_tokens, begin)
            for row in self.groups[g].span.rows(int(tables[g][i]))
        ]

    def _read_after(self, num_tokens: int, begin: int) -> Iterator[tuple[int, int]]:
        """Groups and blocks, from `begin` on, that are read after `num_tokens` tokens."""
        end = -(-num_tokens // self._block_size)
        for g in range(len(self.groups)):
            for i in reversed(range(max(begin, self._first_read(g, num_tokens)), end)):
                yield g, i

    def _first_read(self, g: int, num_tokens: int) -> int:
        """The first block that is read after `num_tokens` tokens."""
        return max(0, num_tokens - self.groups[g].window + 1) // self._block_size

    def evicting(self, node: Node, num_blocks: int) -> None:
        """`node` is about to keep its first `num_blocks` blocks: the others go below."""
        if self._offload is not None:
            for g, own in enumerate(node.windows):
                self._offload_blocks(node, g, max(num_blocks, own.num_gone), len(node.hashes))

    def _offload_blocks(self, node: Node, g: int, begin: int, end: int) -> None:
        """Offload the full blocks `begin` to `end` of `node`, which are there."""
        assert self._offload is not None, "there is nothing below"
        own, span = node.windows[g], self.groups[g].span
        keys: list[int] = []
        rows: list[int] = []
        for i in range(begin, end):
            keys += span.keys(node.hashes[i])
            rows += span.rows(own.blocks[i - own.num_gone])
        if keys:
            blocks = own.blocks[begin - own.num_gone : end - own.num_gone]
            pool = self.groups[g].pool
            pool.begin_read(blocks)
            self._offload(keys, rows, partial(pool.end_read, blocks))

    def keep_rows(self, rows: Sequence[int]) -> Callable[[], None]:
        """As `BranchTree.keep_bytes`."""
        kept: list[tuple[BlockPool, list[int]]] = []
        for group in self.groups:
            span, num = group.span, group.pool.num_blocks * group.span.per_block
            own = [row - span.first for row in rows if 0 <= row - span.first < num]
            kept.append((group.pool, list(dict.fromkeys(row // span.per_block for row in own))))
        for pool, blocks in kept:
            pool.begin_read(blocks)

        def end() -> None:
            for pool, blocks in kept:
                pool.end_read(blocks)

        return end

    def held_hashes(self, g: int) -> Hashes:
        """Hashes of all full blocks in group g, in no particular order."""
        known = self._with_block[g]
        return np.fromiter(known, dtype=np.uint64, count=len(known))

    # Shape

    def split(self, node: Node, upper: Node, num_blocks: int) -> None:
        """`upper`, a new node in its place above `node`, takes its first `num_blocks` blocks."""
        self.begin(upper)
        for above, own in zip(upper.windows, node.windows, strict=True):
            cut = max(0, num_blocks - own.num_gone)
            above.num_gone = min(own.num_gone, num_blocks)
            above.blocks, own.blocks = own.blocks[:cut], own.blocks[cut:]
            own.num_gone -= above.num_gone
        upper.low, upper.num_low = node.low, 1
        self._count_idle(node)
        self._count_idle(upper)

    def merge(self, node: Node, child: Node) -> None:
        """`child` has taken over tokens and hashes of `node`, which it continues, and does its blocks now."""
        for g, (above, own) in enumerate(zip(node.windows, child.windows, strict=True)):
            if own.num_gone:
                end = above.num_gone + len(above.blocks)
                own.num_gone += end
                self._removed(g, child.hashes[above.num_gone : end])
                self.groups[g].pool.free(above.blocks, node)
                self.version += bool(above.blocks)
            else:
                own.num_gone = above.num_gone
                own.blocks = above.blocks + own.blocks
            above.blocks = []
        self._count_idle(node)
        self._count_idle(child)

    # Needs

    def changed(self, node: Node) -> None:
        """The holders, the end or the children of `node` have changed."""
        if node.holders:
            low = (node.end - 1) // self._block_size
            if low == node.low:
                return
        else:
            low = self._lowest_child(node)
        old, node.low = node.low, low
        self._count_idle(node)
        if old != low:
            self._tell_parents(node, old)

    def _lowest_child(self, node: Node) -> int:
        lows = [child.low for child in node.children]
        low = min(lows, default=NO_HOLDER)
        node.num_low = lows.count(low)
        return low

    def _tell_parents(self, node: Node, old: int) -> None:
        """The `low` of `node` is no longer `old`."""
        parent = node.parent
        while parent is not None and not parent.holders:
            before = parent.low
            if node.low < before:
                parent.low, parent.num_low = node.low, 1
            elif node.low == before:
                parent.num_low += 1
                return
            elif old == before:
                parent.num_low -= 1
                if parent.num_low:
                    return
                parent.low = self._lowest_child(parent)
            else:
                return
            self._count_idle(parent)
            node, old, parent = parent, before, parent.parent

    def _count_idle(self, node: Node) -> None:
        for g, own in enumerate(node.windows):
            idle = len(own.blocks)
            if node.low != NO_HOLDER:
                first = self._reach(g, node.low) - node.base // self._block_size
                idle = max(0, min(idle, first - own.num_gone))
            change = idle - own.idle
            if not change:
                continue
            nodes = self._idle_nodes[g]
            if change < 0:  # it is in use again
                nodes.pop(node, None)
            if idle:
                nodes[node] = None
            own.idle = idle
            self._num_idle[g] += change

    def _reach(self, g: int, low: int) -> int:
        """The first block that is read by what goes on after block `low` or inside it."""
        return self._first_read(g, low * self._block_size)

    # Checking

    def check(self, nodes: AbstractSet[Node]) -> None:
        """Raise AssertionError on a broken invariant. O(blocks)."""
        for g, group in enumerate(self.groups):
            group.pool.check()
            owned = [block for node in nodes for block in node.windows[g].blocks]
            assert len(owned) == len(set(owned)), "a window block has two owners"
            assert set(owned) == group.pool.used_blocks(), "window blocks without an owner"
            idle = {node for node in nodes if node.windows[g].idle}
            assert set(self._idle_nodes[g]) == idle, "idle window blocks that can't be given up"
            num_idle = sum(node.windows[g].idle for node in idle)
            assert num_idle == self._num_idle[g], f"idle {self._num_idle[g]}, are {num_idle}"
            found: dict[int, int] = {}
            for node in nodes:
                for value in node.hashes[node.windows[g].num_gone :]:
                    found[value] = found.get(value, 0) + 1
            assert found == self._with_block[g], "hashes of window blocks that are not there"
        for node in nodes:
            self._check_node(node)

    def _check_node(self, node: Node) -> None:
        size = self._block_size
        lows = [child.low for child in node.children]
        low = (node.end - 1) // size if node.holders else min(lows, default=NO_HOLDER)
        assert node.low == low, f"{node} has low {node.low}, not {low}"
        if not node.holders and low != NO_HOLDER:
            assert node.num_low == lows.count(low), f"{node} counts its nearest holders wrong"
        for own in node.windows:
            assert own.num_gone + len(own.blocks) == len(node.blocks), f"{node} has holes"
        if node.holders:
            assert self.can_resume(node, node.end), f"{node} lacks blocks that its holders read"
            for g, table in enumerate(flatten_windows(node, size)):
                begin = max(0, node.end - self.groups[g].window + 1) // size
                assert self._path_blocks(node, g)[begin:] == table[begin:].tolist(), (
                    f"{node} is stale"
                )

    def _path_blocks(self, node: Node, g: int) -> list[int]:
        own = [-1] * node.windows[g].num_gone + node.windows[g].blocks
        if node.parent is None:
            return own
        return self._path_blocks(node.parent, g)[: node.base // self._block_size] + own


def _mixed(key: int, number: int) -> int:
    """A key of its own for each number (the finalizer of SplitMix64: no two keys become one)."""
    value = (key + (number + 1) * _GOLDEN) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31
