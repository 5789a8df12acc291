"""Live gateways in virtual time: the real service over mocked engines that share a replay's clock.

The event loop's time is the clock's. Between two events of the clock the loop runs until nothing is left
to do, so that the order of things is that of a replay. Gateways tell each other their bookings as in a
replay, too: at once, not every few milliseconds.
"""

import asyncio
import heapq
import random
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from bench.doubles.bus import LocalBus, LocalHub
from mallee.gateway.gateway import Gateway
from mallee.mocker.engine import MockedEngine, Outcome
from mallee.mocker.passes import mock_spec
from mallee.mocker.replay.build import ReplayBuilder
from mallee.mocker.replay.clock import Clock
from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.replay.fleet.faults import Action, actions
from mallee.mocker.replay.fleet.workers import Worker
from mallee.mocker.updates import CountedUpdate
from mallee.protocol.bookings import BookingBatch
from mallee.protocol.codec import encode
from mallee.protocol.errors import MalleeError, UnknownCapsule
from mallee.protocol.events import AskSnapshot, Lease, Snapshot, decode_host_ask
from mallee.protocol.hashing import as_tokens
from mallee.protocol.ids import COMMON, CapsuleId, Incarnation, RequestId, WorkerId, capsule_id
from mallee.protocol.messages import Command, Frame, Limits, Release
from mallee.protocol.subjects import Subjects
from mallee.router.dispatch.dispatcher import Dispatcher
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
from mallee.router.dispatch.jobs import ForkJob, GenerateJob, Job, PrefillJob, QueueTerms
from mallee.router.router import Router
from mallee.router.sync.outbox import Outbox
from mallee.router.sync.replicas import Replicas, Room
from mallee.runtime.tasks import Tasks
from mallee.traces.workload import NO_PARENT, Request
from support.live_fleet import make_gateway
from support.plain_ids import PlainIds

SPEC = mock_spec(vocab_size=1 << 32, max_model_len=1 << 24)
_FIRST = 1 << 60  # taken from the order of what comes first


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
            case LetGo(worker=worker):
                entry = ("let go", worker)
            case Missing(capsule=capsule):
                entry = ("missing", capsule)
            case Rebuilt(capsule=capsule, source=source, worker=worker):
                entry = ("rebuilt", capsule, source, worker)
            case _:
                raise AssertionError(f"{effect} is new")
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
    """An event loop in a clock's time. Its timers are the clock's, in order with all else there."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failure: Exception | None = None
        self.num_timers = 0  # on the clock, cancelled ones among them
        super().__init__()

    def time(self) -> float:
        return self._clock.now

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self.num_timers += 1
        self._clock.at(max(when, self._clock.now), self._ring, timer)
        return timer

    def _ring(self, timer: asyncio.TimerHandle) -> None:
        self.num_timers -= 1
        if not timer.cancelled():
            timer._run()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Nothing: it stays on the clock."""

    def play(self, act: Callable[[Any], Any], subject: Any) -> None:
        """`act(subject)` in the loop, and all that follows at this time but for timers."""
        self.call_soon(self._play, act, subject)
        while self._ready:  # type: ignore[attr-defined]
            self.call_soon(self.stop)
            self.run_forever()
        if self._failure is not None:
            raise self._failure

    def _play(self, act: Callable[[Any], Any], subject: Any) -> None:
        try:
            act(subject)
        except Exception as error:
            self._failure = error


class SimLink:
    """A `Link` of one gateway to one life of a worker; `closed` is called once."""

    def __init__(
        self,
        send: Callable[[Command], None],
        on_frame: Callable[[Frame], None],
        on_lost: Callable[[str], None],
        closed: Callable[[], None],
    ) -> None:
        self._send = send
        self.on_frame = on_frame
        self._on_lost = on_lost
        self._closed = closed
        self._names: set[str] = set()  # of the requests that were sent
        self._begun: set[tuple[str, int]] = set()  # branches that were heard of
        self.is_open = True

    def send(self, command: Command) -> None:
        if not isinstance(command, Release):
            self._names.add(command.request)
        self._send(command)

    def first_of(self, frame: Frame) -> int:
        """The place of the first update for this gateway that a replay would hear: a beginning or an end."""
        for place, each in enumerate(frame.updates):
            is_told = each.finish is not None or (each.request, each.branch) not in self._begun
            if is_told and each.request in self._names:
                return place
        return len(frame.updates)

    def hear(self, frame: Frame) -> None:
        """A step's updates, of which this gateway gets its own."""
        updates = tuple(each for each in frame.updates if each.request in self._names)
        self._begun.update((each.request, each.branch) for each in updates)
        if updates and self.is_open:
            self.on_frame(Frame(frame.step, updates))

    def lose(self, reason: str) -> None:
        if self.is_open:
            self.is_open = False
            self._on_lost(reason)

    async def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._closed()


