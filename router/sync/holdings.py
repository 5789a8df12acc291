"""Contents of the workers, as their events say: blocks and capsules, by table slot.

A large snapshot is taken in piece by piece (`work`), so that no call blocks its owner for long; events
that follow wait behind it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from msgspec import Struct, field

from mallee.protocol.events import BlockEvent, Cleared, Event, Snapshot, Stored, unpack_hashes
from mallee.protocol.hashing import Hashes
from mallee.protocol.ids import CapsuleId, WorkerId
from mallee.protocol.model import WeightVersion
from mallee.router.index.capsules import CapsuleDirectory
from mallee.router.index.index import PrefixIndex
from mallee.router.index.windows import WindowIndex

CHUNK = 2048  # blocks of a snapshot that are taken in at once: about 0.1 ms
_EVENTS_AT_ONCE = 256  # of those that waited for a snapshot
_MAX_RECENT = 65_536  # blocks remembered for the watches of a worker


class _Chunk(NamedTuple):
    """A piece of a snapshot."""

    hashes: Hashes
    tier: int
    group: int = 0


class _Backlog(Struct):
    """One worker's messages that wait to be taken in, in order."""

    worker: WorkerId
    queue: deque[_Chunk | Event] = field(default_factory=deque)


class _Recent(Struct):
    """The last runs that a watched worker stored, numbered on."""

    watchers: int = 0
    num_blocks: int = 0
    first: int = 0  # number of the oldest run that is kept
    runs: deque[Hashes] = field(default_factory=deque)

    def add(self, hashes: Hashes) -> None:
        self.runs.append(hashes)
        self.num_blocks += len(hashes)
        while self.num_blocks > _MAX_RECENT:
            self.num_blocks -= len(self.runs.popleft())
            self.first += 1


class Watch(Struct, frozen=True):
    """Remembers what a worker stores from a moment on; ends with `Holdings.unwatch`."""

    slot: int
    recent: _Recent
    position: int

    def not_stored(self, hashes: Hashes) -> Hashes:
        """Those of `hashes` that the worker did not store since then; none if that is too long ago."""
        recent = self.recent
        if self.position < recent.first:
            return hashes[:0]
        runs = list(islice(recent.runs, self.position - recent.first, None))
        return hashes[~np.isin(hashes, np.concatenate(runs))] if runs else hashes


