"""Lets a request wait, in the gateway, for a worker that has room.

A request is placed at once if none waits that could take the same place, and the router finds room.
Otherwise it waits (`router.dispatch.queue`) and is placed, that is routed anew and sent, in the turn of
the loop in which it is chosen: nothing can happen between choosing, booking and sending.
"""

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from mallee.actors.gateway.jobs import QueueTerms
from mallee.actors.telemetry.metrics import GatewayMetrics
from mallee.protocol.errors import (
    DeadlineExceeded,
    MalleeError,
    NoWorker,
    Saturated,
    Unavailable,
    WorkerLost,
)
from mallee.protocol.ids import RequestId, WorkerId
from mallee.router.dispatch.fairness import Ticket
from mallee.router.dispatch.queue import AdmissionConfig, AdmissionQueue

# Room may come unannounced: another gateway's request ended, or a worker reported less load.
RECHECK_S: Final = 0.02
# Per turn of the loop. A refused ticket does not hold up other tickets of its lane, up to a point.
MAX_PLACED: Final = 16
MAX_REFUSED: Final = 4
# Requests that are placed before a refused one of many rows goes in beyond the limit.
MAX_PASSED: Final = 16


class Closable(Protocol):
    """An answer that was placed and can be given up."""

    @property
    def worker(self) -> WorkerId: ...

    async def aclose(self) -> None: ...


P = TypeVar("P", bound=Closable)


class Admitted(NamedTuple, Generic[P]):
    """A request on its way; `cost` in tokens: those to compute and those to generate."""

    answer: P
    cost: float


class PendingRequest(NamedTuple, Generic[P]):
    """A request of `rows` rows to be placed. With `worker` no other can take it.

    `place(may_wait)` raises Saturated if there is no room and it may wait. If it raises, nothing
    was booked or sent. `cost` is an estimate, for until it is placed.
    """

    request: RequestId
    terms: QueueTerms
    worker: WorkerId | None
    rows: int
    cost: float
    place: Callable[[bool], Admitted[P]]


@dataclass(slots=True, eq=False)
class _Waiter:
    pending: PendingRequest[Any]
    answer: asyncio.Future[Any]
    refused_at: int | None = None  # requests placed by then where it could have gone


