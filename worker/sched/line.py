"""A line of branches in fair order: sessions by tag, the branches of one by rank, then by arrival.

Heaps with entries that may be out of date. A branch that left its line, or changed its rank, is found
stale when its entry comes up; a session's tag only grows while it has branches in a line, so an entry
with an old tag comes up too early, never too late. So nothing is searched: O(log n) a change.
Beside that, the line knows who has gone unserved for longest.
"""

import heapq
from collections import deque
from collections.abc import Iterator

from mallee.worker.sched.sequence import Sequence
from mallee.worker.sched.sessions import Session, Sessions

_MIN_LIMIT = 64


class Line:
    """Branches that want to be served. Who stands in it has its `line` set to it."""

    __slots__ = ("_by_age", "_by_session", "_order", "_sessions", "num")

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._by_session: dict[Session, list[tuple[float, int, Sequence]]] = {}
        self._order: list[tuple[float, int, Session]] = []
        self._by_age: deque[tuple[int, Sequence]] = deque()
        self.num = 0

    def push(self, sequence: Sequence, rank: float) -> None:
        """`sequence` stands in the line under `rank`; also to change the rank it stands under."""
        session = sequence.session
        if sequence.line is not self:
            assert sequence.line is None, f"branch {sequence.ticket} stands in two lines"
            sequence.line = self
            self.num += 1
        sequence.rank = rank
        heap = self._by_session.get(session)
        if heap is None:
            heap = self._by_session[session] = []
            entry = (self._sessions.level(session), session.number, session)
            heapq.heappush(self._order, entry)
        elif len(heap) > 2 * session.num_members + _MIN_LIMIT:  # most are out of date
            heap[:] = [entry for entry in heap if self._is_true(entry)]
            heapq.heapify(heap)
        heapq.heappush(heap, (rank, sequence.ticket, sequence))

    def serve(self, sequence: Sequence, step: int) -> None:
        """`sequence`, who stands here, is served in `step`, or begins to wait in it."""
        sequence.last_step = step
        if len(self._by_age) > 2 * self.num + _MIN_LIMIT:
            self._by_age = deque(e for e in self._by_age if self._is_age(e))
        self._by_age.append((step, sequence))

    def remove(self, sequence: Sequence) -> None:
        """`sequence` stands in the line no more."""
        assert sequence.line is self, f"branch {sequence.ticket} stands elsewhere"
        sequence.line = None
        self.num -= 1
        if self.num == 0:  # also forgets tags that may be set back now
            self._by_session.clear()
            self._order.clear()
            self._by_age.clear()

    def first(self) -> Sequence | None:
        """Who is to be served next."""
        while self._order:
            tag, number, session = self._order[0]
            heap = self._by_session[session]
            while heap and not self._is_true(heap[0]):
                heapq.heappop(heap)
            if not heap:
                heapq.heappop(self._order)
                del self._by_session[session]
            elif tag < session.tag:
                heapq.heapreplace(self._order, (session.tag, number, session))
            else:
                return heap[0][2]
        return None

    def oldest(self) -> Sequence | None:
        """Who has not been served for longest."""
        while self._by_age and not self._is_age(self._by_age[0]):
            self._by_age.popleft()
        return self._by_age[0][1] if self._by_age else None

    def lowest_tag(self) -> float | None:
        """Of the sessions with branches here."""
        first = self.first()
        return None if first is None else first.session.tag

    def __iter__(self) -> Iterator[Sequence]:
        """Everybody, each once, in no particular order."""
        seen: set[Sequence] = set()
        for heap in self._by_session.values():
            for entry in heap:
                if self._is_true(entry) and entry[2] not in seen:
                    seen.add(entry[2])
                    yield entry[2]

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        assert sum(1 for _ in self) == self.num, "the line counts wrong"
        assert {entry[2] for entry in self._order} == set(self._by_session), "a session is lost"
        assert all(tag <= session.tag for tag, _, session in self._order), "a tag shrank"

    def _is_true(self, entry: tuple[float, int, Sequence]) -> bool:
        return entry[2].line is self and entry[2].rank == entry[0]

    def _is_age(self, entry: tuple[int, Sequence]) -> bool:
        return entry[1].line is self and entry[1].last_step == entry[0]
