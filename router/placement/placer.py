"""Places one request: what each worker offers it, the choice, the booking, the record of why."""

from collections.abc import Callable
from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from mallee.protocol.bookings import Booked
from mallee.protocol.errors import NoWorker, Saturated
from mallee.protocol.events import pack_hashes
from mallee.protocol.hashing import NO_HASHES, Hashes
from mallee.protocol.ids import Incarnation, RequestId, WorkerId
from mallee.router.config import RouterConfig
from mallee.router.index.capsules import CapsuleEntry
from mallee.router.index.kernels.layout import Counts
from mallee.router.index.kernels.match import look
from mallee.router.load import layout
from mallee.router.load.paths import STRIDE, room_for_marks
from mallee.router.load.slots import Loads
from mallee.router.placement.decisions import DecisionLog, Spill
from mallee.router.placement.kernels import score
from mallee.router.placement.kernels.score import Floats, choose
from mallee.router.placement.pricing import POLICIES, Ask, Cost
from mallee.router.sync.fleet import Fleet
from mallee.router.sync.outbox import Outbox

WARM_UP_EVERY = 8  # one decision in so many may go to a new worker


WARM_UP_PRICE_S = 0.5  # if it is dearer by no more than this


class Choice(NamedTuple):
    """The chosen slot, and how it compares."""

    slot: int
    overlap_blocks: int
    best_overlap_blocks: int
    cost: Cost
    is_new: bool  # it was chosen because it is new


class Selection:
    """One router's way of choosing. `draw` gives floats in [0, 1)."""

    def __init__(self, config: RouterConfig, loads: Loads, draw: Callable[[], float]) -> None:
        self._loads = loads
        self._draw = draw
        width = loads.shape[1]
        self.indexed: Counts = np.zeros((3, width), dtype=np.int32)
        self.active: Counts = np.zeros(width, dtype=np.int32)
        self._spare: Floats = np.zeros((score.NUM_TERMS, width), dtype=np.float32)
        self._params = np.zeros(score.NUM_PARAMS, dtype=np.float64)
        self._needs_draw = False
        cost, params = config.cost, self._params
        for at, value in {
            score.POLICY: POLICIES[config.policy],
            score.BLOCK_SIZE: config.block_size,
            score.TOKEN_S: cost.prefill_token_s,
            score.PREFILL_WEIGHT: cost.prefill_weight,
            score.BASE_S: cost.step_base_s,
            score.ROW_S: cost.step_row_s,
            score.BLOCK_S: cost.step_block_s,
            score.BUSY_RATIO: config.busy_ratio,
            score.TEMPERATURE: config.temperature,
            score.HOST_BLOCK_S: cost.host_block_s,
            score.DISK_BLOCK_S: cost.disk_block_s,
        }.items():
            params[at] = value
        self.choose(Ask(1, 0, 1, 1, 1, 1), self._spare, now=0.0, width=0)  # compiles
        for hashes in (NO_HASHES, np.frombuffer(b"", dtype=np.uint64)):
            self.look(0, 0, hashes, room_for_marks(0), 0)
        self._needs_draw = config.temperature > 0.0 or config.policy == "random"

    def look(self, held: int, used: int, hashes: Hashes, marks: Hashes, tiers: int) -> None:
        """Fill `indexed`, for so many tiers, and `active` from the indexes at these addresses.

        And `marks` with those of the path.
        """
        keys, mark_keys = hashes.view(np.int64), marks.view(np.int64)
        look(held, used, keys, mark_keys, STRIDE, tiers, self.indexed, self.active)

    def choose(
        self,
        ask: Ask,
        terms: Floats,
        *,
        now: float,
        width: int,
        num_tiers: int = 1,
        prefers_new: bool = False,
    ) -> Choice | None:
        """The worker for `ask`, by `indexed` and `active`, with its prices in `terms`; None: nobody.

        `prefers_new`: a worker that joined lately is taken if it isn't much dearer.
        """
        params = self._params
        draw = self._draw() if self._needs_draw else 0.0
        params[: score.NUM_ASKED] = (*ask, now, 0.0, draw, width, num_tiers)
        slot = choose(params, self._loads, self.indexed, self.active, terms)
        if slot < 0:
            return None
        best_overlap = int(params[score.BEST_OVERLAP])
        new_slot = self._new_one(slot, terms) if prefers_new else -1
        is_new = new_slot >= 0 and new_slot != slot
        if is_new:
            slot = new_slot
        overlap, queued, prefill, decode, fetch, _ = terms[:, slot].tolist()
        return Choice(
            slot, int(overlap), best_overlap, Cost(queued, prefill, decode, fetch), is_new
        )

    def queued_s(self, now: float, width: int) -> npt.NDArray[np.float64]:
        """Seconds of prefill that wait on each worker, as the kernel prices them: [width]."""
        loads, token_s = self._loads[:, :width], float(self._params[score.TOKEN_S])
        unconfirmed = loads[layout.PREFILL] * token_s
        left = np.minimum(unconfirmed, loads[layout.PREFILL_ENDS] - now)
        extra = loads[layout.EXTRA_PREFILL] * token_s
        queued: npt.NDArray[np.float64] = np.maximum(left, unconfirmed * score.UNCONFIRMED) + extra
        return queued

    def num_fitting(self) -> int:
        """Workers that the last request fitted, busy or not."""
        return int(self._params[score.NUM_FITTING])

    def _new_one(self, slot: int, terms: Floats) -> int:
        """The best worker that joined lately, or -1 if there is none or it is much dearer."""
        self._params[score.NEW_ONLY] = 1.0
        found = choose(self._params, self._loads, self.indexed, self.active, self._spare)
        self._params[score.NEW_ONLY] = 0.0
        if found < 0:
            return -1
        dearer = float(terms[score.TOTAL, found] - terms[score.TOTAL, slot])
        return int(found) if dearer <= WARM_UP_PRICE_S else -1


