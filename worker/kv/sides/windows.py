"""The blocks of sliding window layers: beside each node's own, the part of them that is still read.

A token of a window group reads the last `window` tokens, so a holder that goes on after position p reads no
block before `reach(p)`. Holders hold the ends of nodes: all that the holders below a node still read of
it is the end of its run, from `reach` of the nearest of them on. So a node keeps a *suffix* of its blocks
in each window group (`WindowPart`), and one number says which part of it is needed: `low`, the least
end of all held nodes at or below it, in blocks. It is kept up by the changes of children, counted like votes
(`num_low` children have the least), so that a thousand siblings in lockstep cost a step each.

Blocks before that are *idle*: cache, by which a prompt can still begin inside the text. They are given up
from the front when the group's pool needs room, those of the node that has had idle ones for longest first;
the full group's blocks stay.

With tiers below, blocks that are evicted with the full group's go down with them, and of those that are given
up before the ones that whoever goes on from the end of the node would read. Other idle ones are dropped.

Rejected: giving blocks up at once (a prompt could go on only from where another one ended: of a system
prompt that many share, nothing would be found again); a table of present blocks per node (suffixes are
all that ever occurs).
"""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

import numpy as np

from mallee.protocol.hashing import Hashes
from mallee.protocol.model import first_read, most_read
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.node import BlockTable, Node
from mallee.worker.kv.pool import BlockPool
from mallee.worker.kv.sides.group import Offload, Reason, RowSpan, SideGroup, Tail

NO_HOLDER: Final = 1 << 60
"""The `low` of a node that is dead."""


