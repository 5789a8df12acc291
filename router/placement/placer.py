"""Places one request: `offers = match(...)`, `choice = choose(demand, offers)`, `book(choice)`."""

from collections import Counter, deque
from collections.abc import Callable
from typing import Final, NoReturn

import numpy as np
from msgspec import Struct

from mallee.protocol.bookings import Booked
from mallee.protocol.errors import KVMemoryExceeded, NoWorker, Saturated
from mallee.protocol.events import Lease, pack_hashes
from mallee.protocol.hashing import NO_HASHES, Hashes
from mallee.protocol.ids import Incarnation, RequestId, WorkerId
from mallee.router.config import RouterConfig
from mallee.router.index.capsules import CapsuleEntry
from mallee.router.load import layout
from mallee.router.load.kernels import match_prompt
from mallee.router.load.paths import room_for_waypoints
from mallee.router.load.prompts import GROWTH, EarlierPrompts, Seen
from mallee.router.placement.affinity import home_slot
from mallee.router.placement.decisions import Entry
from mallee.router.placement.fanout_pricing import Share
from mallee.router.placement.pricing import Choice, Cost, Demand, Offers, Pricer
from mallee.router.placement.pulls import Pull, PullFinder, PullReason
from mallee.router.sync.fleet import Fleet
from mallee.router.sync.outbox import Outbox

WARM_UP_EVERY: Final = 8  # one decision in so many may go to a new worker


class Placement(Struct, frozen=True):
    """The worker that a request was booked on, and why."""

    worker: WorkerId
    address: str
    incarnation: Incarnation
    overlap_blocks: int  # leading prompt blocks there, or being computed there
    best_overlap_blocks: int  # on any worker that could have taken it
    cost: Cost
    decision: int  # its number in the decision log
    reason: str  # cost, warm_up, fan_out, or the policy's name
    pull: Pull | None = None
    is_home: bool = False  # it is the home of the prompt cache key


