"""The fleet as its messages describe it: leases, events, snapshots, deaths.

Keeps the index, the capsule directory and the slots true to the youngest life of each worker. Needs
a lease before anything else: events of a worker without one are ignored, since the lease that
follows has their number and so reveals them as a gap.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import xxhash
from msgspec.structs import replace

from mallee.protocol.bookings import Booked
from mallee.protocol.events import (
    EventBatch,
    FetchPrices,
    Lease,
    Load,
    Snapshot,
    unpack_hashes,
)
from mallee.protocol.hashing import Hashes
from mallee.protocol.ids import Incarnation, RequestId, WorkerId
from mallee.protocol.model import BASE_WEIGHTS, WeightVersion
from mallee.router.config import RouterConfig
from mallee.router.load import layout
from mallee.router.load.predictions import Predictions
from mallee.router.load.slots import SlotTracker
from mallee.router.sync.holdings import Holdings
from mallee.router.sync.members import Member, Registry, Todo

WARM_UP_S: Final = 60.0  # a worker that joins a running fleet is new for so long
PREDICTION_S: Final = 120.0  # a prompt counts as held by a worker whose events don't arrive
_ASSEMBLY_LEASES: Final = (
    3  # leases that a starting fleet may take to gather; later workers are new
)
_MAX_CAPSULES: Final = 65_536
_MAX_BUFFERED: Final = 256  # batches per worker, while a snapshot is awaited


class Fleet:
    """The live workers, what they hold and what is booked on them."""

    def __init__(self, config: RouterConfig, *, clock: Callable[[], float]) -> None:
        self.holdings = Holdings(
            config.max_workers,
            max_capsules=_MAX_CAPSULES,
            max_nbytes=config.max_index_nbytes,
            clock=clock,
        )
        self.index = self.holdings.index
        self.capsules = self.holdings.capsules
        self.slots = SlotTracker(
            config.max_workers,
            prefill_token_s=config.cost.prefill_token_s,
            booking_s=config.booking_s,
        )
        self.predictions = Predictions(config.max_workers, ttl_s=PREDICTION_S)
        self.members = Registry(
            config.max_workers, lease_s=config.lease_s, max_buffered=_MAX_BUFFERED
        )
        self.names: tuple[WorkerId | None, ...] = ()  # by slot, replaced when one comes or goes
        self.remote: set[RequestId] = set()  # booked by other gateways
        self.past_gaps = 0  # of members that left
        self.name_digests: Hashes = np.zeros(config.max_workers, np.uint64)  # by slot
        self.by_slot: list[Member | None] = [None] * config.max_workers
        self.width = 0
        self.weights = BASE_WEIGHTS  # the newest that a lease told of: older ones get no requests
        self.warm_until = 0.0  # until then some worker is new
        self.num_lending = 0  # workers that lend and borrow KV
        self._lent: tuple[str, WeightVersion] | None = None  # of which fingerprint and weights
        self.ignored_messages = 0
        self.refused_leases = 0
        self.last_refusal = ""
        self.orphans: dict[RequestId, tuple[WorkerId, Incarnation]] = {}  # whose workers are lost
        self._lease_s = config.lease_s
        self._running_since = 0.0
        self._kv_events = config.kv_events
        self._block_size = config.block_size
        self._spill = config.spill
        self._clock = clock

    def on_lease(self, lease: Lease) -> bool:
        """Take in `lease`; True if a snapshot of the worker is needed."""
        worker, incarnation = lease.worker, lease.incarnation
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
        is_new_life = known is None or known.lease.incarnation != incarnation
        now = self._clock()
        heard_at = 0.0 if known is None else known.heard_at
        member = self.members.admit(lease, now)
        if member is None:
            return self._refuse(f"{worker} is one more than max_workers={len(self.by_slot)}")
        if self.by_slot[member.slot] is not member:
            self.by_slot[member.slot] = member
            self.name_digests[member.slot] = xxhash.xxh3_64_intdigest(worker.encode())
            self._rename()
        needs_snapshot = self._do(member, member.sync.on_mention(incarnation, lease.next_seq))
        if is_new_life:
            self._begin_life(member, now)
        if lease.load is not None:
            load = lease.load
            self.slots.report(
                member.slot,
                rows=load.rows + load.waiting,
                prefill_tokens=load.prefill_tokens,
                active_blocks=load.active_blocks,
            )
            if load.fetch is not None:
                self.slots.price_fetches(member.slot, self._priced(load.fetch, load))
        self._compare_weights(member)
        if lease.kv_events and not needs_snapshot:
            # Its event was lost, or it is gone: a reply can be slower than both events.
            needs_snapshot = self.capsules.has_unannounced(worker, created_before=heard_at)
        return needs_snapshot and self._kv_events

    def _priced(self, fetch: FetchPrices, load: Load) -> FetchPrices:
        """`fetch` with a price of pulls also before the worker has measured one: by its blocks' bytes.

        What comes with any text, windows and states, is in the time of the first block.
        """
        if not fetch.peer_block_s and load.block_nbytes:
            block_s = load.block_nbytes * self._spill.migrate_byte_s
            latency_s = self._spill.migrate_latency_s
            fetch = replace(fetch, peer_first_s=latency_s, peer_block_s=block_s)
        if not (num := load.side_blocks):
            return fetch
        return replace(
            fetch,
            host_first_s=fetch.host_first_s + num * fetch.host_block_s,
            disk_first_s=fetch.disk_first_s + num * fetch.disk_block_s,
            peer_first_s=fetch.peer_first_s + num * fetch.peer_block_s,
        )

    def on_events(self, batch: EventBatch) -> bool:
        """Take in `batch`; True if a snapshot of the worker is needed."""
        if not self._kv_events:
            return False
        member = self.members.get(batch.worker)
        if member is not None and member.sync.advance(batch):
            self.holdings.apply(member.slot, member.worker, batch.events)
            return False
        member = self._member(batch.worker, batch.incarnation)
        return member is not None and self._do(member, member.sync.on_batch(batch))

    def on_snapshot(self, snapshot: Snapshot, asked_at: float) -> bool:
        """Take in `snapshot`, requested at `asked_at`; True if events are still missing."""
        if not self._kv_events:
            return False
        member = self._member(snapshot.worker, snapshot.incarnation)
        if member is None:
            return False
        return self._do(member, member.sync.on_snapshot(snapshot), asked_at)

    def expire(self, is_heard: Callable[[WorkerId, Incarnation], bool]) -> list[WorkerId]:
        """As `Router.expire_leases`. A worker's report does not outlast a lease, however it is heard."""
        now = self._clock()
        if self.slots.loads[layout.LOAD_EXTRA_ROWS : layout.LOAD_EXTRA_PREFILL + 1].any():
            for member in self.members:
                if member.heard_at + self._lease_s <= now:
                    self.slots.report(member.slot, rows=0, prefill_tokens=0, active_blocks=0)
        changed = self.members.expire(now, lambda m: is_heard(m.worker, m.lease.incarnation))
        for member in changed:
            self._set_room(member)
        return [member.worker for member in changed if member.is_silent]

    def suspend(self, worker: WorkerId, incarnation: Incarnation, *, is_suspended: bool) -> None:
        """Take a life out of routing, or back; ignored if it is not here."""
        member = self.members.get(worker)
        if member is not None and member.lease.incarnation == incarnation:
            member.is_suspended = is_suspended
            self._set_room(member)

    def detach(self, worker: WorkerId, incarnation: Incarnation) -> None:
        """Forget a life that can't be reached now, until its next lease."""
        member = self.members.get(worker)
        if member is not None and member.lease.incarnation == incarnation:
            self._remove(member)

    def bury(self, worker: WorkerId, incarnation: Incarnation) -> None:
        """End this life and those before it for good."""
        self.members.bury(worker, incarnation)
        member = self.members.get(worker)
        if member is not None and (member.sync.incarnation or 0) <= incarnation:
            self._remove(member)

    def take_orphans(self, worker: WorkerId, incarnation: Incarnation) -> list[RequestId]:
        """Requests of lives of `worker` up to this one that are over; each is returned once."""
        found = [
            request
            for request, (of, life) in self.orphans.items()
            if of == worker and life <= incarnation
        ]
        for request in found:
            del self.orphans[request]
        return sorted(found)

    def is_known(self, request: RequestId) -> bool:
        """Whether `request` is booked, or lost its worker and was not returned by `take_orphans` yet."""
        return request in self.slots.bookings or request in self.orphans

    def free(self, request: RequestId) -> bool:
        """End the booking of `request`. False if there was none."""
        self.remote.discard(request)
        is_orphan = self.orphans.pop(request, None) is not None
        return is_orphan or self.slots.free(request, self._clock())

    def predict(self, member: Member, waypoints: Hashes, num_blocks: int, now: float) -> None:
        """Predict that `member` will hold a prompt, if its events don't arrive."""
        has_events = member.lease.kv_events and self._kv_events
        if not has_events or self.members.is_held or self.members.has_run_out(member, now):
            self.predictions.add(
                member.slot, waypoints, num_blocks, capacity=member.lease.num_blocks, now=now
            )

    @contextmanager
    def only(self, workers: Sequence[WorkerId]) -> Iterator[None]:
        """Within it a decision finds room on these workers alone."""
        room = self.slots.loads[layout.LOAD_ROOM]
        members = (self.members.get(worker) for worker in workers)
        slots = [member.slot for member in members if member is not None]
        kept = room.copy()
        room[:] = 0
        room[slots] = kept[slots]
        try:
            yield
        finally:
            room[:] = kept

    @property
    def num_incomplete(self) -> int:
        """Workers with events known to be missing."""
        if not self._kv_events:
            return 0
        return sum(not member.sync.is_whole for member in self.members)

    @property
    def num_unleased(self) -> int:
        """Workers without a lease that are heard otherwise."""
        now = self._clock()
        return sum(self.members.has_run_out(m, now) and not m.is_silent for m in self.members)

    @property
    def num_gaps(self) -> int:
        """Times that events turned out to be missing, since birth."""
        return self.past_gaps + sum(member.sync.gaps for member in self.members)

    def book_remote(self, booking: Booked, now: float) -> bool:
        """Count another gateway's `booking`. False, and nothing changed, if that life is unknown."""
        member = self.members.get(WorkerId(booking.worker))
        request = RequestId(booking.request)
        if member is None or member.sync.incarnation != booking.incarnation:
            return False
        if request not in self.slots.bookings:
            self.slots.book(
                request,
                member.slot,
                unpack_hashes(booking.waypoints),
                num_blocks=booking.num_blocks,
                own_blocks=booking.own_blocks,
                prefill_tokens=booking.prefill_tokens,
                rows=booking.rows,
                now=now,
            )
            self.remote.add(request)
            self.predict(member, unpack_hashes(booking.waypoints), booking.num_blocks, now)
        return True

    def free_remote(self, request: RequestId) -> bool:
        """End the booking of another gateway's `request`. False if there was none."""
        if request not in self.remote:
            return False
        self.remote.discard(request)
        return self.slots.free(request, self._clock())

    def work(self, max_blocks: int) -> bool:
        """Take in so much more of waiting snapshots, sweep a little. True: there is more to do."""
        return self.holdings.work(max_blocks) | self.slots.work() | self.predictions.work()

    def check(self) -> None:
        """Raises AssertionError on a broken invariant of any part, or between parts."""
        for part in (self.holdings, self.slots, self.members, self.predictions):
            part.check()
        room, lends = self.slots.loads[layout.LOAD_ROOM], self.slots.loads[layout.LOAD_LENDS]
        for slot, member in enumerate(self.by_slot):
            if member is None:
                assert not self.index.num_held(slot), f"blocks in empty slot {slot}"
                assert not self.slots.requests(slot), f"requests in empty slot {slot}"
                assert not room[slot], f"empty slot {slot} has room"
                assert not lends[slot], f"empty slot {slot} lends"
            else:
                assert member.slot == slot < self.width, f"{member.worker} is misfiled"
                assert bool(room[slot]) == member.is_routable, f"{member.worker}'s room"
                assert member.is_lending or not lends[slot], f"{member.worker} lends nothing"
        assert len(self.names) == self.width, "names"
        assert self.num_lending == lends.sum(), "workers that lend"
        for request in self.orphans:
            assert request not in self.slots.bookings, f"{request} is booked and orphaned"
        for request in self.remote:
            assert request in self.slots.bookings, f"remote {request} is not booked"

    def _member(self, worker: WorkerId, incarnation: Incarnation) -> Member | None:
        if not self._is_past(worker, incarnation):
            member = self.members.get(worker)
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
            self.holdings.replace(member.slot, member.worker, todo.snapshot, asked_at=asked_at)
        if todo.events:
            self.holdings.apply(member.slot, member.worker, todo.events)
        if todo.clear:
            self._set_room(member)
        return todo.needs_snapshot

    def _compare_weights(self, member: Member) -> None:
        """Route to the newest weights alone, also when no worker has them any more."""
        weights = member.lease.weights
        if weights > self.weights:
            self.weights = weights
            for other in self.members:
                other.is_outdated = other.lease.weights != weights
                self._set_room(other)
        member.is_outdated = weights != self.weights
        self._set_room(member)

    def _set_room(self, member: Member) -> None:
        loads, lease = self.slots.loads, member.lease
        loads[layout.LOAD_ROOM, member.slot] = lease.num_blocks if member.is_routable else 0
        loads[layout.LOAD_MAX_ROWS, member.slot] = lease.max_rows
        self._set_lending(member.slot, is_lending=self._may_lend(member))

    def _set_lending(self, slot: int, *, is_lending: bool) -> None:
        lends = self.slots.loads[layout.LOAD_LENDS]
        self.num_lending += is_lending - int(lends[slot])
        lends[slot] = is_lending

    def _may_lend(self, member: Member) -> bool:
        """Whether `member` lends and borrows KV: if it may, and has the state of the others that do."""
        if not member.is_lending:
            return False
        state = (member.lease.fingerprint, member.lease.weights)
        if not self.num_lending:
            self._lent = state
        return state == self._lent

    def _begin_life(self, member: Member, now: float) -> None:
        """Begin a life of `member`; it is new if the fleet has been running for a while without it."""
        if len(self.members) == 1:
            self._running_since = now
        is_new = now > self._running_since + _ASSEMBLY_LEASES * self._lease_s
        until = now + WARM_UP_S if is_new else 0.0
        self.slots.loads[layout.LOAD_CHOSEN, member.slot] = 0
        self.slots.loads[layout.LOAD_WARM_AT, member.slot] = until
        self.warm_until = max(self.warm_until, until)
        self.index.set_prefix_closed(member.slot, member.lease.is_prefix_closed)
        self.holdings.windows.begin(member.slot, member.lease.windows)

    def _rename(self) -> None:
        self.width = max((each.slot + 1 for each in self.members), default=0)
        self.names = tuple(
            None if each is None else each.worker for each in self.by_slot[: self.width]
        )

    def _end_life(self, member: Member) -> None:
        life = member.lease.incarnation
        for request in self.slots.drop_worker(member.slot):
            if request in self.remote:
                self.remote.discard(request)
            else:
                self.orphans[request] = (member.worker, life)
        self.holdings.forget(member.slot, member.worker, member.lease.weights)
        self.predictions.clear(member.slot)
        self.slots.loads[layout.LOAD_ROOM, member.slot] = 0
        self._set_lending(member.slot, is_lending=False)

    def _remove(self, member: Member) -> None:
        self._end_life(member)
        self.members.remove(member)
        self.past_gaps += member.sync.gaps
        self.by_slot[member.slot] = None
        self._rename()
