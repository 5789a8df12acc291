"""A live gateway in virtual time: the real service over mocked engines that share a replay's clock.

The event loop's time is the clock's. Between two events of the clock the loop runs until nothing is left
to do, so that the order of things is that of a replay.
"""

import asyncio
import heapq
import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from mallee.actors.gateway.gateway import GatewayService
from mallee.mocker.engine import MockedEngine, Outcome
from mallee.mocker.passes import mock_spec
from mallee.mocker.replay.build import ReplayBuilder
from mallee.mocker.replay.clock import Clock
from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.replay.fleet.faults import Action, actions
from mallee.mocker.replay.fleet.workers import Worker
from mallee.mocker.updates import CountedUpdate
from mallee.protocol.codec import encode
from mallee.protocol.errors import MalleeError
from mallee.protocol.events import Lease
from mallee.protocol.hashing import as_tokens
from mallee.protocol.ids import CapsuleId, Incarnation, RequestId, WorkerId, capsule_id
from mallee.protocol.messages import Command, Frame, Limits, Release
from mallee.protocol.parcels import LEAVING
from mallee.protocol.subjects import Subjects
from mallee.router.dispatch.dispatcher import Dispatcher
from mallee.router.dispatch.effects import Deliver, Ended, Failed, Placed, Refused, Send
from mallee.router.dispatch.jobs import ForkJob, GenerateJob, Job, PrefillJob, QueueTerms
from mallee.router.router import Router
from mallee.testing.bus import LocalBus, LocalHub
from mallee.traces.workload import NO_PARENT, Request
from support.live_fleet import make_gateway

SPEC = mock_spec(vocab_size=1 << 32, max_model_len=1 << 24)
_A_MOMENT = 2e-9  # more than the loop's resolution


class Decisions:
    """The decisions of a dispatcher and the news for its clients, with times; tokens by their number."""

    def __init__(
        self, dispatcher: Dispatcher, clock: Clock, ended: Callable[[RequestId], None] | None = None
    ) -> None:
        self.log: list[tuple[float, tuple[Any, ...]]] = []
        self._clock = clock
        self._ended = ended
        self._effects = dispatcher.effects
        self._told: dict[tuple[str, int], int] = defaultdict(int)
        self.capsules: dict[RequestId, CapsuleId] = {}  # of first branches
        dispatcher.effects = self._take  # type: ignore[method-assign]

    def _take(self) -> list[Any]:
        effects = self._effects()
        for effect in effects:
            self._note(effect)
        return effects

    def _note(self, effect: Any) -> None:
        entry: tuple[Any, ...]
        match effect:
            case Placed(request=request, shard=shard, placement=placement):
                entry = (request, shard.name, shard.worker, shard.branches, shard.how)
                entry = ("placed", *entry, placement.overlap_blocks)
            case Send(worker=worker, command=command):
                subject = command.capsule if isinstance(command, Release) else command.request
                entry = ("send", worker, type(command).__name__, subject)
            case Deliver(request=request, branch=branch, update=update):
                self._told[request, branch] += update.num_tokens
                if update.finish is None:
                    return
                if not branch and update.capsule is not None:
                    self.capsules[request] = update.capsule
                entry = ("finish", request, branch, update.finish, self._told[request, branch])
            case Failed(request=request, branch=branch, error=error):
                entry = ("failed", request, branch, error.code)
            case Refused(request=request, error=error):
                entry = ("refused", request, error.code)
            case Ended(request=request):
                entry = ("ended", request)
                if self._ended is not None:
                    self._ended(request)
            case _:
                entry = (type(effect).__name__,)
        self.log.append((self._clock.now, entry))


