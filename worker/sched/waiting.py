"""Branches that are not admitted: in queues if they could be, gated if they wait for others' tokens.

A branch that can draw at once is *ready*. One with no more to compute than one step holds (a fork's suffix,
the end of a cached prompt) is *short*, any other *long*: short ones may overtake long ones of no higher
claim, so that a fork's first token does not wait behind a long prompt.
"""

from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from mallee.protocol.hashing import NO_HASHES, Hashes
from mallee.worker.kv.node import Node
from mallee.worker.kv.paths import last_hash, with_ancestors
from mallee.worker.kv.text import joined
from mallee.worker.kv.tree import BranchTree
from mallee.worker.sched.branch import NOT_LOOKED_UP, Branch
from mallee.worker.sched.queue import Queues

MAX_LOOKED_AT = 256
"""Waiting branches whose tokens left to compute are counted; the others are like them."""


class Awaited(NamedTuple):
    """The first `num_tokens` tokens of `producer`, which another branch waits for."""

    producer: Branch
    num_tokens: int


class Waiting:
    """Queues branches by what is missing of them, and looks up what the cache holds of their texts."""

    __slots__ = ("_last_path", "_max_short", "_queues", "_tree")

    def __init__(self, max_short: int, queues: Queues, tree: BranchTree) -> None:
        """`max_short`: tokens that a short branch has to compute at most."""
        self._max_short = max_short
        self._queues = queues
        self._tree = tree
        self._last_path: tuple[int | None, Hashes] = (None, NO_HASHES)

    @property
    def num(self) -> int:
        """Branches that are not admitted."""
        queues = self._queues
        return len(queues.ready.members) + queues.num_waiting + queues.gates.num

    def push(self, branch: Branch, step: int) -> None:
        """Queue `branch`, which is waiting."""
        if branch.logits is None:
            branch.is_short = self.num_missing(branch) <= self._max_short
        self._queues.of(branch).push(branch, step)

    def extend(self, branches: list[Branch], step: int) -> None:
        """Queue new branches of one job, which are waiting."""
        missing = [branch for branch in branches if branch.logits is None]
        if missing or branches[0].job.has_own_priorities:
            for branch in branches:
                self.push(branch, step)
        else:
            self._queues.ready.extend(branches, step)

    def remove(self, branch: Branch) -> None:
        """`branch` is over, or admitted. Its phase is still the one it waited in."""
        if branch.phase == "gated":
            self._queues.gates.leave(branch)
        else:
            self._queues.of(branch).remove(branch)

    def awaited(self, branch: Branch) -> Awaited | None:
        """The tokens that `branch` would compute first, if they are under way for another."""
        size = self._tree.block_size
        hashes, found = self.found(branch)
        held = max(found, branch.origin_len // size)
        coming = self._queues.gates.num_coming(hashes, held)
        if not coming:
            return None
        end = held + coming
        return Awaited(self._queues.gates.producer_of(int(hashes[end - 1])), end * size)

    def hashes(self, branch: Branch) -> Hashes:
        """Hashes of the full blocks that `branch` can share: one token must run for its logits.

        From the root on; none if its origin has them all.
        """
        size = self._tree.block_size
        usable = (branch.length - 1) // size
        begin = branch.origin_len // size
        if usable <= begin or not self._tree.keeps_cache:
            return NO_HASHES
        if len(branch.hashes) != usable:
            branch.hashes = self._hash(branch, begin, usable)
            branch.found = NOT_LOOKED_UP
        return branch.hashes

    def found(self, branch: Branch) -> tuple[Hashes, int]:
        """`hashes`, and how many of their leading blocks the tree holds. Looked up when that may change."""
        hashes, version = self.hashes(branch), self._tree.version
        if not len(hashes):
            return hashes, 0
        if branch.found[0] != version:
            branch.found = (version, self._tree.find(hashes))
        return hashes, branch.found[1]

    def num_missing(self, branch: Branch) -> int:
        """Tokens that `branch` would have to compute itself now; 0 if its logits are there."""
        if branch.logits is not None:
            return 0
        if branch.producer is not None:  # its origin is not there yet, to be hashed from
            return len(branch.tokens)
        return self._missing(branch, *self.found(branch))

    def num_needed(self, branch: Branch) -> int:
        """Blocks that `branch` takes from those that are available if it computes all that it must.

        Those of what it computes, and those that it finds in the cache and others could have till then.
        """
        hashes, held = self.found(branch)
        missing = self._missing(branch, hashes, held)
        return -(-missing // self._tree.block_size) + self._num_idle(branch, hashes, held)

    def found_nodes(self, branch: Branch) -> set[Node]:
        """Nodes that hold the leading blocks of `branch`."""
        hashes, held = self.found(branch)
        return with_ancestors([self._tree.index.find(int(hashes[held - 1]))] if held else ())

    def _missing(self, branch: Branch, hashes: Hashes, held: int) -> int:
        size = self._tree.block_size
        found = max(held, branch.origin_len // size)
        found += self._queues.gates.num_coming(hashes, found)
        return branch.length - max(found * size, branch.origin_len)

    def _num_idle(self, branch: Branch, hashes: Hashes, end: int) -> int:
        size = self._tree.block_size
        if end * size <= branch.origin_len:
            return 0
        num_idle = 0
        node: Node | None = self._tree.index.find(int(hashes[end - 1]))
        while node is not None and not node.live:
            num_idle += end - node.base // size
            end = node.base // size
            node = node.parent
        return num_idle

    def prefill_tokens(self) -> int:
        """Tokens that the waiting branches would have to compute. O(MAX_LOOKED_AT)."""
        queues = self._queues
        num = queues.num_waiting + queues.gates.num
        found = islice(
            chain(queues.short.members, queues.long.members, queues.gates), MAX_LOOKED_AT
        )
        missing = [self.num_missing(branch) for branch in found]
        return sum(missing) * num // len(missing) if missing else 0

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        queues = self._queues
        for queue in (queues.ready, queues.short, queues.long):
            queue.check()
            for branch in queue.members:
                assert branch.phase == "waiting", "one in a queue does not wait"
                assert queues.of(branch) is queue, "one is in the wrong queue"
                assert branch.node is None, "one that waits holds a node"
        queues.gates.check()
        assert all(s.node is None for s in queues.gates), "gated, and it holds a node"

    def _path_hashes(self, origin: Node) -> Hashes:
        """Siblings ask for the same, one after the other.

        It is known by its last hash, which says what is in it: a node may grow another text when the cache
        it held was evicted.
        """
        last = last_hash(origin, self._tree.block_size)
        if self._last_path[0] != last:
            self._last_path = (last, self._tree.path_hashes(origin))
        return self._last_path[1]

    def _hash(self, branch: Branch, begin: int, usable: int) -> Hashes:
        size = self._tree.block_size
        tokens, notation = branch.tokens, self._tree.notation
        if branch.origin is None:
            assert begin == 0, "gated forks are not hashed before they have their origin"
            return notation.hashes(tokens[: usable * size], size, salt=branch.job.salt)
        above = self._path_hashes(branch.origin)[:begin]
        begun = branch.origin_len % size
        more = tokens[: usable * size - branch.origin_len]
        if begun:
            more = joined(notation, branch.origin.tokens[-begun:], more)
        parent = int(above[-1]) if len(above) else None
        below = notation.hashes(more, size, salt=branch.job.salt, parent=parent)
        return np.concatenate((above, below))