class Admission:
    """The waiting requests of one gateway. Belongs to its event loop.

    `has_worker()`: whether any worker is routable; while none is, requests that wait
    go on waiting. `clock` gives monotonic seconds.
    """

    def __init__(
        self,
        config: AdmissionConfig,
        *,
        has_worker: Callable[[], bool],
        metrics: GatewayMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._queue = AdmissionQueue(config)
        self._has_worker = has_worker
        self._metrics = metrics
        self._clock = clock
        self._waiters: dict[Hashable, _Waiter] = {}
        self._woken: dict[WorkerId | None, None] = {}  # lanes to look at, in order
        self._is_common_next = True
        self._num_placed = 0
        self._placed_on: dict[WorkerId, int] = {}  # since requests wait
        self._pumping: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._num_rechecked = 0  # lanes
        self._is_closed = False

    async def admit(self, pending: PendingRequest[P]) -> P:
        """The answer, once a worker has room for it; without a turn of the loop if one has now.

        Raises what `pending.place` raises, and instead of Saturated: TenantQueueFull, Overloaded, or
        DeadlineExceeded. Cancelled, it leaves neither a ticket nor an answer behind.
        """
        if self._is_closed:
            raise _closed()
        if not self._queue.waiting(None) and not self._queue.waiting(pending.worker):
            try:
                placed = pending.place(True)
            except Saturated:
                pass  # then it waits
            else:
                self._note(placed.answer.worker)
                return placed.answer
        self._offer(pending)
        answer: asyncio.Future[P] = asyncio.get_running_loop().create_future()
        self._waiters[pending.request] = _Waiter(pending, answer)
        self._set_timer()
        if pending.worker is not None:
            self.poke(pending.worker)  # others wait, but perhaps not for this worker
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                await answer.result().aclose()  # placed in the very turn that cancelled it
            raise
        finally:
            self._waiters.pop(pending.request, None)
            self._queue.cancel(pending.request)
            self._metrics.waiting.set(len(self._queue))

    def poke(self, worker: WorkerId | None = None) -> None:
        """Try what waits for `worker`, which may have room or be gone; None: for an unknown one."""
        if not self._waiters:
            return
        self._woken[None] = None
        if worker is not None and self._queue.waiting(worker):
            self._woken[worker] = None
        if self._pumping is None:
            self._pumping = asyncio.get_running_loop().call_soon(self._pump)

    def close(self) -> None:
        """End every waiting request with an error, and let no other wait."""
        self._is_closed = True
        for handle in (self._pumping, self._timer):
            if handle is not None:
                handle.cancel()
        for waiter in self._waiters.values():
            self._fail(waiter, _closed())

    def check(self) -> None:
        """Raises AssertionError if a request waits without a ticket, or a ticket has no request."""
        self._queue.check()
        num_open = sum(not waiter.answer.done() for waiter in self._waiters.values())
        # Those cancelled in this turn of the loop still have theirs.
        assert num_open <= len(self._queue) <= len(self._waiters), (num_open, len(self._queue))

    def _offer(self, pending: PendingRequest[Any]) -> None:
        now, terms = self._clock(), pending.terms
        deadline = None if terms.deadline_s is None else now + terms.deadline_s
        place = (terms.priority, deadline, pending.worker)
        try:
            self._queue.offer(Ticket(pending.request, terms.tenant, now, pending.cost, *place))
        except Unavailable as full:
            self._metrics.refused(full.code)
            raise
        self._metrics.waiting.set(len(self._queue))

    # Placing

    def _pump(self) -> None:
        """Try the next tickets of the woken lanes by turns; the rest in the next turn of the loop."""
        self._pumping = None
        self._expire()
        self._set_timer()
        for _ in range(MAX_PLACED):
            if not self._woken:
                break
            lane = self._next_lane()
            if not self._try_lane(lane):
                del self._woken[lane]
        if not self._waiters:
            self._woken.clear()
            self._placed_on.clear()
        if self._woken:
            self._pumping = asyncio.get_running_loop().call_soon(self._pump)
        self._metrics.waiting.set(len(self._queue))

    def _next_lane(self) -> WorkerId | None:
        """The common lane and the workers' lanes in turn, so that neither starves the other."""
        own = next((lane for lane in self._woken if lane is not None), None)
        if None not in self._woken or (own is not None and not self._is_common_next):
            self._is_common_next = True
            assert own is not None
            self._woken[own] = self._woken.pop(own)  # behind the other workers'
            return own
        self._is_common_next = False
        return None

    def _try_lane(self, lane: WorkerId | None) -> bool:
        """Whether a ticket of this lane was dealt with; those that can't be placed stay in line."""
        refused: list[Ticket] = []
        is_done = False
        now = self._clock()
        while not is_done and len(refused) < (MAX_REFUSED if lane is None else 1):
            ticket = self._queue.pop(now, lane)
            if ticket is None:
                break
            cost = self._try(ticket)
            if cost is None:
                refused.append(ticket)
            else:
                is_done = True
                self._queue.settle(ticket, cost, now)
        for ticket in reversed(refused):
            self._queue.push_back(ticket)
        return is_done

    def _try(self, ticket: Ticket) -> float | None:
        """The ticket's cost, if it is dealt with: placed, failed, or wanted no more."""
        waiter = self._waiters[ticket.key]
        if waiter.answer.done():
            return 0.0  # cancelled, in this turn of the loop
        try:
            placed = waiter.pending.place(not self._is_overdue(waiter))
        except (Saturated, WorkerLost):
            return None
        except Exception as error:  # of that request alone: it is raised to its caller
            if isinstance(error, NoWorker) and not self._has_worker():
                return None
            waiter.answer.set_exception(error)
            return 0.0
        waiter.answer.set_result(placed.answer)
        self._note(placed.answer.worker)
        self._metrics.admission_wait_s.observe(self._clock() - ticket.arrival)
        return placed.cost

    def _is_overdue(self, waiter: _Waiter) -> bool:
        """Whether too many have gone where it could have gone, since its turn came.

        Rows come free one by one, and smaller requests take them; one of many rows would wait
        for ever. Then it goes in beyond the limit and waits for its rows in the worker.
        """
        worker = waiter.pending.worker
        placed = self._num_placed if worker is None else self._placed_on.get(worker, 0)
        if waiter.refused_at is None:
            waiter.refused_at = placed
        return waiter.pending.rows > 1 and placed - waiter.refused_at >= MAX_PASSED

    def _note(self, worker: WorkerId) -> None:
        if self._waiters:
            self._num_placed += 1
            self._placed_on[worker] = self._placed_on.get(worker, 0) + 1

    # Time

    def _expire(self) -> None:
        now = self._clock()
        for ticket in self._queue.expire(now):
            waiter = self._waiters.get(ticket.key)
            if waiter is None or waiter.answer.done():
                continue  # cancelled
            is_own = ticket.deadline is not None and ticket.deadline <= now
            retry_s = self._queue.retry_after_s(now)
            self._fail(waiter, DeadlineExceeded(now - ticket.arrival, retry_s, is_own=is_own))

    def _set_timer(self) -> None:
        """Look again in RECHECK_S, or when the next deadline is over."""
        if self._timer is not None or self._is_closed or not self._waiters:
            return
        deadline = self._queue.next_deadline()
        wait_s = RECHECK_S if deadline is None else min(RECHECK_S, deadline - self._clock())
        self._timer = asyncio.get_running_loop().call_later(max(wait_s, 0.0), self._recheck)

    def _recheck(self) -> None:
        self._timer = None
        lanes = self._queue.lanes()
        for i in range(min(len(lanes), MAX_PLACED)):
            self.poke(lanes[(self._num_rechecked + i) % len(lanes)])
        self._num_rechecked += MAX_PLACED
        if self._pumping is None:
            self._pump()

    def _fail(self, waiter: _Waiter, error: MalleeError) -> None:
        if not waiter.answer.done():
            self._metrics.refused(error.code)
            waiter.answer.set_exception(error)


def _closed() -> Unavailable:
    return Unavailable("the gateway is shutting down; send the request again")