class Placer:
    """The three steps of a decision over one fleet."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        log: deque[Entry],
        outbox: Outbox | None,
        draw: Callable[[], float],
    ) -> None:
        self._config = config
        self._block_size = config.block_size
        self._fleet = fleet
        self._log = log
        self._outbox = outbox
        self._pricer = Pricer(config, fleet.slots.loads, draw)
        self._earlier = EarlierPrompts(config.block_size)
        self._held = np.zeros((0, config.max_workers), np.int32)
        self._active = np.zeros(config.max_workers, np.int32)
        self._most_steps = config.cost.expected_output_tokens
        self._used = fleet.slots.paths.address if config.active_blocks else 0
        self.routed = 0
        self.refused = 0
        self.regret_blocks = 0
        self.pulls: Counter[str] = Counter()  # placements that name holders, by reason
        self.pulled_nbytes: Counter[str] = Counter()  # of those, predicted
        self._pull_finder = PullFinder(config, fleet)
        for hashes in (NO_HASHES, np.frombuffer(b"", dtype=np.uint64)):
            self.match(hashes)  # compiles, as no request should have to

    def demand(
        self,
        num_blocks: int,
        prompt_tokens: int,
        max_tokens: int,
        may_wait: bool,
        *,
        seen: Seen,
        home: int = -1,
    ) -> Demand:
        """The needs of one row of so many tokens, of which `num_blocks` full blocks can be shared."""
        size, steps = self._block_size, min(max_tokens, self._most_steps)
        own = max(0, -(-(prompt_tokens + steps) // size) - num_blocks)
        needed = -(-(prompt_tokens + max_tokens) // size)
        return Demand(
            prompt_tokens=prompt_tokens,
            num_blocks=num_blocks,
            own_blocks=own,
            needed_blocks=needed,
            rows=1,
            steps=steps,
            may_wait=1.0 if may_wait else 0.0,
            home=home,
            growth=1.0 if seen.continues else 1.0 + GROWTH,
            shared_blocks=seen.shared,
            copy_share=1.0 / (1.0 + seen.uses / max(1, self._fleet.width)),
        )

    def home(self, affinity: int) -> int:
        """The slot of the home of a prompt cache key with this digest; -1: no worker."""
        fleet = self._fleet
        room = fleet.slots.loads[layout.LOAD_ROOM, : fleet.width]
        return home_slot(affinity, fleet.name_digests[: fleet.width], room)

    def match(self, hashes: Hashes) -> Offers:
        """Leading blocks on every worker: known from events, predicted, or in use.

        Also takes in, for the prices, how many blocks are free on each, and the prompt itself.
        """
        fleet = self._fleet
        index, predictions, num_blocks = fleet.index, fleet.predictions, len(hashes)
        if len(self._held) != index.num_tiers:
            self._held = np.zeros((index.num_tiers, index.num_workers), np.int32)
        waypoints, held, active = room_for_waypoints(num_blocks), self._held, self._active
        prompts, loads, width = self._earlier.address, fleet.slots.loads, fleet.width
        match_prompt(
            index.address, self._used, prompts, hashes, waypoints, held, active, loads, width
        )
        windows, matched = fleet.holdings.windows, None
        if windows.by_worker:
            matched = held[0].copy()
            windows.limit(held, hashes, self._block_size)
        if predictions.busy:
            predicted = np.empty(index.num_workers, dtype=np.int32)
            predictions.match_into(waypoints, num_blocks, predicted)
            np.maximum(held[0], predicted, out=held[0])
        return Offers(waypoints, held, active, self._earlier.seen(num_blocks), matched)

    def slot_of(self, worker: WorkerId) -> int:
        """The slot of a worker that alone is allowed. Raises NoWorker if it is not alive."""
        member = self._fleet.members.get(worker)
        if member is None or not member.is_routable:
            raise self._no_worker(f"{worker} is not alive")
        return member.slot

    def choose(self, demand: Demand, offers: Offers, now: float) -> Choice:
        """The worker for `demand`. Raises NoWorker, KVMemoryExceeded, Saturated."""
        fleet = self._fleet
        prefers_new = (
            now < fleet.warm_until and demand.only < 0 and self.routed % WARM_UP_EVERY == 0
        )
        choice = self._pricer.choose(
            demand,
            offers,
            now=now,
            width=fleet.width,
            prefers_new=prefers_new,
        )
        if choice is None:
            self._refuse(demand)
        return choice

    def book(
        self,
        request: RequestId,
        demand: Demand,
        offers: Offers,
        choice: Choice,
        *,
        reason: str,
        now: float,
        share: Share | None = None,
        source: CapsuleEntry | None = None,
        why: PullReason = "prefix",
    ) -> Placement:
        """Book `request` on the chosen worker; log it, and queue it for the other gateways.

        `source`: a capsule of exactly its prompt. `why` it pulls, if it does.
        """
        fleet, slot, waypoints = self._fleet, choice.slot, offers.waypoints
        member = fleet.by_slot[slot]
        assert member is not None, f"chose the empty slot {slot}"
        lease = member.lease
        prefill = demand.fixed_prefill
        if prefill < 0:
            num_blocks = choice.overlap_blocks + choice.pulled_blocks
            prefill = max(1, demand.prompt_tokens - num_blocks * self._block_size)
        pull = None
        if source is not None or choice.pulled_blocks:
            pull = self._pull_finder.find(offers, choice, source, why)
        if pull is not None:
            self.pulls[why] += 1
            self.pulled_nbytes[why] += pull.nbytes
            if share is not None and share.how == "migrate":
                pull = pull._replace(prices=share.prices)
        brought = max(0, demand.num_blocks + demand.own_blocks - choice.overlap_blocks)
        expected = -float(brought)
        if demand.growth > 1.0:  # its text is new
            expected = (demand.growth - 1.0) * max(0, demand.num_blocks - demand.shared_blocks)
        number = self.routed
        self.routed += 1
        fleet.slots.book(
            request,
            slot,
            waypoints,
            num_blocks=demand.num_blocks,
            own_blocks=demand.own_blocks,
            prefill_tokens=prefill,
            rows=demand.rows,
            now=now,
            number=self.routed,
            brought=brought,
            expected=expected,
        )
        if fleet.orphans.pop(request, None) is not None and self._outbox is not None:
            self._outbox.freed(request)
        fleet.predict(member, waypoints, demand.num_blocks, now)
        self.regret_blocks += choice.best_overlap_blocks - choice.overlap_blocks
        self._log.append(
            Entry(
                number=number,
                request=request,
                slot=slot,
                reason=reason,
                at=now,
                demand=demand,
                terms=choice.terms,
                names=fleet.names,
                share=share,
                pull=pull,
                matched=offers.matched,
            )
        )
        if self._outbox is not None:
            self._outbox.booked(_booked(request, demand, waypoints, lease, prefill))
        return Placement(
            worker=member.worker,
            address=lease.address,
            incarnation=lease.incarnation,
            overlap_blocks=choice.overlap_blocks,
            best_overlap_blocks=choice.best_overlap_blocks,
            cost=choice.cost,
            decision=number,
            reason=reason,
            pull=pull,
            is_home=slot == demand.home,
        )

    def lends(self, entry: CapsuleEntry) -> bool:
        """Whether the worker of a capsule lends it."""
        return self._pull_finder.lends(entry)

    def offer(self, offers: Offers, entry: CapsuleEntry) -> None:
        """Count all of a capsule's text as held by its worker, whether or not its hashes are known."""
        member = self._fleet.members.get(entry.worker)
        if member is not None:
            held = offers.held[:, member.slot]
            np.maximum(held, entry.boundary // self._block_size, out=held)

    def _refuse(self, demand: Demand) -> NoReturn:
        width = self._fleet.width
        loads = self._fleet.slots.loads[:, :width]
        allowed = np.array([demand.only]) if demand.only >= 0 else np.arange(width)
        room = loads[layout.LOAD_ROOM, allowed]
        fitting = allowed[room >= max(1, demand.needed_blocks)]
        if fitting.size:
            rows = loads[layout.LOAD_ROWS, fitting] + loads[layout.LOAD_EXTRA_ROWS, fitting]
            least = int(rows.argmin())
            limit = int(loads[layout.LOAD_MAX_ROWS, fitting[least]] * self._config.busy_ratio)
            raise Saturated(int(rows[least]), limit)
        if room.any():
            self.refused += 1
            raise KVMemoryExceeded(demand.needed_blocks, int(room.max()), self._block_size)
        reason, refusal = "none is alive", self._fleet.last_refusal
        if self._fleet.members.is_held:
            reason = "none is known, and the broker (NATS), which tells of workers, is not reached"
        raise self._no_worker(reason + (f" (refused: {refusal})" if refusal else ""))

    def _no_worker(self, reason: str) -> NoWorker:
        self.refused += 1
        return NoWorker(reason)


def _booked(
    request: RequestId, demand: Demand, waypoints: Hashes, lease: Lease, prefill_tokens: int
) -> Booked:
    """The message that tells the other gateways of a booking."""
    return Booked(
        request=request,
        worker=lease.worker,
        incarnation=lease.incarnation,
        waypoints=pack_hashes(waypoints),
        num_blocks=demand.num_blocks,
        own_blocks=demand.own_blocks,
        prefill_tokens=prefill_tokens,
        rows=demand.rows,
        steps=demand.steps,
    )
