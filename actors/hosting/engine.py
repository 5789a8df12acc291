"""The thread of an engine: takes items from its inbox, steps, hands the results to the event loop."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

from mallee.actors.hosting.host import Host
from mallee.actors.hosting.weights import WeightSource
from mallee.actors.hosting.worker import (
    STOP_S,
    Capacity,
    Grammars,
    Identity,
    Results,
    Worker,
)
from mallee.protocol.errors import MalleeError, WorkerLost
from mallee.protocol.events import Load, Snapshot
from mallee.protocol.messages import Command
from mallee.runtime.telemetry.logs import ids, told
from mallee.worker.engine import Engine
from mallee.worker.transfer.disk import DiskStore
from mallee.worker.transfer.values import Ask, Loan

log = logging.getLogger(__name__)

LEND_TIMEOUT_S = 10.0  # a capsule may have to come from disk first
EXPIRY_PERIOD_S = 1.0  # an idle engine is asked this often whether a capsule has expired
_ENDED = "its engine has ended"
JOIN_S = 1.0  # a wait for the end of a thread, which can't be cancelled


T = TypeVar("T")


def _nothing(*_: object) -> None:
    pass


class _Item(NamedTuple):
    """Something for the engine to do. `refuse` answers it if the thread ends first."""

    before_step: Callable[[], None] = _nothing
    after_step: Callable[[], None] = _nothing
    refuse: Callable[[Exception], object] = _nothing


class EngineThread:
    """A `Runner`: owns the one thread that touches `engine` after `start`. Belongs to one event loop.

    Items are done in order. `results` is called in the loop, in the order of the steps; once the engine
    has raised, the thread has ended.
    """

    def __init__(self, engine: Engine, results: Results, *, clock: Callable[[], float]) -> None:
        self.engine = engine
        self._results = results
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: deque[_Item] = deque()
        self._lending: set[Future[Loan]] = set()  # that are not answered yet
        self._adopting: set[asyncio.Future[Sequence[MalleeError]]] = set()  # the loop's
        self._wake = threading.Condition()
        self._must_stop = False
        self._clock = clock
        self._turn_began: float | None = None
        self.on_step: Callable[[float], None] | None = None
        name = f"engine of worker {engine.worker}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.engine.notify(self._look)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def next_seq(self) -> int:
        return self.engine.next_seq

    @property
    def grammars(self) -> Grammars:
        return self.engine

    def turn_age(self, now: float) -> float:
        """Seconds that the turn under way has lasted; 0 while the thread waits."""
        began = self._turn_began
        return 0.0 if began is None else now - began

    def submit(self, gateway: str, commands: Sequence[Command]) -> asyncio.Future[None]:
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take() -> None:
            for command in commands:
                if (refusal := self.engine.submit(command, gateway)) is not None:
                    text = "a command of gateway %s was refused: %s"
                    log.warning(text, gateway, told(refusal), extra=ids(gateway=gateway))
            self._post(_resolve, accepted, None)

        self._put(_Item(before_step=take, refuse=partial(_reject, accepted)))
        return accepted

    def drop(self, gateway: str) -> None:
        def forget() -> None:
            self.engine.drop_gateway(gateway)
            self._post(self._results.dropped, gateway)

        self._put(_Item(before_step=forget))

    def snapshot(self) -> asyncio.Future[Snapshot]:
        return self._after_step(self.engine.snapshot, _reject)

    def load(self) -> asyncio.Future[Load]:
        # A lease goes without the load of an engine that has ended.
        return self._after_step(self.engine.load, lambda answer, error: answer.cancel())

    def _after_step(
        self, read: Callable[[], T], refuse: Callable[[asyncio.Future[T], Exception], object]
    ) -> asyncio.Future[T]:
        """The result of `read` in the thread, after a step; `refuse` ends it if there is none."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def take() -> None:
            self._post(_resolve, answer, read())

        self._put(_Item(after_step=take, refuse=partial(refuse, answer)))
        return answer

    def lend(self, ask: Ask) -> Loan:
        """A loan of the engine's blocks, which other threads may read. From any thread but the engine's.

        Raises UnknownCapsule, IncompatibleCapsule, LoansFull, WorkerLost.
        """
        answer: Future[Loan] = Future()

        def answered(loan: Loan | MalleeError) -> None:
            if isinstance(loan, MalleeError):
                _fail(answer, loan)
            elif answer.set_running_or_notify_cancel():
                answer.set_result(loan)
            else:
                loan.close()  # nothing waits for it any more

        with self._wake:
            if self._must_stop or not self._thread.is_alive():
                raise WorkerLost(self.engine.worker, _ENDED)
            self._lending.add(answer)
        try:
            if (ready := self.engine.take_loan(ask)) is not None:
                return ready
            self._put(_Item(before_step=lambda: self.engine.lend(ask, answered)))
            return answer.result(LEND_TIMEOUT_S)
        except TimeoutError:
            if answer.cancel():
                text = f"it lent nothing within {LEND_TIMEOUT_S:g} s"
                raise WorkerLost(self.engine.worker, text) from None
            return answer.result()
        finally:
            with self._wake:
                self._lending.discard(answer)

    def adopt(self, other: DiskStore) -> asyncio.Future[Sequence[MalleeError]]:
        """`Engine.adopt`: the reasons for the capsules that stay. Raises WorkerLost in the future."""
        answer: asyncio.Future[Sequence[MalleeError]] = asyncio.get_running_loop().create_future()
        self._adopting.add(answer)
        answer.add_done_callback(self._adopting.discard)

        def take() -> None:
            self.engine.adopt(other, lambda left: self._post(_resolve, answer, left))

        def refuse(error: Exception) -> None:
            other.close()
            _reject(answer, error)

        self._put(_Item(before_step=take, refuse=refuse))
        return answer

    async def stop(self, error: Exception, *, within_s: float = STOP_S) -> bool:
        """Abort; the thread ends after its step, the moves that have begun, and what they write."""
        self.abort(error)
        ends = self._clock() + within_s
        while self._thread.is_alive() and (left := ends - self._clock()) > 0:
            await asyncio.to_thread(self._thread.join, min(left, JOIN_S))
        return not self._thread.is_alive()

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

    def _look(self) -> None:
        """Wake the thread: there may be work."""
        with self._wake:
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
            self._post(self._results.fail, reason)
        finally:
            self._lend_no_more()
            self.engine.close()
            self._post(self._adopt_no_more)

    def _adopt_no_more(self) -> None:
        for answer in list(self._adopting):
            _reject(answer, WorkerLost(self.engine.worker, _ENDED))

    def _lend_no_more(self) -> None:
        """Answer all that asked for loans and wait."""
        with self._wake:
            self._must_stop = True
            waiting = list(self._lending)
        for answer in waiting:
            _fail(answer, WorkerLost(self.engine.worker, _ENDED))

    def _turn(self, taken: list[_Item]) -> None:
        """Take items in, step, answer questions for a snapshot or the load."""
        for item in taken:
            item.before_step()
        if self.engine.has_work:
            result = self.engine.step()
            if self.on_step is not None and self._turn_began is not None:
                self.on_step(self._clock() - self._turn_began)
            self._post(self._results.deliver, result, self.engine.next_seq)
        for item in taken:
            item.after_step()

    def _post(self, call: Callable[..., None], *args: object) -> None:
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


def _fail(answer: "Future[Loan]", error: Exception) -> None:
    if not answer.done() and answer.set_running_or_notify_cancel():
        answer.set_exception(error)


def _reject(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def identity_of(engine: Engine) -> Identity:
    """Of a worker whose engine is one of ours."""
    # Without tiers the tree evicts from its leaves.
    is_prefix_closed = not engine.has_tiers
    return Identity(engine.worker, engine.incarnation, engine.spec, is_prefix_closed)


def make_worker(host: Host, engine: Engine, capacity: Capacity) -> Worker:
    """`engine` as a worker of `host`, which computes in a thread of its own once it is started."""
    make_runner = partial(EngineThread, engine, clock=host.clock)
    return Worker(
        identity_of(engine), host, capacity, make_runner, spans=host.spans_of(engine.worker)
    )


def add_engine(
    host: Host, engine: Engine, capacity: Capacity, source: WeightSource | None = None
) -> None:
    """Have `host` serve `engine`. Without a `source` its weights can't be changed."""
    host.add(make_worker(host, engine, capacity), source)
