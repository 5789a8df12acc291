"""Places one request: what each worker offers it, the choice, the booking, the record of why."""

from typing import NoReturn

import numpy as np

from mallee.protocol.bookings import Booked
from mallee.protocol.errors import NoWorker, Saturated
from mallee.protocol.events import pack_hashes
from mallee.protocol.hashing import Hashes
from mallee.protocol.ids import Incarnation, RequestId, WorkerId
from mallee.router.capsules import CapsuleEntry
from mallee.router.decisions import DecisionLog, Spill
from mallee.router.fleet import Fleet
from mallee.router.kernels import score
from mallee.router.outbox import Outbox
from mallee.router.records import Placement, RouterConfig
from mallee.router.selection import WARM_UP_EVERY, Ask, Choice, Selection


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
            fitting = np.flatnonzero(loads[score.ROOM] >= max(1, ask.needed_blocks))
            if ask.only >= 0:
                fitting = np.array([ask.only])
            rows = loads[score.ROWS, fitting] + loads[score.EXTRA_ROWS, fitting]
            least = int(rows.argmin())
            limit = int(loads[score.MAX_ROWS, fitting[least]] * self._config.busy_ratio)
            raise Saturated(int(rows[least]), limit)
        if ask.allowed_by and not (loads[score.ALLOWED] == ask.allowed_by).any():
            raise self._no_worker("no worker has loaded its adapter")
        if loads[score.ROOM].any():
            raise self._no_worker(
                f"it needs {ask.needed_blocks} KV blocks, the largest that may take it has"
                f" {int(loads[score.ROOM].max())}"
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
