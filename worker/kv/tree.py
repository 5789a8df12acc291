"""The branch tree: every token sequence in the cache, each shared prefix once, copy on write.

A `Node` owns a run of blocks; its sequence is its parent's up to `base`, then its own tokens. Whoever
needs a sequence to stay (a branch, a capsule) *holds* its last node: one counter. So a fork is one
addition, whatever the length or depth (1000 forks of 128 blocks: 0.15 ms; copying tables and counting
per block took 4.5 ms; design notes, measured). The price is paid at the first append after a fork:
the appender gets a node of its own, which starts at a block boundary and, if the parent ends inside a
block, with a copy of that block's filled slots. Nodes are therefore self-contained from `base` on:
block i of a node holds tokens [i * block_size, (i + 1) * block_size) of `node.tokens`.

Rejected: a reference count per block and a table per branch (slow forks, as above); children that
attach anywhere inside a parent (no splits, but a live child then pins its parent's whole tail).

Page tables are flattened lazily and cached per node. A node that nobody holds and that has one child
is merged into it, which bounds the depth. A node that nobody holds and that has no child keeps its
full blocks as cache, found again by chain hash, until `reserve` needs room: least recently used leaf
first, from its end, so a parent never goes before its child.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mallee.protocol.errors import PoolExhausted
from mallee.protocol.hashing import Hashes, block_hashes
from mallee.worker.kv.catalog import Catalog
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.node import BlockTable, Node, Reservation, SlotCopy
from mallee.worker.kv.pool import BlockPool


class TreeStats(NamedTuple):
    """`cached_blocks` can be evicted now; the counters only grow."""

    num_nodes: int
    cached_blocks: int
    num_copies: int
    num_evicted: int
    num_merges: int
    num_splits: int


class BranchTree:
    """Owner of all nodes over one pool. Not thread-safe: one thread owns the tree."""

    def __init__(self, pool: BlockPool, block_size: int, journal: Journal) -> None:
        self.pool = pool
        self.block_size = block_size
        self._catalog: Catalog[Node] = Catalog(journal)
        self._idle: OrderedDict[Node, None] = OrderedDict()  # no holder, no child; oldest first
        self._cached_blocks = 0  # blocks in nodes without any holder at or below them
        self._nodes: set[Node] = set()
        self._num_copies = self._num_evicted = self._num_merges = self._num_splits = 0

    # Finding and sharing

    def find(self, hashes: Hashes) -> int:
        """How many leading blocks of `hashes` are held. O(log blocks)."""
        return self._catalog.count_leading(hashes)

    def attach(self, hashes: Hashes, salt: str) -> Node:
        """A held node that ends at the longest held prefix of `hashes`; an empty root if none is.

        O(blocks of one node) when the prefix ends inside a node, which is then split there.
        """
        num_blocks = self.find(hashes)
        if num_blocks == 0:
            node = self._add(Node(None, 0, salt))
        else:
            node = self._catalog.find(int(hashes[num_blocks - 1]))
            own = num_blocks - node.base // self.block_size
            if own < len(node.blocks):  # more tokens follow, or room is reserved for some
                node = self._split(node, own)
        self.hold(node)
        return node

    def fork(self, node: Node, n: int) -> list[Node]:
        """n children at the end of `node`: each is a hold on it until its first append.

        No KV is copied and no block is touched; O(n), whatever the length and depth.
        """
        self.hold(node, n)
        return [node] * n

    def hold(self, node: Node, n: int = 1) -> None:
        """n more holders share `node`. O(1) while the node is live."""
        if node.holders == 0:
            self._idle.pop(node, None)
            self._enliven(node)
        node.holders += n

    def release(self, node: Node, n: int = 1) -> None:
        """n holders let go. A node that nobody needs keeps its full blocks as cache, or vanishes."""
        assert node.holders >= n, f"{node} released {n} times too often"
        node.holders -= n
        if node.holders == 0:
            self._deaden(node)
            self._settle(node)

    # Growing

    def reserve(self, node: Node, num_tokens: int) -> Reservation:
        """Room for `num_tokens` more tokens after the end of `node`, for one holder of it.

        If the node is shared, the holder moves to a new child. Evicts cached blocks as needed.
        Raises PoolExhausted, with nothing changed.
        """
        is_own = node.holders == 1 and not node.children
        base = node.base if is_own else node.end - node.end % self.block_size
        needed = -(-(node.end + num_tokens - base) // self.block_size)
        have = len(node.blocks) if is_own else 0
        new_blocks = self._take(max(0, needed - have))
        if is_own:
            if new_blocks:
                node.blocks += new_blocks
                node.flat = None
            return Reservation(node, None)
        child = Node(node, base, node.salt)
        shared = node.end - base
        child.tokens = node.tokens[len(node.tokens) - shared :] if shared else []
        child.blocks = new_blocks
        copy = None
        if shared:
            source = node.blocks[(len(node.tokens) - 1) // self.block_size]
            copy = SlotCopy(source, new_blocks[0], shared)
            self._num_copies += 1
        self._add(child)
        node.children.add(child)
        child.holders = child.live = 1
        node.live += 1  # it was live before: its holder is moving to the child
        self.release(node)
        return Reservation(child, copy)

    def commit(self, node: Node, tokens: Sequence[int]) -> None:
        """The KV of `tokens` is now in the reserved slots; blocks that became full are sealed."""
        node.tokens.extend(tokens)
        size = self.block_size
        assert len(node.blocks) * size >= len(node.tokens), "committed more than was reserved"
        first = len(node.hashes)
        num_full = len(node.tokens) // size
        if num_full == first:
            return
        new = block_hashes(
            node.tokens[first * size : num_full * size],
            size,
            salt=node.salt,
            parent=self._last_hash(node),
        )
        for value in new.tolist():
            node.hashes.append(value)
            self._catalog.add(value, node)

    # Reading

    def table(self, node: Node) -> BlockTable:
        """Block ids of the whole sequence, reserved ones included; read-only, cached on the node."""
        path = []
        walk: Node | None = node
        while walk is not None and walk.flat is None:
            path.append(walk)
            walk = walk.parent
        for step in reversed(path):
            own = np.array(step.blocks, dtype=np.int32)
            if step.parent is not None and step.base:
                above = step.parent.flat
                assert above is not None
                own = np.concatenate((above[: step.base // self.block_size], own))
            own.flags.writeable = False
            step.flat = own
        assert node.flat is not None
        return node.flat

    def path_hashes(self, node: Node) -> Hashes:
        """Chain hashes of all full blocks of the sequence, from the root on."""
        parts: list[list[int]] = []
        walk: Node | None = node
        limit = len(node.hashes)
        while walk is not None:
            parts.append(walk.hashes[:limit])
            limit = (walk.base - (walk.parent.base if walk.parent else 0)) // self.block_size
            walk = walk.parent
        return np.array([h for part in reversed(parts) for h in part], dtype=np.uint64)

    def held_hashes(self) -> Hashes:
        """Chain hashes of all blocks the worker holds (for snapshots), in no particular order."""
        return self._catalog.hashes()

    def holds(self) -> dict[Node, int]:
        """Holders of every node that has any."""
        return {node: node.holders for node in self._nodes if node.holders}

    @property
    def num_available(self) -> int:
        """Blocks that `reserve` can get: free ones and cached ones."""
        return self.pool.num_free + self._cached_blocks

    def stats(self) -> TreeStats:
        return TreeStats(
            len(self._nodes),
            self._cached_blocks,
            self._num_copies,
            self._num_evicted,
            self._num_merges,
            self._num_splits,
        )

    # Structure

    def _add(self, node: Node) -> Node:
        self._nodes.add(node)
        return node

    def _enliven(self, node: Node) -> None:
        walk: Node | None = node
        while walk is not None:
            walk.live += 1
            if walk.live > 1:
                return
            self._cached_blocks -= len(walk.blocks)
            walk = walk.parent

    def _deaden(self, node: Node) -> None:
        walk: Node | None = node
        while walk is not None:
            walk.live -= 1
            if walk.live:
                return
            self._cached_blocks += len(walk.blocks)
            walk = walk.parent

    def _split(self, node: Node, num_blocks: int) -> Node:
        """A new node above `node` takes its first `num_blocks` full blocks."""
        cut = num_blocks * self.block_size
        upper = self._add(Node(node.parent, node.base, node.salt))
        upper.tokens, node.tokens = node.tokens[:cut], node.tokens[cut:]
        upper.blocks, node.blocks = node.blocks[:num_blocks], node.blocks[num_blocks:]
        upper.hashes, node.hashes = node.hashes[:num_blocks], node.hashes[num_blocks:]
        for value in upper.hashes:
            self._catalog.move(value, node, upper)
        if node.parent is not None:
            node.parent.children.remove(node)
            node.parent.children.add(upper)
        upper.children.add(node)
        upper.live = min(node.live, 1)
        node.parent, node.base = upper, node.base + cut
        self._num_splits += 1
        return upper

    def _merge_down(self, node: Node) -> None:
        """The only child of `node`, which nobody holds, takes over its blocks."""
        (child,) = node.children
        kept = (child.base - node.base) // self.block_size
        for value in node.hashes:
            self._catalog.move(value, node, child)
        self._free_blocks(node, kept)  # the partial block, of which the child has a copy
        child.tokens = node.tokens[: kept * self.block_size] + child.tokens
        child.blocks = node.blocks + child.blocks
        child.hashes = node.hashes + child.hashes
        child.base, child.parent = node.base, node.parent
        if node.parent is not None:
            node.parent.children.remove(node)
            node.parent.children.add(child)
        self._nodes.remove(node)
        self._num_merges += 1

    def _settle(self, node: Node, *, is_newest: bool = True) -> None:
        """Merge, cache or drop `node` and what thereby becomes unneeded above it.

        What is cached goes last if it `is_newest`, else next: it was used before its children were.
        """
        walk: Node | None = node
        while walk is not None and walk.holders == 0:
            if len(walk.children) == 1:
                self._merge_down(walk)
            if walk.children:
                return
            self._truncate(walk, len(walk.hashes))
            if walk.blocks:
                self._idle[walk] = None
                if not is_newest:
                    self._idle.move_to_end(walk, last=False)
                return
            walk = self._unlink(walk)
            is_newest = False

    def _unlink(self, node: Node) -> Node | None:
        """Remove a node without blocks and children; returns its parent."""
        self._nodes.remove(node)
        self._idle.pop(node, None)
        if node.parent is not None:
            node.parent.children.remove(node)
        return node.parent

    def _take(self, num_blocks: int) -> list[int]:
        """Free blocks, evicting cache if there are too few. Raises PoolExhausted before it evicts."""
        if num_blocks > self.num_available:
            raise PoolExhausted(num_blocks, self.num_available, self.pool.num_blocks)
        while self.pool.num_free < num_blocks:
            oldest = next(iter(self._idle))
            short = num_blocks - self.pool.num_free
            kept = max(0, len(oldest.blocks) - short)
            self._num_evicted += len(oldest.blocks) - kept
            self._truncate(oldest, kept)
            if not oldest.blocks:
                parent = self._unlink(oldest)
                if parent is not None:
                    self._settle(parent, is_newest=False)
        return self.pool.alloc(num_blocks)

    def _truncate(self, node: Node, num_blocks: int) -> None:
        """Keep the first `num_blocks` full blocks of a leaf."""
        for value in node.hashes[num_blocks:]:
            self._catalog.remove(value, node)
        del node.hashes[num_blocks:]
        del node.tokens[num_blocks * self.block_size :]
        self._free_blocks(node, num_blocks)

    def _free_blocks(self, node: Node, kept: int) -> None:
        extra = node.blocks[kept:]
        if extra:
            self.pool.free(extra)
            del node.blocks[kept:]
            node.flat = None
            if node.live == 0:
                self._cached_blocks -= len(extra)

    def _last_hash(self, node: Node) -> int | None:
        """Chain hash of the last full block before the node's first unhashed one."""
        if node.hashes:
            return node.hashes[-1]
        walk = node.parent
        while walk is not None and walk.base == node.base:
            walk = walk.parent
        if walk is None:
            return None
        return walk.hashes[(node.base - walk.base) // self.block_size - 1]
