"""The branch tree: every token sequence in the cache, each shared prefix once, copy on write.

A `Node` owns a run of blocks; its sequence is its parent's up to `base`, then its own tokens. A branch or
capsule that needs a sequence to stay *holds* its last node: one counter. So a fork is one
addition, whatever the length or depth (1000 forks of 128 blocks: 0.15 ms; copying tables and counting
per block took 4.5 ms; design notes, measured). The price is paid at the first append after a fork:
the appender gets a node of its own, which starts at a block boundary and, if the parent ends inside a
block, with a copy of that block's filled slots. Nodes are therefore self-contained from `base` on:
block i of a node holds tokens [i * block_size, (i + 1) * block_size) of `node.tokens`.

Rejected: a reference count per block and a table per branch (slow forks, as above); children that
attach anywhere inside a parent (no splits, but a live child then keeps its parent's whole tail).

Page tables are flattened lazily and cached per node. A node is *live* while it is held, or a node below
it is. A live node that is not held itself is there for its children only: it is merged into the only one,
which bounds the depth, or gives up its partial block, of which they have copies. A dead node keeps its
full blocks as cache, found again by chain hash, until `reserve` needs room (`eviction.py`).

`Node.blocks` are those of the layers with full attention, of all layers if there are no others. The KV of
others is in `Node.sides`, and may be given up earlier (`sides/group.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from mallee.protocol.errors import PoolExhausted
from mallee.protocol.hashing import Hashes
from mallee.worker.kv.block_index import BlockIndex
from mallee.worker.kv.eviction import AllAlike, EvictionName, Ranks
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.node import BlockCopy, BlockTable, Node, Reservation, Spare
from mallee.worker.kv.node_store import NodeStore
from mallee.worker.kv.paths import flatten, last_hash, path_hashes
from mallee.worker.kv.pool import BlockPool, BlocksLeaving
from mallee.worker.kv.sides.group import (
    Offload,
    Places,
    Reason,
    SideGroup,
    Tail,
    keep_rows,
)
from mallee.worker.kv.text import Notation, Text, TokenNotation


class TreeStats(NamedTuple):
    """`cached_blocks` can be evicted now; the counters only grow."""

    num_nodes: int
    cached_blocks: int
    num_copies: int  # blocks copied on write, of
    num_children: int  # nodes that began below another
    num_evicted: int
    num_merges: int
    num_splits: int


class BranchTree:
    """Owner of all nodes over one pool. Not thread-safe: one thread owns the tree.

    Without `keeps_cache` no block is hashed or found again, and a node that is not held is free at once.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        journal: Journal,
        *,
        eviction: EvictionName = "lru",
        keeps_cache: bool = True,
        notation: Notation | None = None,
        sides: Sequence[SideGroup] = (),
        ranks: Ranks | None = None,
        offload: Offload | None = None,
        offload_rows: Offload | None = None,
    ) -> None:
        """Without `ranks` no block stays longer than the order of eviction says.

        `offload` takes blocks of the full group, `offload_rows` a partial one, and rows of the sides.
        """
        self.pool = pool
        self.sides = tuple(sides)
        self.has_states = any(side.needs_parent for side in sides)
        self.notation = notation or TokenNotation()
        self.block_size = block_size
        self.keeps_cache = keeps_cache
        self.ranks = AllAlike() if ranks is None else ranks
        self._store = NodeStore(
            pool,
            block_size,
            journal,
            eviction=eviction,
            ranks=self.ranks,
            sides=self.sides,
            offload=offload,
        )
        self._offload = offload, offload_rows
        self._num_copies = self._num_children = 0

    # Finding and sharing

    def find(self, hashes: Hashes) -> int:
        """The number of leading blocks of `hashes` that are held, as far as a branch can go on after them.

        O(log blocks); O(blocks) where sides have given some up.
        """
        num_blocks = self._store.index.count_leading(hashes)
        while self.sides and num_blocks:
            node = self._store.index.find(int(hashes[num_blocks - 1]))
            if self._can_resume(node, num_blocks * self.block_size):
                break
            num_blocks -= 1
        return num_blocks

    def resume_point(self, node: Node, num_tokens: int) -> int:
        """The most tokens, up to `num_tokens`, after which a branch can go on from the path of `node`.

        These, or fewer that are whole blocks, where a side has given up what would be read.
        """
        size = self.block_size
        while num_tokens > 0 and not self._can_resume(node, num_tokens):
            num_tokens = (num_tokens - 1) // size * size
        return num_tokens

    def _can_resume(self, node: Node, num_tokens: int) -> bool:
        return all(side.can_resume(node, num_tokens) for side in self.sides)

    def aligned_len(self, num_tokens: int) -> int:
        """The last place up to `num_tokens` where cache may end that is gone on from as it is."""
        return min([num_tokens, *(side.aligned_len(num_tokens) for side in self.sides)])

    def places(self, hashes: Hashes, begin: int, end: int, named: Sequence[int] = ()) -> Places:
        """Places at which a text of `end` tokens leaves states when it is computed from `begin` on.

        `hashes`: those of its blocks. Where the tree has more of them than can be gone on from, others will
        part from it: what two texts share, a third one may.
        """
        known = self._store.index.count_leading(hashes) * self.block_size
        places: Places = {}
        for side in self.sides:
            places |= side.places(begin, end, known, named)
        return places

    def chunk(self, begin: int, num_tokens: int, places: Places) -> int:
        """The most of `num_tokens` to compute at once from `begin` on, of a text with these places."""
        for side in self.sides:
            num_tokens = side.chunk(begin, num_tokens, places)
        return num_tokens

    @property
    def version(self) -> int:
        """A count that grows whenever `find` may answer differently."""
        version = self._store.index.version
        for side in self.sides:
            version += side.version
        return version

    def attach(self, hashes: Hashes, salt: str, num_found: int | None = None) -> Node:
        """A held node that ends at the longest held prefix of `hashes`; an empty root if none is.

        `num_found`: `find` of the same hashes, if the caller knows. O(blocks of one node) when the
        prefix ends inside a node, which is then split there.
        """
        num_blocks = self.find(hashes) if num_found is None else num_found
        if len(self.ranks):
            self.ranks.refresh(hashes[:num_blocks].tolist())
        if num_blocks == 0:
            node = Node(None, 0, salt, self.notation.empty(), self._store.parts())
            self._store.nodes.add(node)
        else:
            node = self._store.index.find(int(hashes[num_blocks - 1]))
            own = num_blocks - node.base // self.block_size
            if own < len(node.blocks):  # more tokens follow, or room is reserved for some
                node = self._store.split(node, own)
        self.hold(node)
        return node

    def hold_prefix(self, node: Node, num_tokens: int, n: int = 1) -> Node:
        """A node, held n times, that ends after `num_tokens` tokens of a live sequence that `node` ends.

        `num_tokens` is a whole number of blocks, at least one, or all that `node` has; and a
        `resume_point`.
        """
        assert 0 < num_tokens <= node.end, f"{node} has no prefix of {num_tokens} tokens"
        if num_tokens % self.block_size == 0:
            while node.base >= num_tokens:
                assert node.parent is not None
                node = node.parent
            own = (num_tokens - node.base) // self.block_size
            if own < len(node.blocks):  # more tokens follow, or room is reserved for some
                node = self._store.split(node, own)
        else:
            assert num_tokens == node.end, f"{num_tokens} tokens end inside a block"
        self.hold(node, n)
        return node

    def hold(self, node: Node, n: int = 1) -> None:
        """n more holders share `node`, each with it as its own until its first append. O(1) while it is live.

        So a fork is a hold: no KV is copied and no block is touched, whatever the length and depth.
        """
        if node.holders:
            node.holders += n
            return
        self._store.activate(node)
        node.holders = n
        for side in self.sides:
            side.changed(node)

    def release(self, node: Node, n: int = 1) -> None:
        """n holders let go. A node that is not needed keeps its full blocks as cache, or vanishes."""
        assert node.holders >= n, f"{node} released {n} times too often"
        node.holders -= n
        if node.holders == 0:
            self._store.deactivate(node)
            for side in self.sides:
                side.changed(node)
            self._store.settle(node)

    def is_ranked(self, node: Node) -> bool:
        """Whether any block of a sequence has a rank: then its first one has. O(depth)."""
        while node.parent is not None:
            node = node.parent
        return bool(node.hashes) and node.hashes[0] in self.ranks

    # Growing

    def reserve(self, node: Node, num_tokens: int, *, is_fetched: bool = False) -> Reservation:
        """Room for `num_tokens` more tokens after the end of `node`, for one holder of it.

        If the node is shared, the holder moves to a new child. Evicts cached blocks as needed. Until
        the node's next `commit`, a copy that it needs is returned again by every call.
        `is_fetched`: all of these tokens come from below together, to a new child of `node`, which ends with
        a block: sides get room only for what is read after them.
        Raises PoolExhausted, with nothing changed; BlocksLeaving, if transfers still read blocks that were
        given up: with cache on its way down, and nothing else changed.
        """
        size = self.block_size
        if is_fetched or node.holders != 1 or node.children:
            return self._branch_off(node, num_tokens, is_fetched=is_fetched)
        missing = max(0, -(-(len(node.tokens) + num_tokens) // size) - len(node.blocks))
        if self.sides:
            self._make_room(node, missing, None)
        if missing:
            taken = self._store.take(missing, node)  # may merge the parent into `node`
            node.blocks += taken
            node.flat = None
        for side in self.sides:
            side.extend(node, missing, None)
        return Reservation(node, self._copy_of(node) if node.is_copying else None)

    def room(self, node: Node, num_tokens: int) -> int:
        """The position up to which `node`, with room for `num_tokens` more, can be filled without more.

        Of a model with states these alone: each pass writes a slot of its own.
        """
        if self.has_states:
            return node.end + num_tokens
        return node.base + len(node.blocks) * self.block_size

    def spare(self, node: Node) -> Spare | None:
        """A free block for the token after the end of `node`, which is shared, as `reserve` would take it.

        It belongs to no node; the caller gives it back to the pool. None without one, and where sides have
        blocks of their own.
        """
        if self.sides or not self.pool.num_free:
            return None
        place, shared = divmod(node.end, self.block_size)
        (block,) = self.pool.alloc(1, node)
        copy = BlockCopy(int(self.table(node)[place]), block, shared) if shared else None
        return Spare(block, copy)

    def trim(self, node: Node) -> None:
        """Give back the room of `node` behind its tokens: of a draft, or a pass ahead. It has one holder."""
        assert node.holders == 1, f"{node} is not its holder's own"
        assert not node.children, f"{node} is not its holder's own"
        self._store.trim(node)
        for side in self.sides:
            side.trim(node)

    def extend_ahead(self, node: Node) -> bool:
        """Whether `node`, which has blocks for it, has room for a pass after the one under way, until `trim`.

        A state that is cache makes way, as one does for each pass.
        """
        return all(side.extend_ahead(node) for side in self.sides)

    def commit(
        self,
        node: Node,
        tokens: Text | Sequence[int],
        hashes: Hashes | None = None,
        reason: Reason | None = None,
    ) -> None:
        """The KV of `tokens` is now in the reserved slots; blocks that became full are sealed.

        `hashes`: those of the sequence's blocks from the root on, as far as the caller knows them. `reason`:
        what a state is left for at the end.
        """
        if node.is_copying:
            self._copied(node)
        size = self.block_size
        before = len(node.tokens)
        node.tokens.extend(tokens)
        after = before + len(tokens)
        first, num_full = before // size, after // size
        assert len(node.blocks) * size >= after, "committed more than was reserved"
        for side in self.sides:
            side.advanced(node, len(tokens), reason)
        if self.pool.watch is not None:
            self._watch_commit(node, len(tokens))
        if num_full == first or not self.keeps_cache:
            return
        above = node.base // size
        if hashes is not None and len(hashes) >= above + num_full:
            new = hashes[above + first : above + num_full]
        else:
            new = self.notation.hashes(
                node.tokens[first * size : num_full * size],
                size,
                salt=node.salt,
                parent=last_hash(node, size),
            )
        values = new.tolist()
        node.hashes += values
        self._store.index.add(values, node, is_preferred=bool(self.sides))
        for side in self.sides:
            side.sealed(node, values)

    # Reading

    def table(self, node: Node) -> BlockTable:
        """Block ids of the whole sequence, reserved ones included; read-only, cached on the node."""
        return flatten(node, self.block_size)

    def side_keys(
        self, keys: Hashes | Sequence[int], num_tokens: int, begin: int = 0
    ) -> tuple[int, ...]:
        """Keys of the sides' rows, of blocks from `begin` on, that are read after `num_tokens` of a text.

        `keys` are those of the text's blocks.
        """
        return tuple(k for side in self.sides for k in side.keys_after(keys, num_tokens, begin))

    def side_rows(self, node: Node, num_tokens: int, begin: int = 0) -> list[int]:
        """The rows themselves, on the path of `node`."""
        return [row for side in self.sides for row in side.rows_after(node, num_tokens, begin)]

    def side_tails(self, num_tokens: int) -> Iterator[Tail]:
        """Those of the rows that are read after `num_tokens` that these fill in part."""
        place, keys = 0, range(-(-num_tokens // self.block_size))
        for side in self.sides:
            for tail in side.tails_after(num_tokens):
                yield tail._replace(place=place + tail.place)
            place += sum(1 for _ in side.keys_after(keys, num_tokens))

    def have_room(
        self, num_blocks: int, num_texts: int, num_computed: int, num_states: int
    ) -> bool:
        """Whether all sides have room: see `SideGroup.has_room`."""
        return all(
            side.has_room(num_blocks, num_texts, num_computed, num_states) for side in self.sides
        )

    def overlap(self, hashes: Hashes, nodes: AbstractSet[Node]) -> int:
        """The number of leading blocks of `hashes` in `nodes`, which has every node's parent too."""
        num_blocks = self.index.count_leading(hashes)
        if num_blocks == 0:
            return 0
        walk: Node | None = self.index.find(int(hashes[num_blocks - 1]))
        while walk is not None and walk not in nodes:
            num_blocks = walk.base // self.block_size
            walk = walk.parent
        return num_blocks

    def path_hashes(self, node: Node) -> Hashes:
        """Chain hashes of all full blocks of the sequence, from the root on."""
        return path_hashes(node, self.block_size)

    def held_hashes(self) -> Hashes:
        """Chain hashes of all blocks the worker holds (for snapshots), in no particular order."""
        return self._store.index.hashes()

    def held_in_sides(self) -> list[Hashes]:
        """The same for each side group."""
        return [side.announced.hashes() for side in self.sides]

    def holds(self) -> dict[Node, int]:
        """Holders of every node that has any."""
        return {node: node.holders for node in self._store.nodes if node.holders}

    def nodes(self) -> AbstractSet[Node]:
        """All nodes, to be read only."""
        return self._store.nodes

    @property
    def index(self) -> BlockIndex[Node]:
        """The index from blocks to nodes, to be read only."""
        return self._store.index

    def next_evicted(self) -> Node | None:
        """The leaf that gives up blocks next; None if nothing is cached."""
        return self._store.oldest()

    @property
    def num_available(self) -> int:
        """Blocks that `reserve` can get: free ones and cached ones."""
        return self._store.num_available

    def num_free_after(self, node: Node) -> int:
        """Blocks that `node`, which has room for a pass, can have behind it without evicting any."""
        takers = [side.pool for side in self.sides if side.num_needed(node, 1, None)]
        return min([self.pool.num_free, *(pool.num_free for pool in takers)])

    @property
    def lacks_states(self) -> bool:
        """Whether holders need most slots of states, so that few are left for cache."""
        return self.has_states and any(
            2 * side.in_use > side.pool.num_blocks for side in self.sides if side.needs_parent
        )

    @property
    def num_free(self) -> int:
        """Blocks without an owner, in the group that has the fewest."""
        return min([self.pool.num_free, *(side.pool.num_free for side in self.sides)])

    def weight(self, num_tokens: int) -> int:
        """Blocks of the pool that a held text is worth: its own, or more if it weighs more in a side's."""
        num_blocks = -(-num_tokens // self.block_size)
        shares = [side.share(num_blocks, self.pool.num_blocks) for side in self.sides]
        return max([num_blocks, *shares])

    def stats(self) -> TreeStats:
        return TreeStats(
            num_nodes=len(self._store.nodes),
            cached_blocks=self._store.cached_blocks,
            num_copies=self._num_copies,
            num_children=self._num_children,
            num_evicted=self._store.num_evicted,
            num_merges=self._store.num_merges,
            num_splits=self._store.num_splits,
        )

    # Copies of the bytes that others make

    def keep_bytes(self, blocks: Sequence[int]) -> Callable[[], None]:
        """Have `blocks`, also rows of sides, not handed out anew until the function returned is called.

        Whoever owns them may give them up meanwhile, and go on writing behind their tokens.
        """
        full = [*blocks]
        if self.sides:
            full = [block for block in blocks if block < self.sides[0].span.first]
        self.pool.begin_read(full)
        rows = blocks[len(full) :]
        ends = [keep_rows(side, rows) for side in self.sides] if rows else []

        def end() -> None:
            self.pool.end_read(full)
            for each in ends:
                each()

        return end

    def offload(self, keys: Sequence[int], blocks: Sequence[int], *, are_full: bool = True) -> None:
        """Copy `blocks` below, as if they were evicted; `are_full`: full ones of the full group."""
        offload = self._offload[0 if are_full else 1]
        if offload is not None and blocks:
            offload(keys, blocks, self.keep_bytes(blocks))

    def offload_path(self, hashes: Sequence[int], begin: int) -> None:
        """Copy below the full group's blocks of `hashes`, which are held; the first one is block `begin`.

        A text that sides have given up comes back with them, by host memory.
        """
        nodes = [self.index.find(value) for value in hashes]
        size = self.block_size
        blocks = [node.blocks[i - node.base // size] for i, node in enumerate(nodes, start=begin)]
        self.offload(hashes, blocks)

    def evict_ahead(self, num_blocks: int) -> None:
        """Give up cache until so many blocks, or as many as can be, are free or on their way down.

        Blocks with a rank stay until they are needed.
        """
        self._store.evict(min(num_blocks, self._store.num_available), spares_ranked=True)
        for side in self.sides:
            side.evict(min(num_blocks, side.num_available))

    # Checking the bytes; nothing is done without a watch

    def seal(self, node: Node) -> None:
        """The tokens of `node`, which its caller holds, are final: its partial block has a digest too."""
        for side in self.sides:
            side.final(node)
        watch, filled = self.pool.watch, len(node.tokens) % self.block_size
        if watch is not None and filled:
            watch.sealed(node.blocks[len(node.tokens) // self.block_size], filled)

    def verify(self, node: Node) -> None:
        """Every sealed block of the sequence is what it was. Raises CorruptKV, if faults raise."""
        if self.pool.watch is not None:
            self.pool.watch.verify(self.table(node).tolist())

    # Growing, inside

    def _branch_off(self, node: Node, num_tokens: int, *, is_fetched: bool) -> Reservation:
        """One holder of `node` moves to a new child that has room for `num_tokens`."""
        shared = node.end % self.block_size
        copied = node.tokens[-shared:] if shared else self.notation.empty()
        child = Node(node, node.end - shared, node.salt, copied, self._store.parts())
        num_blocks = -(-(shared + num_tokens) // self.block_size)
        end = node.end + num_tokens if is_fetched else None
        if self.sides:
            self._make_room(child, num_blocks, end)
        child.blocks = self._store.take(num_blocks, child)
        child.holders = child.live = 1
        self._store.nodes.add(child)
        node.children.add(child)
        for side in self.sides:
            side.extend(child, num_blocks, end)
            side.changed(child)
        node.live += 1  # it was live before: its holder is moving to the child
        self._num_children += 1
        if shared or self.has_states:
            child.is_copying = True
            node.num_copying += 1
        self._num_copies += bool(shared)
        copy = self._copy_of(child)
        self.release(node)
        return Reservation(child, copy)

    def _make_room(self, node: Node, num_blocks: int, end: int | None) -> None:
        """Have the blocks free in each side that `extend` will take for `node`.

        Raises PoolExhausted before anything is given up, BlocksLeaving after it.
        """
        needs = [(side, side.num_needed(node, num_blocks, end)) for side in self.sides]
        for side, num in needs:
            if num > side.num_available:
                raise PoolExhausted(num, side.num_available, side.pool.num_blocks)
        for side, num in needs:
            side.evict(num)
        if any(num > side.pool.num_free for side, num in needs):
            raise BlocksLeaving

    def _copy_of(self, child: Node) -> BlockCopy | None:
        """The copy that fills the first slots of `child`; None if it begins with a block."""
        parent = child.parent
        if parent is None or parent.end == child.base:
            return None
        source = parent.blocks[(child.base - parent.base) // self.block_size]
        sides = tuple(side.copies(parent, child) for side in self.sides)
        return BlockCopy(source, child.blocks[0], parent.end - child.base, sides)

    def _copied(self, child: Node) -> None:
        """`child` has its copy: its parent's partial block may go."""
        parent = child.parent
        assert parent is not None
        child.is_copying = False
        parent.num_copying -= 1
        for side in self.sides:
            side.copied(parent)
        if parent.holders == 0:
            self._store.collapse(parent)

    def _watch_commit(self, node: Node, num_tokens: int) -> None:
        """The last `num_tokens` of `node` were written just now."""
        watch, size = self.pool.watch, self.block_size
        assert watch is not None
        begin = (len(node.tokens) - num_tokens) // size
        full = len(node.tokens) // size
        watch.written(node.blocks[begin : -(-len(node.tokens) // size)])
        for block in node.blocks[begin:full]:
            watch.sealed(block, size)
