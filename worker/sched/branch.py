"""One branch on its way through the engine, and the states it can be in.

GATED <-> WAITING -> READY ------> DECODE      any but the last two -> FINISHED, FAILED
             ^  `--> PREFILL ------^  |
             `----------<-------------'        preempted: READY, PREFILL, DECODE -> WAITING
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

from mallee.protocol.errors import PoolExhausted
from mallee.protocol.hashing import NO_HASHES
from mallee.worker.kv.node import Node, SlotCopy
from mallee.worker.kv.text import Text
from mallee.worker.kv.tree import BranchTree
from mallee.worker.sched.sessions import Session, Sessions

NOT_LOOKED_UP = (-1, 0)
"""No version of the tree, no blocks."""


class Phase(Enum):
    """A branch's place on its way."""

    GATED = "gated"  # waits for tokens that another branch computes
    WAITING = "waiting"
    READY = "ready"  # admitted; its next token can be drawn without a pass
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"
    FAILED = "failed"


_RUNNING = frozenset((Phase.READY, Phase.PREFILL, Phase.DECODE))
_ENDS = frozenset((Phase.FINISHED, Phase.FAILED))
_LEGAL = (
    {(before, end) for before in Phase if before not in _ENDS for end in _ENDS}
    | {(phase, Phase.WAITING) for phase in _RUNNING}
    | {
        (Phase.GATED, Phase.WAITING),
        (Phase.WAITING, Phase.GATED),
        (Phase.WAITING, Phase.READY),
        (Phase.WAITING, Phase.PREFILL),
        (Phase.READY, Phase.DECODE),
        (Phase.PREFILL, Phase.DECODE),
    }
)


