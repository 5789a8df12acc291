"""What workers say of themselves, taken in: leases, events, snapshots, deaths.

Keeps the index, the capsule directory and the slots true to the youngest life of each worker. Needs
a lease before anything else: events of a worker without one are ignored, since the lease that
follows says how many there were and so reveals them as a gap.
"""

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from mallee.protocol.events import (
    CapsuleReleased,
    CapsuleStored,
    Cleared,
    Event,
    EventBatch,
    Lease,
    Removed,
    Snapshot,
    Stored,
    unpack_hashes,
)
from mallee.protocol.ids import CapsuleId, Incarnation, RequestId, WorkerId
from mallee.router.capsules import CapsuleDirectory
from mallee.router.index import PrefixIndex
from mallee.router.records import RouterConfig
from mallee.router.registry import Member, Registry
from mallee.router.slots import SlotTracker
from mallee.router.sync import Todo


class Fleet:
    """The live workers, what they hold and what is booked on them."""

    def __init__(self, config: RouterConfig, *, clock: Callable[[], float]) -> None:
        self.index = PrefixIndex(config.max_workers)
        self.slots = SlotTracker(config.max_workers)
        self.capsules = CapsuleDirectory(config.max_capsules)
        self.members = Registry(
            config.max_workers, lease_s=config.lease_s, max_buffered=config.max_buffered_batches
        )
        # Per table slot; 0 where no request may go. Only [:width] is ever non-zero.
        self.room: npt.NDArray[np.int64] = np.zeros(config.max_workers, dtype=np.int64)
        self.by_slot: list[Member | None] = [None] * config.max_workers
        self.width = 0
        self.ignored_messages = 0
        self.refused_leases = 0
        self.last_refusal = ""
        self._orphans: dict[RequestId, tuple[WorkerId, Incarnation]] = {}
        self._block_size = config.block_size
        self._clock = clock

    @property
    def num_orphans(self) -> int:
        return len(self._orphans)

    def on_lease(self, lease: Lease) -> bool:
        """Take in `lease`; True if the worker must be asked for a snapshot."""
        worker, incarnation = WorkerId(lease.worker), Incarnation(lease.incarnation)
        if self._is_past(worker, incarnation):
            self.ignored_messages += 1
            return False
        if lease.is_leaving:
            self.bury(worker, incarnation)
            return False
        if lease.block_size != self._block_size:
            return self._refuse(
                f"{worker} has block size {lease.block_size}, the router {self._block_size}"
            )
        if lease.num_blocks < 1:
            return self._refuse(f"{worker} has {lease.num_blocks} KV blocks")
        known = self.members.get(worker)
        if known is not None and known.sync.incarnation != incarnation:
            self._end_life(known)  # before its lease is replaced: orphans name the life they lost
        member = self.members.admit(lease, self._clock())
        if member is None:
            return self._refuse(f"{worker} is one more than max_workers={len(self.by_slot)}")
        self.by_slot[member.slot] = member
        return self._do(member, member.sync.on_lease(lease))

    def on_events(self, batch: EventBatch) -> bool:
        """Take in `batch`; True if the worker must be asked for a snapshot.

        Raises CodecError, and changes nothing, if a hash run is not whole numbers long.
        """
        _check_runs(batch.events)
        member = self._member(batch.worker, batch.incarnation)
        return member is not None and self._do(member, member.sync.on_batch(batch))

    def on_snapshot(self, snapshot: Snapshot, asked_at: float) -> bool:
        """Take in `snapshot`, asked for at `asked_at`; True if events are still missing.

        Raises CodecError as `on_events`.
        """
        unpack_hashes(snapshot.hashes)
        _check_runs(snapshot.capsules)
        member = self._member(snapshot.worker, snapshot.incarnation)
        if member is None:
            return False
        return self._do(member, member.sync.on_snapshot(snapshot), asked_at)

    def expire(self) -> list[WorkerId]:
        """Workers whose lease has just run out get no requests until the next one; returns them.

        What is known of them and booked on them stays: only their link tells whether they live.
        """
        expired = self.members.expire(self._clock())
        for member in expired:
            self.room[member.slot] = 0
        return [member.worker for member in expired]

    def detach(self, worker: WorkerId, incarnation: Incarnation) -> None:
        """This life can't be reached now: it is forgotten until its next lease."""
        member = self.members.get(worker)
        if member is not None and member.lease.incarnation == incarnation:
            self._remove(member)

    def bury(self, worker: WorkerId, incarnation: Incarnation) -> None:
        """This life and those before it are over for good."""
        self.members.bury(worker, incarnation)
        member = self.members.get(worker)
        if member is not None and (member.sync.incarnation or 0) <= incarnation:
            self._remove(member)

    def take_orphans(self, worker: WorkerId, incarnation: Incarnation) -> list[RequestId]:
        """Requests of lives of `worker` up to this one that are over; each is returned once."""
        found = [
            request
            for request, (of, life) in self._orphans.items()
            if of == worker and life <= incarnation
        ]
        for request in found:
            del self._orphans[request]
        return sorted(found)

    def drop_orphan(self, request: RequestId) -> bool:
        """`request` is no orphan. False if it was none."""
        return self._orphans.pop(request, None) is not None

    def free(self, request: RequestId) -> bool:
        """`request` is booked nowhere. False (and counted) if it was not before."""
        return self.drop_orphan(request) or self.slots.free(request)

    def check(self) -> None:
        """Raises AssertionError on a broken invariant of any part, or between parts."""
        for part in (self.index, self.slots, self.capsules, self.members):
            part.check()
        for slot, member in enumerate(self.by_slot):
            if member is None:
                assert not self.index.num_held(slot), f"blocks in empty slot {slot}"
                assert not self.slots.requests(slot), f"requests in empty slot {slot}"
                assert not self.room[slot], f"empty slot {slot} has room"
            else:
                assert member.slot == slot < self.width, f"{member.worker} is misfiled"
                assert bool(self.room[slot]) == member.is_routable, f"{member.worker}'s room"
        for request in self._orphans:
            assert request not in self.slots, f"{request} is booked and orphaned"

    def _member(self, worker: str, incarnation: int) -> Member | None:
        if not self._is_past(WorkerId(worker), Incarnation(incarnation)):
            member = self.members.get(WorkerId(worker))
            if member is not None:
                return member
        self.ignored_messages += 1
        return None

    def _is_past(self, worker: WorkerId, incarnation: Incarnation) -> bool:
        member = self.members.get(worker)
        youngest = incarnation if member is None else member.sync.incarnation or 0
        return incarnation < youngest or self.members.is_past(worker, incarnation)

    def _refuse(self, reason: str) -> bool:
        self.refused_leases += 1
        self.last_refusal = reason
        return False

    def _do(self, member: Member, todo: Todo, asked_at: float = 0.0) -> bool:
        if todo.clear:
            self._end_life(member)
        if todo.snapshot is not None:
            self._replace(member, todo.snapshot, asked_at)
        for event in todo.events:
            self._apply(member, event)
        self.room[member.slot] = member.lease.num_blocks if member.is_routable else 0
        self.width = max(self.width, member.slot + 1)
        return todo.needs_snapshot

    def _apply(self, member: Member, event: Event) -> None:
        match event:
            case Stored():
                hashes = unpack_hashes(event.hashes)
                self.index.store(member.slot, hashes)
                self.slots.confirm(member.slot, hashes.tolist())
            case Removed():
                self.index.remove(member.slot, unpack_hashes(event.hashes))
            case Cleared():
                self.index.clear(member.slot)
                self.capsules.drop_worker(member.worker)
            case CapsuleStored() | CapsuleReleased():
                self.capsules.apply(member.worker, event, created=self._clock())

    def _replace(self, member: Member, snapshot: Snapshot, asked_at: float) -> None:
        hashes = unpack_hashes(snapshot.hashes)
        self.index.clear(member.slot)
        self.index.store(member.slot, hashes)
        self.slots.confirm(member.slot, hashes.tolist())
        # A capsule learned on the reply path after the question was sent may be younger than the answer.
        held = {CapsuleId(capsule.capsule) for capsule in snapshot.capsules}
        self.capsules.drop_older(member.worker, created_before=asked_at, keep=held)
        for capsule in snapshot.capsules:
            self.capsules.apply(member.worker, capsule, created=self._clock())

    def _end_life(self, member: Member) -> None:
        life = Incarnation(member.lease.incarnation)
        for request in self.slots.drop_worker(member.slot):
            self._orphans[request] = (member.worker, life)
        self.index.clear(member.slot)
        self.capsules.drop_worker(member.worker)
        self.room[member.slot] = 0

    def _remove(self, member: Member) -> None:
        self._end_life(member)
        self.members.remove(member)
        self.by_slot[member.slot] = None
        self.width = max((each.slot + 1 for each in self.members), default=0)


def _check_runs(events: Iterable[Event]) -> None:
    for event in events:
        match event:
            case Stored() | Removed() | CapsuleStored():
                unpack_hashes(event.hashes)
            case Cleared() | CapsuleReleased():
                pass
