"""Membership: leases of workers, the lives that are over, and a table slot for each live worker."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from mallee.protocol.events import Event, Lease, Snapshot
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.router.sync.streams import StreamSync, StreamTodo

Todo: TypeAlias = StreamTodo[Snapshot, Event]


@dataclass(slots=True)
class Member:
    """One worker with a lease. Owned by the registry; `lease` is the youngest received."""

    worker: WorkerId
    slot: int
    lease: Lease
    heard_at: float
    expires_at: float
    sync: StreamSync[Snapshot, Event]
    is_silent: bool = False  # its lease ran out, and nothing else is heard of it
    is_suspended: bool = False  # it makes no progress with what it has
    is_outdated: bool = False  # another worker has newer weights, or had them

    @property
    def is_routable(self) -> bool:
        """False while it is silent, between the first event of a new life and its lease, if suspended, while
        it drains or changes its weights, and with older weights than others.
        """
        if self.is_silent or self.is_suspended or self.is_outdated:
            return False
        if self.lease.is_draining or self.lease.is_finishing:
            return False
        return self.sync.incarnation == self.lease.incarnation

    @property
    def is_lending(self) -> bool:
        """Whether other workers may borrow its KV: also while it drains or is to change its weights."""
        if self.is_silent or self.is_suspended or self.is_outdated:
            return False
        return self.lease.serves_kv and self.sync.incarnation == self.lease.incarnation

    @property
    def state(self) -> str:
        """The state in one word, for people."""
        if self.is_silent:
            return "silent"
        if self.lease.is_draining:
            return "draining"
        if self.lease.is_finishing:
            return "changing"
        if self.is_outdated:
            return "outdated"
        return "suspect" if self.is_suspended else "ready"


class Registry:
    """Live workers, at most `capacity`. Slots are the lowest free integers, reused after removal.

    `lease_s`: how long a lease lasts. While held (`hold`), no lease runs out.
    """

    def __init__(self, capacity: int, *, lease_s: float, max_buffered: int) -> None:
        self._capacity = capacity
        self._lease_s = lease_s
        self._max_buffered = max_buffered
        self.by_name: dict[WorkerId, Member] = {}
        self._free = list(range(capacity))  # a heap
        self._oldest: OrderedDict[WorkerId, Incarnation] = OrderedDict()
        self._is_held = False

    def __len__(self) -> int:
        return len(self.by_name)

    def __iter__(self) -> Iterator[Member]:
        return iter(self.by_name.values())

    @property
    def is_held(self) -> bool:
        return self._is_held

    def get(self, worker: WorkerId) -> Member | None:
        return self.by_name.get(worker)

    def is_past(self, worker: WorkerId, incarnation: Incarnation) -> bool:
        """Whether this life of `worker` is known to be over."""
        return incarnation < self._oldest.get(worker, incarnation)

    def admit(self, lease: Lease, now: float) -> Member | None:
        """The member with a full lease from `now`; None if all slots are taken."""
        worker = lease.worker
        member = self.by_name.get(worker)
        if member is None:
            if not self._free:
                return None
            sync: StreamSync[Snapshot, Event] = StreamSync(
                max_buffered=self._max_buffered, oldest=self._oldest.get(worker)
            )
            member = Member(worker, heapq.heappop(self._free), lease, now, now, sync)
            self.by_name[worker] = member
        if lease.incarnation != member.lease.incarnation:
            member.is_suspended = False
        member.lease = lease
        member.heard_at = now
        member.expires_at = now + self._lease_s
        member.is_silent = False
        return member

    def remove(self, member: Member) -> None:
        """Remove a member and free its slot. Lives before its youngest stay over."""
        del self.by_name[member.worker]
        heapq.heappush(self._free, member.slot)
        if member.sync.incarnation is not None:
            self._end_before(member.worker, member.sync.incarnation)

    def bury(self, worker: WorkerId, incarnation: Incarnation) -> None:
        """End this life of `worker` for good, and all before it."""
        self._end_before(worker, Incarnation(incarnation + 1))

    def hold(self, is_held: bool, now: float) -> None:
        """Stop leases from running out, or start them again with a full period from `now`."""
        if self._is_held and not is_held:
            for member in self.by_name.values():
                member.expires_at = now + self._lease_s
        self._is_held = is_held

    def has_run_out(self, member: Member, now: float) -> bool:
        """Whether the lease of `member` has run out."""
        return not self._is_held and member.expires_at <= now

    def expire(self, now: float, is_heard: Callable[[Member], bool]) -> list[Member]:
        """Mark members without a lease as silent, unless `is_heard` otherwise; returns those that changed."""
        changed = []
        for member in self:
            is_silent = self.has_run_out(member, now) and not is_heard(member)
            if is_silent != member.is_silent:
                member.is_silent = is_silent
                changed.append(member)
        return changed

    def check(self) -> None:
        """Raises AssertionError unless every slot is either free or of one member."""
        taken = [member.slot for member in self.by_name.values()]
        assert sorted([*taken, *self._free]) == list(range(self._capacity)), "slots don't add up"
        for member in self:
            member.sync.check()
            assert member.lease.worker == member.worker, f"{member.worker} has another's lease"

    def _end_before(self, worker: WorkerId, incarnation: Incarnation) -> None:
        self._oldest[worker] = max(incarnation, self._oldest.get(worker, incarnation))
        self._oldest.move_to_end(worker)
        if len(self._oldest) > 4 * self._capacity:
            self._oldest.popitem(last=False)
