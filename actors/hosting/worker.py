"""One worker inside a host: its open requests by gateway, its lease, its end."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from msgspec import structs

from mallee.actors.hosting.compiler import Done
from mallee.actors.hosting.waits import Answered, Waits
from mallee.protocol.capabilities import Capability
from mallee.protocol.errors import InvalidParameter, MalleeError, Unavailable, WorkerLost
from mallee.protocol.events import EventBatch, Lease, Load, Snapshot
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import (
    ALL_BRANCHES,
    Command,
    Fork,
    Frame,
    Generate,
    Prefill,
    Update,
)
from mallee.protocol.model import ModelSpec, WeightChange
from mallee.protocol.parcels import Report
from mallee.protocol.subjects import check_token
from mallee.runtime.telemetry.logs import ids, stack_of
from mallee.worker.records import StepResult
from mallee.worker.transfer.values import Ask, Loan

if TYPE_CHECKING:
    from mallee.runtime.telemetry.engines import EngineMeter
    from mallee.runtime.telemetry.tracing.workers import WorkerSpans

log = logging.getLogger(__name__)


class Identity(NamedTuple):
    """One life of a worker, and its engine, for the lease."""

    worker: WorkerId
    incarnation: Incarnation
    model: ModelSpec
    is_prefix_closed: bool = True  # with any block it holds all before it
    lacks: tuple[Capability, ...] = ()


class Capacity(NamedTuple):
    """The engine's size, for the lease."""

    block_size: int
    num_blocks: int
    max_rows: int


class Demand(NamedTuple):
    """Use of a worker and its size: blocks are needed that would not give way to others."""

    rows: int
    waiting: int
    max_rows: int
    needed_blocks: float
    num_blocks: int


STOP_S: Final = 10.0  # that the end of a runner is waited for where nothing depends on it
NO_DEMAND = Demand(rows=0, waiting=0, max_rows=0, needed_blocks=0.0, num_blocks=0)


class Grammars(Protocol):
    """Compiles grammars ahead of the commands that need them."""

    def is_prepared(self, command: Command) -> bool:
        """`Engine.is_prepared`. From any thread."""
        ...

    def prepare(self, command: Command) -> None:
        """`Engine.prepare`, from any thread."""
        ...


class Runner(Protocol):
    """Computes for a worker: an engine in a thread of its own, a mocked one in the loop, or a foreign one.

    Commands that its engine can't do (`Identity.lacks`) are refused by name, in a frame.
    """

    @property
    def grammars(self) -> Grammars | None:
        """None: commands need no preparation."""
        ...

    @property
    def lend(self) -> Callable[[Ask], Loan] | None:
        """Lends the engine's blocks, from any thread but the engine's and the event loop's. None: it can't.

        Raises UnknownCapsule, IncompatibleCapsule, LoansFull, WorkerLost.
        """
        ...

    def start(self) -> None: ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def next_seq(self) -> int:
        """The number of the next cache event. Before `start`."""
        ...

    def turn_age(self, now: float) -> float:
        """Seconds that a turn of computing has lasted; 0 where none can hang."""
        ...

    def submit(self, gateway: str, commands: Sequence[Command]) -> asyncio.Future[None] | None:
        """Done when the engine has taken all commands, or (None) will before any that come later."""
        ...

    def drop(self, gateway: str) -> None:
        """`Engine.drop_gateway`, in turn."""
        ...

    def snapshot(self) -> asyncio.Future[Snapshot]:
        """The engine's contents after a step whose events were handed over before."""
        ...

    def load(self) -> asyncio.Future[Load]:
        """The engine's load after the step under way. Cancelled if there won't be an answer."""
        ...

    def abort(self, error: Exception) -> None:
        """End after the turn under way: no result of it counts, and every caller that waits gets `error`."""
        ...

    on_step: Callable[[float], None] | None
    """Called with the seconds of each step, from any thread, if it is set."""

    async def stop(self, error: Exception, *, within_s: float = STOP_S) -> bool:
        """Abort, and return when all that it does has ended, files too; False: not within that time."""
        ...


class Results(Protocol):
    """Takes what a runner has to report, in the order of its steps: its worker."""

    def deliver(self, result: StepResult, next_seq: int) -> None:
        """Take the result of a step; `next_seq` is the number of the next cache event."""
        ...

    def dropped(self, gateway: str) -> None:
        """Note that the runner has done one `drop`."""
        ...

    def fail(self, reason: str) -> None:
        """Note that the engine has raised."""
        ...