class WindowPart:
    """A node's blocks in a window group: those after the first `num_gone`, as far as `Node.blocks`."""

    __slots__ = ("blocks", "flat", "idle", "low", "num_gone", "num_low")

    def __init__(self) -> None:
        self.num_gone = 0  # leading blocks that were given up: no layer reads them again
        self.blocks: list[int] = []
        self.idle = 0  # leading ones of `blocks` that no holder reads again: cache
        self.flat: BlockTable | None = None  # as `Node.flat`
        self.low = NO_HOLDER  # the least end of all held nodes at or below it, in blocks
        self.num_low = 0  # children that have it, if the node is not held itself

    def table(self, node: Node, place: int, block_size: int) -> BlockTable:
        """The blocks of the whole sequence, true from the first one on that is still read."""
        if self.flat is not None:
            return self.flat
        path = [node]
        above: BlockTable | None = None
        while above is None and (parent := path[-1].parent) is not None:
            above = _part(parent, place).flat
            path.append(parent)
        if above is not None:
            path.pop()
        for step in reversed(path):
            own = _part(step, place)
            table = np.array([-1] * own.num_gone + own.blocks, dtype=np.int32)
            if step.base:
                assert above is not None, "a root begins at 0"
                table = np.concatenate((above[: step.base // block_size], table))
            above = own.flat = table
        assert above is not None, "a path has at least one node"
        return above


def _part(node: Node, place: int) -> WindowPart:
    part = node.sides[place]
    assert isinstance(part, WindowPart), "a part of another kind of group"
    return part


class WindowGroup(SideGroup):
    """All nodes' blocks in the layers that read `window` tokens."""

    __slots__ = ("_idle_nodes", "_num_idle", "window")

    def __init__(
        self,
        window: int,
        pool: BlockPool,
        span: RowSpan,
        *,
        block_size: int,
        journal: Journal,
        offload: Offload | None = None,
    ) -> None:
        super().__init__(pool, span, block_size=block_size, journal=journal, offload=offload)
        self.window = window
        self._num_idle = 0
        # Nodes with idle blocks, those that have had them for longest first.
        self._idle_nodes: dict[Node, None] = {}

    def begin(self) -> WindowPart:
        return WindowPart()

    def _part(self, node: Node) -> WindowPart:
        return _part(node, self._place)

    def can_resume(self, node: Node, num_tokens: int) -> bool:
        end = -(-num_tokens // self._block_size)
        return self._first_present(node, end) <= self._first_read(num_tokens)

    def _first_present(self, node: Node, end: int) -> int:
        """The first of the path's blocks from which on none is missing before block `end`."""
        walk: Node | None = node
        while walk is not None:
            base = walk.base // self._block_size
            if end > base:
                gone = self._part(walk).num_gone
                if gone:
                    return min(base + gone, end)
                end = base
            walk = walk.parent
        return 0

    def _first_read(self, num_tokens: int) -> int:
        """The first block that is read after `num_tokens` tokens."""
        return first_read(self.window, num_tokens, self._block_size)

    # Room

    @property
    def num_idle(self) -> int:
        return self._num_idle

    def num_needed(self, node: Node, num_blocks: int, end: int | None) -> int:
        return num_blocks - self._num_unread(node, end)

    def _num_unread(self, node: Node, end: int | None) -> int:
        """The first blocks of `node`, a new one, that nothing reads after `end` tokens."""
        if end is None:
            return 0
        return max(0, self._first_read(end) - node.base // self._block_size)

    def has_room(self, num_blocks: int, num_texts: int, num_computed: int, num_states: int) -> bool:
        return min(num_blocks, num_texts * self._num_read + num_computed) <= self.num_available

    def share(self, num_blocks: int, num_full: int) -> int:
        return -(-min(num_blocks, self._num_read) * num_full // self.pool.num_blocks)

    @property
    def _num_read(self) -> int:
        """Blocks that a text needs to go on, at most."""
        return most_read(self.window, self._block_size)

    def least_blocks(self, num_step_blocks: int) -> int:
        # Those of the text that a branch was forked from, its own, what a step computes, and one copied.
        return 2 * self._num_read + num_step_blocks + 1

    def extend(self, node: Node, num_blocks: int, end: int | None) -> None:
        part, unread = self._part(node), self._num_unread(node, end)
        if not num_blocks:
            return
        part.num_gone += unread
        part.blocks += self.pool.alloc(num_blocks - unread, node)
        part.flat = None

    def evict(self, num_blocks: int) -> None:
        pool, nodes = self.pool, self._idle_nodes
        while pool.num_coming < num_blocks:
            victim = next(iter(nodes))
            part = self._part(victim)
            self._give_up(victim, part, min(part.idle, num_blocks - pool.num_coming))
            if not part.idle:
                del nodes[victim]

    def _give_up(self, node: Node, part: WindowPart, num_blocks: int) -> None:
        """The first `num_blocks`, which are idle."""
        begin = part.num_gone
        end = node.base + len(node.hashes) * self._block_size
        read = self._first_read(end) - node.base // self._block_size
        self._offload_blocks(node, max(begin, read), begin + num_blocks)
        self.announced.remove(node.hashes[begin : begin + num_blocks])
        self.pool.free(part.blocks[:num_blocks], node)
        del part.blocks[:num_blocks]
        part.num_gone += num_blocks
        part.idle -= num_blocks
        self._num_idle -= num_blocks
        self.version += 1

    # Blocks

    def cut(self, node: Node, num_blocks: int) -> None:
        part = self._part(node)
        kept = max(0, num_blocks - part.num_gone)
        extra = part.blocks[kept:]
        if extra:
            self.announced.remove(node.hashes[part.num_gone + kept :])
            extra.reverse()
            self.pool.free(extra, node)
            del part.blocks[kept:]
            self.version += 1
        part.num_gone = min(part.num_gone, num_blocks)
        part.flat = None
        self._count_idle(node)

    def copies(self, parent: Node, child: Node) -> tuple[int, int] | None:
        at = (child.base - parent.base) // self._block_size
        above = self._part(parent)
        return above.blocks[at - above.num_gone], self._part(child).blocks[0]

    def sealed(self, node: Node, values: list[int]) -> None:
        begin = len(node.hashes) - len(values)
        self.announced.add(values[max(0, self._part(node).num_gone - begin) :])

    def copied(self, parent: Node) -> None:
        """Nothing to do: a block that is copied is among those that the child's holders read."""

    def trim(self, node: Node) -> None:
        """Nothing to do: all room is in blocks."""

    def final(self, node: Node) -> None:
        """Nothing to do: all blocks are announced."""

    # Below the device

    def keys_after(
        self, keys: Hashes | Sequence[int], num_tokens: int, begin: int = 0
    ) -> Iterator[int]:
        for i in self._read_after(num_tokens, begin):
            yield from self.span.keys(int(keys[i]))

    def rows_after(self, node: Node, num_tokens: int, begin: int = 0) -> Iterator[int]:
        table = self._part(node).table(node, self._place, self._block_size)
        for i in self._read_after(num_tokens, begin):
            yield from self.span.rows(int(table[i]))

    def tails_after(self, num_tokens: int) -> Iterator[Tail]:
        if num_tokens % self._block_size:  # the last block comes first
            for part in range(self.span.per_block):
                yield Tail(part, self.span.group, part)

    def _read_after(self, num_tokens: int, begin: int) -> Iterator[int]:
        """Blocks, from `begin` on, that are read after `num_tokens` tokens."""
        end = -(-num_tokens // self._block_size)
        return reversed(range(max(begin, self._first_read(num_tokens)), end))

    def evicting(self, node: Node, num_blocks: int) -> None:
        begin = max(num_blocks, self._part(node).num_gone)
        self._offload_blocks(node, begin, len(node.hashes))

    def _offload_blocks(self, node: Node, begin: int, end: int) -> None:
        """Offload the full blocks `begin` to `end` of `node`, which are there."""
        part = self._part(node)
        blocks = part.blocks[begin - part.num_gone : max(begin, end) - part.num_gone]
        self._send_below(node.hashes[begin:end], blocks)

    # Shape

    def split(self, node: Node, upper: Node, num_blocks: int) -> None:
        above, own = self._part(upper), self._part(node)
        cut = max(0, num_blocks - own.num_gone)
        above.num_gone = min(own.num_gone, num_blocks)
        above.blocks, own.blocks = own.blocks[:cut], own.blocks[cut:]
        own.num_gone -= above.num_gone
        above.low, above.num_low = own.low, 1
        self._count_idle(node)
        self._count_idle(upper)

    def merge(self, node: Node, child: Node) -> None:
        above, own = self._part(node), self._part(child)
        if own.num_gone:
            end = above.num_gone + len(above.blocks)
            own.num_gone += end
            self.announced.remove(child.hashes[above.num_gone : end])
            self.pool.free(above.blocks, node)
            self.version += bool(above.blocks)
        else:
            own.num_gone = above.num_gone
            own.blocks = above.blocks + own.blocks
        above.blocks = []
        self._count_idle(node)
        self._count_idle(child)

    # Needs

    def advanced(self, node: Node, num_tokens: int, reason: Reason | None) -> None:
        self.changed(node)

    def changed(self, node: Node) -> None:
        part = self._part(node)
        if node.holders:
            low = (node.end - 1) // self._block_size
            if low == part.low:
                return
        else:
            low = self._lowest_child(node)
        old, part.low = part.low, low
        self._count_idle(node)
        if old != low:
            self._tell_parents(node, old)

    def _lowest_child(self, node: Node) -> int:
        lows = [self._part(child).low for child in node.children]
        low = min(lows, default=NO_HOLDER)
        self._part(node).num_low = lows.count(low)
        return low

    def _tell_parents(self, node: Node, old: int) -> None:
        """The `low` of `node` is no longer `old`."""
        parent = node.parent
        while parent is not None and not parent.holders:
            above, low = self._part(parent), self._part(node).low
            before = above.low
            if low < before:
                above.low, above.num_low = low, 1
            elif low == before:
                above.num_low += 1
                return
            elif old == before:
                above.num_low -= 1
                if above.num_low:
                    return
                above.low = self._lowest_child(parent)
            else:
                return
            self._count_idle(parent)
            node, old, parent = parent, before, parent.parent

    def _count_idle(self, node: Node) -> None:
        part = self._part(node)
        idle = len(part.blocks)
        if part.low != NO_HOLDER:
            # What goes on after block `low`, or inside it, reads from here on.
            first = self._first_read(part.low * self._block_size) - node.base // self._block_size
            idle = max(0, min(idle, first - part.num_gone))
        change = idle - part.idle
        if not change:
            return
        if change < 0:  # it is in use again
            self._idle_nodes.pop(node, None)
        if idle:
            self._idle_nodes[node] = None
        part.idle = idle
        self._num_idle += change

    # Checking

    def owned(self, node: Node) -> Sequence[int]:
        return self._part(node).blocks

    def check(self, nodes: AbstractSet[Node]) -> None:
        super().check(nodes)
        parts = {node: self._part(node) for node in nodes}
        idle = {node for node, part in parts.items() if part.idle}
        assert set(self._idle_nodes) == idle, "idle window blocks that can't be given up"
        num_idle = sum(part.idle for part in parts.values())
        assert num_idle == self._num_idle, f"idle {self._num_idle}, are {num_idle}"
        found: dict[int, int] = {}
        for node, part in parts.items():
            for value in node.hashes[part.num_gone :]:
                found[value] = found.get(value, 0) + 1
        assert found == self.announced.counts(), "announced window blocks that are not there"
        for node, part in parts.items():
            self._check_node(node, part)

    def _check_node(self, node: Node, part: WindowPart) -> None:
        size = self._block_size
        lows = [self._part(child).low for child in node.children]
        low = (node.end - 1) // size if node.holders else min(lows, default=NO_HOLDER)
        assert part.low == low, f"{node} has low {part.low}, not {low}"
        if not node.holders and low != NO_HOLDER:
            assert part.num_low == lows.count(low), f"{node} counts its nearest holders wrong"
        assert part.num_gone + len(part.blocks) == len(node.blocks), f"{node} has holes"
        if node.holders:
            assert self.can_resume(node, node.end), f"{node} lacks blocks that its holders read"
            begin = self._first_read(node.end)
            table = part.table(node, self._place, size)[begin:].tolist()
            assert self.path_blocks(node)[begin:] == table, f"{node} is stale"

    def path_blocks(self, node: Node) -> list[int]:
        """The blocks of the path of `node`, and -1 for those that are gone."""
        part = self._part(node)
        own = [-1] * part.num_gone + part.blocks
        if node.parent is None:
            return own
        return self.path_blocks(node.parent)[: node.base // self._block_size] + own