class Placement(NamedTuple):
    """Where a request was booked and why."""

    worker: WorkerId
    address: str
    incarnation: Incarnation
    overlap_blocks: int  # leading prompt blocks there, or being computed there
    best_overlap_blocks: int  # on any worker that could have taken it
    cost: Cost
    decision: int  # its number in the decision log
    reason: str  # cost, capsule, pin, warm_up, fan_out, or the policy's name


class Placing:
    """The steps of one decision, for `Router` and `FanOuts`: only, ask, look, choose, place."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        selection: Selection,
        log: DecisionLog,
        outbox: Outbox | None,
    ) -> None:
        self._config = config
        self._cost = config.cost
        self._fleet = fleet
        self._selection = selection
        self._log = log
        self._outbox = outbox
        self._predicted = np.zeros_like(selection.active)
        self.routed = 0
        self.refused = 0
        self.regret_blocks = 0

    def slot_of(self, placement: Placement) -> int:
        """The table slot of a worker that a request was just placed on."""
        member = self._fleet.members.get(placement.worker)
        assert member is not None, f"{placement.worker} is gone within one call"
        return member.slot

    def only(self, entry: CapsuleEntry | None, pin: WorkerId | None) -> int:
        """The slot of the one worker that is allowed; -1: any."""
        only = -1
        for worker in (entry.worker if entry is not None else None, pin):
            if worker is None:
                continue
            member = self._fleet.members.get(worker)
            if member is None or not member.is_routable:
                raise self._no_worker(f"{worker} is not alive")
            if only not in (-1, member.slot):
                raise self._no_worker(f"its capsule is not on {pin}")
            only = member.slot
        return only

    def ask(
        self,
        num_blocks: int,
        prompt_tokens: int,
        max_tokens: int,
        rows: int,
        entry: CapsuleEntry | None,
        suffix_tokens: int | None,
        only: int,
        may_wait: bool,
    ) -> Ask:
        """What the request wants; all but the first few as in `Router.route`, `only` from here."""
        size = self._config.block_size
        steps = self._cost.steps(max_tokens)
        shared, fixed = num_blocks, -1
        if entry is not None:
            # A capsule's prefix is there, whether or not its hashes are known.
            shared = max(num_blocks, entry.boundary // size)
            fixed = max(0, prompt_tokens - entry.boundary)
            fixed = fixed if suffix_tokens is None else suffix_tokens
        own = rows * max(0, -(-(prompt_tokens + steps) // size) - shared)
        needed = -(-(prompt_tokens + max_tokens) // size)
        return Ask(
            prompt_tokens, num_blocks, own, needed, rows, steps, fixed, only, float(may_wait)
        )

    def look(self, hashes: Hashes, marks: Hashes, entry: CapsuleEntry | None) -> None:
        """What every worker offers is in the selection's arrays, and the path's marks in `marks`."""
        fleet, selection = self._fleet, self._selection
        used = fleet.slots.paths.address if self._config.active_blocks else 0
        tiers = 0 if entry is not None else fleet.index.num_tiers
        selection.look(fleet.index.address, used, hashes, marks, tiers)
        if entry is not None:
            selection.indexed[:] = entry.boundary // self._config.block_size
        elif fleet.predictions:
            fleet.predictions.match_into(marks, len(hashes), self._predicted)
            np.maximum(selection.indexed[0], self._predicted, out=selection.indexed[0])

    def choose(self, ask: Ask, now: float) -> Choice:
        """The worker for `ask` by what `look` saw, its terms in the log. Raises NoWorker, Saturated."""
        choice = self._selection.choose(
            ask,
            self._log.terms(),
            now=now,
            width=self._fleet.width,
            num_tiers=self._fleet.index.num_tiers,
            prefers_new=ask.only < 0
            and now < self._fleet.warm_until
            and self.routed % WARM_UP_EVERY == 0,
        )
        if choice is None:
            self._refuse(ask)
        return choice

    def _refuse(self, ask: Ask) -> NoReturn:
        width = self._fleet.width
        loads = self._fleet.slots.loads[:, :width]
        if self._selection.num_fitting():
            fitting = np.flatnonzero(loads[layout.ROOM] >= max(1, ask.needed_blocks))
            if ask.only >= 0:
                fitting = np.array([ask.only])
            rows = loads[layout.ROWS, fitting] + loads[layout.EXTRA_ROWS, fitting]
            least = int(rows.argmin())
            limit = int(loads[layout.MAX_ROWS, fitting[least]] * self._config.busy_ratio)
            raise Saturated(int(rows[least]), limit)
        if ask.allowed_by and not (loads[layout.ALLOWED] == ask.allowed_by).any():
            raise self._no_worker("no worker has loaded its adapter")
        if loads[layout.ROOM].any():
            raise self._no_worker(
                f"it needs {ask.needed_blocks} KV blocks, the largest that may take it has"
                f" {int(loads[layout.ROOM].max())}"
            )
        refusal = self._fleet.last_refusal
        raise self._no_worker("none is alive" + (f" (refused: {refusal})" if refusal else ""))

    def _no_worker(self, reason: str) -> NoWorker:
        self.refused += 1
        return NoWorker(reason)

    def place(
        self,
        request: RequestId,
        choice: Choice,
        ask: Ask,
        marks: Hashes,
        reason: str,
        now: float,
        spill: Spill | None = None,
    ) -> Placement:
        """`request` is booked on the chosen worker, logged, and told to the other gateways."""
        fleet, slot = self._fleet, choice.slot
        member = fleet.by_slot[slot]
        assert member is not None, f"chose the empty slot {slot}"
        prefill = ask.fixed_prefill
        if prefill < 0:
            prefill = max(1, ask.prompt_tokens - choice.overlap_blocks * self._config.block_size)
        fleet.slots.book(
            request,
            slot,
            marks,
            num_blocks=ask.num_blocks,
            own_blocks=ask.own_blocks,
            prefill_tokens=prefill,
            rows=ask.rows,
            now=now,
        )
        if fleet.drop_orphan(request) and self._outbox is not None:
            self._outbox.freed(request)
        fleet.predict(member, marks, ask.num_blocks, now)
        self.routed += 1
        fleet.slots.set_chosen(slot, self.routed)
        self.regret_blocks += choice.best_overlap_blocks - choice.overlap_blocks
        number = self._log.add((request, slot, reason, now, ask, fleet.names, spill))
        if self._outbox is not None:
            self._outbox.booked(
                Booked(
                    request,
                    member.worker,
                    member.lease.incarnation,
                    pack_hashes(marks),
                    ask.num_blocks,
                    ask.own_blocks,
                    prefill,
                    ask.rows,
                    ask.steps,
                )
            )
        return Placement(
            member.worker,
            member.lease.address,
            Incarnation(member.lease.incarnation),
            choice.overlap_blocks,
            choice.best_overlap_blocks,
            choice.cost,
            number,
            reason,
        )


# Chooses among workers: gathers what each offers a request and lets the kernel price it.
