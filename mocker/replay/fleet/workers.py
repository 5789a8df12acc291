"""Workers of a replay: engines with inboxes on one clock."""

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Literal, NamedTuple, Protocol, TypeAlias

from mallee.mocker.device import DeviceConfig
from mallee.mocker.engine import MockedEngine, Outcome
from mallee.mocker.links import LinkConfig
from mallee.mocker.replay.clock import Clock
from mallee.mocker.replay.fleet.devices import FleetDevices
from mallee.mocker.replay.fleet.loans import FleetPeers, Question
from mallee.mocker.texts import Texts
from mallee.mocker.tiers import TierConfig
from mallee.mocker.timing import Timing
from mallee.mocker.updates import CountedUpdate
from mallee.mocker.vllm import VllmEngine
from mallee.protocol.errors import WorkerLost
from mallee.protocol.events import Lease, Snapshot
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Command, Holder
from mallee.protocol.model import ModelSpec
from mallee.worker.engine import Engine
from mallee.worker.records import EngineConfig

Role: TypeAlias = Literal["both", "prefill", "decode"]

AnyEngine: TypeAlias = MockedEngine | VllmEngine

_IDLE, _BETWEEN, _BUSY = range(3)  # between: its next step begins in this instant


def worker_name(index: int) -> WorkerId:
    """The name of worker `index`, counted from 0."""
    return WorkerId(f"w{index}")


class Listener(Protocol):
    """Receives the outcomes, leases and deaths of workers."""

    def on_outcome(self, worker: "Worker", outcome: Outcome) -> None:
        """Take the outcome of a step of `worker` that ends now."""
        ...

    def on_lease(self, worker: "Worker", lease: Lease) -> None:
        """Take the lease of `worker`, possibly its last."""
        ...

    def on_death(self, worker: "Worker", unreported: Sequence[CountedUpdate]) -> None:
        """Take the end of this life of `worker`. `unreported`: tokens drawn since branches' last updates."""
        ...

    def on_broker(self, is_up: bool) -> None:
        """Lose what workers publish from now on, or let it arrive again."""
        ...

    def is_needed(self, worker: "Worker") -> bool:
        """Whether a gateway has not let go of `worker`."""
        ...


class Worker:
    """One life of one engine."""

    __slots__ = (
        *("begun", "busy_s", "busy_until", "due", "engine", "inbox", "incarnation", "index"),
        *("is_alive", "is_draining", "is_telling", "joined_s", "left_s", "name", "num_steps"),
        *("questions", "role", "state", "waiting"),
    )

    def __init__(
        self, index: int, incarnation: Incarnation, engine: AnyEngine, role: Role, now: float
    ) -> None:
        self.index = index
        self.name = worker_name(index)
        self.incarnation = incarnation
        self.engine = engine
        self.role: Role = role
        self.inbox: list[Command] = []
        self.waiting: list[
            Callable[[Snapshot], None]
        ] = []  # for a snapshot, until its step is over
        self.questions: list[Question] = []  # of other workers, until then too
        self.is_telling = False  # outcomes of the step that is just over are being delivered
        self.state = _IDLE
        self.begun = 0.0  # of the step that runs
        self.due = inf  # its end
        self.busy_s = 0.0
        self.num_steps = 0
        self.joined_s = self.busy_until = now
        self.left_s = inf
        self.is_alive = True
        self.is_draining = False  # it takes no new requests

    @property
    def own(self) -> Engine:
        """Our engine, that is mocked: only ours lend, and have tiers."""
        assert isinstance(self.engine, MockedEngine), "settings of vLLM's are checked before"
        return self.engine.engine

    @property
    def is_busy(self) -> bool:
        """Whether a step runs."""
        return self.state == _BUSY

    @property
    def is_idle(self) -> bool:
        """Whether no step runs or is about to."""
        return self.state == _IDLE


class FleetSettings(NamedTuple):
    """Settings of a fleet's workers and of the machines that they run on.

    Workers share devices, if `device` has several of them on each. They borrow over a `link`, if there is
    one, from those that commands name. `is_lending`: routers know that all of them lend. `join_role` is
    what those that join later do.
    """

    timing: Timing
    texts: Texts
    block_size: int
    num_blocks: int
    config: EngineConfig
    seed: int
    spec: ModelSpec
    tiers: TierConfig | None
    link: LinkConfig | None
    is_lending: bool
    device: DeviceConfig
    is_vllm: bool
    join_role: Role