class TokenEngine(MockedEngine):
    """A mocked engine that tells each token when it is drawn."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**(more | {"reports_progress": True, "max_multi_step": 1}))

    def finish_raw(self) -> Any:
        self.result = super().finish_raw()
        return self.result

    def unreported(self, now: float) -> list[CountedUpdate]:
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in a clock's time."""

    def __init__(self, clock: Clock) -> None:
        self._now = clock.read
        self._failure: Exception | None = None
        super().__init__()

    def time(self) -> float:
        return self._now()

    @property
    def next_timer(self) -> float:
        timers: list[Any] = self._scheduled  # type: ignore[attr-defined]
        return min((t.when() for t in timers if not t.cancelled()), default=float("inf"))

    def play(self, act: Callable[[Any], Any], subject: Any) -> None:
        """`act(subject)` in the loop, and all that follows at this time."""
        self.call_soon(self._play, act, subject)
        self.settle()
        if self._failure is not None:
            raise self._failure

    def _play(self, act: Callable[[Any], Any], subject: Any) -> None:
        try:
            act(subject)
        except Exception as error:
            self._failure = error

    def settle(self) -> None:
        """Run until nothing is left to do at this time."""
        while self._ready or self.next_timer <= self.time():  # type: ignore[attr-defined]
            self.call_soon(self.stop)
            self.run_forever()


