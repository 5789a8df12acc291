"""Chooses a worker for each request and books it there, in one synchronous call.

Single-threaded, in memory, no I/O: the owner feeds it leases, events and snapshots as they arrive
and asks the workers for the snapshots it wants. With the broker gone it goes on with what it knows
and what it booked itself.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mallee.protocol.errors import NoWorker
from mallee.protocol.events import EventBatch, Lease, Snapshot
from mallee.protocol.hashing import Hashes
from mallee.protocol.ids import CapsuleId, Incarnation, RequestId, WorkerId
from mallee.router.capsules import CapsuleEntry
from mallee.router.cost import Costs, Demand, price
from mallee.router.fleet import Fleet
from mallee.router.index import Counts
from mallee.router.records import Placement, RouterConfig, RouterStats, WorkerView
from mallee.router.slots import Loads


class _Belief(NamedTuple):
    """Blocks of a prompt that the index promised on the worker the request went to."""

    slot: int
    hashes: Hashes
    num_judged: int  # leading blocks whose absence at the worker would prove the index stale


class _Options(NamedTuple):
    """What every worker offers one request, each [width]."""

    indexed: Counts
    overlap: Counts
    new_blocks: npt.NDArray[np.int64]
    prefill_tokens: npt.NDArray[np.int64]


class Router:
    """Routing over one fleet that serves one model. `clock` gives monotonic seconds."""

    def __init__(self, config: RouterConfig, *, clock: Callable[[], float]) -> None:
        self.config = config
        self._clock = clock
        self._fleet = Fleet(config, clock=clock)
        self._beliefs: dict[RequestId, _Belief] = {}
        self._last_chosen: npt.NDArray[np.int64] = np.zeros(config.max_workers, dtype=np.int64)
        self._routed = 0
        self._routed_to_capsule = 0
        self._refused = 0
        self._repaired_blocks = 0

    def on_lease(self, lease: Lease) -> bool:
        """The worker is routable for `lease_s`. True: ask it for a snapshot.

        A lease of a life that was lost, has left or was followed by a younger one is ignored; so is
        one with another block size, or beyond `max_workers` (both counted as refused).
        """
        return self._fleet.on_lease(lease)

    def on_events(self, batch: EventBatch) -> bool:
        """Take in what is new in `batch`, in order. True: ask the worker for a snapshot.

        Raises CodecError, and changes nothing, if a hash run is not whole numbers long.
        """
        return self._fleet.on_events(batch)

    def on_snapshot(self, snapshot: Snapshot, *, asked_at: float) -> bool:
        """Replace what is known of the worker. True: it was too old, ask for another.

        `asked_at`: when the request was sent, on the router's clock. Raises CodecError as `on_events`.
        """
        return self._fleet.on_snapshot(snapshot, asked_at)

    def set_broker_up(self, is_up: bool) -> None:
        """While down no lease runs out; once up again every lease gets a full period."""
        self._fleet.members.hold(not is_up, self._clock())

    def expire_leases(self) -> list[WorkerId]:
        """Workers whose lease has just run out are not routable until the next one; returns them.

        What they hold and what is booked on them is kept: whether they live, only the transport
        knows (`detach_worker`, `lose_worker`).
        """
        return self._fleet.expire()

    def lose_worker(self, worker: WorkerId, incarnation: Incarnation) -> list[RequestId]:
        """This life of `worker` is over for good; returns the requests that were booked on it.

        Its blocks and capsules are forgotten, and only a younger life can bring it back. A younger
        life that is here already stays.
        """
        self._fleet.bury(worker, incarnation)
        return self._lost(worker, incarnation)

    def detach_worker(self, worker: WorkerId, incarnation: Incarnation) -> list[RequestId]:
        """This life can't be reached now: as `lose_worker`, but its next lease brings it back."""
        self._fleet.detach(worker, incarnation)
        return self._lost(worker, incarnation)

    def _lost(self, worker: WorkerId, incarnation: Incarnation) -> list[RequestId]:
        lost = self._fleet.take_orphans(worker, incarnation)
        for request in lost:
            self._beliefs.pop(request, None)
        return lost

    def route(
        self,
        request: RequestId,
        hashes: Hashes,
        *,
        prompt_tokens: int,
        max_tokens: int,
        rows: int = 1,
        capsule: CapsuleId | None = None,
        suffix_tokens: int | None = None,
        pin: WorkerId | None = None,
    ) -> Placement:
        """Choose a worker for `request` and book it there until `free`.

        `hashes` are the prompt's full blocks, `prompt_tokens` its length (of the longest row, what a
        capsule holds included). With `capsule`: goes to its worker; `suffix_tokens` (all rows
        together, default prompt_tokens - boundary) are computed; empty `hashes` stand for the
        capsule's. Without: the cheapest worker (`router.cost`); of equally cheap ones that which
        was chosen longest ago, then the lowest table slot. `pin` allows one worker only.

        Raises UnknownCapsule; NoWorker if none is alive, or the request fits no worker's blocks;
        ValueError if `request` is booked already.
        """
        if request in self._fleet.slots:
            raise ValueError(f"request {request} is booked already; free it first")
        entry = None if capsule is None else self._fleet.capsules.lookup(capsule)
        if entry is not None and not len(hashes):
            hashes = entry.hashes
        size = self.config.block_size
        steps = self.config.cost.steps(max_tokens)
        # A capsule's prefix is there, whether or not its hashes are known.
        shared = max(len(hashes), entry.boundary // size if entry is not None else 0)
        own_blocks = rows * max(0, -(-(prompt_tokens + steps) // size) - shared)
        eligible = self._eligible(-(-(prompt_tokens + max_tokens) // size), entry, pin)
        options = self._options(hashes, prompt_tokens, own_blocks, entry, suffix_tokens)
        demand = Demand(options.prefill_tokens, options.new_blocks, rows, steps)
        width = self._fleet.width
        loads = Loads(*(amounts[:width] for amounts in self._fleet.slots.loads))
        costs = price(self.config.cost, loads, demand)
        slot = self._choose(costs, eligible)
        self._fleet.slots.book(
            request,
            slot,
            hashes,
            own_blocks=own_blocks,
            prefill_tokens=int(options.prefill_tokens[slot]),
            rows=rows,
        )
        self._fleet.drop_orphan(request)
        self._beliefs.pop(request, None)
        self._routed += 1
        self._last_chosen[slot] = self._routed
        if entry is not None:
            self._routed_to_capsule += 1
        elif num_judged := min(int(options.indexed[slot]), (prompt_tokens - 1) // size):
            # A worker computes a prompt's last token anew, so a last full block proves nothing.
            self._beliefs[request] = _Belief(slot, hashes, num_judged)
        return self._placement(slot, options.overlap, eligible, costs)

    def first_token(self, request: RequestId) -> None:
        """Its prefill is over and queues nobody any more. Ignored (and counted) if not booked."""
        self._fleet.slots.prefill_done(request)

    def free(self, request: RequestId) -> None:
        """Its booking is gone. Ignored (and counted) if there is none: freed before, or unknown."""
        self._beliefs.pop(request, None)
        self._fleet.free(request)

    def observe_hit(self, request: RequestId, cached_tokens: int) -> int:
        """The worker really had `cached_tokens` of the prompt (of its first row).

        Blocks that the index promised beyond that are forgotten there, except those that the worker
        reported again meanwhile. Returns how many were. Ignored for requests not booked.
        """
        belief = self._beliefs.get(request)
        if belief is None or request not in self._fleet.slots:
            return 0
        start = max(0, cached_tokens) // self.config.block_size
        slots = self._fleet.slots
        stale = [
            block
            for block in belief.hashes[start : belief.num_judged].tolist()
            if not slots.is_confirmed(belief.slot, block)
            and belief.slot in self._fleet.index.holders(block)
        ]
        self._fleet.index.remove(belief.slot, np.array(stale, dtype=np.uint64))
        self._repaired_blocks += len(stale)
        return len(stale)

    def learn_capsule(
        self, capsule: CapsuleId, worker: WorkerId, boundary: int, hashes: Hashes
    ) -> None:
        """`capsule` is on `worker`, as its reply said. Ignored if the worker is not alive here."""
        if self._fleet.members.get(worker) is not None:
            self._fleet.capsules.learn(
                capsule, worker, boundary=boundary, hashes=hashes, created=self._clock()
            )

    def capsule(self, capsule: CapsuleId) -> CapsuleEntry:
        """Raises UnknownCapsule."""
        return self._fleet.capsules.lookup(capsule)

    def forget_capsule(self, capsule: CapsuleId) -> bool:
        """`capsule` is not known here. False if it was not before."""
        return self._fleet.capsules.forget(capsule)

    def workers(self) -> tuple[WorkerView, ...]:
        """The routable workers, in the order of the table."""
        now, loads, index = self._clock(), self._fleet.slots.loads, self._fleet.index
        return tuple(
            WorkerView(
                worker=member.worker,
                incarnation=Incarnation(member.lease.incarnation),
                address=member.lease.address,
                num_blocks=member.lease.num_blocks,
                active_blocks=int(loads.active_blocks[member.slot]),
                rows=int(loads.rows[member.slot]),
                prefill_tokens=int(loads.prefill_tokens[member.slot]),
                indexed_blocks=index.num_held(member.slot),
                lease_age_s=now - member.heard_at,
                is_whole=member.sync.is_whole,
            )
            for member in self._fleet.by_slot[: self._fleet.width]
            if member is not None and member.is_routable
        )

    def stats(self) -> RouterStats:
        fleet = self._fleet
        return RouterStats(
            num_workers=int((fleet.room > 0).sum()),
            num_incomplete=sum(not member.sync.is_whole for member in fleet.members),
            is_broker_up=not fleet.members.is_held,
            num_orphans=fleet.num_orphans,
            routed=self._routed,
            routed_to_capsule=self._routed_to_capsule,
            refused=self._refused,
            repaired_blocks=self._repaired_blocks,
            ignored_messages=fleet.ignored_messages,
            refused_leases=fleet.refused_leases,
            index=fleet.index.stats(),
            slots=fleet.slots.stats(),
            capsules=fleet.capsules.stats(),
        )

    def check(self) -> None:
        """Raises AssertionError on a broken invariant. O(everything)."""
        self._fleet.check()

    def _eligible(
        self, needed_blocks: int, entry: CapsuleEntry | None, pin: WorkerId | None
    ) -> npt.NDArray[np.bool_]:
        fleet = self._fleet
        room = fleet.room[: fleet.width]
        eligible = room >= max(1, needed_blocks)
        for only in (entry.worker if entry is not None else None, pin):
            if only is None:
                continue
            member = fleet.members.get(only)
            if member is None or not member.is_routable:
                raise self._no_worker(f"{only} is not alive")
            eligible &= np.arange(fleet.width) == member.slot
        if not eligible.any():
            raise self._no_worker(self._why_none(needed_blocks, room))
        return eligible

    def _why_none(self, needed_blocks: int, room: npt.NDArray[np.int64]) -> str:
        if room.any():
            return (
                f"it needs {needed_blocks} KV blocks, the largest that may take it has {room.max()}"
            )
        refusal = self._fleet.last_refusal
        return "none is alive" + (f" (refused: {refusal})" if refusal else "")

    def _no_worker(self, reason: str) -> NoWorker:
        self._refused += 1
        return NoWorker(reason)

    def _options(
        self,
        hashes: Hashes,
        prompt_tokens: int,
        own_blocks: int,
        entry: CapsuleEntry | None,
        suffix_tokens: int | None,
    ) -> _Options:
        fleet, width = self._fleet, self._fleet.width
        active = fleet.slots.active_overlap(hashes)[:width]
        new_blocks = (len(hashes) + own_blocks) - active.astype(np.int64)
        if entry is not None:
            suffix = (
                max(0, prompt_tokens - entry.boundary) if suffix_tokens is None else suffix_tokens
            )
            held = np.full(width, entry.boundary // self.config.block_size, dtype=np.int32)
            return _Options(held, held, new_blocks, np.full(width, suffix, dtype=np.int64))
        indexed = fleet.index.match(hashes)[:width]
        overlap = np.maximum(indexed, active)
        cached = overlap.astype(np.int64) * self.config.block_size
        return _Options(indexed, overlap, new_blocks, np.maximum(prompt_tokens - cached, 1))

    def _choose(self, costs: Costs, eligible: npt.NDArray[np.bool_]) -> int:
        total = np.where(eligible, costs.total_s, np.inf)
        cheapest = np.flatnonzero(total == total.min())
        return int(cheapest[self._last_chosen[cheapest].argmin()])

    def _placement(
        self, slot: int, overlap: Counts, eligible: npt.NDArray[np.bool_], costs: Costs
    ) -> Placement:
        member = self._fleet.by_slot[slot]
        assert member is not None, f"chose the empty slot {slot}"
        return Placement(
            worker=member.worker,
            address=member.lease.address,
            incarnation=Incarnation(member.lease.incarnation),
            overlap_blocks=int(overlap[slot]),
            best_overlap_blocks=int(overlap[eligible].max()),
            cost=costs.at(slot),
        )
