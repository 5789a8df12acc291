"""The thread of an engine: takes items from its inbox, steps, hands the results to the event loop."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from mallee.actors.bus.bus import Bus
from mallee.actors.hosting.host import MAX_STEP_S, Host
from mallee.actors.hosting.streams import HEARTBEAT_S, MAX_PENDING_FRAMES
from mallee.actors.hosting.worker import Capacity, Worker
from mallee.protocol.events import Load, Snapshot
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Command
from mallee.protocol.model import ModelSpec
from mallee.worker.engine import Engine
from mallee.worker.records import StepResult

log = logging.getLogger(__name__)

EXPIRY_PERIOD_S = 1.0  # an idle engine is asked this often whether a capsule has expired
JOIN_TIMEOUT_S = 10.0


class _Batch(NamedTuple):
    gateway: str
    commands: tuple[Command, ...]
    accepted: asyncio.Future[None]

    def before_step(self, thread: "EngineThread") -> None:
        for command in self.commands:
            if (refusal := thread.engine.submit(command, self.gateway)) is not None:
                log.warning("a command of gateway %s was refused: %s", self.gateway, refusal)
        thread.post(_resolve, self.accepted, None)

    def after_step(self, thread: "EngineThread") -> None:
        pass

    def refuse(self, error: Exception) -> None:
        _reject(self.accepted, error)


class _Drop(NamedTuple):
    gateway: str

    def before_step(self, thread: "EngineThread") -> None:
        thread.engine.drop_gateway(self.gateway)
        thread.post(thread.on_dropped, self.gateway)

    def after_step(self, thread: "EngineThread") -> None:
        pass

    def refuse(self, error: Exception) -> None:
        pass


class _AskSnapshot(NamedTuple):
    answer: asyncio.Future[Snapshot]

    def before_step(self, thread: "EngineThread") -> None:
        pass

    def after_step(self, thread: "EngineThread") -> None:
        thread.post(_resolve, self.answer, thread.engine.snapshot())

    def refuse(self, error: Exception) -> None:
        _reject(self.answer, error)


class _AskLoad(NamedTuple):
    answer: asyncio.Future[Load]

    def before_step(self, thread: "EngineThread") -> None:
        pass

    def after_step(self, thread: "EngineThread") -> None:
        thread.post(_resolve, self.answer, thread.engine.load())

    def refuse(self, error: Exception) -> None:
        self.answer.cancel()  # a lease goes without it


_Item: TypeAlias = _Batch | _Drop | _AskSnapshot | _AskLoad


class EngineThread:
    """A `Runner`: owns the one thread that touches `engine` after `start`. Belongs to one event loop.

    Items are done in order. The callbacks run in the loop, in the order of the steps:
    `on_result(result, next_seq)` after each, `on_dropped(gateway)` after each drop, and
    `on_failure(reason)` once, when the engine has raised; the thread has ended then.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        name: str,
        on_result: Callable[[StepResult, int], None],
        on_dropped: Callable[[str], None],
        on_failure: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self.engine = engine
        self._on_result = on_result
        self.on_dropped = on_dropped
        self._on_failure = on_failure
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: deque[_Item] = deque()
        self._wake = threading.Condition()
        self._must_stop = False
        self._clock = clock
        self._turn_began: float | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def next_seq(self) -> int:
        return self.engine.next_seq

    def prepare(self, command: Command) -> None:
        self.engine.prepare(command)

    def turn_age(self, now: float) -> float:
        """Seconds that the turn under way has lasted; 0 while the thread waits."""
        began = self._turn_began
        return 0.0 if began is None else now - began

    def submit(self, gateway: str, commands: Sequence[Command]) -> asyncio.Future[None]:
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._put(_Batch(gateway, tuple(commands), accepted))
        return accepted

    def drop(self, gateway: str) -> None:
        self._put(_Drop(gateway))

    def snapshot(self) -> asyncio.Future[Snapshot]:
        answer: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()
        self._put(_AskSnapshot(answer))
        return answer

    def load(self) -> asyncio.Future[Load]:
        answer: asyncio.Future[Load] = asyncio.get_running_loop().create_future()
        self._put(_AskLoad(answer))
        return answer

    async def stop(self) -> None:
        """End the thread; a step longer than ten seconds is not waited for."""
        with self._wake:
            self._must_stop = True
            self._wake.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, JOIN_TIMEOUT_S)

    def abort(self, error: Exception) -> None:
        """End after the turn under way; every caller that waits for the inbox gets `error`."""
        with self._wake:
            self._must_stop = True
            items, self._inbox = list(self._inbox), deque()
            self._wake.notify()
        for item in items:
            item.refuse(error)

    def _put(self, item: _Item) -> None:
        with self._wake:
            self._inbox.append(item)
            self._wake.notify()

    def _run(self) -> None:
        taken: list[_Item] = []
        try:
            while True:
                with self._wake:
                    if not (self._inbox or self._must_stop or self.engine.has_work):
                        self._wake.wait(EXPIRY_PERIOD_S)
                    if self._must_stop:
                        return
                    taken, self._inbox = list(self._inbox), deque()
                self._turn_began = self._clock()
                self._turn(taken)
                self._turn_began = None
        except Exception as error:  # engine loop top: the engine's state is unknown from here on
            log.exception("%s failed", self._thread.name)
            reason = f"{type(error).__name__}: {error}"
            with self._wake:
                self._inbox.extendleft(reversed(taken))  # so that `abort` refuses them too
            self.post(self._on_failure, reason)

    def _turn(self, taken: list[_Item]) -> None:
        """Take items in, step, answer questions for a snapshot or the load."""
        for item in taken:
            item.before_step(self)
        if self.engine.has_work:
            result = self.engine.step()
            self.post(self._on_result, result, self.engine.next_seq)
        for item in taken:
            item.after_step(self)

    def post(self, call: Callable[..., None], *args: object) -> None:
        """Have the loop make a call, after those posted before."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            # The loop was closed without `close`: no reader is left.
            with self._wake:
                self._must_stop = True


def _resolve(future: asyncio.Future[object], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _reject(future: asyncio.Future[None] | asyncio.Future[Snapshot], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def host_engine(
    engine: Engine,
    bus: Bus,
    *,
    worker: WorkerId,
    incarnation: Incarnation,
    address: str,
    model: ModelSpec,
    capacity: Capacity,
    fleet: str,
    clock: Callable[[], float],
    lease_period_s: float = 1.0,
    max_pending_frames: int = MAX_PENDING_FRAMES,
    heartbeat_s: float = HEARTBEAT_S,
    max_step_s: float = MAX_STEP_S,
) -> Host:
    """A host of one worker, by whose name it goes, whose engine computes in a thread of its own.

    If the engine fails, so has the host.
    """
    host = Host(
        worker,
        bus,
        address=address,
        fleet=fleet,
        clock=clock,
        lease_period_s=lease_period_s,
        max_pending_frames=max_pending_frames,
        heartbeat_s=heartbeat_s,
        max_step_s=max_step_s,
    )
    only = Worker(worker, incarnation, host, model=model, capacity=capacity)
    only.runner = EngineThread(
        engine,
        name=f"engine of worker {worker}",
        on_result=only.deliver,
        on_dropped=only.dropped,
        on_failure=only.fail,
        clock=clock,
    )
    host.add(only)
    return host
