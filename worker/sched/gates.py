"""Branches that wait for tokens of others, and the blocks that are under way.

Two reasons, one mechanism. *Single flight*: the next blocks of a prompt are under way for another branch
(known by chain hash), so that n cold siblings cost one prefix. *Watermarks*: a fork of a capsule that is
still computing, or comes back from below, starts when the tokens it continues are there. Either way the
branch is gated on a producer and a number of its tokens, and let through when the producer has committed
that many. If the producer stops before: a branch that waited in single flight goes on without it, a fork
can't.
"""

import heapq
from collections.abc import Iterator

from mallee.protocol.hashing import Hashes
from mallee.worker.sched.branch import Branch, Producer


class Gates:
    """Gated branches by producer; and blocks under way, by chain hash, with the branch that computes them."""

    __slots__ = ("_departed", "_gated", "_in_flight", "num")

    def __init__(self) -> None:
        self._gated: dict[Producer, list[tuple[int, int, Branch]]] = {}
        self._in_flight: dict[int, Branch] = {}
        # Hashes of the blocks that each computes, the last one first.
        self._departed: dict[Branch, list[int]] = {}
        self.num = 0

    def hold(self, branch: Branch, producer: Producer, num_tokens: int) -> None:
        """`branch` is gated until `producer` has committed `num_tokens` tokens."""
        branch.move("gated")
        self._push(branch, producer, num_tokens)

    def _push(self, branch: Branch, producer: Producer, num_tokens: int) -> None:
        branch.waits_for = producer if isinstance(producer, Branch) else None
        entry = (num_tokens, branch.ticket, branch)
        heapq.heappush(self._gated.setdefault(producer, []), entry)
        self.num += 1

    def passed(self, producer: Producer, num_tokens: int | None = None) -> list[Branch]:
        """Let through, and return, branches that need at most `num_tokens` of `producer` (None: all).

        Their phase is the caller's to move on.
        """
        heap = self._gated.get(producer)
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
            del self._gated[producer]
        return through

    def next_awaited(self, producer: Branch) -> int | None:
        """The number of tokens of `producer` after which the next branch goes on, if any waits for it."""
        heap = self._gated.get(producer)
        return heap[0][0] if heap else None

    def is_awaited(self, producer: Producer) -> bool:
        """Whether any branch waits for tokens of `producer`; if not, nothing of it is left here."""
        if any(self._waiting_for(producer)):
            return True
        self._gated.pop(producer, None)
        return False

    def _waiting_for(self, producer: Producer) -> Iterator[Branch]:
        for _, _, branch in self._gated.get(producer, ()):
            if branch.phase == "gated":
                yield branch

    def dropped(self, producer: Branch) -> list[Branch]:
        """Let through the branches that waited for `producer` in single flight; its forks stay gated."""
        through = []
        for branch in self.passed(producer):
            if branch.producer is None:
                through.append(branch)
            else:
                self._push(branch, producer, branch.origin_len)
        return through

    def stranded(self, producer: Producer) -> list[Branch]:
        """The forks of `producer`, which it will never let through: they must be finished."""
        through = self.passed(producer)
        self.num += len(through)
        return through

    def leave(self, branch: Branch) -> None:
        """`branch`, which is gated, is over; its entry is dropped when it comes up."""
        branch.waits_for = None
        self.num -= 1

    def waiters(self, producer: Branch) -> list[Branch]:
        """All that wait for tokens of `producer`, or for one that waits for them."""
        found = [*self._waiting_for(producer)]
        for branch in found:  # which grows
            found += self._waiting_for(branch)
        return found

    def waits(self, branch: Branch, producer: Branch) -> bool:
        """Whether `producer` computes for `branch`, or for one that that waits for."""
        walk = branch.waits_for
        while walk is not None and walk is not producer:
            walk = walk.waits_for
        return walk is not None

    def __iter__(self) -> Iterator[Branch]:
        """All that are gated, in no particular order."""
        for producer in self._gated:
            yield from self._waiting_for(producer)

    # Single flight

    def depart(self, hashes: Hashes, branch: Branch) -> None:
        """`branch` will compute the blocks of `hashes` that no other branch computes already."""
        values = hashes.tolist()
        for value in values:
            self._in_flight.setdefault(value, branch)
        if values:
            values.reverse()
            self._departed[branch] = values

    def land(self, branch: Branch, num_left: int = 0) -> None:
        """`branch` computes no more of its blocks than the last `num_left` for others.

        Those that are here are found in the cache; where they are not, for want of a state there or of what
        a window gave up, nobody brings them by waiting.
        """
        values = self._departed.get(branch)
        if values is None:
            return
        while len(values) > num_left:
            value = values.pop()
            if self._in_flight.get(value) is branch:
                del self._in_flight[value]
        if not values:
            del self._departed[branch]

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
        over = [p for p in self._gated if isinstance(p, Branch) and p.is_over]
        assert not over, "a branch waits for one that is over"
        assert all(s.is_running for s in self._in_flight.values()), "in flight without running"