class Holdings:
    """Blocks and capsules of the workers in slots 0 .. num_workers - 1."""

    def __init__(
        self,
        num_workers: int,
        *,
        max_capsules: int,
        max_nbytes: int,
        clock: Callable[[], float],
    ) -> None:
        self.index = PrefixIndex(num_workers, max_nbytes=max_nbytes)
        self.windows = WindowIndex(num_workers, max_nbytes)
        self.capsules = CapsuleDirectory(max_capsules)
        self.num_events = 0  # taken in, or behind a snapshot that is
        self._clock = clock
        self._backlog: dict[int, _Backlog] = {}
        self._recent: dict[int, _Recent] = {}

    @property
    def backlog_blocks(self) -> int:
        """Blocks of snapshots that wait to be taken in."""
        waiting = (each for backlog in self._backlog.values() for each in backlog.queue)
        return sum(len(each.hashes) for each in waiting if isinstance(each, _Chunk))

    def apply(self, slot: int, worker: WorkerId, events: Sequence[Event]) -> None:
        """Take in `events` of `worker`, in order, after all messages of it before."""
        self.num_events += len(events)
        if slot in self._backlog:
            self._backlog[slot].queue.extend(events)
        else:
            self._apply(slot, worker, events)

    def replace(self, slot: int, worker: WorkerId, snapshot: Snapshot, *, asked_at: float) -> None:
        """Replace `worker`'s contents by `snapshot`, but keep capsules learned since `asked_at`."""
        self.index.clear(slot)
        self.windows.clear(slot)
        self._backlog.pop(slot, None)
        parts = [(tier, 0, raw) for tier, raw in enumerate(snapshot.by_tier)]
        parts += [(0, group, raw) for group, raw in enumerate(snapshot.windows, 1)]
        for tier, group, raw in parts:
            hashes = unpack_hashes(raw)
            if slot not in self._backlog and len(hashes) <= CHUNK:
                self._store(slot, hashes, tier, group)
                continue
            self.index.set_loading(slot, True)
            backlog = self._backlog.setdefault(slot, _Backlog(worker))
            chunks = (hashes[start : start + CHUNK] for start in range(0, len(hashes), CHUNK))
            backlog.queue.extend(_Chunk(chunk, tier, group) for chunk in chunks)
        # A capsule learned on the reply path after the question was sent may be younger than the answer.
        held = {CapsuleId(capsule.capsule) for capsule in snapshot.capsules}
        self.capsules.drop_older(worker, created_before=asked_at, keep=held)
        for capsule in snapshot.capsules:
            self.capsules.apply(worker, capsule, created=self._clock())

    def forget(self, slot: int, worker: WorkerId, weights: WeightVersion | None = None) -> None:
        """Forget what `worker`, a life of which with these weights is over, holds, and messages that wait."""
        self._backlog.pop(slot, None)
        self._recent.pop(slot, None)
        self.index.clear(slot)
        self.windows.clear(slot)
        self.capsules.drop_worker(worker, self._clock(), weights)

    def work(self, max_blocks: int) -> bool:
        """Take in so much more of waiting snapshots, sweep a little. True: there is more to do."""
        while max_blocks > 0 and self._backlog:
            max_blocks -= self._work_off(next(iter(self._backlog)))
        return self.index.work() | self.windows.work() or bool(self._backlog)

    def repair(self, slot: int, hashes: Hashes) -> int:
        """The worker turned out not to go on after these blocks, as far as it holds them; how many they were.

        Of one with windows it is they that lack: the other layers' blocks it tells of itself.
        """
        if slot in self.windows.by_worker:
            return self.windows.forget(slot, hashes)
        return self.index.repair(slot, hashes)

    def watch(self, slot: int) -> Watch:
        """Blocks that this worker stores are remembered from here on, until `unwatch`."""
        recent = self._recent.get(slot)
        if recent is None:
            recent = self._recent[slot] = _Recent()
        recent.watchers += 1
        return Watch(slot, recent, recent.first + len(recent.runs))

    def unwatch(self, watch: Watch) -> None:
        """End a watch; without another one, nothing is remembered."""
        watch.recent.watchers -= 1
        if not watch.recent.watchers and self._recent.get(watch.slot) is watch.recent:
            del self._recent[watch.slot]

    def check(self) -> None:
        """Raises AssertionError on a broken invariant of either part."""
        self.index.check()
        self.windows.check()
        self.capsules.check()

    def _apply(self, slot: int, worker: WorkerId, events: Sequence[Event]) -> None:
        """Neighbours of one kind, tier and group go to the index together."""
        start, num_events = 0, len(events)
        while start < num_events:
            event, end = events[start], start + 1
            if isinstance(event, BlockEvent):
                kind, tier, group, runs = type(event), event.tier, event.group, [event.hashes]
                while end < num_events:
                    after = events[end]
                    if type(after) is not kind or after.tier != tier or after.group != group:
                        break
                    runs.append(after.hashes)
                    end += 1
                change = self._store if kind is Stored else self._remove
                change(slot, unpack_hashes(b"".join(runs)), tier, group)
            elif isinstance(event, Cleared):
                self.index.clear(slot)
                self.windows.clear(slot)
                self.capsules.drop_worker(worker, self._clock())
            else:
                self.capsules.apply(worker, event, created=self._clock())
            start = end

    def _remove(self, slot: int, hashes: Hashes, tier: int, group: int) -> None:
        if group:
            self.windows.remove(slot, hashes, group)
        else:
            self.index.remove(slot, hashes, tier)

    def _store(self, slot: int, hashes: Hashes, tier: int, group: int) -> None:
        if group:
            self.windows.store(slot, hashes, group)
        else:
            self.index.store(slot, hashes, tier)
        if self._recent and slot in self._recent:
            self._recent[slot].add(hashes)

    def _work_off(self, slot: int) -> int:
        """Take in the next piece of a snapshot, or the events that waited for it; how many blocks."""
        backlog = self._backlog[slot]
        first = backlog.queue[0] if backlog.queue else None
        if isinstance(first, _Chunk):
            backlog.queue.popleft()
            self._store(slot, first.hashes, first.tier, first.group)
            return len(first.hashes)
        self.index.set_loading(slot, False)
        events: list[Event] = []
        while backlog.queue and len(events) < _EVENTS_AT_ONCE:
            event = backlog.queue.popleft()
            assert not isinstance(event, _Chunk), "a snapshot behind its own events"
            events.append(event)
        self._apply(slot, backlog.worker, events)
        if not backlog.queue:
            del self._backlog[slot]
        return 1 + len(events)
