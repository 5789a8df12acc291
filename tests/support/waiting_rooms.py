"""Several gateways that share rows of workers, in virtual time: their waiting rooms, outboxes and replicas.

Real are `Waiting`, `Outbox` and `Replicas`; workers are a number of rows, clients ask again and again.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from mallee.protocol.bookings import Booked, BookingBatch
from mallee.protocol.errors import MalleeError, Saturated
from mallee.protocol.hashing import NO_HASHES, as_tokens
from mallee.protocol.ids import Incarnation, RequestId, WorkerId
from mallee.protocol.messages import Limits
from mallee.router.dispatch.jobs import GenerateJob, QueueTerms
from mallee.router.dispatch.queue import AdmissionConfig
from mallee.router.dispatch.shards import Dispatch, RequestState
from mallee.router.dispatch.waiting import Waiting
from mallee.router.sync.outbox import Outbox
from mallee.router.sync.replicas import Replicas

PROMPT = as_tokens([1])
FLUSH_S = 0.003
BEAT_S = 1.0
LEASE_S = 3.0


@dataclass(frozen=True)
class Crowd:
    """Clients of one tenant: so many at each gateway. A request costs `tokens`, half to twice as much."""

    tenant: str
    at: Mapping[int, int]
    tokens: int = 400


@dataclass
class Gateway:
    """A waiting room, its view of the rows, and its share in the broadcast."""

    fleet: "Fleet"
    number: int
    life: int
    booked: set[str] = field(default_factory=set)
    open: dict[str, float] = field(default_factory=dict)  # its requests that have a row; costs
    is_dead: bool = False

    def __post_init__(self) -> None:
        self.name = f"g{self.number}"
        clock = self.fleet.clock
        self.outbox = Outbox(self.name, Incarnation(self.life))
        self.outbox.on_filled = lambda: self.fleet.after(FLUSH_S, self._flush)
        self.waiting = Waiting(
            AdmissionConfig(weights=self.fleet.weights, max_wait_s=1e9),
            place=self._place,
            placed=lambda dispatch: None,
            failed=self._fail,
            has_workers=lambda: True,
            has_room=lambda: len(self.booked) < self.fleet.rows,
            clock=clock,
            outbox=self.outbox,
        )
        room = self.waiting.elsewhere
        self.replicas = Replicas(
            self,
            gateway=self.name,
            clock=clock,
            lease_s=LEASE_S,
            room=room,
            incarnation=self.life,
        )
        self.timer_at = float("inf")
        self._beat()

    # Requests

    def ask(self, request: str, crowd: Crowd, cost: int) -> None:
        job = GenerateJob(PROMPT, Limits(1), n=1, terms=QueueTerms(tenant=crowd.tenant))
        state = RequestState(RequestId(request), job, self.fleet.clock())
        dispatch = Dispatch(state, job, range(1), NO_HASHES, num_moves=0)
        self.fleet.costs[request] = cost
        self.fleet.crowds[request] = crowd
        if self.waiting.is_free(None):
            try:
                self._place(dispatch, True)
            except Saturated:
                pass
            else:
                return
        self.waiting.add(dispatch, cost * self.fleet.rng.uniform(0.5, 2.0))  # as estimated
        self.set_timer()

    def _place(self, dispatch: Dispatch, may_wait: bool) -> float:
        request = dispatch.state.id
        crowd = self.fleet.crowds[request]
        if crowd.tenant in self.fleet.stuck or len(self.booked) >= self.fleet.rows:
            raise Saturated(1, 1)
        self.booked.add(request)
        cost = self.fleet.costs[request]
        self.open[request] = cost
        self.outbox.booked(Booked(request, "w", 1, b"", 0, 0, 0, 1, 1))
        self.fleet.run(self, request)
        return cost

    def _fail(self, dispatch: Dispatch, error: MalleeError) -> None:
        raise AssertionError(error)

    def end(self, request: str) -> None:
        self.booked.discard(request)
        del self.open[request]
        self.outbox.freed(RequestId(request))
        self.waiting.wake(WorkerId("w"))
        self.waiting.pump()
        self.set_timer()

    def on_time(self, at: float) -> None:
        if self.is_dead or at != self.timer_at:
            return
        self.timer_at = float("inf")
        self.waiting.on_time()
        self.set_timer()

    def set_timer(self) -> None:
        at = self.waiting.next_time()
        if at is not None and at < self.timer_at:
            self.timer_at = max(at, self.fleet.now)
            self.fleet.at(self.timer_at, lambda at=self.timer_at: self.on_time(at))

    # The broadcast

    def _flush(self) -> None:
        if self.is_dead:
            return
        while (batch := self.outbox.take()) is not None:
            self.fleet.broadcast(self, batch)

    def _beat(self) -> None:
        if self.is_dead:
            return
        lags = self.waiting.elsewhere.lags()
        self.fleet.broadcast(self, self.outbox.heartbeat(lags=lags))
        self.replicas.expire()
        self.fleet.after(BEAT_S, self._beat)

    def hear(self, batch: BookingBatch) -> None:
        if self.is_dead:
            return
        if self.replicas.on_batch(batch):
            other = next(g for g in self.fleet.gateways if g.name == batch.gateway)
            if not other.is_dead:
                self.replicas.on_snapshot(other.outbox.snapshot())
        self.waiting.on_heard()
        self.set_timer()

    # `Ledger`

    def book_remote(self, booking: Booked) -> bool:
        self.booked.add(booking.request)
        return True

    def prefill_done_remote(self, request: RequestId) -> bool:
        return True

    def free_remote(self, request: RequestId) -> bool:
        self.booked.discard(request)
        return True


class Fleet:
    """Gateways, rows, clients and a clock. `token_s`: seconds of a row for a token."""

    def __init__(
        self,
        gateways: int,
        crowds: Sequence[Crowd],
        weights: Mapping[str, float],
        *,
        rows: int = 32,
        token_s: float = 0.001,
        lag_s: float = 0.003,
        seed: int = 0,
    ) -> None:
        self.now, self.rows, self.token_s, self.lag_s = 0.0, rows, token_s, lag_s
        self.weights = weights
        self.rng = random.Random(seed)
        self._due: list[tuple[float, int, Callable[[], Any]]] = []
        self._order, self._names = count(), count()
        self.costs: dict[str, int] = {}
        self.crowds: dict[str, Crowd] = {}
        self.stuck: set[str] = set()  # tenants whose requests fit nowhere
        self.is_cut = False  # the broker is away
        self._running: set[str] = set()
        self._queued: deque[tuple[Gateway, str]] = deque()  # in the workers
        self.served: dict[str, int] = {}  # tokens, by tenant
        self.most_queued = 0
        self.gateways = [Gateway(self, number, number + 1) for number in range(gateways)]
        for crowd in crowds:
            for number, num in crowd.at.items():
                for _ in range(num):
                    self.after(self.rng.random(), lambda c=crowd, n=number: self.ask(c, n))

    def clock(self) -> float:
        return self.now

    def at(self, at: float, act: Callable[[], Any]) -> None:
        heapq.heappush(self._due, (at, next(self._order), act))

    def after(self, seconds: float, act: Callable[[], Any]) -> None:
        self.at(self.now + seconds, act)

    def run_until(self, end: float) -> None:
        while self._due and self._due[0][0] <= end:
            self.now, _, act = heapq.heappop(self._due)
            act()
        self.now = end

    def ask(self, crowd: Crowd, number: int) -> None:
        gateway = self.gateways[number]
        if not gateway.is_dead:
            cost = int(crowd.tokens * self.rng.uniform(0.5, 2.0))
            gateway.ask(f"r{next(self._names)}", crowd, cost)

    def run(self, gateway: Gateway, request: str) -> None:
        """A row computes it, once one is free."""
        if len(self._running) >= self.rows:
            self._queued.append((gateway, request))
            self.most_queued = max(self.most_queued, len(self._queued))
            return
        self._running.add(request)
        cost, crowd = self.costs[request], self.crowds[request]

        def end() -> None:
            self._running.discard(request)
            self.served[crowd.tenant] = self.served.get(crowd.tenant, 0) + cost
            if self._queued:
                self.run(*self._queued.popleft())
            if not gateway.is_dead:
                gateway.end(request)
                self.after(0.002, lambda: self.ask(crowd, gateway.number))

        self.after(cost * self.token_s, end)

    def broadcast(self, source: Gateway, batch: BookingBatch) -> None:
        if self.is_cut:
            return
        for gateway in getattr(self, "gateways", ()):
            if gateway is not source:
                lag_s = self.lag_s
                self.after(lag_s, lambda g=gateway: g.hear(batch))

    def kill(self, number: int) -> None:
        """A gateway dies with what it runs; its clients go."""
        gateway = self.gateways[number]
        gateway.is_dead = True
        for request in list(gateway.open):
            self._running.discard(request)
        self._queued = deque(each for each in self._queued if each[0] is not gateway)

    def restart(self, number: int, life: int, crowds: Sequence[Crowd]) -> None:
        """A gateway of the same name begins, with new clients."""
        self.gateways[number] = Gateway(self, number, life)
        for crowd in crowds:
            for _ in range(crowd.at.get(number, 0)):
                self.ask(crowd, number)

    def shares(self, end: float) -> dict[str, float]:
        """The part of all tokens that each tenant is served from now to `end`."""
        before = dict(self.served)
        self.run_until(end)
        got = {t: n - before.get(t, 0) for t, n in self.served.items()}
        self.total = sum(got.values())
        return {t: n / self.total for t, n in got.items()}

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        for gateway in self.gateways:
            if not gateway.is_dead:
                gateway.waiting.check()
                gateway.replicas.check()
                gateway.outbox.check()