class Fleet:
    """Workers by name, on one clock. `listener` gets every step, lease and death."""

    def __init__(self, clock: Clock, listener: Listener, settings: FleetSettings) -> None:
        self._clock = clock
        self._listener = listener
        self._settings = settings
        timing, link, device = settings.timing, settings.link, settings.device
        self._request_s = timing.request_s / timing.speedup
        self.peers: FleetPeers | None = None
        if link is not None:
            self.peers = FleetPeers(clock, link, put=self._put, left_at=self._left_at)
        self.devices: FleetDevices | None = None  # that are shared
        if device.engines > 1:
            self.devices = FleetDevices(clock, device, self._device_done)
        self.workers: dict[WorkerId, Worker] = {}  # that live
        self.lives: dict[Incarnation, Worker] = {}  # all that ever did
        self._slow: dict[WorkerId, float] = {}  # machines that are, by how much

    # Life

    def open(self, index: int, role: Role = "both") -> Worker:
        """Add worker `index`, with its first lease."""
        worker = self._open(index, role)
        self._listener.on_lease(worker, self.lease(worker))
        return worker

    def _open(self, index: int, role: Role) -> Worker:
        incarnation = Incarnation(len(self.lives) + 1)
        name = worker_name(index)
        worker = Worker(index, incarnation, self._engine(name, incarnation), role, self._clock.now)
        if name in self._slow:
            worker.engine.slow(self._slow[name])
        self.workers[name] = self.lives[incarnation] = worker
        if self.peers is not None:
            worker.own.notify(partial(self._poke, worker))
        return worker

    def _engine(self, name: WorkerId, incarnation: Incarnation) -> AnyEngine:
        settings = self._settings
        if settings.is_vllm:
            return VllmEngine(
                timing=settings.timing,
                texts=settings.texts,
                num_blocks=settings.num_blocks,
                worker=name,
                incarnation=incarnation,
                config=settings.config.scheduler,
                seed=settings.seed + incarnation,
                leaves_capsules=settings.config.max_answer_capsules > 0,
            )
        return MockedEngine(
            timing=settings.timing,
            num_blocks=settings.num_blocks,
            block_size=settings.block_size,
            worker=name,
            incarnation=incarnation,
            clock=self._clock.read,
            config=settings.config,
            spec=settings.spec,
            texts=settings.texts,
            seed=settings.seed + incarnation,
            max_multi_step=1 << 20 if self.devices is None else 1,
            reports_progress=False,
            tiers=settings.tiers,
            peers=self.peers,
        )

    def lease(self, worker: Worker) -> Lease:
        """The lease of `worker` now."""
        settings = self._settings
        return Lease(
            worker=worker.name,
            incarnation=worker.incarnation,
            address=worker.name,
            model="mock",
            fingerprint="mock",
            block_size=settings.block_size,
            num_blocks=settings.num_blocks,
            max_rows=settings.config.scheduler.max_rows,
            max_model_len=worker.engine.max_model_len,
            next_seq=worker.engine.next_seq,
            is_prefix_closed=settings.tiers is None and not settings.is_vllm,
            serves_kv=settings.is_lending,
            is_draining=worker.is_draining,
            windows=tuple(group.reach for group in worker.engine.spec.sides),
        )

    # Work

    def send(self, worker: Worker, command: Command) -> None:
        """Send `command` to `worker`, which takes it up after the step that runs at its arrival.

        Commands arrive in order, as late as a request's own path takes. Nothing happens if the worker
        is dead by then: the sender learns that from its death.
        """
        if self._request_s:
            at = self._clock.now + self._request_s
            self._clock.at(at, partial(self._arrive, worker), command)
        else:
            self._arrive(worker, command)

    def _arrive(self, worker: Worker, command: Command) -> None:
        if not worker.is_alive:
            return
        worker.inbox.append(command)
        state = worker.state
        if state == _BUSY:
            self._cut(worker)
        elif state == _IDLE:
            worker.state = _BETWEEN  # all commands of this instant are taken up together
            self._clock.at_last(self._clock.now, self._begin, worker)

    def _cut(self, worker: Worker) -> None:
        if self.devices is not None:
            return  # single steps
        now = self._clock.now
        end = max(now, worker.engine.cut(now))
        if end != worker.due:
            worker.due = end
            self._clock.at_last(end, self._end, worker)

    def _begin(self, worker: Worker) -> None:
        if not worker.is_alive:
            return
        engine = worker.engine
        for command in worker.inbox:
            engine.submit(command)
        worker.inbox.clear()
        now = self._clock.now
        end = engine.start(now)
        if end is None:
            worker.state = _IDLE
            if engine.next_due < inf:
                self._clock.at(engine.next_due, self._wake, worker)
            return
        if end < now:  # by a rounding error: a step that takes no time
            end = now
        worker.state = _BUSY
        worker.begun = now
        worker.due = end
        if self.devices is None:
            self._clock.at_last(end, self._end, worker)
        else:  # the end is known when it comes
            ready = min(end, now + engine.host_s)
            self.devices.begin(worker.index, worker.incarnation, ready, end - ready)

    def _device_done(self, life: Incarnation) -> None:
        worker = self.lives[life]
        worker.due = self._clock.now
        worker.engine.delay(self._clock.now)
        self._end(worker)

    def _wake(self, worker: Worker) -> None:
        """A move of blocks has ended."""
        if worker.is_alive and worker.state == _IDLE:
            worker.state = _BETWEEN
            self._clock.at_last(self._clock.now, self._begin, worker)

    def _poke(self, worker: Worker) -> None:
        """A question of `worker` is answered, or a loan of it is over."""
        if worker.is_alive and worker.state == _BUSY:
            self._cut(worker)
        else:
            self._wake(worker)

    def _end(self, worker: Worker) -> None:
        now = self._clock.now
        if worker.due != now or worker.state != _BUSY:
            return  # it was cut, or its worker died
        worker.state = _BETWEEN
        worker.due = inf
        outcome = worker.engine.finish()
        worker.busy_s += now - worker.begun
        worker.busy_until = now
        worker.num_steps += outcome.num_steps
        worker.is_telling = True
        self._listener.on_outcome(worker, outcome)
        worker.is_telling = False
        if worker.waiting:
            waiting, worker.waiting = worker.waiting, []
            for take in waiting:
                take(self._snapshot(worker))
        if worker.questions:
            questions, worker.questions = worker.questions, []
            for question in questions:
                worker.own.lend(*question)
        self._begin(worker)

    def _put(self, question: Question) -> None:
        """A question reaches its lender, which answers between its steps; at once if it has a loan ready."""
        holder = question.ask.holder
        worker = self.lives[Incarnation(holder.incarnation)]
        if not worker.is_alive:
            question.told(WorkerLost(holder.worker, "it is gone"))
        elif (ready := worker.own.take_loan(question.ask)) is not None:
            question.told(ready)
        elif worker.state == _BUSY or worker.is_telling:
            worker.questions.append(question)
            self._poke(worker)
        else:
            worker.own.lend(*question)
            if worker.engine.has_work:  # a capsule has to come from below first
                self._poke(worker)

    def _left_at(self, holder: Holder) -> float:
        return self.lives[Incarnation(holder.incarnation)].left_s

    def ask_snapshot(self, worker: Worker, take: Callable[[Snapshot], None]) -> None:
        """Call `take` with `worker`'s contents when the step that runs there is over and reported."""
        if worker.state == _BUSY or worker.is_telling:
            worker.waiting.append(take)
            if worker.state == _BUSY:
                self._cut(worker)
        else:
            take(self._snapshot(worker))

    @staticmethod
    def _snapshot(worker: Worker) -> Snapshot:
        return worker.engine.snapshot()

    def let_go(self, worker: Worker) -> None:
        """End a draining worker that no gateway needs any more. No change for any other."""
        if worker.is_draining and worker.is_alive and not self._listener.is_needed(worker):
            self._bury(worker)

    def _bury(self, worker: Worker) -> None:
        unreported = worker.engine.unreported(self._clock.now)
        if worker.is_busy:
            worker.busy_s += self._clock.now - worker.begun
        worker.is_alive = False
        worker.state, worker.due = _IDLE, inf
        worker.left_s = self._clock.now
        worker.inbox.clear()
        if self.devices is not None:
            self.devices.leave(worker.index, worker.incarnation)
        del self.workers[worker.name]
        for question in worker.questions:
            question.told(WorkerLost(worker.name, "it is gone"))
        worker.questions.clear()
        worker.engine.close()
        self._listener.on_death(worker, unreported)

    def check(self) -> None:
        """Raises AssertionError on a broken invariant. O(everything)."""
        for name, worker in self.workers.items():
            assert worker.name == name, f"{name} is misfiled"
            assert worker.is_alive, f"{name} is dead"
            assert (worker.state == _BUSY) == (worker.due < inf), f"{name}'s end"
            if worker.state != _BUSY:
                worker.engine.check()
        if self.devices is not None:
            self.devices.check()