class SimLink:
    """A `Link` to one life of a worker."""

    def __init__(
        self,
        send: Callable[[Command], None],
        on_frame: Callable[[Frame], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self.send = send
        self.on_frame = on_frame
        self.on_lost = on_lost
        self.is_open = True

    async def close(self) -> None:
        self.is_open = False


class LiveWorld:
    """One live gateway over the fleet of a replay, which plays the same requests and faults."""

    def __init__(self, requests: Sequence[Request], config: ReplayConfig, id_tokens: int) -> None:
        self.clock = Clock()
        self.loop = VirtualLoop(self.clock)
        self._id_tokens = id_tokens
        self._requests = {f"r{request.number}": request for request in requests}
        self._children: dict[str, list[Request]] = defaultdict(list)
        for request in requests:
            if request.parent != NO_PARENT:
                self._children[f"r{request.parent}"].append(request)
        self._forks_left = {name: len(forks) for name, forks in self._children.items()}
        builder = ReplayBuilder(
            config, config.load_timing(), config.block_tokens(id_tokens), self.clock
        )
        self.fleet = builder.fleet(self, None, has_forks=True)  # type: ignore[arg-type]
        self._actions: list[Action] = actions(config.faults, config.engines)
        self._num_engines = config.engines
        routing = builder._router(0, builder._cost_model(), None).config
        draw = random.Random(config.seed * 1009).random
        self.router = Router(routing, clock=self.clock.read, draw=draw)
        self._links: dict[Incarnation, SimLink] = {}
        self._names: deque[str] = deque()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._streams: dict[str, Any] = {}
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.errors: dict[str, str] = {}
        self._ended: set[str] = set()

    def run(self) -> None:
        """From the first request to the end of the last."""
        self.loop.run_until_complete(self._open())
        for index in range(self._num_engines):
            self.loop.play(self.fleet.open, index)
        for action in self._actions:
            self.clock.at(action.at_s, action.play, self.fleet)
        for request in self._requests.values():
            if request.parent == NO_PARENT:
                self.clock.at(request.arrival_s, self._begin, request)
        while self.clock._due or len(self._ended) < len(self._requests):
            at = self.clock._due[0][0] if self.clock._due else float("inf")
            if (timer := self.loop.next_timer) < at:
                assert timer < 1e6, "nothing is to come, and requests wait"
                self.clock.now = max(self.clock.now, timer + _A_MOMENT)
                self.loop.settle()
            else:
                self.clock.now, _, act, subject = heapq.heappop(self.clock._due)
                self.loop.play(act, subject)
            self.gateway.check()
        self.loop.run_until_complete(self._close())
        self.loop.close()

    async def _open(self) -> None:
        hub = LocalHub()
        self.bus = LocalBus(hub)
        await self.bus.connect()
        own = LocalBus(hub)
        await own.connect()
        self.gateway: GatewayService = make_gateway(
            "g",
            own,
            self,
            self.router,
            SPEC,
            clock=self.clock.read,
            new_request_id=self._names.popleft,
        )
        await self.gateway.start_up()
        dispatcher = self.gateway._dispatcher
        dispatcher._waiting._recheck_s = None  # all room is announced, as in a replay
        dispatcher._config = dispatcher._config._replace(can_convict=False)
        self.decisions = Decisions(dispatcher, self.clock, self._on_end)

    async def _close(self) -> None:
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self.gateway.close()

    # Requests

    def _begin(self, request: Request) -> None:
        name = f"r{request.number}"
        self._names.append(name)
        self._tasks[name] = self.loop.create_task(self._follow(name, self._job(request)))

    def _job(self, request: Request) -> Job:
        limits, terms = Limits(request.output_tokens, (), True), QueueTerms(request.session)
        if request.parent == NO_PARENT:
            size = self._id_tokens
            ids = [i * size + k for i in request.ids for k in range(size)]
            tokens = as_tokens(ids[: request.input_tokens])
            if not request.output_tokens:
                return PrefillJob(tokens, terms=terms)
            return GenerateJob(tokens, limits, n=request.branches, terms=terms)
        suffixes = [
            as_tokens(
                [
                    (1 << 30) + 1000 * (8 * request.number + b) + k
                    for k in range(request.input_tokens)
                ]
            )
            for b in range(request.branches)
        ]
        return ForkJob(self._capsule(request.parent), suffixes, limits, terms=terms)

    def _capsule(self, number: int) -> CapsuleId:
        """The capsule that the first branch of request `number` left."""
        name = RequestId(f"r{number}")
        return self.decisions.capsules.get(name, capsule_id(name))

    async def _follow(self, name: str, job: Job) -> None:
        try:
            stream = self._streams[name] = await self.gateway.start(job)
        except MalleeError as error:
            self.errors[name] = error.code
            if name not in self._ended:  # it never was the dispatcher's
                self._on_end(RequestId(name))
            return
        async for delta in stream:
            self.tokens[name, delta.branch].extend(delta.tokens)

    def cancel(self, name: str, branch: int | None) -> None:
        """The client gives up `branch`, or all of a request."""
        stream = self._streams.get(name)
        if stream is None:
            if branch is None and name in self._tasks:
                self._tasks[name].cancel()
        elif branch is None:
            self.loop.create_task(stream.aclose())
        else:
            stream.cancel(branch)

    def _on_end(self, name: RequestId) -> None:
        self._ended.add(name)
        for fork in self._children.get(name, ()):
            if fork.arrival_s > self.clock.now:
                self.clock.at(fork.arrival_s, self._begin, fork)
            else:
                self._begin(fork)
        parent = self._requests[name].parent
        if parent != NO_PARENT:
            key = f"r{parent}"
            self._forks_left[key] -= 1
            if not self._forks_left[key]:
                self.loop.create_task(self._release(self._capsule(parent)))

    async def _release(self, capsule: CapsuleId) -> None:
        with suppress(MalleeError):
            await self.gateway.release_capsule(capsule)

    # The transport

    def link(
        self,
        worker: WorkerId,
        incarnation: Incarnation,
        address: str,
        on_frame: Callable[[Frame], None],
        on_lost: Callable[[str], None],
    ) -> SimLink:
        life = self.fleet.lives[incarnation]
        link = SimLink(partial(self.fleet.send, life), on_frame, on_lost)
        self._links[incarnation] = link
        return link

    # The fleet's listener

    def on_outcome(self, worker: Worker, outcome: Outcome) -> None:
        if outcome.events is not None:
            self.router.on_events(outcome.events)
        frame = worker.engine.result.frames.get("g")  # type: ignore[attr-defined]
        link = self._links.get(worker.incarnation)
        if frame is not None and link is not None and link.is_open:
            link.on_frame(frame)

    def on_lease(self, worker: Worker, lease: Lease) -> None:
        self.bus.publish(Subjects.of("test").lease(worker.name), encode((lease,)))
        self.loop.call_soon(self.gateway._peers._feed.pump.poke)  # a feed may wait with leases

    def on_death(self, worker: Worker, unreported: Sequence[CountedUpdate]) -> None:
        link = self._links.get(worker.incarnation)
        if link is not None and link.is_open:
            link.is_open = False
            link.on_lost(LEAVING if worker.is_leaving else "it is gone")

    def on_broker(self, is_up: bool) -> None:
        raise AssertionError("the broker stays")

    def is_needed(self, worker: Worker) -> bool:
        return self.gateway._dispatcher.is_busy(worker.name)
