"""Side groups: layers whose KV comes and goes on other terms than that of the full group.

`Node.blocks` belong to the full group, whose layers read every token. Layers that read a window
(`windows.py`) or fold all tokens into a state (`states.py`) are side groups: a node holds a part for each,
`Node.sides`, and a group of either kind answers the same questions. The first one is `can_resume`: a prefix
may be held by the full group and yet be no place to go on from. It is the only judge of that, for prompts,
capsules, forks inside a text, events and the router's credit alike. A model of one group has no sides, and
nothing is asked.

Below the device all KV is rows of one size, that of a block of the full group. A side's block (or state) may
be larger: it is several rows, the last one filled up with zeros. Rows are numbered after the full group's
blocks, and have keys made from the chain hash of their tokens, so that one space of numbers and one of keys
hold all there is.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from mallee.protocol.hashing import Hashes
from mallee.protocol.ids import splitmix64
from mallee.protocol.model import GroupSpec
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.node import Node, SidePart
from mallee.worker.kv.pool import BlockPool

Offload: TypeAlias = Callable[[Sequence[int], Sequence[int], Callable[[], None]], None]
"""Takes keys and blocks of cache that is about to be evicted, the first of a text first, and a function that
it calls when their bytes are needed no longer."""

Reason: TypeAlias = Literal["end", "named", "branching", "awaited", "answer", "cadence"]
"""The place at which a state was left: the end of a prompt; a place that a client named; one where texts that
begin alike part; one that a branch waits for; the end of an answer; or that of any chunk."""

Places: TypeAlias = dict[int, Reason]
"""Places at which a text is to leave states, by its tokens up to there."""


class RowSpan(NamedTuple):
    """The rows of a side group: block b has `per_block` from `first + b * per_block` on."""

    group: int  # 1 or more
    first: int
    per_block: int

    def rows(self, block: int) -> range:
        """The rows of `block`."""
        begin = self.first + block * self.per_block
        return range(begin, begin + self.per_block)

    def keys(self, key: int) -> list[int]:
        """The keys of the rows of the block whose chain hash is `key`: no two keys become one."""
        return [splitmix64(key, (self.group << 16 | part) + 1) for part in range(self.per_block)]


def row_spans(groups: Sequence[GroupSpec], num_blocks: int, block_size: int) -> list[RowSpan]:
    """The rows of each of `groups` but the first, which is the full one and has `num_blocks`."""
    spans = []
    first = num_blocks
    for number, group in enumerate(groups[1:], start=1):
        per_block = group.rows_per_block(groups[0], block_size)
        spans.append(RowSpan(number, first, per_block))
        first += per_block * group.num_blocks(num_blocks, block_size)
    return spans


class Tail(NamedTuple):
    """A row whose block is filled in part: its place among the rows that are read, and whose part it is."""

    place: int
    group: int
    part: int


class Announced:
    """Blocks of a side group that events have announced, by chain hash: how many nodes have each."""

    __slots__ = ("_counts", "_group", "_journal")

    def __init__(self, journal: Journal, group: int) -> None:
        self._journal = journal
        self._group = group
        self._counts: dict[int, int] = {}

    def add(self, values: Sequence[int]) -> None:
        """Nodes have these."""
        counts = self._counts
        new = [value for value in values if value not in counts]
        for value in values:
            counts[value] = counts.get(value, 0) + 1
        if new:
            self._journal.stored(new, self._group)

    def remove(self, values: Sequence[int]) -> None:
        """Nodes have these no longer. The last one goes first."""
        for value in reversed(values):
            self._counts[value] -= 1
            if not self._counts[value]:
                del self._counts[value]
                self._journal.removed(value, self._group)

    def counts(self) -> dict[int, int]:
        """All of them, with how many nodes have each."""
        return self._counts

    def hashes(self) -> Hashes:
        """All of them, in no particular order."""
        return np.fromiter(self._counts, dtype=np.uint64, count=len(self._counts))


class SideGroup(ABC):
    """Blocks of all nodes in one group. The tree tells it every change of a node."""

    __slots__ = (
        "_block_size",
        "_offload",
        "_place",
        "announced",
        "needs_parent",
        "pool",
        "span",
        "version",
    )

    def __init__(
        self,
        pool: BlockPool,
        span: RowSpan,
        *,
        block_size: int,
        journal: Journal,
        offload: Offload | None = None,
        needs_parent: bool = False,
    ) -> None:
        """`offload` takes rows.

        `needs_parent`: a node's first tokens are computed from what is at the end of its parent, which is not
        copied.
        """
        self.pool = pool
        self.span = span
        self.needs_parent = needs_parent
        self.announced = Announced(journal, span.group)
        self.version = 0  # grows whenever `can_resume` may answer differently
        self._place = span.group - 1  # in `Node.sides`
        self._block_size = block_size
        self._offload = offload

    @abstractmethod
    def begin(self) -> SidePart:
        """The part of a new node without blocks."""

    @abstractmethod
    def can_resume(self, node: Node, num_tokens: int) -> bool:
        """Whether all is there that is read after the first `num_tokens` tokens on the path of `node`."""

    def aligned_len(self, num_tokens: int) -> int:
        """The last place up to `num_tokens` where cache may end that is gone on from as it is."""
        return num_tokens

    def places(self, begin: int, end: int, num_known: int, named: Sequence[int]) -> Places:
        """Places at which a text of `end` tokens leaves states when it is computed from `begin` on.

        The tree has the KV of its first `num_known`; clients have `named` places.
        """
        return {}

    def chunk(self, begin: int, num_tokens: int, places: Places) -> int:
        """The most of `num_tokens` to compute at once from `begin` on, of a text with these places."""
        return num_tokens

    # Room

    @property
    def num_available(self) -> int:
        """Blocks that are free, leaving, or nobody's but the cache's."""
        return self.pool.num_coming + self.num_idle

    @property
    def in_use(self) -> int:
        """Blocks that holders still need."""
        return self.pool.num_blocks - self.num_available

    @property
    @abstractmethod
    def num_idle(self) -> int:
        """Blocks that are nobody's but the cache's."""

    @abstractmethod
    def num_needed(self, node: Node, num_blocks: int, end: int | None) -> int:
        """Blocks that `extend` takes."""

    @abstractmethod
    def evict(self, num_blocks: int) -> None:
        """Give up cache until `num_blocks`, which are available, are free or leaving."""

    @abstractmethod
    def extend(self, node: Node, num_blocks: int, end: int | None) -> None:
        """`node` gets room for `num_blocks` blocks more, and `evict` has made it.

        With an `end` what is up to it comes from below: there is room only for what is read after it.
        """

    def extend_ahead(self, node: Node) -> bool:
        """Whether `node` has room for a pass after the one under way, in a place of its own until `trim`."""
        return True

    @abstractmethod
    def trim(self, node: Node) -> None:
        """Give back what `node` has room for beside its blocks."""

    @abstractmethod
    def has_room(self, num_blocks: int, num_texts: int, num_computed: int, num_states: int) -> bool:
        """Whether texts that take `num_blocks` in all have room; a step computes `num_computed` of them.

        Beside them `num_states` are needed for branches that draw.
        """

    @abstractmethod
    def share(self, num_blocks: int, num_full: int) -> int:
        """The share of this group that a held text of `num_blocks` takes, in blocks of `num_full`."""

    @abstractmethod
    def least_blocks(self, num_step_blocks: int) -> int:
        """Blocks without which a branch may have no room for a step of so many."""

    # Changes of a node

    @abstractmethod
    def changed(self, node: Node) -> None:
        """The holders or the children of `node` have changed."""

    @abstractmethod
    def advanced(self, node: Node, num_tokens: int, reason: Reason | None) -> None:
        """The last `num_tokens` of `node` are computed, and their full blocks are hashed after this.

        `reason`: what a state is left for at its end, if there is a reason.
        """

    @abstractmethod
    def sealed(self, node: Node, values: list[int]) -> None:
        """The blocks of `values`, the last of the hashes of `node`, are full."""

    @abstractmethod
    def final(self, node: Node) -> None:
        """The end of `node`, which is held, is a place that others will go on from."""

    @abstractmethod
    def copied(self, parent: Node) -> None:
        """A child of `parent` has what it needs of it."""

    @abstractmethod
    def cut(self, node: Node, num_blocks: int) -> None:
        """`node`, whose hashes are still there, keeps its first `num_blocks` blocks."""

    @abstractmethod
    def split(self, node: Node, upper: Node, num_blocks: int) -> None:
        """`upper`, a new node in its place above `node`, takes its first `num_blocks` blocks."""

    @abstractmethod
    def merge(self, node: Node, child: Node) -> None:
        """`child` has taken over tokens and hashes of `node`, which it continues, and does its blocks now."""

    @abstractmethod
    def evicting(self, node: Node, num_blocks: int) -> None:
        """`node` is about to keep its first `num_blocks` blocks: the others go below."""

    def _send_below(self, hashes: Sequence[int], blocks: Sequence[int]) -> None:
        """Offload `blocks`, which are those of `hashes`, and about to be evicted."""
        if self._offload is None or not blocks:
            return
        keys = [key for value in hashes for key in self.span.keys(value)]
        rows = [row for block in blocks for row in self.span.rows(block)]
        self.pool.begin_read(blocks)
        self._offload(keys, rows, partial(self.pool.end_read, blocks))

    # Reading

    def copies(self, parent: Node, child: Node) -> tuple[int, int] | None:
        """Source and target of the block of `parent` in which `child` begins; None if none is copied."""
        return None

    @abstractmethod
    def keys_after(
        self, keys: Hashes | Sequence[int], num_tokens: int, begin: int = 0
    ) -> Iterator[int]:
        """Keys of the rows, of blocks from `begin` on, that are read after `num_tokens` of a text.

        `keys` are those of the text's blocks. The last block comes first.
        """

    @abstractmethod
    def rows_after(self, node: Node, num_tokens: int, begin: int = 0) -> Iterator[int]:
        """The rows themselves, on the path of `node`."""

    def tails_after(self, num_tokens: int) -> Iterator[Tail]:
        """Those of them that `num_tokens` fill in part."""
        return iter(())

    # Checking

    @abstractmethod
    def owned(self, node: Node) -> Sequence[int]:
        """The blocks of `node`."""

    def lost_blocks(self, nodes: AbstractSet[Node]) -> list[int]:
        """Blocks that are in use and no node owns."""
        owned = {block for node in nodes for block in self.owned(node)}
        return sorted(self.pool.used_blocks() - owned)

    def check(self, nodes: AbstractSet[Node]) -> None:
        """Raise AssertionError on a broken invariant. O(blocks)."""
        self.pool.check()
        owned = [block for node in nodes for block in self.owned(node)]
        assert len(owned) == len(set(owned)), "a block of a side group has two owners"
        assert set(owned) == self.pool.used_blocks(), "blocks of a side group without an owner"


def keep_rows(group: SideGroup, rows: Sequence[int]) -> Callable[[], None]:
    """Those of `rows` that are the group's, kept as by `BranchTree.keep_bytes`."""
    span, pool = group.span, group.pool
    num = pool.num_blocks * span.per_block
    own = [row - span.first for row in rows if 0 <= row - span.first < num]
    blocks = list(dict.fromkeys(row // span.per_block for row in own))
    pool.begin_read(blocks)
    return partial(pool.end_read, blocks)
