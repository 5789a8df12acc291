"""Branches that are not admitted: in queues if they could be, gated if they wait for others' tokens.

Three queues. A branch that can draw at once is *ready*. One with no more to compute than one step holds (a
fork's suffix, the end of a cached prompt) is *short*, any other *long*: short ones may overtake long ones
of no higher claim, so that a fork's first token does not wait behind a long prompt.
"""

import heapq
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mallee.protocol.hashing import NO_HASHES, Hashes
from mallee.worker.kv.node import Node
from mallee.worker.kv.paths import last_hash, with_ancestors
from mallee.worker.kv.text import joined
from mallee.worker.kv.tree import BranchTree
from mallee.worker.sched.branch import NOT_LOOKED_UP, Branch, FairQueue, Producer
from mallee.worker.sched.policy import Policy, SchedulerConfig
from mallee.worker.sched.sessions import Sessions

MAX_LOOKED_AT = 256
"""Waiting branches whose tokens left to compute are counted; the others are like them."""


class Awaited(NamedTuple):
    """The first `num_tokens` tokens of `producer`, which another branch waits for."""

    producer: Branch
    num_tokens: int


class Waiting:
    """Owns the queues and the gated branches."""

    __slots__ = (
        *("_last_path", "_lenders", "max_short", "_policy", "_sessions", "_tree"),
        *("prefix_waits", "long", "ready", "short"),
    )

    def __init__(
        self, config: SchedulerConfig, policy: Policy, sessions: Sessions, tree: BranchTree
    ) -> None:
        self._policy = policy
        self._tree = tree
        self._sessions = sessions
        self._lenders: dict[Branch, dict[Branch, None]] = {}  # gated branches by producer
        self._last_path: tuple[int | None, Hashes] = (None, NO_HASHES)
        self.max_short = config.max_step_tokens
        self.prefix_waits = PrefixWaits()
        self.ready = FairQueue(sessions)
        self.short = FairQueue(sessions)
        self.long = FairQueue(sessions)

    @property
    def num(self) -> int:
        """Branches that are not admitted."""
        return self.num_queued + self.prefix_waits.num

    @property
    def num_queued(self) -> int:
        """Branches that could be admitted."""
        return self.ready.num + self.short.num + self.long.num

    @property
    def num_to_compute(self) -> int:
        """Branches that could be admitted and would have to compute."""
        return self.short.num + self.long.num

    def push(self, branch: Branch, step: int) -> None:
        """Queue `branch`, which is waiting."""
        if branch.logits is not None:
            queue = self.ready
        else:
            branch.is_short = self.num_missing(branch) <= self.max_short
            queue = self.short if branch.is_short else self.long
        queue.push(branch, self._policy.rank(branch.sponsor or branch))
        queue.serve(branch, step)

    def extend(self, branches: list[Branch], step: int) -> None:
        """Queue new branches of one job, which are waiting."""
        missing = [branch for branch in branches if branch.logits is None]
        if missing or len(branches[0].job.priorities) > 1:
            for branch in branches:
                self.push(branch, step)
        else:
            self.ready.extend(branches, self._policy.rank(branches[0]), step)

    def remove(self, branch: Branch) -> None:
        """`branch` is over, or admitted. Its phase is still the one it waited in."""
        if branch.phase == "gated":
            self.prefix_waits.left()
        else:
            assert branch.queue is not None, "it waits nowhere"
            branch.queue.remove(branch)

    def awaited(self, branch: Branch) -> Awaited | None:
        """The tokens that `branch` would compute first, if they are under way for another."""
        size = self._tree.block_size
        hashes, found = self.found(branch)
        held = max(found, branch.origin_len // size)
        coming = self.prefix_waits.num_coming(hashes, held)
        if not coming:
            return None
        end = held + coming
        return Awaited(self.prefix_waits.producer_of(int(hashes[end - 1])), end * size)

    def hold(self, branch: Branch, producer: Producer, num_tokens: int) -> None:
        """Gate `branch` until `producer` has committed `num_tokens` tokens."""
        self.prefix_waits.hold(branch, producer, num_tokens)
        self.lend(branch)
        for waiter in self._lenders.get(branch, ()):
            self.lend(waiter)

    def lend(self, waiter: Branch) -> None:
        """Let the branches that compute for `waiter`, which is gated, go by its claim while it is better."""
        rank = self._policy.rank
        producer = waiter.waits_for
        while producer is not None:
            if waiter.job.session is not producer.job.session or rank(waiter) < rank(producer):
                self._lenders.setdefault(producer, {})[waiter] = None
            producer = producer.waits_for

    def update_claims(self) -> None:
        """Choose every producer's claim anew: tags have changed, waiters have come and gone."""
        if not self._lenders:
            return
        for producer, waiters in list(self._lenders.items()):
            lenders = [w for w in waiters if w.phase == "gated" and _waits_for(w, producer)]
            if producer.is_over or not lenders:
                del self._lenders[producer]
            else:
                self._lenders[producer] = dict.fromkeys(lenders)
            best = min((*lenders, producer), key=lambda s: self._claim_order(s, s is producer))
            producer.sponsor = None if best is producer else best
            if producer.queue is not None:
                producer.queue.push(producer, self._policy.rank(best))

    def _claim_order(self, branch: Branch, is_own: bool) -> tuple[tuple[float, float], bool, float]:
        """At equal tags a lender's claim counts: the producer may be far behind in its own session."""
        level = self._sessions.level(branch.job.session)
        return (level, is_own, self._policy.rank(branch))

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
        found += self.prefix_waits.num_coming(hashes, found)
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
        total = looked_at = 0
        for group in (self.short, self.long, self.prefix_waits):
            for branch in group:
                if looked_at == MAX_LOOKED_AT:
                    break
                looked_at += 1
                total += self.num_missing(branch)
        num = self.num - self.ready.num
        return total * num // looked_at if looked_at else 0

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        for queue in (self.ready, self.short, self.long):
            queue.check()
            assert all(s.phase == "waiting" for s in queue), "one in a queue does not wait"
            assert all(s.node is None for s in queue), "one that waits holds a node"
        self.prefix_waits.check()
        assert all(s.queue is None and s.node is None for s in self.prefix_waits), (
            "gated, and in a queue"
        )

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


def _waits_for(branch: Branch, producer: Branch) -> bool:
    """Whether `producer` computes for `branch`, or for what that waits for."""
    walk = branch.waits_for
    while walk is not None and walk is not producer:
        walk = walk.waits_for
    return walk is not None


# Branches that wait for tokens of others, and the blocks that are under way.
#
# Two reasons, one mechanism. *Single flight*: the next blocks of a prompt are under way for another branch
# (known by chain hash), so that n cold siblings cost one prefix. *Watermarks*: a fork of a capsule that is
# still computing starts when the tokens it continues are there. Either way the branch is gated on a
# producer and a number of its tokens, and let through when the producer has committed that many. If the
# producer stops before: a branch that waited in single flight goes on without it, a fork can't.


class PrefixWaits:
    """Gated branches by producer; and blocks under way, by chain hash, with the branch that computes them."""

    __slots__ = ("_departed", "_in_flight", "_waiting", "num")

    def __init__(self) -> None:
        self._waiting: dict[Producer, list[tuple[int, int, Branch]]] = {}
        self._in_flight: dict[int, Branch] = {}
        self._departed: dict[Branch, list[int]] = {}  # hashes of the blocks that each computes
        self.num = 0

    def hold(self, branch: Branch, producer: Producer, num_tokens: int) -> None:
        """`branch` is gated until `producer` has committed `num_tokens` tokens."""
        branch.move("gated")
        branch.waits_for = producer if isinstance(producer, Branch) else None
        self._push(branch, producer, num_tokens)

    def passed(self, producer: Producer, num_tokens: int | None) -> list[Branch]:
        """Let through, and return, branches that need at most `num_tokens` of `producer` (None: all).

        Their phase is the caller's to move on.
        """
        heap = self._waiting.get(producer)
        if heap is None:
            return []
        through = []
        while heap and (num_tokens is None or heap[0][0] <= num_tokens):
            branch = heapq.heappop(heap)[2]
            if branch.phase == "gated":
                self.num -= 1
                branch.waits_for = None
                through.append(branch)
        if not heap:
            del self._waiting[producer]
        return through

    def dropped(self, producer: Branch) -> list[Branch]:
        """Let through the branches that waited for `producer` in single flight; its forks stay gated."""
        through = []
        for branch in self.passed(producer, None):
            if branch.producer is None:
                through.append(branch)
            else:
                branch.waits_for = producer
                self._push(branch, producer, branch.origin_len)
        return through

    def stranded(self, producer: Producer) -> list[Branch]:
        """The forks of `producer`, which it will never let through: they must be finished."""
        through = self.passed(producer, None)
        self.num += len(through)
        return through

    def left(self) -> None:
        """A gated branch is over; its entry is dropped when it comes up."""
        self.num -= 1

    def __iter__(self) -> Iterator[Branch]:
        """All that are gated, in no particular order."""
        for heap in self._waiting.values():
            for _, _, branch in heap:
                if branch.phase == "gated":
                    yield branch

    def _push(self, branch: Branch, producer: Producer, num_tokens: int) -> None:
        entry = (num_tokens, branch.ticket, branch)
        heapq.heappush(self._waiting.setdefault(producer, []), entry)
        self.num += 1

    # Single flight

    def depart(self, hashes: Hashes, branch: Branch) -> None:
        """`branch` will compute the blocks of `hashes` that no other branch computes already."""
        values = hashes.tolist()
        if values:
            self._departed[branch] = values
        for value in values:
            self._in_flight.setdefault(value, branch)

    def land(self, branch: Branch) -> None:
        """`branch` computes nothing for others any more."""
        for value in self._departed.pop(branch, ()):
            if self._in_flight.get(value) is branch:
                del self._in_flight[value]

    def num_coming(self, hashes: Hashes, held: int) -> int:
        """The number of blocks from the one at `held` on, without a gap, that are under way."""
        if not self._in_flight:
            return 0
        end = held
        while end < len(hashes) and int(hashes[end]) in self._in_flight:
            end += 1
        return end - held

    def producer_of(self, value: int) -> Branch:
        """The branch that computes the block."""
        return self._in_flight[value]

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        gated = list(self)
        assert len(gated) == len(set(gated)) == self.num, "gated branches counted wrong"
        assert not any(isinstance(p, Branch) and p.is_over for p in self._waiting), (
            "a branch waits for one that is over"
        )
        assert all(s.is_running for s in self._in_flight.values()), "in flight without running"
