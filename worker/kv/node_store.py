"""Life, death and shape of the tree's nodes: what `BranchTree`'s verbs have in common.

Keeps three things true, and knows nothing of forks or tokens to come: a live node that is not held itself is
*thin* (it has several children, and no partial block unless one is still to be copied from it); a dead
node holds full blocks only; the index lists exactly the full blocks of all nodes.
"""

from collections.abc import Sequence
from functools import partial

from mallee.protocol.errors import PoolExhausted
from mallee.worker.kv.block_index import BlockIndex
from mallee.worker.kv.eviction import EvictionName, Ranks, eviction_order
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.node import Node, SidePart
from mallee.worker.kv.pool import BlockPool, BlocksLeaving
from mallee.worker.kv.sides.group import Offload, SideGroup


class NodeStore:
    """All nodes over one pool. Only `BranchTree` calls it; the counters only grow."""

    __slots__ = (
        "_num_deaths",
        "_offload",
        "_order",
        "block_size",
        "cached_blocks",
        "index",
        "nodes",
        "num_evicted",
        "num_merges",
        "num_splits",
        "pool",
        "ranks",
        "sides",
    )

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        journal: Journal,
        *,
        eviction: EvictionName,
        ranks: Ranks,
        sides: Sequence[SideGroup] = (),
        offload: Offload | None = None,
    ) -> None:
        self.pool = pool
        self.sides = sides
        self._offload = offload
        self.block_size = block_size
        self.index: BlockIndex[Node] = BlockIndex(journal)
        self.nodes: set[Node] = set()
        self.cached_blocks = 0  # of dead nodes
        self.num_evicted = self.num_merges = self.num_splits = 0
        self.ranks = ranks
        self._order = eviction_order(eviction, ranks)
        self._num_deaths = 0

    def parts(self) -> tuple[SidePart, ...]:
        """Those of a new node."""
        return tuple(side.begin() for side in self.sides) if self.sides else ()

    @property
    def num_available(self) -> int:
        """Blocks that `take` can get, now or later: free ones, leaving ones, and those of dead nodes."""
        return self.pool.num_coming + self.cached_blocks

    def oldest(self) -> Node | None:
        """The dead leaf that gives up blocks next; None if nothing is dead."""
        return self._order.oldest() if self.cached_blocks else None

    # Life and death

    def activate(self, node: Node) -> None:
        """`node` gets its first holder. O(dead nodes above it), which merge: their next time is short."""
        revived = []
        walk: Node | None = node
        while walk is not None:
            walk.live += 1
            if walk.live > 1:
                break
            if walk.stamp:
                walk.stamp = 0
                self._order.revived(walk)
            self.cached_blocks -= len(walk.blocks)
            revived.append(walk)
            walk = walk.parent
        for above in revived[1:]:
            self.collapse(above)

    def deactivate(self, node: Node) -> None:
        """`node` lost its last holder: it and what is above it die, if nothing else needs them."""
        walk: Node | None = node
        while walk is not None:
            walk.live -= 1
            if walk.live:
                return
            self._num_deaths += 1
            walk.stamp = self._num_deaths
            self.cached_blocks += len(walk.blocks)
            self._order.died(walk)
            walk = walk.parent

    # Shape

    def split(self, node: Node, num_blocks: int) -> Node:
        """A new node above `node` takes its first `num_blocks` full blocks."""
        cut = num_blocks * self.block_size
        upper = Node(node.parent, node.base, node.salt, node.tokens[:cut], self.parts())
        self.nodes.add(upper)
        node.tokens = node.tokens[cut:]
        upper.blocks, node.blocks = node.blocks[:num_blocks], node.blocks[num_blocks:]
        upper.hashes, node.hashes = node.hashes[:num_blocks], node.hashes[num_blocks:]
        for value in upper.hashes:
            self.index.move(value, node, upper)
        if node.parent is not None:
            node.parent.children.remove(node)
            node.parent.children.add(upper)
        upper.children.add(node)
        upper.live, upper.stamp = min(node.live, 1), node.stamp
        upper.is_copying, node.is_copying = node.is_copying, False
        node.parent, node.base = upper, node.base + cut
        for side in self.sides:
            side.split(node, upper, num_blocks)
            if side.needs_parent and node.end == upper.end and not node.is_copying:
                node.is_copying, upper.num_copying = True, 1
        self.num_splits += 1
        return upper

    def collapse(self, node: Node) -> None:
        """`node` is live and not held itself: keep what its children need of it, in as few nodes."""
        if len(node.children) == 1:
            (child,) = node.children
            if not child.is_copying:
                self._merge_down(node, child)
        elif node.num_copying == 0:
            self._free_blocks(node, self._drop_partial(node))

    def _merge_down(self, node: Node, child: Node) -> None:
        """The only child of `node`, which is not held itself, takes over its blocks. O(both)."""
        kept = (child.base - node.base) // self.block_size
        for value in node.hashes:
            self.index.move(value, node, child)
        self._free_blocks(node, kept)  # the partial block, of which the child has a copy
        del node.tokens[kept * self.block_size :]
        # The parent's lists grow: in a chain of turns they are the long ones.
        node.tokens.extend(child.tokens)
        node.blocks += child.blocks
        node.hashes += child.hashes
        child.tokens, child.blocks, child.hashes = node.tokens, node.blocks, node.hashes
        child.base, child.parent = node.base, node.parent
        for side in self.sides:
            side.merge(node, child)
        child.is_copying = node.is_copying
        if node.parent is not None:
            node.parent.children.remove(node)
            node.parent.children.add(child)
        self.nodes.remove(node)
        self.num_merges += 1

    def settle(self, node: Node) -> None:
        """Thin, cache or drop `node`, which lost a holder or a child, and what that makes unneeded."""
        walk: Node | None = node
        while walk is not None and walk.holders == 0:
            if walk.live:
                self.collapse(walk)
                return
            if walk.children:
                self._free_blocks(walk, self._drop_partial(walk))
                return
            self._truncate(walk, len(walk.hashes))
            if walk.blocks:
                return
            walk = self._unlink(walk)

    def _unlink(self, node: Node) -> Node | None:
        """Remove a node without blocks and children; returns its parent."""
        self.nodes.remove(node)
        node.stamp = 0
        parent = node.parent
        if parent is not None:
            parent.children.remove(node)
            if node.is_copying:
                parent.num_copying -= 1
                for side in self.sides:
                    side.copied(parent)
            if parent.stamp and not parent.children:
                self._order.became_leaf(parent)
        return parent

    # Blocks

    def take(self, num_blocks: int, owner: Node) -> list[int]:
        """Free blocks, evicting cache if there are too few.

        Raises PoolExhausted before it evicts, BlocksLeaving after it.
        """
        if num_blocks > self.num_available:
            raise PoolExhausted(num_blocks, self.num_available, self.pool.num_blocks)
        self.evict(num_blocks)
        if num_blocks > self.pool.num_free:
            raise BlocksLeaving
        return self.pool.alloc(num_blocks, owner)

    def evict(self, num_blocks: int, *, spares_ranked: bool = False) -> None:
        """Give up cache until `num_blocks`, which are available, are free or leaving.

        `spares_ranked`: or until only blocks with a rank are left.
        """
        if len(self.ranks):
            self._expire_ranks()
        while self.pool.num_coming < num_blocks:
            oldest = self._order.oldest()
            if spares_ranked and self.ranks.rank(oldest):
                return
            short = num_blocks - self.pool.num_coming
            kept = max(len(oldest.blocks) - short, self.ranks.num_above(oldest))
            self.num_evicted += len(oldest.blocks) - kept
            if self._offload is not None:
                for side in self.sides:
                    side.evicting(oldest, kept)
                blocks = oldest.blocks[kept:]
                self.pool.begin_read(blocks)
                self._offload(oldest.hashes[kept:], blocks, partial(self.pool.end_read, blocks))
            self._truncate(oldest, kept)
            if not oldest.blocks:
                parent = self._unlink(oldest)
                if parent is not None:
                    self.settle(parent)
            elif oldest.rank != self.ranks.rank(oldest):
                self._order.became_leaf(oldest)

    def trim(self, node: Node) -> None:
        """Free the blocks of `node` that hold no token of it."""
        self._free_blocks(node, -(-len(node.tokens) // self.block_size))

    def _expire_ranks(self) -> None:
        """Give leaves their place back whose blocks have no rank any more."""
        for value in self.ranks.take_expired():
            for node in self.index.holders_of(value):
                if node.stamp and not node.children:
                    self._order.became_leaf(node)

    def _truncate(self, node: Node, num_blocks: int) -> None:
        """Keep the first `num_blocks` full blocks of a leaf. The others go, the last one first."""
        for side in self.sides:
            side.cut(node, num_blocks)
        for value in reversed(node.hashes[num_blocks:]):
            self.index.remove(value, node)
            if len(self.ranks) and not self.index.holders_of(value):
                self.ranks.drop(value)
        del node.hashes[num_blocks:]
        del node.tokens[num_blocks * self.block_size :]
        self._free_blocks(node, num_blocks)

    def _drop_partial(self, node: Node) -> int:
        """Forget the tokens after the last full block; how many blocks are full."""
        num_full = len(node.tokens) // self.block_size
        del node.tokens[num_full * self.block_size :]
        return num_full

    def _free_blocks(self, node: Node, kept: int) -> None:
        """Free the blocks of `node` after the first `kept`, the last one first."""
        extra = node.blocks[kept:]
        if extra:
            for side in self.sides:
                side.cut(node, kept)
            extra.reverse()
            self.pool.free(extra, node)
            del node.blocks[kept:]
            node.flat = None
            if node.live == 0:
                self.cached_blocks -= len(extra)
