"""The gateway of a replay: a dispatcher's shell, which carries out its effects in virtual time.

All decisions are those of the live gateway, which drives the same `router.dispatch`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from mallee.mocker.replay.clock import MAX_S, Clock
from mallee.mocker.replay.fleet.workers import Fleet, Worker
from mallee.mocker.replay.gateway.texts import ReplayTexts
from mallee.mocker.updates import CountedUpdate
from mallee.protocol.errors import MalleeError
from mallee.protocol.events import Lease
from mallee.protocol.ids import CapsuleId, Incarnation, RequestId, WorkerId
from mallee.protocol.messages import Prefill
from mallee.protocol.parcels import LEAVING
from mallee.router.dispatch.dispatcher import DispatchConfig, Dispatcher
from mallee.router.dispatch.effects import (
    Deliver,
    Ended,
    Failed,
    LetGo,
    Missing,
    Placed,
    Rebuilt,
    Refused,
    Send,
)
from mallee.router.dispatch.jobs import Job
from mallee.router.dispatch.queue import AdmissionConfig
from mallee.router.router import Router


class Recorder(Protocol):
    """Records the course of requests."""

    def placed(self, effect: Placed) -> None:
        """Take the booking of a shard."""
        ...

    def deliver(self, effect: Deliver, ended: float) -> None:
        """Take news of a branch, from a step that ended at `ended`."""
        ...

    def failed(self, request: RequestId, error: MalleeError) -> None:
        """Take the failure of a branch, or of all of `request`, which is then over."""
        ...

    def over(self, request: RequestId) -> None:
        """Take the end of a request, well or not."""
        ...


class Gateway:
    """One gateway of one simulation, or one half of one that has prompts computed apart.

    `send` carries out a command, else it goes to its worker. `on_booked` is called when the other gateways
    are to be told of bookings, or of tenants that wait.
    """

    def __init__(
        self,
        name: str,
        router: Router,
        *,
        clock: Clock,
        fleet: Fleet,
        texts: ReplayTexts,
        recorder: Recorder,
        admission: AdmissionConfig,
        send: Callable[[Worker, Send], None] | None = None,
        on_booked: Callable[["Gateway"], None] | None = None,
    ) -> None:
        self.name = name
        self.router = router
        self.routers: Mapping[str, Router] = {"both": router}
        self._clock = clock
        self._fleet = fleet
        self._texts = texts
        self._recorder = recorder
        self._send = send or self.send
        self._on_booked = on_booked
        # All room is announced, and workers die of faults alone.
        config = DispatchConfig(
            replace(admission, max_idle_tenants=65_536),
            recheck_s=None,
            can_convict=False,
            asks_first=True,
        )
        self._dispatcher = Dispatcher(router, texts, config, clock=clock.read)
        self.room = self._dispatcher.room
        self._lives: dict[WorkerId, Incarnation] = {}  # that have joined and are not known as lost
        self._is_carrying_out = self._has_more = False
        self._timed_at = MAX_S

    def router_for(self, worker: Worker) -> Router:
        """The router that knows `worker`."""
        return self.router

    # What happens

    def begin(self, request: RequestId, job: Job) -> None:
        """Route a new request and send it off, or let it wait for room."""
        try:
            self._dispatcher.submit(request, job)
        except MalleeError as error:
            self._recorder.failed(request, error)
            self._clock.at(self._clock.now, self._recorder.over, request)
            return
        self._carry_out(self._clock.now)

    def cancel(self, request: RequestId, branch: int | None = None) -> None:
        """End `branch` of a request, or all that is left of it."""
        self._dispatcher.cancel(request, branch)
        self._carry_out(self._clock.now)

    def on_updates(self, worker: Worker, updates: Sequence[CountedUpdate], ended: float) -> None:
        """Handle updates by a step of `worker` that ended at `ended`."""
        self._dispatcher.on_updates(worker.name, updates)
        self._carry_out(ended)

    def on_lease(self, worker: Worker, lease: Lease) -> None:
        """`worker` joins, drains or has room; the router knows."""
        name, incarnation = lease.worker, lease.incarnation
        if self._lives.get(name) == incarnation:
            if lease.is_draining:
                self._dispatcher.on_draining(name)
            self.poke(name)
            return
        if not self.router.is_routable(name, incarnation):
            return  # it drains, or was let go of
        if name in self._lives:
            self._dispatcher.on_lost(name, "it was restarted")
        self._lives[name] = incarnation
        self._dispatcher.on_join(name, incarnation)
        self._carry_out(self._clock.now)

    def lost(self, worker: Worker) -> None:
        """Have what ran on `worker` go on elsewhere; the router knows that it is gone."""
        if self.is_linked(worker):
            del self._lives[worker.name]
            self._dispatcher.on_lost(worker.name, "it is gone")
            self._carry_out(self._clock.now)

    def _let_go(self, name: WorkerId) -> None:
        """End the link to a worker that drains, unless something was sent there meanwhile."""
        incarnation = self._lives.get(name)
        if incarnation is None or self._dispatcher.is_busy(name):
            return
        del self._lives[name]
        self.router.lose_worker(name, incarnation)
        self._dispatcher.on_lost(name, LEAVING, is_death=False)
        self._carry_out(self._clock.now)
        self._fleet.let_go(self._fleet.lives[incarnation])

    def poke(self, worker: WorkerId | None) -> None:
        """Try what waits again: `worker` may have room now."""
        self._dispatcher.on_room(worker)
        self._carry_out(self._clock.now)

    def release(self, capsule: CapsuleId) -> None:
        """No request will fork `capsule` any more: it is not made again if its worker drains."""
        if self._dispatcher.is_rebuilding:
            self._dispatcher.forget_capsule(capsule)
            self._carry_out(self._clock.now)

    def is_linked(self, worker: Worker) -> bool:
        """Whether this life of `worker` has joined and was neither lost nor let go of."""
        return self._lives.get(worker.name) == worker.incarnation

    # Effects

    def _carry_out(self, ended: float) -> None:
        """Do what the dispatcher decided, in order."""
        if self._is_carrying_out:
            self._has_more = (
                True  # the end of a request began another one: its effects come after these
            )
            return
        self._is_carrying_out = self._has_more = True
        let_go: list[WorkerId] = []
        while self._has_more:
            self._has_more = False
            for effect in self._dispatcher.effects():
                if type(effect) is Deliver:
                    self._recorder.deliver(effect, ended)
                elif type(effect) is Send:
                    assert effect.shard is not None, "nothing is sent but for requests"
                    self._send(self._fleet.lives[effect.shard.incarnation], effect)
                elif type(effect) is Placed:
                    self._recorder.placed(effect)
                elif type(effect) is Ended:
                    self._recorder.over(effect.request)
                elif type(effect) is LetGo:
                    let_go.append(effect.worker)
                elif type(effect) is Missing:  # nobody else releases it
                    self._dispatcher.confirm(effect.capsule, None)
                    self._has_more = True
                elif type(effect) is Rebuilt:  # a replay makes nothing durable by itself
                    self._dispatcher.secured(effect.source, effect.capsule)
                else:
                    assert isinstance(effect, Failed | Refused), "there is nobody to ask"
                    self._recorder.failed(effect.request, effect.error)
        self._is_carrying_out = False
        at = self._dispatcher.next_time()
        if at is not None:
            self._set_timer(at)
        if self._on_booked is not None and self.router.outbox:
            self._on_booked(self)
        for worker in let_go:
            self._let_go(worker)

    def send(self, worker: Worker, effect: Send) -> None:
        """Send a command."""
        command = effect.command
        if isinstance(command, Prefill) and command.capsule:
            self._texts.built(CapsuleId(command.capsule), worker)
        self._fleet.send(worker, command)

    def _set_timer(self, at: float) -> None:
        """Call the dispatcher at this time."""
        if at < self._timed_at:
            self._timed_at = at
            self._clock.at(max(at, self._clock.now), self._on_time, None)

    def _on_time(self, _: None) -> None:
        if self._clock.now >= self._timed_at:
            self._timed_at = MAX_S
        self._dispatcher.on_time()
        self._carry_out(self._clock.now)

    # Reading

    @property
    def num_retries(self) -> int:
        """Shards that were placed again."""
        return self._dispatcher.num_moved

    @property
    def num_rebuilt(self) -> int:
        """Capsules that were gone and were computed again."""
        return self._dispatcher.num_rebuilt

    def check(self) -> None:
        """Raises AssertionError on a broken invariant, or if a request is under way."""
        self._dispatcher.check()
        assert not self._dispatcher.num_running, "requests under way"
