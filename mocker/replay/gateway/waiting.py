"""Dispatches that wait for room, or for a worker to be alive."""

from collections.abc import Callable
from dataclasses import replace

from mallee.mocker.replay.clock import Clock
from mallee.mocker.replay.gateway.requests import Dispatch
from mallee.protocol.errors import Saturated
from mallee.protocol.ids import WorkerId
from mallee.router.dispatch.fairness import Ticket
from mallee.router.dispatch.queue import AdmissionConfig, AdmissionQueue

_UNLIMITED = 1 << 40


class WaitingQueue:
    """The live gateway's admission queue without limits: a replay drops no request.

    `place` routes a dispatch or raises Saturated; it handles all other errors.
    """

    def __init__(self, clock: Clock, place: Callable[[Dispatch], None]) -> None:
        self._clock = clock
        self._place = place
        self._queue = AdmissionQueue(
            AdmissionConfig(_UNLIMITED, _UNLIMITED, max_wait_s=1e12, max_idle_tenants=65_536)
        )
        self._dispatches: dict[int, Dispatch] = {}
        self._next = 0
        self.stranded: list[Dispatch] = []  # there was no worker at all

    @property
    def is_empty(self) -> bool:
        return not self._dispatches and not self.stranded

    def try_now(self, dispatch: Dispatch, lane: WorkerId | None) -> None:
        """Place it, or let it wait behind others of its lane. `lane`: the only worker it can go to."""
        if not self._dispatches or not self._queue.waiting(lane):
            try:
                self._place(dispatch)
            except Saturated:
                pass
            else:
                return
        state, self._next = dispatch.state, self._next + 1
        cost = float(state.prompt_tokens + dispatch.rows * dispatch.max_tokens)
        self._dispatches[self._next] = dispatch
        now, session = self._clock.now, state.request.session
        self._queue.offer(Ticket(self._next, session, now, cost, worker=lane))

    def poke(self, worker: WorkerId | None) -> None:
        """Try what waits for `worker`, which may have room or be gone; None: for any."""
        if self._dispatches:
            for lane in (worker, None) if worker is not None else self._queue.lanes():
                self._pump(lane)

    def _pump(self, lane: WorkerId | None) -> None:
        now = self._clock.now
        while (ticket := self._queue.pop(now, lane)) is not None:
            assert isinstance(ticket.key, int)
            try:
                self._place(self._dispatches[ticket.key])
            except Saturated:
                self._queue.push_back(ticket)
                if lane is None or self._dispatches[ticket.key].capsule is not None:
                    return
                # Its capsule went with its worker: only in the lane of any worker is it tried again.
                self._queue.cancel(ticket.key)
                self._queue.offer(replace(ticket, worker=None))
                continue
            del self._dispatches[ticket.key]
            self._queue.settle(ticket, ticket.cost, now)
