"""Orders that no worker has room for, and those that come while no worker is alive."""

from collections.abc import Callable
from dataclasses import replace

from mallee.mocker.replay.calls import Order
from mallee.mocker.replay.clock import Clock
from mallee.protocol.errors import Saturated
from mallee.protocol.ids import WorkerId
from mallee.router.dispatch.fairness import Ticket
from mallee.router.dispatch.queue import AdmissionConfig, AdmissionQueue

_UNLIMITED = 1 << 40


class Waiting:
    """The gateway's own admission queue, without limits: a replay loses nobody.

    `place` routes an order or raises Saturated; what else may be wrong is its business.
    """

    def __init__(self, clock: Clock, place: Callable[[Order], None]) -> None:
        self._clock = clock
        self._place = place
        self._queue = AdmissionQueue(
            AdmissionConfig(_UNLIMITED, _UNLIMITED, max_wait_s=1e12, max_idle_tenants=65_536)
        )
        self._orders: dict[int, Order] = {}
        self._next = 0
        self.stranded: list[Order] = []  # there was no worker at all

    @property
    def is_empty(self) -> bool:
        return not self._orders and not self.stranded

    def try_now(self, order: Order, lane: WorkerId | None) -> None:
        """Place it, or let it wait: behind others of its lane, `lane` being its only worker."""
        if not self._orders or not self._queue.waiting(lane):
            try:
                self._place(order)
            except Saturated:
                pass
            else:
                return
        call, self._next = order.call, self._next + 1
        cost = float(call.prompt_tokens + order.rows * order.max_tokens)
        self._orders[self._next] = order
        now, session = self._clock.now, call.request.session
        self._queue.offer(Ticket(self._next, session, now, cost, worker=lane))

    def poke(self, worker: WorkerId | None) -> None:
        """`worker` may have room now, or is gone; None: any may."""
        if self._orders:
            for lane in (worker, None) if worker is not None else self._queue.lanes():
                self._pump(lane)

    def _pump(self, lane: WorkerId | None) -> None:
        now = self._clock.now
        while (ticket := self._queue.pop(now, lane)) is not None:
            assert isinstance(ticket.key, int)
            try:
                self._place(self._orders[ticket.key])
            except Saturated:
                self._queue.push_back(ticket)
                if lane is None or self._orders[ticket.key].capsule is not None:
                    return
                # Its capsule went with its worker: it waits for any, or nobody would ever ask again.
                self._queue.cancel(ticket.key)
                self._queue.offer(replace(ticket, worker=None))
                continue
            del self._orders[ticket.key]
            self._queue.settle(ticket, ticket.cost, now)
