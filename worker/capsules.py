"""Which capsules a worker keeps, and for how long: the policy over `worker.kv`'s mechanism.

Two kinds. *Kept* capsules were asked for: they stay until released or until their time to live has
passed since their last use. *Replaceable* ones are what finished answers leave behind: they stay
while there is room, least recently used out first.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from mallee.protocol.errors import InvalidParameter, UnknownCapsule
from mallee.protocol.events import CapsuleReleased, CapsuleStored, pack_hashes
from mallee.protocol.hashing import NO_HASHES
from mallee.protocol.ids import CapsuleId, RequestId, capsule_id
from mallee.worker.kv.capsule import Capsule
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.node import Node
from mallee.worker.kv.tree import BranchTree


class CapsuleStats(NamedTuple):
    """Counts of live capsules, and how many replaceable ones were pushed out so far."""

    kept: int
    replaceable: int
    num_replaced: int
    num_expired: int


class CapsuleRegistry:
    """Capsules by id. Each holds its node in the tree; letting go is `release`."""

    def __init__(
        self,
        tree: BranchTree,
        journal: Journal,
        *,
        clock: Callable[[], float],
        max_replaceable: int,
    ) -> None:
        self._tree = tree
        self._journal = journal
        self._clock = clock
        self._max_replaceable = max_replaceable
        self._capsules: dict[CapsuleId, Capsule] = {}
        self._replaceable: OrderedDict[CapsuleId, None] = OrderedDict()
        self._ttl: dict[CapsuleId, float] = {}
        self._expires: dict[CapsuleId, float] = {}
        self._num_replaced = self._num_expired = 0

    def check_unused(self, request: str, num_branches: int) -> None:
        """Raises InvalidParameter if a branch of an earlier request of this name left a capsule."""
        for branch in range(num_branches):
            if capsule_id(RequestId(request), branch) in self._capsules:
                raise InvalidParameter("request", request, "this id was used; ids are used once")

    def keep(self, capsule: Capsule, *, ttl_s: float = 0.0) -> None:
        """`capsule`, whose hold on its node passes to the registry, stays until released.

        With `ttl_s` > 0 it also ends when it has not been used for that long.
        """
        if ttl_s > 0:
            self._ttl[capsule.id] = ttl_s
            self._expires[capsule.id] = self._clock() + ttl_s
        self._add(capsule)

    def leave(self, capsule: Capsule) -> bool:
        """Keep `capsule` while there is room; False (its hold dropped) if answers leave none here."""
        if self._max_replaceable == 0:
            self._tree.release(capsule.node)
            return False
        self._replaceable[capsule.id] = None
        self._add(capsule)
        if len(self._replaceable) > self._max_replaceable:
            self.replace_oldest()
        return True

    def get(self, capsule: str) -> Capsule:
        """The capsule, now the most recently used. Raises UnknownCapsule."""
        self.expire()
        key = CapsuleId(capsule)
        found = self._capsules.get(key)
        if found is None:
            raise UnknownCapsule(capsule)
        if key in self._replaceable:
            self._replaceable.move_to_end(key)
        elif key in self._ttl:
            self._expires[key] = self._clock() + self._ttl[key]
        return found

    def release(self, capsule: str) -> None:
        """Forget the capsule; branches forked from it go on. Raises UnknownCapsule."""
        key = CapsuleId(capsule)
        found = self._capsules.pop(key, None)
        if found is None:
            raise UnknownCapsule(capsule)
        self._replaceable.pop(key, None)
        self._ttl.pop(key, None)
        self._expires.pop(key, None)
        self._journal.capsule(CapsuleReleased(capsule))
        self._tree.release(found.node)

    def replace_oldest(self) -> bool:
        """Release the least recently used replaceable capsule; False if there is none."""
        if not self._replaceable:
            return False
        self.release(next(iter(self._replaceable)))
        self._num_replaced += 1
        return True

    def expire(self) -> None:
        """Release every capsule whose time to live is over."""
        if not self.is_expiry_due:
            return
        now = self._clock()
        for key in [key for key, at in self._expires.items() if at <= now]:
            self.release(key)
            self._num_expired += 1

    @property
    def is_expiry_due(self) -> bool:
        return bool(self._expires) and min(self._expires.values()) <= self._clock()

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
        """How often each node is held by capsules."""
        return dict(Counter(capsule.node for capsule in self._capsules.values()))

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        assert set(self._replaceable) <= set(self._capsules), "a replaceable capsule is gone"
        assert set(self._expires) == set(self._ttl), "expiry without time to live"
        assert set(self._expires) <= set(self._capsules), "a capsule that is gone may expire"
        assert len(self._replaceable) <= self._max_replaceable, "too many replaceable capsules"
        assert all(c.node.holders > 0 for c in self._capsules.values()), "a capsule holds nothing"

    def stats(self) -> CapsuleStats:
        left = len(self._replaceable)
        return CapsuleStats(len(self._capsules) - left, left, self._num_replaced, self._num_expired)

    def _add(self, capsule: Capsule) -> None:
        assert capsule.id not in self._capsules, f"capsule {capsule.id} made twice"
        self._capsules[capsule.id] = capsule
        self._journal.capsule(self.describe(capsule))
