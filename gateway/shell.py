"""A dispatcher's shell: frames and changes of workers go in, its effects are carried out.

One event loop owns everything here. All decisions are the dispatcher's (`router.dispatch`), which a
replay drives in virtual time; NATS feeds the router but is never on the path of a request.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple, Protocol

from mallee.gateway.fleet.links import WorkerLinks
from mallee.gateway.fleet.questions import MOVE_S, WorkerQuestions
from mallee.gateway.metrics import GatewayMetrics
from mallee.gateway.requests.request import RunningRequest
from mallee.protocol.errors import MalleeError, Unavailable, UnknownCapsule, from_wire
from mallee.protocol.ids import COMMON, CapsuleId, Incarnation, RequestId, Scope, WorkerId
from mallee.protocol.messages import Delete, Demote, Frame, traced
from mallee.protocol.model import ModelSpec
from mallee.protocol.parcels import is_death
from mallee.router.dispatch.dispatcher import Dispatcher
from mallee.router.dispatch.effects import (
    Deliver,
    Ended,
    Failed,
    LetGo,
    Missing,
    NotInjected,
    Placed,
    Rebuilt,
    Refused,
    Send,
)
from mallee.router.dispatch.inboxes import Injection
from mallee.router.router import Router
from mallee.runtime.bus.bus import Bus
from mallee.runtime.tasks import Tasks
from mallee.runtime.telemetry.logs import ids, told
from mallee.runtime.transport.link import Transport

log = logging.getLogger(__name__)

_DISK: Final = 2  # of `Demote`


class RequestIds(Protocol):
    """Names of requests, by scope."""

    def new(self, scope: Scope, account: str = "") -> RequestId:
        """A name that was never given before; `account_of` tells the account from it."""
        ...

    def belongs(self, name: str, scope: Scope) -> bool:
        """Whether `name`, of a request or a capsule that it left, was made for `scope`."""
        ...

    def made_at(self, name: str, gateway: str) -> bool:
        """Whether `name` may have been made at that gateway; of few gateways it is true of one alone."""
        ...


class Keeper(Protocol):
    """Knows the capsules that outlive their gateways."""

    async def check(self, capsule: CapsuleId, scope: Scope) -> None:
        """Raises the error of one that must not be computed again."""
        ...

    async def adopt(self, worker: WorkerId) -> None:
        """Have the texts of kept capsules there that no gateway which lives has made.

        Soon, and if it is this gateway's turn: the first of all by name.
        """
        ...


class GatewayContext(NamedTuple):
    """Everything that all parts of one gateway share.

    `clock` (monotonic seconds) must be the router's; `wall_clock` dates capsules and sessions.
    """

    gateway: str
    fleet: str
    model: ModelSpec
    bus: Bus
    router: Router
    metrics: GatewayMetrics
    ids: RequestIds
    clock: Callable[[], float]
    wall_clock: Callable[[], float]


class Shell:
    """The running requests of a gateway, between its dispatcher and the links to workers.

    Made in its event loop. After a call of the `dispatcher`'s, `carry_out` what it decided.
    """

    def __init__(
        self, context: GatewayContext, dispatcher: Dispatcher, transport: Transport
    ) -> None:
        self.dispatcher = dispatcher
        self.room = dispatcher.room
        self.running: dict[RequestId, RunningRequest] = {}
        self.is_closed = False
        self.tasks = Tasks(f"gateway {context.gateway}")
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._injecting: dict[str, asyncio.Future[int]] = {}  # by injection
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0  # uvloop's handles don't tell it
        self.links = WorkerLinks(
            context.bus,
            transport,
            context.router,
            owner=self,
            model=context.model,
            fleet=context.fleet,
            metrics=context.metrics,
            clock=context.clock,
        )
        self.questions = WorkerQuestions(self.links)
        self.keeper: Keeper  # of this gateway's capsules, which are made after it

    def check_open(self) -> None:
        """Raises Unavailable, once this gateway closes."""
        if self.is_closed:
            raise _closing()

    async def end_requests(self) -> None:
        """Take nothing new, and end every request and every question to a worker; links stay."""
        self.is_closed = True
        await self.links.stop_listening()
        self.dispatcher.close(_closing())
        self.carry_out()
        self.questions.close(_closing())
        if self._timer is not None:
            self._timer.cancel()

    async def inject(self, request: RequestId, branch: int, injection: Injection) -> int:
        """The tokens of a branch's answer before those of `injection`, once they are in it.

        Raises UnknownBranch, InvalidParameter, QueueFull, Superseded.
        """
        self.dispatcher.inject(request, branch, injection)
        place: asyncio.Future[int] = self._loop.create_future()
        self._injecting[injection.name] = place
        try:
            self.carry_out()
            return await place
        finally:
            del self._injecting[injection.name]

    def give_up(self, request: RequestId, error: MalleeError) -> None:
        """End a request from outside: its reader gets `error`."""
        found = self.running.get(request)
        if found is None:
            return
        if found.placed.done():
            found.fail_all(error, self._context.clock(), self._context.router.weights.label)
        else:
            found.refuse(error)
        self.dispatcher.cancel(request)
        self.carry_out()

    # Workers: `fleet.links.LinkOwner`

    def on_frame(self, worker: WorkerId, frame: Frame) -> None:
        self.dispatcher.on_frame(worker, frame.step, frame.updates)
        for reply in frame.replies:
            is_injection = reply.error is not None and self.dispatcher.on_inject_refused(
                worker, reply.request, from_wire(reply.error)
            )
            if not is_injection:
                self.questions.take(reply)
        self.carry_out()

    def on_join(self, worker: WorkerId, incarnation: Incarnation) -> None:
        self.dispatcher.on_join(worker, incarnation)
        self.carry_out()

    def on_drain(self, worker: WorkerId) -> None:
        self.tasks.spawn(self._drain(worker), name="a worker that drains")

    async def _drain(self, worker: WorkerId) -> None:
        before = self._context.router.worker(worker)
        await self.keeper.adopt(worker)
        view = self._context.router.worker(worker)
        if before is not None and view is not None and view.incarnation == before.incarnation:
            self.dispatcher.on_draining(worker)
            self.carry_out()

    def on_change(self, worker: WorkerId) -> None:
        self.dispatcher.on_room(worker)
        self.carry_out()

    def on_heard(self) -> None:
        if self.dispatcher.num_waiting:
            self.dispatcher.on_heard()
            self.carry_out()

    def on_loss(self, worker: WorkerId, reason: str) -> None:
        self.dispatcher.on_lost(worker, reason, is_death=is_death(reason))
        self.carry_out()
        self.questions.lost(worker, reason)

    def is_busy(self, worker: WorkerId) -> bool:
        return self.dispatcher.is_busy(worker)

    # Effects

    def carry_out(self) -> None:
        """Do what the dispatcher decided, in order."""
        now = self._context.clock()
        for effect in self.dispatcher.effects():
            match effect:
                case Deliver(request=request):
                    running = self.running[request]
                    if effect.update.injected:
                        self._took_in(effect.update.injected, running.num_tokens(effect.branch))
                    running.deliver(effect, now)
                case Send():
                    self._send(effect)
                case Placed(request=request):
                    if effect.shard.dispatch.is_moved or effect.shard.how != "stay":
                        _log_placed(effect)
                    self.running[request].place(effect.shard, effect.placement, now)
                case Ended(request=request):
                    self.running.pop(request).end()
                case NotInjected(name=name, error=error):
                    self._took_in(name, error)
                case Failed(request=request, branch=branch, error=error):
                    _log_failure(request, branch, error)
                    weights = self._context.router.weights.label
                    self.running[request].fail(branch, error, now, weights)
                case Refused(request=request, error=error):
                    self.running[request].refuse(error)
                case Rebuilt(capsule=capsule, source=source, worker=worker):
                    securing = self._secure(capsule, source, worker)
                    self.tasks.spawn(securing, name="a durable capsule")
                case Missing():
                    self.tasks.spawn(self._confirm(effect), name="a capsule that is missing")
                case LetGo(worker=worker):
                    # Not at once: effects that follow may be for that worker.
                    self._loop.call_soon(self.links.let_go, worker)
        # Call the dispatcher when it wants to be called.
        at = self.dispatcher.next_time()
        if at is None or self.is_closed:
            return
        due = self._loop.time() + max(0.0, at - now)
        if self._timer is not None:
            if self._timer_due <= due:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._on_time)
        self._timer_due = due

    def _took_in(self, name: str, place: int | MalleeError) -> None:
        """Tokens are in a branch, so many tokens into its answer, or won't be."""
        waiting = self._injecting.get(name)
        if waiting is None or waiting.done():
            return  # its client has gone
        if isinstance(place, int):
            waiting.set_result(place)
        else:
            waiting.set_exception(place)

    def _send(self, effect: Send) -> None:
        """Queue a command, by which its worker learns of the trace that it is part of."""
        command, shard = effect.command, effect.shard
        if shard is not None:
            running = self.running.get(shard.state.id)
            if running is not None and running.trace is not None:
                command = traced(command, running.trace.parent_of(shard.name))
        self.links.send(effect.worker, command)

    async def _secure(self, capsule: CapsuleId, source: WorkerId, worker: WorkerId) -> None:
        """Have a capsule that was durable on `source`, which drains, be so on `worker`, and there alone."""
        new = self._context.ids.new
        try:
            with suppress(UnknownCapsule):  # it was deleted meanwhile: so it must be there
                await self.questions.ask(worker, Demote(new(COMMON), capsule, _DISK), MOVE_S)
            await self.questions.ask(source, Delete(new(COMMON), capsule))
        except MalleeError as error:
            text = "capsule %s, durable on worker %s that drains, stays on its disk: %s"
            log.warning(text, capsule, source, told(error), extra=ids(worker=worker))
        finally:
            self.dispatcher.secured(source, capsule)
            self.carry_out()

    async def _confirm(self, missing: Missing) -> None:
        """Tell the dispatcher whether a capsule may be computed again."""
        error: MalleeError | None = None
        try:
            await self.keeper.check(missing.capsule, missing.scope)
        except MalleeError as refusal:
            error = refusal
        self.dispatcher.confirm(missing.capsule, error)
        self.carry_out()

    def _on_time(self) -> None:
        self._timer = None
        self.dispatcher.on_time()
        self.carry_out()


def _log_placed(effect: Placed) -> None:
    """Say where a shard goes, if it was moved or is a part of a fan-out."""
    shard, worker = effect.shard, effect.placement.worker
    extra = ids(request=effect.request, worker=worker)
    if shard.dispatch.is_moved:
        log.info("%s goes on as %s on %s", effect.request, shard.name, worker, extra=extra)
    if shard.how != "stay":
        text, rows = "%s: %d rows %s on %s; %s", len(shard.branches)
        log.info(text, shard.name, rows, shard.how, worker, effect.prices, extra=extra)


def _log_failure(request: RequestId, branch: int, error: MalleeError) -> None:
    extra = ids(request=request, branch=branch, worker=error.fields.get("worker"))
    log.warning("%s, branch %d: %s", request, branch, told(error), extra=extra)


def _closing() -> Unavailable:
    return Unavailable("the gateway is shutting down; send the request again")
