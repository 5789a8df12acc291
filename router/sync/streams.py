"""Puts a numbered stream in order after losses, repetitions and swaps by the broker.

One machine for two streams: a worker's events (`WorkerSync`) and a gateway's bookings
(`router.sync.replicas`). Pure state: it returns what to do and touches no index. Two numbers describe a life
of a sender as seen from here: `next_seq`, the first item not taken in, and `known_seq`, the largest
next_seq that any message mentioned. They differ exactly while something is missing. Then batches wait in
a bounded buffer until the gap closes by itself (reordering) or a snapshot jumps over it (loss, late
join). A life starts at item 0 with nothing, so its first batch needs no snapshot.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from mallee.protocol.events import Event, Lease, Snapshot
from mallee.protocol.ids import Incarnation

ItemT = TypeVar("ItemT")
ItemT_co = TypeVar("ItemT_co", covariant=True)


class StreamBatch(Protocol[ItemT_co]):
    """Consecutive items of one life of a sender: numbers first_seq .. next_seq - 1."""

    @property
    def incarnation(self) -> int: ...

    @property
    def first_seq(self) -> int: ...

    @property
    def next_seq(self) -> int: ...

    @property
    def items(self) -> Sequence[ItemT_co]: ...


class StreamSnapshot(Protocol):
    """The sum of items 0 .. next_seq - 1 of one life of a sender."""

    @property
    def incarnation(self) -> int: ...

    @property
    def next_seq(self) -> int: ...


SnapshotT = TypeVar("SnapshotT", bound=StreamSnapshot)


class StreamTodo(NamedTuple, Generic[SnapshotT, ItemT]):
    """Work for the caller, in this order."""

    clear: bool = False  # forget all of this sender
    snapshot: SnapshotT | None = None  # then replace all of it by this
    events: tuple[ItemT, ...] = ()  # then apply these items
    needs_snapshot: bool = False  # then ask the sender for one


@dataclass(frozen=True, slots=True)
class SyncStats:
    """Position of the stream, and counts of its messages since birth."""

    incarnation: Incarnation | None
    next_seq: int
    known_seq: int
    buffered: int
    applied_events: int
    duplicate_batches: int
    stale_messages: int  # of older lives, or snapshots older than what is applied
    gaps: int
    dropped_batches: int  # for lack of buffer


class StreamSync(Generic[SnapshotT, ItemT]):
    """The order of items of one sender, over all its lives.

    `oldest`: lives before this one are ignored from the start.
    """

    def __init__(self, *, max_buffered: int = 256, oldest: Incarnation | None = None) -> None:
        if max_buffered < 1:
            raise ValueError(f"max_buffered={max_buffered}: must be at least 1")
        self._max_buffered = max_buffered
        self._oldest = oldest
        self._incarnation: Incarnation | None = None
        self._next_seq = 0
        self._known_seq = 0
        self._buffer: dict[int, StreamBatch[ItemT]] = {}  # by first_seq
        self._applied_events = 0
        self._duplicate_batches = 0
        self._stale_messages = 0
        self._gaps = 0
        self._dropped_batches = 0

    @property
    def incarnation(self) -> Incarnation | None:
        """The youngest life known; None before any."""
        return self._incarnation

    @property
    def gaps(self) -> int:
        """Times that items turned out to be missing."""
        return self._gaps

    @property
    def is_whole(self) -> bool:
        """Whether everything known to have happened is taken in."""
        return self._next_seq == self._known_seq

    def advance(self, batch: StreamBatch[ItemT]) -> bool:
        """Take in `batch` if it is just what comes next, as it usually is. Else False, and no change."""
        if self._known_seq != self._next_seq or batch.first_seq != self._next_seq:
            return False
        if batch.incarnation != self._incarnation:
            return False
        next_seq = batch.next_seq
        self._applied_events += next_seq - self._next_seq
        self._next_seq = self._known_seq = next_seq
        return True

    def on_batch(self, batch: StreamBatch[ItemT]) -> StreamTodo[SnapshotT, ItemT]:
        """Take in `batch`. Asks for a snapshot once, when it reveals a gap; mentions ask again."""
        clear = self._adopt(Incarnation(batch.incarnation))
        if clear is None:
            return StreamTodo()
        next_seq = batch.next_seq
        if next_seq <= self._next_seq:
            self._duplicate_batches += bool(batch.items)
            return StreamTodo(clear)
        if self.advance(batch):
            return StreamTodo(clear, None, tuple(batch.items))
        was_whole = self.is_whole
        self._known_seq = max(self._known_seq, next_seq)
        self._keep(batch)
        events = self._drain()
        has_new_gap = was_whole and not self.is_whole
        self._gaps += has_new_gap
        return StreamTodo(clear, None, events, has_new_gap)

    def on_snapshot(self, snapshot: SnapshotT) -> StreamTodo[SnapshotT, ItemT]:
        """Take in `snapshot` unless more is applied already; then what waited for it."""
        clear = self._adopt(Incarnation(snapshot.incarnation))
        if clear is None:
            return StreamTodo()
        if snapshot.next_seq < self._next_seq:
            self._stale_messages += 1
            return StreamTodo(clear, needs_snapshot=not self.is_whole)
        self._next_seq = snapshot.next_seq
        self._known_seq = max(self._known_seq, snapshot.next_seq)
        events = self._drain()
        return StreamTodo(clear, snapshot, events, not self.is_whole)

    def on_mention(self, incarnation: int, next_seq: int) -> StreamTodo[SnapshotT, ItemT]:
        """Compare with the number of items sent; asks for a snapshot while any is missing."""
        clear = self._adopt(Incarnation(incarnation))
        if clear is None:
            return StreamTodo()
        was_whole = self.is_whole
        self._known_seq = max(self._known_seq, next_seq)
        self._gaps += was_whole and not self.is_whole
        return StreamTodo(clear, needs_snapshot=not self.is_whole)

    def stats(self) -> SyncStats:
        return SyncStats(
            incarnation=self._incarnation,
            next_seq=self._next_seq,
            known_seq=self._known_seq,
            buffered=len(self._buffer),
            applied_events=self._applied_events,
            duplicate_batches=self._duplicate_batches,
            stale_messages=self._stale_messages,
            gaps=self._gaps,
            dropped_batches=self._dropped_batches,
        )

    def check(self) -> None:
        """Raises AssertionError on an impossible state."""
        assert 0 <= self._next_seq <= self._known_seq, f"{self._next_seq} > {self._known_seq}"
        assert len(self._buffer) <= self._max_buffered, f"{len(self._buffer)} batches buffered"
        for first_seq, batch in self._buffer.items():
            assert first_seq == batch.first_seq > self._next_seq, "an applicable batch waits"
            assert batch.incarnation == self._incarnation, "a batch of another life waits"
            assert batch.next_seq <= self._known_seq, "an unknown batch waits"

    def _adopt(self, incarnation: Incarnation) -> bool | None:
        """True: a new life began. False: the life at hand. None: a past life, to be ignored."""
        current = self._incarnation
        if current == incarnation:
            return False
        oldest = self._oldest if current is None else current
        if oldest is not None and incarnation < oldest:
            self._stale_messages += 1
            return None
        self._incarnation = incarnation
        self._next_seq = self._known_seq = 0
        self._buffer.clear()
        return True

    def _keep(self, batch: StreamBatch[ItemT]) -> None:
        held = self._buffer.get(batch.first_seq)
        if held is not None and held.next_seq >= batch.next_seq:
            self._duplicate_batches += 1
            return
        self._buffer[batch.first_seq] = batch
        if len(self._buffer) > self._max_buffered:
            # The snapshot on its way covers the oldest; the newest are what it won't.
            applicable = batch.first_seq <= self._next_seq
            oldest = max(self._buffer) if applicable else min(self._buffer)
            del self._buffer[oldest]
            self._dropped_batches += 1

    def _drain(self) -> tuple[ItemT, ...]:
        """The items that now follow on what is applied; they count as applied."""
        if not self._buffer:
            return ()
        items: list[ItemT] = []
        for first_seq in sorted(self._buffer):
            if first_seq > self._next_seq:
                break
            batch = self._buffer.pop(first_seq)
            items += batch.items[self._next_seq - first_seq :]
            self._next_seq = max(self._next_seq, batch.next_seq)
        self._applied_events += len(items)
        return tuple(items)


Todo: TypeAlias = StreamTodo[Snapshot, Event]


class WorkerSync(StreamSync[Snapshot, Event]):
    """The order of events of one worker, over all its lives."""

    def on_lease(self, lease: Lease) -> Todo:
        """`on_mention` of the position in `lease`."""
        return self.on_mention(lease.incarnation, lease.next_seq)
