"""Chooses a worker for each request and books it there, in one synchronous call.

Single-threaded, in memory, no I/O: the owner feeds it leases, events and snapshots as they arrive,
asks the workers for the snapshots it wants and calls `work` when it has a moment. With the broker gone
it goes on with what it knows, what it booked itself and what it can predict.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Final

from mallee.protocol.bookings import Booked
from mallee.protocol.errors import CapsuleStale
from mallee.protocol.events import EventBatch, Lease, Snapshot
from mallee.protocol.hashing import Hashes
from mallee.protocol.ids import CapsuleId, Incarnation, RequestId, Scope, WorkerId
from mallee.protocol.model import WeightVersion
from mallee.router.config import RouterConfig
from mallee.router.index.capsules import CapsuleEntry
from mallee.router.load import layout
from mallee.router.placement.decisions import Decision, Entry, last
from mallee.router.placement.fanouts import FanOut, FanOutPlacer, Part
from mallee.router.placement.placer import Placement, Placer
from mallee.router.placement.pricing import Offers
from mallee.router.placement.pulls import PullReason
from mallee.router.sync.fleet import Fleet
from mallee.router.sync.holdings import Watch
from mallee.router.sync.members import Member
from mallee.router.sync.outbox import Outbox
from mallee.router.views import RouterStats, WorkerView

LOGGED_DECISIONS: Final = 128
TAKEOVER_S: Final = (
    30.0  # in which another worker, or the next life, has the disk of one that is gone
)
_ANYWHERE: Final = nullcontext()


class Router:
    """Routing over one fleet that serves one model. `clock` gives monotonic seconds.

    `draw` gives floats in [0, 1), for policies that need chance. `outbox`, if given, records every
    booking, for the other gateways.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        clock: Callable[[], float],
        draw: Callable[[], float] | None = None,
        outbox: Outbox | None = None,
    ) -> None:
        self.config = config
        self.outbox = outbox
        self.lacks: tuple[str, ...] = ()  # by its engines, which are of one kind
        self._clock = clock
        self._fleet = Fleet(config, clock=clock)
        self._log: deque[Entry] = deque(maxlen=LOGGED_DECISIONS)
        draw = draw or random.Random(0).random  # noqa: S311 # decides between workers
        self._placer = Placer(config, self._fleet, self._log, outbox, draw)
        self._fan_outs = FanOutPlacer(config, self._fleet, self._placer)
        # Blocks that the index promised on a request's worker: if it lacks them, the index is stale.
        self._beliefs: dict[RequestId, tuple[Hashes, Watch]] = {}
        self._routed_to_capsule = 0
        self._repaired_blocks = 0

    def on_lease(self, lease: Lease) -> bool:
        """Take in a lease: the worker is routable for `lease_s`. True: ask it for a snapshot.

        A lease of a life that was lost, has left or was followed by a younger one is ignored; so is
        one with another block size, or beyond `max_workers` (both counted as refused).
        """
        self.lacks = lease.lacks
        return self._fleet.on_lease(lease)

    def on_events(self, batch: EventBatch) -> bool:
        """Take in what is new in `batch`, in order. True: ask the worker for a snapshot."""
        return self._fleet.on_events(batch)

    def on_snapshot(self, snapshot: Snapshot, *, asked_at: float) -> bool:
        """Replace what is known of the worker. True: it was too old, ask for another.

        `asked_at`: when the request was sent, on the router's clock.
        """
        return self._fleet.on_snapshot(snapshot, asked_at)

    def set_broker_up(self, is_up: bool) -> None:
        """While down no lease runs out; once up again every lease gets a full period."""
        self._fleet.members.hold(not is_up, self._clock())

    def work(self, max_blocks: int = 4096) -> bool:
        """A bounded piece of housekeeping. True: there is more to do, call again soon.

        Takes in waiting snapshots, sweeps what forgotten workers held, grows and shrinks tables, drops
        predictions and bookings that ran out.
        """
        now = self._clock()
        self._fleet.predictions.expire(now)
        # Another gateway's bookings end by its messages, or with that gateway (`router.sync.replicas`).
        for request in self._fleet.slots.expire(now, keep=self._fleet.remote):
            self._forget(request)
        return self._fleet.work(max_blocks)

    def expire_leases(
        self, is_heard: Callable[[WorkerId, Incarnation], bool] = lambda worker, incarnation: False
    ) -> list[WorkerId]:
        """Take workers out of routing that have fallen silent: without a lease, and not heard otherwise.

        Returns those that just have. They are back once they are heard. What they hold and what is booked
        on them is kept: whether they live, only the transport knows (`detach_worker`, `lose_worker`), and
        `is_heard` is its word.
        """
        return self._fleet.expire(is_heard)

    def lose_worker(self, worker: WorkerId, incarnation: Incarnation) -> list[RequestId]:
        """End this life of `worker` for good; returns the requests that were booked on it.

        Its blocks and capsules are forgotten, and only a younger life can bring it back. A younger
        life that is here already stays.
        """
        self._fleet.bury(worker, incarnation)
        return self._lost(worker, incarnation)

    def detach_worker(self, worker: WorkerId, incarnation: Incarnation) -> list[RequestId]:
        """Detach a life that can't be reached now: as `lose_worker`, but its next lease brings it back."""
        self._fleet.detach(worker, incarnation)
        return self._lost(worker, incarnation)

    def _lost(self, worker: WorkerId, incarnation: Incarnation) -> list[RequestId]:
        lost = self._fleet.take_orphans(worker, incarnation)
        for request in lost:
            self._forget(request)
        return lost

    def route(
        self,
        request: RequestId,
        hashes: Hashes,
        *,
        prompt_tokens: int,
        max_tokens: int,
        may_wait: bool = False,
        affinity: int = 0,
        source: CapsuleId | None = None,
        why: PullReason = "prefix",
        among: Sequence[WorkerId] | None = None,
    ) -> Placement:
        """Choose a worker for `request` and book it there until `free`.

        `hashes` are the prompt's full blocks, `prompt_tokens` its length. It goes to the cheapest worker
        (`router.placement.pricing`); of equally cheap ones to the one chosen longest ago, then to the
        lowest table slot. `affinity`: a digest of its prompt cache key; 0: it has none. `source`: a capsule
        of exactly the prompt, to be pulled if its worker lends; `why` it pulls, if it does. `among`: the
        workers that alone may take it; None: all.

        Raises NoWorker if none is alive; KVMemoryExceeded if it fits no worker's blocks; Saturated if it
        `may_wait` and all that it fits are busy; ValueError if `request` is booked.
        """
        self._check_unbooked((request,))
        placer = self._placer
        now = self._clock()
        with _ANYWHERE if among is None else self._fleet.only(among):
            home = placer.home(affinity) if affinity else -1
            offers = placer.match(hashes)
            demand = placer.demand(
                len(hashes), prompt_tokens, max_tokens, may_wait, seen=offers.seen, home=home
            )
            entry = None
            if source is not None and (entry := self._lent(source)) is not None:
                placer.offer(offers, entry)
            choice = placer.choose(demand, offers, now)
        reason = "warm_up" if choice.is_new else self.config.policy
        placement = placer.book(
            request, demand, offers, choice, reason=reason, now=now, source=entry, why=why
        )
        self._believe(request, choice.slot, offers, hashes, prompt_tokens)
        return placement

    def route_fanout(
        self,
        requests: Sequence[RequestId],
        hashes: Hashes,
        *,
        prompt_tokens: int,
        max_tokens: int,
        suffix_tokens: Sequence[int],
        capsule: CapsuleId | None = None,
        can_recompute: bool = True,
        may_wait: bool = False,
        affinity: int = 0,
        source: CapsuleId | None = None,
        why: PullReason = "prefix",
    ) -> tuple[Part, ...]:
        """Choose workers for the rows of one fan-out and book each part, as `requests[i]`.

        Row i continues the shared prefix (`hashes`, `prompt_tokens` long; of the capsule, if one is
        named) by `suffix_tokens[i]`. All rows go where the prefix is cheapest, with a capsule to its
        worker, unless it is clearly sooner to send some elsewhere, which takes copies of the prefix
        (`placement.fanout_pricing`); at most as many parts as `requests`. They pull the copies, if the
        capsule's worker and their own lend. Raises UnknownCapsule, else as `route`, before anything is
        booked.
        """
        self._check_unbooked(requests)
        entry = None if capsule is None else self._fleet.capsules.lookup(capsule)
        if entry is not None:
            # Capsules of answers are announced without hashes; the caller may know them.
            hashes = entry.hashes if len(entry.hashes) else hashes
            prompt_tokens = entry.boundary
        home = self._placer.home(affinity) if affinity else -1
        lent = None if source is None else self._lent(source)
        fan_out = FanOut(
            hashes=hashes,
            prefix_tokens=prompt_tokens,
            max_tokens=max_tokens,
            suffix_tokens=suffix_tokens,
            capsule=entry,
            may_wait=may_wait,
            home=home,
            source=lent,
            why=why,
        )
        if len(requests) == 1 < len(suffix_tokens) or self.config.policy != "cost":
            # A part needs a name of its own; and baselines price nothing.
            can_recompute = False
        offers, parts = self._fan_outs.place(
            requests, fan_out, self._clock(), can_recompute=can_recompute
        )
        self._routed_to_capsule += entry is not None
        if entry is None and parts[0].how == "stay":
            slot = self._placer.slot_of(parts[0].placement.worker)
            self._believe(requests[0], slot, offers, hashes, prompt_tokens)
        return parts

    def _lent(self, capsule: CapsuleId) -> CapsuleEntry | None:
        """`capsule`, if its worker is here and lends it."""
        entry = self._fleet.capsules.get(capsule)
        return entry if entry is not None and self._placer.lends(entry) else None

    def first_token(self, request: RequestId) -> None:
        """End the outstanding prefill of a request. Ignored if not booked."""
        if self._fleet.slots.prefill_done(request, self._clock()) and self.outbox is not None:
            self.outbox.prefill_done(request)

    def is_booked(self, request: RequestId) -> bool:
        """Whether `request` is booked, or was until its worker was lost."""
        return self._fleet.is_known(request)

    def touch(self, request: RequestId) -> None:
        """Renew the booking of a running request for another `booking_s`."""
        self._fleet.slots.touch(request, self._clock())

    def free(self, request: RequestId) -> None:
        """End a booking. Ignored if there is none: freed before, or unknown."""
        self._forget(request)
        self._fleet.free(request)

    def observe_hit(self, request: RequestId, cached_tokens: int) -> int:
        """Compare the index with the `cached_tokens` that the worker had of the prompt (of its first row).

        Blocks that the index promised beyond that are forgotten there, except those that the worker
        reported again meanwhile. Returns how many were. Ignored for requests not booked.
        """
        belief = self._beliefs.get(request)
        if belief is None or request not in self._fleet.slots.bookings:
            return 0
        hashes, watch = belief
        unproven = hashes[max(0, cached_tokens) // self.config.block_size :]
        repaired = 0
        if len(unproven):
            stale = watch.not_stored(unproven)
            repaired = self._fleet.holdings.repair(watch.slot, stale) if len(stale) else 0
        self._forget_belief(request)
        self._repaired_blocks += repaired
        return repaired

    def book_remote(self, booking: Booked) -> bool:
        """Count another gateway's `booking`. False, and nothing changed, if that life is unknown."""
        return self._fleet.book_remote(booking, self._clock())

    def prefill_done_remote(self, request: RequestId) -> bool:
        """End the outstanding prefill of another gateway's `request`. False if it is not booked."""
        return request in self._fleet.remote and self._fleet.slots.prefill_done(
            request, self._clock()
        )

    def free_remote(self, request: RequestId) -> bool:
        """End the booking of another gateway's `request`. False if there was none."""
        return self._fleet.free_remote(request)

    def decisions(
        self, limit: int = 16, *, of: RequestId | None = None, candidates: int = 1000
    ) -> list[Decision]:
        """The last decisions, youngest first; those on `of` and on its parts (`of`-1, ..) if given.

        Each with its `candidates` cheapest workers, and the chosen one.
        """
        return last(self._log, limit, of=of, candidates=candidates)

    def digest(self, worker: WorkerId) -> int | None:
        """A 64-bit sum of what `worker` is known to hold: equal in all gateways once they agree."""
        member = self._fleet.members.get(worker)
        return None if member is None else self._fleet.index.digest(member.slot)

    def learn_capsule(
        self,
        capsule: CapsuleId,
        worker: WorkerId,
        boundary: int,
        hashes: Hashes,
        scope: Scope | None = None,
        *,
        is_computing: bool = False,
    ) -> None:
        """Note that `capsule` is on `worker`, by its reply, or that it `is_computing` there.

        Ignored if the worker is not alive here. `scope` None: as it is known.
        """
        if worker in self._fleet.members.by_name:
            self._fleet.capsules.learn(
                capsule,
                worker,
                boundary=boundary,
                hashes=hashes,
                created=self._clock(),
                scope=scope,
                is_computing=is_computing,
            )

    def find_capsule(self, capsule: CapsuleId) -> CapsuleEntry | None:
        """As `capsule`; None if it is not known."""
        return self._fleet.capsules.get(capsule)

    def capsule(self, capsule: CapsuleId) -> CapsuleEntry:
        """Raises UnknownCapsule."""
        return self._fleet.capsules.lookup(capsule)

    def capsules_of(self, worker: WorkerId) -> list[CapsuleId]:
        """The capsules on `worker`, by name."""
        return self._fleet.capsules.of_worker(worker)

    def capsules(self, scope: Scope, after: str = "") -> Iterator[CapsuleId]:
        """See `CapsuleDirectory.of_scope`."""
        return self._fleet.capsules.of_scope(scope, after)

    def forget_capsule(self, capsule: CapsuleId) -> bool:
        """Forget `capsule`. False if it was not known."""
        return self._fleet.capsules.forget(capsule)

    def note_lost(self, capsule: CapsuleId) -> None:
        """See `CapsuleDirectory.note_lost`."""
        self._fleet.capsules.note_lost(capsule)

    def was_lost(self, capsule: CapsuleId) -> bool:
        """Whether `capsule` was there and went with its worker."""
        return self._fleet.capsules.was_lost(capsule)

    def is_taken_over(self, capsule: CapsuleId) -> bool:
        """Whether `capsule` was on the disk of a worker that has just gone: another one takes that over."""
        at = self._fleet.capsules.durable_until(capsule)
        return at is not None and self._clock() < at + TAKEOVER_S

    @property
    def weights(self) -> WeightVersion:
        """The newest weights that a worker had: requests go to no others."""
        return self._fleet.weights

    def check_fresh(
        self, capsule: CapsuleId, made_by: WeightVersion | None = None
    ) -> CapsuleEntry | None:
        """The capsule, if a worker has it; `made_by`: what the caller knows of one that none has.

        Raises CapsuleStale if other weights than the newest made it, or its worker changes them.
        """
        made_by, serving = made_by or self._fleet.capsules.lost_weights(capsule), self.weights
        entry = self._fleet.capsules.get(capsule)
        member = None if entry is None else self._fleet.members.get(entry.worker)
        if member is not None:
            made_by, change = member.lease.weights, member.lease.change
            if change is not None and member.lease.is_finishing:
                serving = max(serving, change.target)
        if made_by is not None and made_by != serving:
            raise CapsuleStale(capsule, made_by.label, serving.label)
        return entry

    def suspend(self, worker: WorkerId, incarnation: Incarnation) -> None:
        """Route nothing to this life of `worker` until `resume`; what is known of it is kept."""
        self._fleet.suspend(worker, incarnation, is_suspended=True)

    def resume(self, worker: WorkerId, incarnation: Incarnation) -> None:
        """End `suspend`."""
        self._fleet.suspend(worker, incarnation, is_suspended=False)

    def is_routable(self, worker: WorkerId, incarnation: Incarnation) -> bool:
        """Whether requests may go to this life of `worker`. O(1)."""
        member = self._fleet.members.get(worker)
        return member is not None and member.is_routable and member.lease.incarnation == incarnation

    @property
    def has_workers(self) -> bool:
        """Whether any worker is routable. O(workers), cheap."""
        return bool(self._fleet.slots.loads[layout.LOAD_ROOM].any())

    @property
    def has_room(self) -> bool:
        """Whether any routable worker is below its limit of rows. O(workers), cheap."""
        loads = self._fleet.slots.loads[:, : self._fleet.width]
        most = loads[layout.LOAD_MAX_ROWS]
        rows = loads[layout.LOAD_ROWS] + loads[layout.LOAD_EXTRA_ROWS]
        is_free = (rows == 0) | (most == 0) | (rows + 1 <= most * self.config.busy_ratio)
        return bool((is_free & (loads[layout.LOAD_ROOM] > 0)).any())

    def workers(self) -> tuple[WorkerView, ...]:
        """The routable workers, in the order of the table."""
        return tuple(self._view(member) for member in self._members() if member.is_routable)

    def all_workers(self) -> tuple[WorkerView, ...]:
        """Those that get no new requests now, too."""
        return tuple(self._view(member) for member in self._members())

    def worker(self, worker: WorkerId) -> WorkerView | None:
        """One worker; None if it is gone."""
        member = self._fleet.members.get(worker)
        return None if member is None else self._view(member)

    def _members(self) -> Iterator[Member]:
        fleet = self._fleet
        return (member for member in fleet.by_slot[: fleet.width] if member is not None)

    def _view(self, member: Member) -> WorkerView:
        now, loads = self._clock(), self._fleet.slots.loads
        load = member.lease.load
        return WorkerView(
            worker=member.worker,
            incarnation=member.lease.incarnation,
            address=member.lease.address,
            num_blocks=member.lease.num_blocks,
            active_blocks=int(loads[layout.LOAD_BLOCKS, member.slot]),
            rows=int(loads[layout.LOAD_ROWS, member.slot]),
            prefill_tokens=int(loads[layout.LOAD_PREFILL, member.slot]),
            indexed_blocks=self._fleet.index.num_held(member.slot),
            lease_age_s=now - member.heard_at,
            is_whole=member.sync.is_whole,
            is_new=bool(loads[layout.LOAD_WARM_AT, member.slot] > now),
            waiting=0 if load is None else load.waiting,
            state=member.state,
            weight_version=member.lease.weights.label,
            weight_change=member.lease.change,
            lends_at=member.lease.address if member.lease.serves_kv else "",
            lacks=member.lease.lacks,
            device=member.lease.device,
            metrics_at=member.lease.metrics_at,
        )

    def stats(self) -> RouterStats:
        fleet = self._fleet
        return RouterStats(
            num_workers=int((fleet.slots.loads[layout.LOAD_ROOM] > 0).sum()),
            num_incomplete=fleet.num_incomplete,
            num_unleased=fleet.num_unleased,
            is_broker_up=not fleet.members.is_held,
            num_orphans=len(fleet.orphans),
            routed=self._placer.routed,
            routed_to_capsule=self._routed_to_capsule,
            spilled={(how, why): n for (how, why), n in self._fan_outs.spilled.items()},
            pulls=dict(self._placer.pulls),
            pulled_nbytes=dict(self._placer.pulled_nbytes),
            refused=self._placer.refused,
            repaired_blocks=self._repaired_blocks,
            ignored_messages=fleet.ignored_messages,
            refused_leases=fleet.refused_leases,
            gaps=fleet.num_gaps,
            backlog_blocks=fleet.holdings.backlog_blocks,
            remote_requests=len(fleet.remote),
            regret_blocks=self._placer.regret_blocks,
            index=fleet.index.stats(),
            booked_requests=len(fleet.slots.bookings),
            booked_rows=int(fleet.slots.loads[layout.LOAD_ROWS].sum()),
            expired_bookings=fleet.slots.expired,
            predicted_prompts=fleet.predictions.num_prompts,
            num_capsules=len(fleet.capsules),
            events_applied=fleet.holdings.num_events,
            unknown_rows=int(fleet.slots.loads[layout.LOAD_EXTRA_ROWS].sum()),
        )

    def check(self) -> None:
        """Raises AssertionError on a broken invariant. O(everything)."""
        self._fleet.check()
        for request in self._beliefs:
            assert self._fleet.is_known(request), f"a belief about {request}, which is over"

    def _believe(
        self, request: RequestId, slot: int, offers: Offers, hashes: Hashes, prompt_tokens: int
    ) -> None:
        # A worker computes a prompt's last token anew, so a last full block proves nothing.
        num_judged = min(offers.held.item(0, slot), (prompt_tokens - 1) // self.config.block_size)
        if num_judged > 0:
            self._beliefs[request] = (hashes[:num_judged], self._fleet.holdings.watch(slot))

    def _check_unbooked(self, requests: Sequence[RequestId]) -> None:
        """Raises ValueError before anything is priced or logged."""
        for request in requests:
            if request in self._fleet.slots.bookings:
                raise ValueError(f"request {request} is booked already; free it first")

    def _forget(self, request: RequestId) -> None:
        """Drop what is remembered of `request`, and queue its end for the other gateways."""
        if request in self._beliefs:
            self._forget_belief(request)
        if self.outbox is not None:
            self.outbox.freed(request)

    def _forget_belief(self, request: RequestId) -> None:
        self._fleet.holdings.unwatch(self._beliefs.pop(request)[1])