class SimBus(LocalBus):
    """A gateway's bus. `snapshot(worker)` has what it holds; raises ConnectionError for one that is gone."""

    def __init__(
        self, hub: LocalHub, snapshot: Callable[[WorkerId], asyncio.Future[Snapshot]]
    ) -> None:
        super().__init__(hub)
        self._snapshot = snapshot

    async def request(self, subject: str, raw: bytes, timeout_s: float) -> bytes:
        if not self.is_up:
            raise ConnectionError("the broker is away")
        asked = decode_host_ask(raw)
        assert isinstance(asked, AskSnapshot), f"{asked} is new"
        snapshot = await self._snapshot(asked.worker)
        if not self.is_up:
            raise ConnectionError("the broker went away")
        return encode(snapshot)


class SimBookings:
    """A gateway's share in the others' bookings: a `BookingFeed` without a bus."""

    def __init__(self, router: Router, name: str, clock: Clock, room: Room) -> None:
        self.replicas = Replicas(
            router, gateway=name, clock=clock.read, lease_s=1e12, room=room, incarnation=1
        )
        self.tasks = Tasks("the bookings of a test")

    async def start_up(self, metrics_at: str) -> None:
        """Nothing: they are told by calls."""

    async def close(self) -> None:
        """Nothing."""


class LiveGateway:
    """One live gateway of a world, and its links."""

    def __init__(self, world: "LiveWorld", index: int, router: Router) -> None:
        self.name = f"g{index}"
        self.router = router
        self._world = world
        self.links: dict[Incarnation, SimLink] = {}
        self.names: deque[str] = deque()  # of the requests to come
        self.unwanted: deque[CapsuleId] = deque()  # capsules that no request will fork
        self._has_more = False  # something was answered in the midst of carrying out

    async def open(self, hub: LocalHub) -> None:
        world, clock = self._world, self._world.clock
        bus = SimBus(hub, world.snapshot)
        await bus.connect()
        self.service: Gateway = make_gateway(
            self.name,
            bus,
            self,
            self.router,
            SPEC,
            clock=clock.read,
            ids=PlainIds(self.names.popleft),
        )
        peers = self.service.shell.links
        if self.router.outbox is not None:
            room = self.service.shell.room
            self.bookings = SimBookings(self.router, self.name, clock, room)
            peers._bookings = self.bookings  # type: ignore[assignment]
        shell = self.service.shell
        self._carry_out = shell.carry_out
        shell.carry_out = self._carry_out_and_more  # type: ignore[method-assign]
        # As a replay, where nobody else releases capsules and none is durable. What asks the store has its
        # answer only when the engine has begun its next step, at the same time.
        shell._confirm = self._confirmed  # type: ignore[method-assign]
        shell._secure = self._secured  # type: ignore[method-assign]
        await self.service.start_up()
        dispatcher = self.service.shell.dispatcher
        dispatcher._waiting._recheck_s = None  # all room is announced, as in a replay
        dispatcher._config = dispatcher._config._replace(can_convict=False)
        self.decisions = Decisions(dispatcher, clock, world.on_end)

    def link(
        self,
        worker: WorkerId,
        incarnation: Incarnation,
        address: str,
        on_frame: Callable[[Frame], None],
        on_lost: Callable[[str], None],
    ) -> SimLink:
        fleet = self._world.fleet
        life = fleet.lives[incarnation]
        closed = partial(fleet.let_go, life)
        link = SimLink(partial(fleet.send, life), on_frame, on_lost, closed)
        self.links[incarnation] = link
        return link

    def poke_feed(self) -> None:
        """It may wait with leases."""
        self.service.shell.links._feed.pump.poke()

    def is_linked(self, worker: Worker) -> bool:
        link = self.links.get(worker.incarnation)
        return link is not None and link.is_open

    def _carry_out_and_more(self) -> None:
        """Carry out, then release capsules and tell the other gateways, before the next step as a replay."""
        self._carry_out()
        while self._has_more:
            self._has_more = False
            self._carry_out()
        while self.unwanted:
            self._release(self.unwanted.popleft())
        if self.router.outbox:
            self._world.tell_bookings(self)

    def _confirmed(self, missing: Missing) -> Coroutine[Any, Any, None]:
        self.service.shell.dispatcher.confirm(missing.capsule, None)
        self._has_more = True
        return asyncio.sleep(0)

    def _secured(
        self, capsule: CapsuleId, source: WorkerId, _: WorkerId
    ) -> Coroutine[Any, Any, None]:
        self.service.shell.dispatcher.secured(source, capsule)
        self._has_more = True
        return asyncio.sleep(0)

    def _release(self, capsule: CapsuleId) -> None:
        """As a replay does it: at once. Over HTTP the worker is asked, and answers."""
        try:
            worker = self.router.capsule(capsule).worker
        except UnknownCapsule:
            return  # it is pushed out, or went with its worker
        self.service.shell.links.send(worker, Release(capsule))
        self.router.forget_capsule(capsule)
        self.service.capsules._abandon(capsule)
        self.service.tasks.spawn(self.service.capsules.texts.release(capsule, COMMON))


