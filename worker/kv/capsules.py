"""Capsules, and the rules by which a worker keeps them.

One id is one text, wherever it is computed: a capsule that is made again under its id takes the place of
the one that is there, and is announced anew; no release is told, for the id goes on.

Two kinds. *Kept* capsules were asked for: they stay until released or until their time to live has
passed since their last use. What they hold can't be evicted, so there is a limit to it, and a request that
would pass it is refused before anything is computed. *Replaceable* ones are what finished answers
leave behind: they stay while there is room, least recently used out first.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from mallee.protocol.errors import CapsulesFull, InvalidParameter, UnknownCapsule
from mallee.protocol.events import CapsuleReleased, CapsuleStored, pack_hashes
from mallee.protocol.hashing import NO_HASHES
from mallee.protocol.ids import CapsuleId, request_of
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.node import Node
from mallee.worker.kv.paths import with_ancestors
from mallee.worker.kv.text import Text
from mallee.worker.kv.tree import BranchTree
from mallee.worker.kv.usage import sole_blocks


@dataclass(frozen=True, slots=True)
class Capsule:
    """State from which any number of branches can go on; holds `node`.

    Of models with attention only that is all; recurrent state joins here when models have it.

    `pending` are the last tokens of the text whose KV isn't computed yet (the token that was drawn
    last). `logits` (opaque) belong to the token after the boundary; None if `pending` must run first.
    `matcher` (opaque, never changed): the grammar's state at the boundary, inside a constrained text.
    """

    id: CapsuleId
    node: Node
    pending: tuple[int, ...]
    logits: object | None
    matcher: object | None = None

    @property
    def boundary(self) -> int:
        """Committed tokens."""
        return self.node.end + len(self.pending)


class CapsuleStats(NamedTuple):
    """Counts of live capsules, and how many replaceable ones were pushed out so far."""

    kept: int
    replaceable: int
    num_replaced: int


class CapsuleRegistry:
    """Capsules by id. Each holds its node in the tree; letting go is `release`."""

    def __init__(
        self,
        tree: BranchTree,
        journal: Journal,
        *,
        clock: Callable[[], float],
        max_replaceable: int,
        max_kept_blocks: int,
        row_blocks: int = 0,
    ) -> None:
        """`row_blocks`: blocks that the logits of a kept capsule are worth in bytes."""
        self._tree = tree
        self._journal = journal
        self._clock = clock
        self._max_replaceable = max_replaceable
        self._max_kept_blocks = max_kept_blocks
        self._row_blocks = row_blocks
        self._capsules: dict[CapsuleId, Capsule] = {}
        self._num_left: dict[str, int] = {}  # capsules here by request
        self._replaceable: OrderedDict[CapsuleId, None] = OrderedDict()
        self._ttl: dict[CapsuleId, float] = {}
        self._expires: dict[CapsuleId, float] = {}
        self._next_expiry = inf  # nothing expires before
        self._kept_blocks = 0  # of kept capsules, shared ones counted for each
        self._promised: dict[str, int] = {}  # request -> blocks that its capsule will add, at most
        self._num_replaced = 0

    def check_unused(self, request: str) -> None:
        """Raises InvalidParameter if a branch of an earlier request of this name left a capsule."""
        if request in self._num_left:
            raise InvalidParameter("request", request, "this id was used; ids are used once")

    def check_owner(self, capsule: str, salt: str) -> None:
        """Raises InvalidParameter if `capsule` is here, and is no text of `salt`."""
        found = self._capsules.get(CapsuleId(capsule))
        if found is not None and found.node.salt != salt:
            raise InvalidParameter("capsule", capsule, "this id is in use by another tenant")

    def promise(self, request: str, tokens: Text, salt: str) -> None:
        """There will be room to keep a capsule of `tokens`, until `request` ends (`forgo`).

        What it shares with other kept capsules is not counted again; that is looked at only if everything
        would not fit without. O(kept capsules) then, and of tokens. Raises CapsulesFull.
        """
        size = self._tree.block_size
        needed = -(-len(tokens) // size) + self._row_blocks
        promised = sum(self._promised.values())
        kept = self._kept_blocks
        if kept + promised + needed > self._max_kept_blocks:
            held = [capsule.node for capsule in self._kept()]
            nodes = with_ancestors(held)
            kept = sum(len(node.blocks) for node in nodes) + len(held) * self._row_blocks
            needed -= self._tree.overlap(self._tree.notation.hashes(tokens, size, salt=salt), nodes)
        if kept + promised + needed > self._max_kept_blocks:
            raise CapsulesFull(needed, kept + promised, self._max_kept_blocks)
        self._promised[request] = needed

    def forgo(self, request: str) -> None:
        """`request` has made its capsule, or won't."""
        self._promised.pop(request, None)

    def keep(self, capsule: Capsule, *, ttl_s: float = 0.0) -> None:
        """`capsule`, whose hold on its node passes to the registry, stays until released.

        With `ttl_s` > 0 it also ends when it has not been used for that long.
        """
        if capsule.id in self._capsules:
            self._remove(capsule.id)
        if ttl_s > 0:
            self._ttl[capsule.id] = ttl_s
            self._postpone(capsule.id)
        self._kept_blocks += self._num_blocks(capsule)
        self._add(capsule)

    @property
    def keeps_answers(self) -> bool:
        """Whether answers leave capsules here (`leave`)."""
        return self._max_replaceable > 0

    def leave(self, capsule: Capsule) -> None:
        """Keep `capsule` while there is room."""
        assert self.keeps_answers, "answers leave nothing here"
        if capsule.id in self._capsules:
            self._remove(capsule.id)
        self._replaceable[capsule.id] = None
        self._add(capsule)
        if len(self._replaceable) > self._max_replaceable:
            self.replace_oldest()

    def get(self, capsule: str) -> Capsule:
        """The capsule, now the most recently used. Raises UnknownCapsule; CorruptKV, if checked."""
        self.expire()
        key = CapsuleId(capsule)
        found = self._capsules.get(key)
        if found is None:
            raise UnknownCapsule(capsule)
        if key in self._replaceable:
            self._replaceable.move_to_end(key)
        elif key in self._ttl:
            self._postpone(key)
        self._tree.verify(found.node)
        return found

    def release(self, capsule: str) -> None:
        """Forget the capsule; branches forked from it go on. Raises UnknownCapsule."""
        key = CapsuleId(capsule)
        if key not in self._capsules:
            raise UnknownCapsule(capsule)
        self._journal.capsule(CapsuleReleased(capsule))
        self._remove(key)

    def _remove(self, key: CapsuleId) -> None:
        found = self._capsules.pop(key)
        request = request_of(key)
        self._num_left[request] -= 1
        if not self._num_left[request]:
            del self._num_left[request]
        if key in self._replaceable:
            del self._replaceable[key]
        else:
            self._kept_blocks -= self._num_blocks(found)
        self._ttl.pop(key, None)
        self._expires.pop(key, None)
        self._tree.release(found.node)

    def replace_oldest(self) -> None:
        """Release the least recently used replaceable capsule. There must be one."""
        self.release(next(iter(self._replaceable)))
        self._num_replaced += 1

    def reclaim(self, num_blocks: int, kept: Container[Node]) -> bool:
        """Release replaceable capsules, oldest first, until the tree has `num_blocks` more to give.

        False, with none released, if all of them would not do (`num_reclaimable`).
        """
        if self.num_reclaimable(kept) < num_blocks:
            return False
        enough = self._tree.num_available + num_blocks
        while self._tree.num_available < enough:
            self.replace_oldest()
        return True

    def num_reclaimable(self, kept: Container[Node]) -> int:
        """Blocks that only replaceable capsules hold; those of nodes in `kept` don't count."""
        if not self._replaceable:
            return 0
        holds = Counter(self._capsules[key].node for key in self._replaceable)
        return sole_blocks(holds, kept)

    def expire(self) -> None:
        """Release every capsule whose time to live is over."""
        if not self.is_expiry_due:
            return
        now = self._clock()
        for key in [key for key, at in self._expires.items() if at <= now]:
            self.release(key)

    @property
    def is_expiry_due(self) -> bool:
        """Whether a time to live is over. O(1), but for once in the shortest of them."""
        if self._next_expiry > self._clock():
            return False
        self._next_expiry = min(self._expires.values(), default=inf)
        return self._next_expiry <= self._clock()

    @property
    def next_expiry(self) -> float:
        """Nothing expires before, on the clock."""
        return self._next_expiry

    def describe(self, capsule: Capsule) -> CapsuleStored:
        """The event that announces `capsule`.

        Answers leave many, most are never forked, and repeating their whole path for each would make
        messages too large for the broker: only kept capsules tell their hashes.
        """
        is_kept = capsule.id not in self._replaceable
        hashes = self._tree.path_hashes(capsule.node) if is_kept else NO_HASHES
        return CapsuleStored(capsule.id, capsule.boundary, pack_hashes(hashes))

    def describe_all(self) -> tuple[CapsuleStored, ...]:
        return tuple(self.describe(capsule) for capsule in self._capsules.values())

    def holds(self) -> dict[Node, int]:
        """The number of capsules that hold each node."""
        return dict(Counter(capsule.node for capsule in self._capsules.values()))

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        assert Counter(map(request_of, self._capsules)) == self._num_left, "capsules miscounted"
        assert set(self._replaceable) <= set(self._capsules), "a replaceable capsule is gone"
        assert set(self._expires) == set(self._ttl), "expiry without time to live"
        assert set(self._expires) <= set(self._capsules), "a capsule that is gone may expire"
        earliest = min(self._expires.values(), default=inf)
        assert self._next_expiry <= earliest, "a capsule expires unseen"
        assert len(self._replaceable) <= self._max_replaceable, "too many replaceable capsules"
        kept = sum(map(self._num_blocks, self._kept()))
        assert self._kept_blocks == kept, f"kept blocks {self._kept_blocks}, are {kept}"
        assert all(c.node.holders > 0 for c in self._capsules.values()), "a capsule holds nothing"

    def stats(self) -> CapsuleStats:
        left = len(self._replaceable)
        return CapsuleStats(len(self._capsules) - left, left, self._num_replaced)

    def _kept(self) -> Iterator[Capsule]:
        return (c for key, c in self._capsules.items() if key not in self._replaceable)

    def _num_blocks(self, capsule: Capsule) -> int:
        return -(-capsule.boundary // self._tree.block_size) + self._row_blocks

    def _postpone(self, key: CapsuleId) -> None:
        self._expires[key] = self._clock() + self._ttl[key]
        self._next_expiry = min(self._next_expiry, self._expires[key])

    def _add(self, capsule: Capsule) -> None:
        assert capsule.id not in self._capsules, f"capsule {capsule.id} made twice"
        self._capsules[capsule.id] = capsule
        request = request_of(capsule.id)
        self._num_left[request] = self._num_left.get(request, 0) + 1
        self._tree.seal(capsule.node)
        self._journal.capsule(self.describe(capsule))
