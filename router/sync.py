"""Puts one worker's event stream in order, whatever the broker lost, repeated or swapped.

Pure state: it says what to do and touches no index. Two numbers describe a life of a worker as seen
from here: `next_seq`, the first event not taken in, and `known_seq`, the largest next_seq that
anybody mentioned. They differ exactly while something is missing. Then batches wait in a bounded
buffer until the gap closes by itself (reordering) or a snapshot jumps over it (loss, late join).
A life starts at event 0 with an empty worker, so its first batch needs no snapshot.
"""

from dataclasses import dataclass
from typing import NamedTuple

from mallee.protocol.events import Event, EventBatch, Lease, Snapshot
from mallee.protocol.ids import Incarnation


class Todo(NamedTuple):
    """What the caller does now, in this order."""

    clear: bool = False  # forget all of this worker
    snapshot: Snapshot | None = None  # then replace all of it by this
    events: tuple[Event, ...] = ()  # then apply these
    needs_snapshot: bool = False  # then ask the worker for one


@dataclass(frozen=True, slots=True)
class SyncStats:
    """Where the stream is, and what happened to its messages since birth."""

    incarnation: Incarnation | None
    next_seq: int
    known_seq: int
    buffered: int
    applied_events: int
    duplicate_batches: int
    stale_messages: int  # of older lives, or snapshots older than what is applied
    gaps: int
    dropped_batches: int  # for lack of buffer


class WorkerSync:
    """The order of events of one worker, over all its lives.

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
        self._buffer: dict[int, EventBatch] = {}  # by first_seq
        self._applied_events = 0
        self._duplicate_batches = 0
        self._stale_messages = 0
        self._gaps = 0
        self._dropped_batches = 0

    @property
    def incarnation(self) -> Incarnation | None:
        """The youngest life heard of; None before any."""
        return self._incarnation

    @property
    def is_whole(self) -> bool:
        """Whether everything known to have happened is taken in."""
        return self._next_seq == self._known_seq

    def on_batch(self, batch: EventBatch) -> Todo:
        """Take in `batch`. Asks for a snapshot once, when it reveals a gap; leases ask again."""
        clear = self._adopt(Incarnation(batch.incarnation))
        if clear is None:
            return Todo()
        if batch.next_seq <= self._next_seq:
            self._duplicate_batches += bool(batch.events)
            return Todo(clear)
        was_whole = self.is_whole
        self._known_seq = max(self._known_seq, batch.next_seq)
        self._keep(batch)
        events = self._drain()
        has_new_gap = was_whole and not self.is_whole
        self._gaps += has_new_gap
        return Todo(clear, None, events, has_new_gap)

    def on_snapshot(self, snapshot: Snapshot) -> Todo:
        """Take in `snapshot` unless more is applied already; then what waited for it."""
        clear = self._adopt(Incarnation(snapshot.incarnation))
        if clear is None:
            return Todo()
        if snapshot.next_seq < self._next_seq:
            self._stale_messages += 1
            return Todo(clear, needs_snapshot=not self.is_whole)
        self._next_seq = snapshot.next_seq
        self._known_seq = max(self._known_seq, snapshot.next_seq)
        events = self._drain()
        return Todo(clear, snapshot, events, not self.is_whole)

    def on_lease(self, lease: Lease) -> Todo:
        """Compare with what the worker says it has sent; asks for a snapshot while any is missing."""
        clear = self._adopt(Incarnation(lease.incarnation))
        if clear is None:
            return Todo()
        was_whole = self.is_whole
        self._known_seq = max(self._known_seq, lease.next_seq)
        self._gaps += was_whole and not self.is_whole
        return Todo(clear, needs_snapshot=not self.is_whole)

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

    def _keep(self, batch: EventBatch) -> None:
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

    def _drain(self) -> tuple[Event, ...]:
        """The events that now follow on what is applied; they count as applied."""
        if not self._buffer:
            return ()
        events: list[Event] = []
        for first_seq in sorted(self._buffer):
            if first_seq > self._next_seq:
                break
            batch = self._buffer.pop(first_seq)
            events += batch.events[self._next_seq - first_seq :]
            self._next_seq = max(self._next_seq, batch.next_seq)
        self._applied_events += len(events)
        return tuple(events)