class LiveWorld:
    """Live gateways over the fleet of a replay, which play the same requests and faults."""

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
        self.gateways: list[LiveGateway] = []
        for index in range(config.gateways):
            outbox = Outbox(f"g{index}", Incarnation(1)) if config.gateways > 1 else None
            router = builder._router(index, config.cost_model(builder.block_size), outbox)
            self.gateways.append(LiveGateway(self, index, router))
        self._draw = random.Random(config.seed)
        self._connections: dict[str, LiveGateway] = {}  # by session
        self._hub = LocalHub()
        self._asked: dict[Incarnation, list[asyncio.Future[Snapshot]]] = defaultdict(list)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._streams: dict[str, Any] = {}
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.errors: dict[str, str] = {}
        self._ended: set[str] = set()
        self._num_leases = 0

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
        while len(self.clock) > self.loop.num_timers or len(self._ended) < len(self._requests):
            self.clock.now, _, act, subject = heapq.heappop(self.clock._due)
            assert self.clock.now < 1e4, "nothing is to come, and requests wait"
            self.loop.play(act, subject)
            for gateway in self.gateways:
                gateway.service.check()
        closing = self.loop.create_task(self._close())
        self.loop.play(lambda _: None, None)
        while not closing.done():  # writes to the store may wait to be tried again
            self.clock.now, _, act, subject = heapq.heappop(self.clock._due)
            self.loop.play(act, subject)
        closing.result()
        self.loop.close()

    async def _open(self) -> None:
        self._bus = LocalBus(self._hub)
        await self._bus.connect()
        for gateway in self.gateways:
            await gateway.open(self._hub)

    async def _close(self) -> None:
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for gateway in self.gateways:
            await gateway.service.close()

    # Requests

    def _gateway(self, session: str) -> LiveGateway:
        """As a replay chooses it."""
        if len(self.gateways) == 1:
            return self.gateways[0]
        if session not in self._connections:
            self._connections[session] = self._draw.choice(self.gateways)
        return self._connections[session]

    def _begin(self, request: Request) -> None:
        name, gateway = f"r{request.number}", self._gateway(request.session)
        gateway.names.append(name)
        follow = self._follow(name, gateway, self._job(request))
        self._tasks[name] = self.loop.create_task(follow)

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
        decisions = self._gateway(self._requests[name].session).decisions
        return decisions.capsules.get(name, capsule_id(name))

    async def _follow(self, name: str, gateway: LiveGateway, job: Job) -> None:
        try:
            stream = self._streams[name] = await gateway.service.requests.start(job)
        except MalleeError as error:
            self.errors[name] = error.code
            if name not in self._ended:  # it never was the dispatcher's
                self.on_end(RequestId(name))
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

    def on_end(self, name: RequestId) -> None:
        """A request is over: its forks may begin."""
        self._ended.add(name)
        for fork in self._children.get(name, ()):
            self.clock.at(max(self.clock.now, fork.arrival_s), self._begin, fork)
        parent = self._requests[name].parent
        if parent != NO_PARENT:
            key = f"r{parent}"
            self._forks_left[key] -= 1
            if not self._forks_left[key]:
                gateway = self._gateway(self._requests[key].session)
                gateway.unwanted.append(self._capsule(parent))

    def tell_bookings(self, source: LiveGateway) -> None:
        """Tell the other gateways what `source` books and frees."""
        outbox = source.router.outbox
        assert outbox is not None, "one gateway tells nobody"
        while (batch := outbox.take()) is not None:
            self._tell(source, batch)

    def _tell(self, source: LiveGateway, batch: BookingBatch) -> None:
        for gateway in self.gateways:
            if gateway is source or not self.fleet.is_broker_up:
                continue
            if gateway.bookings.replicas.on_batch(batch):
                assert source.router.outbox is not None
                gateway.bookings.replicas.on_snapshot(source.router.outbox.snapshot())
            gateway.service.shell.dispatcher.on_room()
            gateway.service.shell.carry_out()

    # The fleet's listener

    def on_outcome(self, worker: Worker, outcome: Outcome) -> None:
        if outcome.events is not None and self.fleet.is_broker_up:
            raw = encode(outcome.events)
            for gateway in self.gateways:
                gateway.service.shell.links._feed._on_events(raw)
        frame = worker.engine.result.frames.get("g")  # type: ignore[attr-defined]
        if frame is not None:
            links = [g.links[worker.incarnation] for g in self.gateways if g.is_linked(worker)]
            for link in sorted(links, key=lambda link: link.first_of(frame)):
                link.hear(frame)

    def snapshot(self, name: WorkerId) -> asyncio.Future[Snapshot]:
        """The contents of a worker when its step is over; fails with ConnectionError if it dies before."""
        answer: asyncio.Future[Snapshot] = self.loop.create_future()
        worker = self.fleet.workers.get(name)
        if worker is None:
            answer.set_exception(ConnectionError(f"{name} is gone"))
        else:
            self._asked[worker.incarnation].append(answer)
            self.fleet.ask_snapshot(worker, answer.set_result)
        return answer

    def on_lease(self, worker: Worker, lease: Lease) -> None:
        """Before all else of this time, one by one, each with the snapshot that gateways ask for then."""
        self._num_leases += 1
        order = self._num_leases - _FIRST
        heapq.heappush(self.clock._due, (self.clock.now, order, self._publish, lease))

    def _publish(self, lease: Lease) -> None:
        if not self._hub.is_up:
            return
        self._bus.publish(Subjects.of("test").lease(lease.worker), encode((lease,)))
        for gateway in self.gateways:
            self.loop.call_soon(gateway.poke_feed)
            # A lease announces room in a replay; a live gateway looks for it every 20 ms.
            self.loop.call_soon(gateway.service.shell.on_change, lease.worker)

    def on_death(self, worker: Worker, unreported: Sequence[CountedUpdate]) -> None:
        for answer in self._asked.pop(worker.incarnation, ()):
            if not answer.done():
                answer.set_exception(ConnectionError(f"{worker.name} is gone"))
        for gateway in self.gateways:
            if (link := gateway.links.get(worker.incarnation)) is not None:
                link.lose("it is gone")

    def on_broker(self, is_up: bool) -> None:
        self._hub.set_up(is_up)
        if is_up and len(self.gateways) > 1:
            for gateway in self.gateways:
                assert gateway.router.outbox is not None
                lags = gateway.service.shell.room.lags()
                self._tell(gateway, gateway.router.outbox.heartbeat(lags=lags))

    def is_needed(self, worker: Worker) -> bool:
        return any(gateway.is_linked(worker) for gateway in self.gateways)
