"""Who waits for tokens that another branch is computing, and what is being computed for whom.

Two reasons, one mechanism. *Single flight*: the next blocks of a prompt are under way for another branch
(known by chain hash), so that n cold siblings cost one prefix. *Watermarks*: a fork of a capsule that is
still computing starts when the tokens it continues are there. Either way the branch is gated on a
producer and a number of its tokens, and let through when the producer has committed that many. If the
producer stops before: who waited in single flight goes on without it, a fork can't.
"""

import heapq
from collections.abc import Iterator

from mallee.protocol.hashing import Hashes
from mallee.worker.sched.sequence import Phase, Sequence


class Gates:
    """Gated branches by producer; and blocks under way, by chain hash, with the branch that computes them."""

    __slots__ = ("_in_flight", "_waiting", "num")

    def __init__(self) -> None:
        self._waiting: dict[Sequence, list[tuple[int, int, Sequence]]] = {}
        self._in_flight: dict[int, Sequence] = {}
        self.num = 0

    # Gates

    def hold(self, sequence: Sequence, producer: Sequence, num_tokens: int) -> None:
        """`sequence` is gated until `producer` has committed `num_tokens` tokens."""
        sequence.move(Phase.GATED)
        self._push(sequence, producer, num_tokens)

    def passed(self, producer: Sequence, num_tokens: int | None) -> list[Sequence]:
        """Those that need no more than `num_tokens` of `producer` (None: all), let through.

        Their phase is the caller's to move on.
        """
        heap = self._waiting.get(producer)
        if heap is None:
            return []
        through = []
        while heap and (num_tokens is None or heap[0][0] <= num_tokens):
            sequence = heapq.heappop(heap)[2]
            if sequence.phase is Phase.GATED:
                self.num -= 1
                through.append(sequence)
        if not heap:
            del self._waiting[producer]
        return through

    def dropped(self, producer: Sequence) -> list[Sequence]:
        """Those that waited for `producer` in single flight, gated no longer; its forks stay."""
        through = []
        for sequence in self.passed(producer, None):
            if sequence.producer is None:
                through.append(sequence)
            else:
                self._push(sequence, producer, sequence.origin_len)
        return through

    def stranded(self, producer: Sequence) -> list[Sequence]:
        """Its forks, which stay gated: `producer` will never let them through. They must be finished."""
        through = self.passed(producer, None)
        self.num += len(through)
        return through

    def left(self) -> None:
        """A gated branch is over; its entry is dropped when it comes up."""
        self.num -= 1

    def __iter__(self) -> Iterator[Sequence]:
        """All that are gated, in no particular order."""
        for heap in self._waiting.values():
            for _, _, sequence in heap:
                if sequence.phase is Phase.GATED:
                    yield sequence

    def _push(self, sequence: Sequence, producer: Sequence, num_tokens: int) -> None:
        entry = (num_tokens, sequence.ticket, sequence)
        heapq.heappush(self._waiting.setdefault(producer, []), entry)
        self.num += 1

    # Single flight

    def depart(self, hashes: Hashes, sequence: Sequence) -> None:
        """`sequence` will compute the blocks of `hashes`, but for those that somebody computes already."""
        sequence.in_flight = hashes.tolist()
        for value in sequence.in_flight:
            self._in_flight.setdefault(value, sequence)

    def land(self, sequence: Sequence) -> None:
        """`sequence` computes nothing for others any more."""
        for value in sequence.in_flight:
            if self._in_flight.get(value) is sequence:
                del self._in_flight[value]
        sequence.in_flight = []

    def num_coming(self, hashes: Hashes, held: int) -> int:
        """How many blocks from the one at `held` on, without a gap, are under way."""
        if not self._in_flight:
            return 0
        end = held
        while end < len(hashes) and int(hashes[end]) in self._in_flight:
            end += 1
        return end - held

    def producer_of(self, value: int) -> Sequence:
        """Who computes the block."""
        return self._in_flight[value]

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        gated = list(self)
        assert len(gated) == len(set(gated)) == self.num, "gated branches counted wrong"
        assert all(not p.is_over for p in self._waiting), "somebody waits for a branch that is over"
        assert all(s.is_running for s in self._in_flight.values()), "in flight without running"