class Sequence:
    """The scheduler's view of a branch: tokens after `origin`, and the node that holds their KV.

    `origin` is the node it was forked from (None: it starts at the root and may attach to any cached
    prefix), `origin_len` its length. `tokens` are all tokens after the origin, prompt first. The
    sequence holds `origin` and, while running, `node`. `logits` (opaque) are set while a next token can
    be drawn without a pass. `members` are the branches of its request that wait for its tokens.

    With a `producer` the branch continues the first `origin_len` tokens of another one that is still
    computing them: it is gated, and gets its origin when they are there.
    """

    # Many wait for long, by the thousand: what is needed later is set later.
    __slots__ = (
        *("attached_tokens", "entry", "found", "hashes", "is_short", "last_step", "logits"),
        *("members", "node", "num_admissions", "origin", "origin_len", "payer", "phase", "place"),
        *("priority", "producer", "queue", "rank", "room", "salt", "session", "sponsor", "ticket"),
        *("tokens", "waits_for"),
    )

    def __init__(
        self,
        ticket: int,
        tokens: Text,
        salt: str,
        priority: float = 0.0,
        origin: Node | None = None,
        logits: object | None = None,
        producer: "Sequence | None" = None,
        origin_len: int = 0,
        members: tuple[int, ...] = (0,),
    ) -> None:
        self.ticket = ticket  # arrival order; ties are decided by it
        self.tokens = tokens
        self.salt = salt
        self.priority = priority
        self.origin = origin
        self.origin_len = origin_len
        self.logits = logits
        self.producer = producer
        self.members = members
        self.node: Node | None = None
        self.phase = Phase.WAITING
        self.hashes = NO_HASHES  # of the full blocks it can share, once the scheduler needs them
        self.num_admissions = 0
        self.queue: FairQueue | None = None  # the line it stands in
        self.entry = 0  # the number of its entry there; entries with others are out of date
        self.sponsor: Sequence | None = None  # waits for its tokens and has the better claim
        self.waits_for: Sequence | None = None  # the branch that computes for it, while it is gated
        self.found: tuple[int, int]  # a version of the tree, and the leading `hashes` in it
        # From `Scheduler.add` on.
        self.session: Session
        # From the first line on.
        self.payer: Session  # of the claim under which it stands there: charged for its grants
        self.rank: float  # of that claim
        self.last_step: int  # when it was last served, or began to wait
        self.is_short: bool  # it had little to compute when it began to wait
        # From the first admission on.
        self.attached_tokens: int  # found in the cache then
        self.room: int  # its own node has room up to this position; 0: it has no node of its own
        self.place: tuple[bytes, int]  # order inside a batch

    @property
    def length(self) -> int:
        """Tokens of the whole sequence, computed or not."""
        return self.origin_len + len(self.tokens)

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is not computed yet."""
        done = self.node.end if self.node is not None else self.origin_len
        return self.length - done

    @property
    def is_running(self) -> bool:
        return self.phase in _RUNNING

    @property
    def is_over(self) -> bool:
        return self.phase in _ENDS

    @property
    def claim(self) -> "Sequence":
        """The branch by whose session and priority it is served: itself, or its sponsor."""
        return self.sponsor or self

    def pending(self, n: int) -> Text:
        """The next n tokens to compute."""
        assert self.node is not None, "only a running sequence has a next chunk"
        start = self.node.end - self.origin_len
        return self.tokens[start : start + n]

    def move(self, phase: Phase) -> None:
        """Raises AssertionError if the state machine has no such arrow."""
        assert (self.phase, phase) in _LEGAL, f"{self.phase} -> {phase}"
        self.phase = phase

    def let_go(self, tree: BranchTree) -> None:
        """Release what the sequence holds in the tree."""
        if self.node is not None:
            tree.release(self.node)
            self.node = None
        if self.origin is not None:
            tree.release(self.origin)
            self.origin = None
        self.logits = None
        self.producer = self.sponsor = self.waits_for = None


def node_of(sequence: Sequence) -> Node:
    """The node that holds the KV of a branch that runs."""
    assert sequence.node is not None, "only running branches have a node"
    return sequence.node


# A line of branches in fair order: sessions by tag, the branches of one by rank, then by arrival.
#
# Heaps with entries that may be out of date. A branch that left its line, or changed its rank, is found
# stale when its entry comes up; a session's tag only grows while it has branches in a line, so an entry
# with an old tag comes up too early, never too late. So nothing is searched: O(log n) a change.
# Beside that, the line knows who has gone unserved for longest.

QueueEntry: TypeAlias = "tuple[float, int, Sequence, int]"
_MIN_LIMIT = 64


class FairQueue:
    """Branches that want to be served; `line` of each is this queue."""

    __slots__ = ("_by_age", "_by_session", "_order", "_sessions", "num")

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._by_session: dict[Session, list[QueueEntry]] = {}
        self._order: list[tuple[float, int, Session]] = []
        self._by_age: deque[tuple[int, Sequence]] = deque()
        self.num = 0

    def extend(
        self, sequences: list[Sequence], rank: Callable[[Sequence], float], step: int
    ) -> None:
        """Queue new branches of one session, each under its `rank`; they begin to wait in `step`."""
        session = sequences[0].session
        heap, entries = self._heap(session), []
        for sequence in sequences:
            assert sequence.queue is None, f"branch {sequence.ticket} stands in two lines"
            sequence.queue = self
            sequence.payer = session
            sequence.last_step = step
            ranked = sequence.rank = rank(sequence)
            number = sequence.entry = sequence.entry + 1
            entries.append((ranked, sequence.ticket, sequence, number))
        if heap:
            for entry in entries:
                heapq.heappush(heap, entry)
        else:
            heap.extend(entries)
            heapq.heapify(heap)
        self._by_age.extend([(step, sequence) for sequence in sequences])
        self.num += len(sequences)

    def push(self, sequence: Sequence, rank: float) -> None:
        """Queue `sequence` under `rank`, or change the rank that it is queued under."""
        session = (sequence.sponsor or sequence).session  # `claim`, without the call
        if sequence.queue is not self:
            assert sequence.queue is None, f"branch {sequence.ticket} stands in two lines"
            sequence.queue = self
            self.num += 1
        elif sequence.rank == rank and sequence.payer is session:
            return
        sequence.rank, sequence.payer = rank, session
        sequence.entry += 1
        entry = (rank, sequence.ticket, sequence, sequence.entry)
        heapq.heappush(self._heap(session), entry)

    def _heap(self, session: Session) -> list[QueueEntry]:
        """The entries of `session`, most of them up to date."""
        heap = self._by_session.get(session)
        if heap is None:
            heap = self._by_session[session] = []
            entry = (self._sessions.level(session), session.number, session)
            heapq.heappush(self._order, entry)
        elif len(heap) > 2 * session.num_members + _MIN_LIMIT:
            heap[:] = [entry for entry in heap if self._is_true(entry)]
            heapq.heapify(heap)
        return heap

    def serve(self, sequence: Sequence, step: int) -> None:
        """`sequence`, who stands here, is served in `step`, or begins to wait in it."""
        sequence.last_step = step
        if len(self._by_age) > 2 * self.num + _MIN_LIMIT:
            self._by_age = deque(e for e in self._by_age if self._is_age(e))
        self._by_age.append((step, sequence))

    def remove(self, sequence: Sequence) -> None:
        """`sequence` stands in the line no more."""
        assert sequence.queue is self, f"branch {sequence.ticket} stands elsewhere"
        sequence.queue = None
        sequence.entry += 1
        self.num -= 1
        if self.num == 0:  # also forgets tags that may be set back now
            self._by_session.clear()
            self._order.clear()
            self._by_age.clear()

    def first(self) -> Sequence | None:
        """The branch that is to be served next."""
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
        """The branch that has not been served for longest."""
        while self._by_age and not self._is_age(self._by_age[0]):
            self._by_age.popleft()
        return self._by_age[0][1] if self._by_age else None

    def lowest_tag(self) -> float | None:
        """Of the sessions with branches here."""
        first = self.first()
        return None if first is None else first.payer.tag

    def __iter__(self) -> Iterator[Sequence]:
        """All branches, each once, in no particular order."""
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

    def _is_true(self, entry: QueueEntry) -> bool:
        return entry[2].entry == entry[3]

    def _is_age(self, entry: tuple[int, Sequence]) -> bool:
        return entry[1].queue is self and entry[1].last_step == entry[0]


# What one step does, as values.


class Chunk(NamedTuple):
    """Compute `tokens` of `sequence` from `start` on. `is_last`: nothing is pending after it."""

    sequence: Sequence
    tokens: Text
    start: int
    is_last: bool


@dataclass(slots=True)
class Plan:
    """The work of one step.

    `decodes` compute the one token that they drew last; `chunks` are pieces of prompts; `ready` draw
    without a pass; `failed` can't go on. `copies` come before everything.
    """

    decodes: list[Sequence]
    chunks: list[Chunk]
    ready: list[Sequence]
    copies: list[SlotCopy]
    failed: list[tuple[Sequence, PoolExhausted]]
