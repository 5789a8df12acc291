"""All that waits: branches that are not admitted, in queues or gated, and prompts that run, for more.

A branch that can draw at once is *ready*. One with no more to compute than one step holds (a fork's suffix,
the end of a cached prompt) is *short*, any other *long*: short ones may overtake long ones of no higher
claim, so that a fork's first token does not wait behind a long prompt.
"""

from itertools import chain, islice

import numpy as np

from mallee.protocol.hashing import NO_HASHES, Hashes
from mallee.worker.kv.node import Node
from mallee.worker.kv.paths import last_hash, with_ancestors
from mallee.worker.kv.text import joined
from mallee.worker.kv.tree import BranchTree
from mallee.worker.sched.branch import NOT_LOOKED_UP, Branch, Producer
from mallee.worker.sched.gates import Gates
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.sched.queue import FairQueue
from mallee.worker.sched.sessions import Account

MAX_LOOKED_AT = 256
"""Waiting branches whose tokens left to compute are counted; the others are like them."""


class Waiting:
    """Owns the queues and the gates, and looks up what the cache holds of the texts of branches."""

    __slots__ = (
        *("_last_path", "_max_short", "_tree", "gates", "long", "prompts", "ready"),
        *("running_long", "running_short", "short"),
    )

    def __init__(self, config: SchedulerConfig, root: Account, tree: BranchTree) -> None:
        self._max_short = config.max_step_tokens
        self._tree = tree
        self._last_path: tuple[int | None, Hashes] = (None, NO_HASHES)
        self.gates = Gates()
        queues = [FairQueue(config.order, root, self.gates) for _ in range(5)]
        self.ready, *self.prompts = queues
        self.running_short, self.running_long, self.short, self.long = self.prompts

    @property
    def num(self) -> int:
        """Branches that are not admitted."""
        queued = len(self.ready.members) + len(self.short.members) + len(self.long.members)
        return queued + self.gates.num

    @property
    def num_to_compute(self) -> int:
        """Branches that could be admitted and would have to compute."""
        return len(self.short.members) + len(self.long.members)

    @property
    def num_prompts(self) -> int:
        """Those, and prompts that run, of which more could be computed."""
        running = len(self.running_short.members) + len(self.running_long.members)
        return running + len(self.short.members) + len(self.long.members)

    def queue_of(self, branch: Branch) -> FairQueue:
        """The queue that `branch` belongs to, by its phase."""
        if branch.phase == "waiting":
            if branch.logits is not None:
                return self.ready
            return self.short if branch.is_short else self.long
        return self.running_short if branch.is_short else self.running_long

    def is_queued(self, branch: Branch) -> bool:
        return branch.phase in ("waiting", "prefill") and branch in self.queue_of(branch).members

    def push(self, branch: Branch, step: int) -> None:
        """Queue `branch`, which is waiting."""
        if branch.logits is None:
            branch.is_short = self.num_missing(branch) <= self._max_short
        self.queue_of(branch).push(branch, step)

    def extend(self, branches: list[Branch], step: int) -> None:
        """Queue new branches of one job, which are waiting."""
        are_alike = branches[0].job.priorities is None
        for branch in branches:
            are_alike = are_alike and branch.logits is not None
        if are_alike:
            self.ready.extend(branches, step)
        else:
            for branch in branches:
                self.push(branch, step)

    def remove(self, branch: Branch) -> None:
        """`branch` is over, or admitted. Its phase is still the one it waited in."""
        if branch.phase == "gated":
            self.gates.leave(branch)
        else:
            self.queue_of(branch).remove(branch)

    def hold(self, branch: Branch, producer: Producer, num_tokens: int) -> None:
        """Gate `branch` until `producer` has committed `num_tokens` tokens."""
        self.gates.hold(branch, producer, num_tokens)
        self.claim_for(branch, [branch, *self.gates.waiters(branch)])

    def claim_for(self, gated: Branch, waiters: list[Branch]) -> None:
        """The branch that computes for `gated` goes by the claims of `waiters`, while they are better."""
        producer = gated.waits_for
        while producer is not None and producer.waits_for is not None:
            producer = producer.waits_for
        if producer is not None and self.is_queued(producer):
            self.queue_of(producer).claim(producer, waiters)

    def lowest(self, of: Account) -> float | None:
        """The least virtual time of the accounts below `of` that have branches in the queues."""
        queues = (queue for queue in (self.ready, *self.prompts) if queue.members)
        levels = (queue.lowest(of) for queue in queues)
        return min((level for level in levels if level is not None), default=None)

    def prefill_tokens(self) -> int:
        """Tokens that branches which are not admitted would have to compute. O(MAX_LOOKED_AT)."""
        num = self.num_to_compute + self.gates.num
        found = islice(chain(self.short.members, self.long.members, self.gates), MAX_LOOKED_AT)
        missing = [self.num_missing(branch) for branch in found]
        return sum(missing) * num // len(missing) if missing else 0

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        for queue in (self.ready, *self.prompts):
            queue.check()
            assert all(self.queue_of(branch) is queue for branch in queue.members), "misplaced"
        for branch in chain(self.ready.members, self.short.members, self.long.members, self.gates):
            assert branch.phase in ("waiting", "gated"), "one that waits does not"
            assert branch.node is None, "one that waits holds a node"
        self.gates.check()

    # Texts

    def awaited(self, branch: Branch) -> tuple[Branch, int] | None:
        """The producer of what `branch` would compute first, and up to which token, if it is under way."""
        if branch.job.is_scoring:  # it computes all of its prompt
            return None
        size = self._tree.block_size
        hashes, found = self.found(branch)
        held = max(found, branch.origin_len // size)
        coming = self.gates.num_coming(hashes, held)
        if not coming:
            return None
        end = held + coming
        return self.gates.producer_of(int(hashes[end - 1])), end * size

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
        held = branch.found[1]
        if branch.job.is_scoring:  # what is found in the cache has no logits
            held = min(held, len(branch.job.scores) // self._tree.block_size)
        return hashes, held

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
        found += self.gates.num_coming(hashes, found)
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