class Outlet(Protocol):
    """The worker's way to the bus and to its gateways: its host."""

    clock: Callable[[], float]

    @property
    def gateways(self) -> Sequence[str]:
        """The gateways that read now."""
        ...

    def publish(self, events: EventBatch) -> None: ...

    def send(self, gateway: str, report: Report) -> bool:
        """Queue a report. False: the gateway does not read (any more)."""
        ...

    def compile(
        self, tenant: str, prepare: Callable[[], None], done: Done, *, is_new: bool
    ) -> None:
        """`Compiler.submit`."""
        ...

    def failed(self, worker: "Worker") -> None:
        """End its lease; the gateways have its last report."""
        ...


class Worker:
    """The life of an engine in a host; the `Results` of its `runner`."""

    def __init__(
        self,
        identity: Identity,
        outlet: Outlet,
        capacity: Capacity,
        make_runner: Callable[[Results], Runner],
        *,
        spans: "WorkerSpans | None" = None,
    ) -> None:
        """`make_runner` makes what computes for this worker. Without `spans` nothing is traced.

        Raises ConfigError if the worker's name can't be part of a subject.
        """
        self.identity = identity
        self.worker = WorkerId(check_token(identity.worker, "worker"))
        self.incarnation = identity.incarnation
        self._outlet = outlet
        self._spans = spans
        self.model = identity.model
        self.capacity = capacity
        self.meter: EngineMeter | None = None  # None: nothing reads it
        self._open: dict[str, dict[str, int]] = {}  # gateway -> request: branches not ended
        self._waits: dict[str, Waits] = {}  # by gateway: commands that the runner has not got yet
        # Drops that the runner has not done: until then, frames for the gateway are of its past.
        self._dropping: Counter[str] = Counter()
        self._published_seq = 0
        self._load: Load | None = None
        self._asked_load: asyncio.Future[Load] | None = None
        self.num_steps = 0
        self.step = 0  # the engine's count, with steps of which nothing was reported
        self._num_beats = 0  # while grammars were compiled, and no step could be done
        self.failure: str | None = None
        self.is_draining = False  # nothing new comes, what runs goes on
        self.change: WeightChange | None = None  # the last one asked of this life
        self._released_by: set[str] = set()  # gateways that need it no more, while it drains
        self._changed = asyncio.Event()
        self.runner = make_runner(self)

    def start(self) -> None:
        self._published_seq = self.runner.next_seq
        self.runner.start()

    @property
    def is_serving(self) -> bool:
        return self.failure is None and self.runner.is_alive

    @property
    def num_open(self) -> int:
        return sum(map(len, self._open.values())) + sum(map(len, self._waits.values()))

    def progress_for(self, gateway: str) -> Report | None:
        """A report without updates, whose step is this worker's progress; None: it has nothing to do.

        A grammar that is compiled counts as progress: its compiler has limits of its own.
        """
        if self.failure is not None:
            return None
        if gateway in self._open:
            return self._report(())
        if gateway not in self._waits:
            return None
        self._num_beats += 1
        return Report(self.worker, self.incarnation, Frame(self.step + self._num_beats, ()))

    # Requests of gateways

    def submit(self, gateway: str, commands: Sequence[Command]) -> asyncio.Future[None] | None:
        """See `Runner.submit`; commands whose grammar has to be compiled follow later, by themselves."""
        if self._spans is not None:
            self._trace(self._spans, gateway, commands)
        waits = self._waits.get(gateway)
        grammars = self.runner.grammars
        if grammars is None or (waits is None and all(map(grammars.is_prepared, commands))):
            return self._hand_over(gateway, commands)
        waits = waits or self._waits.setdefault(gateway, Waits(grammars.is_prepared))
        admitted = waits.admit(commands)
        for command, error in admitted.refused:
            self._refuse(gateway, command, error)
        for command in admitted.compiling:
            try:
                self._outlet.compile(
                    command.share.tenant,
                    partial(self._prepare, gateway, waits, command),
                    partial(self._compiled, gateway, waits, command),
                    is_new=_is_new(command),
                )
            except Unavailable as error:
                admitted.free.extend(waits.refuse(command))
                self._refuse(gateway, command, error)
        self._forget_empty(gateway, waits)
        return self._hand_over(gateway, admitted.free) if admitted.free else None

    def _trace(self, spans: "WorkerSpans", gateway: str, commands: Sequence[Command]) -> None:
        """Begin the spans of commands that are part of a trace."""
        for command in commands:
            match command:
                case Generate(request=request, trace=trace, n=n) if trace:
                    kind = "generate"
                case Fork(request=request, trace=trace, suffixes=suffixes) if trace:
                    kind, n = "fork", len(suffixes)
                case Prefill(request=request, trace=trace) if trace:
                    kind, n = "prefill", 1
                case _:
                    continue
            spans.begin(gateway, request, kind, branches=n, trace=trace, step=self.step)

    def _is_waiting(self, gateway: str, waits: Waits, command: Answered) -> bool:
        """Whether `command` is still wanted."""
        return self._waits.get(gateway) is waits and waits.is_compiling(command)

    def _prepare(self, gateway: str, waits: Waits, command: Answered) -> None:
        """In the thread for grammars: compile that of `command`."""
        grammars = self.runner.grammars
        if grammars is not None and self._is_waiting(gateway, waits, command):
            grammars.prepare(command)

    def _compiled(
        self, gateway: str, waits: Waits, command: Answered, error: BaseException | None
    ) -> None:
        """Hand over `command`, and what waited behind it, unless it is not wanted any more."""
        if not self._is_waiting(gateway, waits, command):
            return
        if error is None:
            if self._spans:
                self._spans.note(gateway, command.request, "grammar compiled")
            free = waits.compiled(command)
        else:
            if not isinstance(error, Unavailable):
                request = command.request
                text = "the grammar of request %s broke its compiler"
                log.error(text, request, extra=ids(request=request) | stack_of(error))
                error = _broken(command, error)
            free = waits.refuse(command)
            self._refuse(gateway, command, error)
        self._forget_empty(gateway, waits)
        if free and (taken := self._hand_over(gateway, free)) is not None:
            taken.add_done_callback(_note)

    def _forget_empty(self, gateway: str, waits: Waits) -> None:
        if not waits:
            del self._waits[gateway]
            self._changed.set()

    def _refuse(self, gateway: str, command: Answered, error: MalleeError) -> None:
        wire = error.to_wire()
        update = Update(command.request, ALL_BRANCHES, finish="error", error=wire)
        if self._spans:
            self._spans.take(gateway, (update,), self.step)
        self._outlet.send(gateway, self._report((update,)))

    def _hand_over(self, gateway: str, commands: Sequence[Command]) -> asyncio.Future[None] | None:
        for command in commands:
            match command:
                case Generate(request=request, n=n):
                    self._count(gateway, request, n)
                case Fork(request=request, suffixes=suffixes):
                    self._count(gateway, request, len(suffixes))
                case Prefill(request=request):
                    self._count(gateway, request, 1)
        return self.runner.submit(gateway, commands)

    def drop(self, gateway: str) -> None:
        """Free everything that the gateway has running: it gave this worker up."""
        if self.is_draining:
            self._released_by.add(gateway)
        self._changed.set()
        self._waits.pop(gateway, None)
        if self._spans:
            self._spans.drop(gateway)
        if self.meter is not None:
            self.meter.dropped(gateway)
        if not self._open.pop(gateway, None):
            return
        if self.failure is None:
            self._dropping[gateway] += 1
            self.runner.drop(gateway)

    def abandon(self) -> None:
        """Forget all that is open: this life is over."""
        self._open.clear()
        self._waits.clear()
        if self.meter is not None:
            self.meter.dropped()
        self._changed.set()
        if self._spans:
            self._spans.end_all("worker_lost")

    async def wait_released(self) -> None:
        """Returns when every gateway that reads has given this worker up, or it has failed."""
        while self.failure is None and set(self._outlet.gateways) - self._released_by:
            self._changed.clear()
            await self._changed.wait()

    async def wait_idle(self) -> None:
        """Returns when no request is open here, or it has failed."""
        while self.failure is None and self.num_open:
            self._changed.clear()
            await self._changed.wait()

    def lost(self, reason: str) -> Report:
        """The report that this life is over."""
        return self._report((), reason)

    def _report(self, updates: tuple[Update, ...], lost: str | None = None) -> Report:
        return Report(self.worker, self.incarnation, Frame(self.step, updates), lost)

    def _count(self, gateway: str, request: str, num_branches: int) -> None:
        # A second command with an id in use is refused without a word, and leaves the first alone.
        self._open.setdefault(gateway, {}).setdefault(request, num_branches)
        if self.meter is not None:
            self.meter.asked(gateway, request, self._outlet.clock())

    # Results of the runner

    def deliver(self, result: StepResult, next_seq: int) -> None:
        """Pass the results of a step on, unless the engine has failed."""
        if self.failure is not None:
            return
        self.num_steps += 1
        self.step = result.step
        if result.events is not None:
            self._outlet.publish(result.events)
        self._published_seq = next_seq
        now = self._outlet.clock() if self.meter is not None else 0.0
        for gateway, frame in result.frames.items():
            if gateway in self._dropping:
                continue
            if self._spans:
                self._spans.take(gateway, frame.updates, result.step)
            if self.meter is not None:
                self.meter.took(gateway, frame.updates, now)
            if self._outlet.send(gateway, Report(self.worker, self.incarnation, frame)):
                self._count_ends(gateway, frame)

    def dropped(self, gateway: str) -> None:
        self._dropping[gateway] -= 1
        if not self._dropping[gateway]:
            del self._dropping[gateway]

    def fail(self, reason: str) -> None:
        """End this life: the engine's state is unknown. Gateways have its requests go on elsewhere."""
        if self.failure is not None:
            return
        self.failure = reason
        self.abandon()
        for gateway in self._outlet.gateways:
            self._outlet.send(gateway, self.lost(reason))
        self.runner.abort(WorkerLost(self.worker, reason))
        self._outlet.failed(self)

    def _count_ends(self, gateway: str, frame: Frame) -> None:
        mine = self._open.get(gateway)
        if mine is None:
            return
        for update in frame.updates:
            if update.finish is None or update.request not in mine:
                continue
            mine[update.request] -= 1
            if mine[update.request] <= 0 or update.branch == ALL_BRANCHES:
                del mine[update.request]
                if self.meter is not None:
                    self.meter.over(gateway, update.request)
        if not mine:
            del self._open[gateway]
            self._changed.set()

    # The lease

    def renew_load(self) -> asyncio.Future[Load]:
        """Ask for a load now, for a reader that can't wait for the next lease."""
        self._take_load()
        if self._asked_load is None:
            self._asked_load = self.runner.load()
        return self._asked_load

    def ask_load(self) -> asyncio.Future[Load] | None:
        """The load for the next lease, to be waited for a moment. None: it is known already."""
        if self._asked_load is None:
            self._asked_load = self.runner.load()
        return None if self._asked_load.done() else self._asked_load

    @property
    def load(self) -> Load | None:
        """The last load of the engine; fresh, unless it computes."""
        self._take_load()
        return self._load

    def _take_load(self) -> None:
        asked = self._asked_load
        if asked is not None and asked.done():
            if not asked.cancelled():
                self._load = asked.result()
            self._asked_load = None

    @property
    def demand(self) -> Demand:
        """Use and size, by the last load."""
        load, size = self.load or Load(0, 0, 0, 0), self.capacity
        return Demand(
            rows=load.rows,
            waiting=load.waiting,
            max_rows=size.max_rows,
            needed_blocks=_needed(load),
            num_blocks=size.num_blocks,
        )

    def lease(
        self,
        address: str,
        host: str,
        *,
        is_leaving: bool = False,
        serves_kv: bool = False,
        metrics_at: str = "",
        device: str = "",
    ) -> Lease:
        """A lease, with what routing needs of the last load."""
        load = self.load
        return Lease(
            worker=self.worker,
            incarnation=self.incarnation,
            address=address,
            model=self.model.name,
            fingerprint=self.model.fingerprint,
            block_size=self.capacity.block_size,
            num_blocks=self.capacity.num_blocks,
            max_rows=self.capacity.max_rows,
            max_model_len=self.model.max_model_len,
            next_seq=self._published_seq,
            is_leaving=is_leaving,
            load=None if load is None else structs.replace(load, use=None),
            is_prefix_closed=self.identity.is_prefix_closed,
            host="" if host == self.worker else host,
            is_draining=self.is_draining,
            weights=self.model.weights,
            change=self.change,
            windows=tuple(group.reach for group in self.model.sides),
            serves_kv=serves_kv,
            metrics_at=metrics_at,
            device=device,
            lacks=self.identity.lacks,
        )

    def check(self) -> None:
        """Raises AssertionError if an open request has no reader, or no branch left."""
        assert self._open.keys() | self._waits.keys() <= set(self._outlet.gateways)
        for waits in self._waits.values():
            waits.check()
        assert all(n > 0 for mine in self._open.values() for n in mine.values())


def _needed(load: Load) -> float:
    """Blocks of running branches and kept capsules; answers' capsules give way. All count as equally long."""
    use = load.use
    if use is None or not use.readers:
        return float(load.active_blocks)
    return load.active_blocks * min(1.0, (load.rows + use.kept_capsules) / use.readers)


def _note(taken: asyncio.Future[None]) -> None:
    """Retrieve its exception, if any: a worker that failed reports that itself."""
    if not taken.cancelled():
        taken.exception()


def _is_new(command: Answered) -> bool:
    """Whether nothing of it was computed on another worker: an answer under way is not refused."""
    match command:
        case Generate(drawn=drawn):
            return not drawn
        case Prefill(capsule=capsule):
            return not capsule
    return True


def _broken(command: Answered, error: BaseException) -> InvalidParameter:
    grammar = command.grammar
    source = "" if grammar is None else grammar.source
    return InvalidParameter("grammar", source, f"its compiler broke: {type(error).__name__}")
