"""Puts a numbered stream in order after losses, repetitions and swaps by the broker.

One machine for two streams: a worker's events (`router.sync.members`) and a gateway's bookings
(`router.sync.replicas`). Pure state: it returns what to do and touches no index. Two numbers describe a life
of a sender as seen from here: `next_seq`, the first item not taken in, and `known_seq`, the largest
next_seq that any message mentioned. They differ exactly while something is missing. Then batches wait in
a bounded buffer until the gap closes by itself (reordering) or a snapshot jumps over it (loss, late
join). A life starts at item 0 with nothing, so its first batch needs no snapshot.
"""

from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

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


class StreamSync(Generic[SnapshotT, ItemT]):
    """The order of items of one sender, over all its lives.

    `oldest`: lives before this one are ignored from the start.
    """

    def __init__(self, *, max_buffered: int = 256, oldest: Incarnation | None = None) -> None:
        if max_buffered < 1:
            raise ValueError(f"max_buffered={max_buffered}: must be at least 1")
        self._max_buffered = max_buffered
        self._oldest = oldest
        self.incarnation: Incarnation | None = None  # the youngest life known
        self.gaps = 0  # times that items turned out to be missing
        self.stale_messages = 0  # of older lives, or snapshots older than what is applied
        self._next_seq = 0
        self._known_seq = 0
        self._buffer: dict[int, StreamBatch[ItemT]] = {}  # by first_seq

    @property
    def is_whole(self) -> bool:
        """Whether everything known to have happened is taken in."""
        return self._next_seq == self._known_seq

    def advance(self, batch: StreamBatch[ItemT]) -> bool:
        """Take in `batch` if it is just what comes next, as it usually is. Else False, and no change."""
        expected = self._next_seq
        if batch.first_seq != expected or self._known_seq != expected:
            return False
        if batch.incarnation != self.incarnation:
            return False
        self._next_seq = self._known_seq = batch.next_seq
        return True

    def on_batch(self, batch: StreamBatch[ItemT]) -> StreamTodo[SnapshotT, ItemT]:
        """Take in `batch`. Asks for a snapshot once, when it reveals a gap; mentions ask again."""
        clear = self._adopt(Incarnation(batch.incarnation))
        if clear is None:
            return StreamTodo()
        next_seq = batch.next_seq
        if next_seq <= self._next_seq:
            return StreamTodo(clear)
        if self.advance(batch):
            return StreamTodo(clear, None, tuple(batch.items))
        was_whole = self.is_whole
        self._known_seq = max(self._known_seq, next_seq)
        self._keep(batch)
        events = self._drain()
        has_new_gap = was_whole and not self.is_whole
        self.gaps += has_new_gap
        return StreamTodo(clear, None, events, has_new_gap)

    def on_snapshot(self, snapshot: SnapshotT) -> StreamTodo[SnapshotT, ItemT]:
        """Take in `snapshot` unless more is applied already; then what waited for it."""
        clear = self._adopt(Incarnation(snapshot.incarnation))
        if clear is None:
            return StreamTodo()
        if snapshot.next_seq < self._next_seq:
            self.stale_messages += 1
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
        self.gaps += was_whole and not self.is_whole
        return StreamTodo(clear, needs_snapshot=not self.is_whole)

    def check(self) -> None:
        """Raises AssertionError on an impossible state."""
        assert 0 <= self._next_seq <= self._known_seq, f"{self._next_seq} > {self._known_seq}"
        assert len(self._buffer) <= self._max_buffered, f"{len(self._buffer)} batches buffered"
        for first_seq, batch in self._buffer.items():
            assert first_seq == batch.first_seq > self._next_seq, "an applicable batch waits"
            assert batch.incarnation == self.incarnation, "a batch of another life waits"
            assert batch.next_seq <= self._known_seq, "an unknown batch waits"

    def _adopt(self, incarnation: Incarnation) -> bool | None:
        """True: a new life began. False: the life at hand. None: a past life, to be ignored."""
        current = self.incarnation
        if current == incarnation:
            return False
        oldest = self._oldest if current is None else current
        if oldest is not None and incarnation < oldest:
            self.stale_messages += 1
            return None
        self.incarnation = incarnation
        self._next_seq = self._known_seq = 0
        self._buffer.clear()
        return True

    def _keep(self, batch: StreamBatch[ItemT]) -> None:
        held = self._buffer.get(batch.first_seq)
        if held is not None and held.next_seq >= batch.next_seq:
            return
        self._buffer[batch.first_seq] = batch
        if len(self._buffer) > self._max_buffered:
            # The snapshot on its way covers the oldest; the newest are what it won't.
            applicable = batch.first_seq <= self._next_seq
            oldest = max(self._buffer) if applicable else min(self._buffer)
            del self._buffer[oldest]

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
        return tuple(items)
