"""A mocked engine at the pace of the wall clock: a `Runner` that computes nothing and has no thread."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import TypeAlias

from mallee.actors.hosting.worker import STOP_S, Grammars, Results
from mallee.actors.mock.device import LiveDevice
from mallee.actors.mock.pacer import Pacer
from mallee.mocker.engine import MockedEngine
from mallee.protocol.events import Load, Snapshot
from mallee.protocol.messages import Command

log = logging.getLogger(__name__)

# How far behind its schedule an engine may begin a step: what was late by less is made up for.
CATCH_UP_S = 0.05

_Item: TypeAlias = tuple[str, Sequence[Command] | None]  # None: the gateway is dropped


class MockRunner:
    """One engine of many on a loop. Commands wait while it computes, as they do for a thread.

    A step begins when the one before was due to end, not when the loop noticed: so streams keep their
    pace. Where the loop can't follow every step of every engine, several are reported at once, at the
    time of the last.
    """

    lend = None  # it has no bytes

    def __init__(
        self,
        mocked: MockedEngine,
        pacer: Pacer,
        results: Results,
        *,
        clock: Callable[[], float],
        device: LiveDevice | None = None,
    ) -> None:
        """`device`: one that others use too; then the engine runs single steps."""
        self._mocked = mocked
        self._device = device
        self._pacer = pacer
        self._results = results
        self._clock = clock
        self._inbox: deque[_Item] = deque()
        self._snapshots: list[asyncio.Future[Snapshot]] = []
        # The last request for the load. Once answered it serves later ones, until a step begins.
        self._load: asyncio.Future[Load] | None = None
        # Callbacks of a step may send commands at once: these wait until the turn is over.
        self._is_turning = False
        self.is_alive = False
        self.due: float | None = None
        self._began = 0.0
        self.on_step: Callable[[float], None] | None = None

    @property
    def next_seq(self) -> int:
        return self._mocked.engine.next_seq

    def start(self) -> None:
        self.is_alive = True

    def turn_age(self, now: float) -> float:
        return 0.0

    @property
    def grammars(self) -> Grammars:
        return self._mocked.engine

    def submit(self, gateway: str, commands: Sequence[Command]) -> None:
        self._put((gateway, commands))

    def drop(self, gateway: str) -> None:
        self._put((gateway, None))

    def snapshot(self) -> asyncio.Future[Snapshot]:
        answer: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()
        self._snapshots.append(answer)
        if not self._mocked.is_busy:
            self._answer()
        return answer

    def load(self) -> asyncio.Future[Load]:
        """Known until something changes: an idle fleet costs next to nothing."""
        if not self._mocked.is_busy and self.is_alive and self._mocked.engine.has_work:
            self._turn(lambda: self._begin(self._clock()))  # a capsule expires
        if self._load is None:
            self._load = asyncio.get_running_loop().create_future()
            if not self.is_alive:
                self._load.cancel()
            elif not self._mocked.is_busy:
                self._answer()
        return self._load

    def abort(self, error: Exception) -> None:
        for answer in self._snapshots:
            if not answer.done():
                answer.set_exception(error)
        self._snapshots.clear()
        if self._load is not None:
            self._load.cancel()  # a lease goes without it
        self._end()

    async def stop(self, error: Exception, *, within_s: float = STOP_S) -> bool:
        """Abort, in this very turn of the loop."""
        self.abort(error)
        return True

    def wake(self) -> None:
        """The step under way is over, or a move of blocks while there was none."""
        due, self.due = self.due, None
        assert due is not None, "nothing was under way"

        def turn() -> None:
            if self._mocked.is_busy:
                if self.on_step is not None:
                    self.on_step(due - self._began)
                self._results.deliver(self._mocked.finish_raw(), self.next_seq)
            if self.is_alive:
                self._begin(max(due, self._clock() - CATCH_UP_S))

        self._turn(turn)

    def device_done(self, at: float) -> None:
        """The shared device has done the step under way, at `at`."""
        self._mocked.delay(at)
        self.due = at
        self.wake()

    def check(self) -> None:
        """Raises AssertionError if it computes without an end in sight, or commands wait for nothing."""
        is_awaited = self._mocked.is_busy or self._mocked.next_due < inf
        assert not self.is_alive or is_awaited == (self.due is not None)
        assert self._mocked.is_busy or not self._inbox or not self.is_alive
        assert not self._is_turning

    def _put(self, item: _Item) -> None:
        if not self.is_alive:
            return
        self._inbox.append(item)
        if not self._is_turning:
            self._turn(self._take)

    def _take(self) -> None:
        if not self._mocked.is_busy:
            self._begin(self._clock())
        elif self._device is None and (due := self._mocked.cut(self._clock())) != self.due:
            self._wait_for(due)

    def _turn(self, work: Callable[[], None]) -> None:
        self._is_turning = True
        try:
            work()
        except Exception as error:  # engine loop top: the engine's state is unknown from here on
            log.error("a mocked engine failed", exc_info=error)
            self._end()
            self._results.fail(f"{type(error).__name__}: {error}")
        finally:
            self._is_turning = False

    def _begin(self, at: float) -> None:
        """Answer open requests, take in the commands that wait, then compute."""
        if self._load is not None and self._load.done():
            self._load = None
        if self._snapshots or self._load is not None:
            self._answer()  # first: what commands change has no events yet
        while self._inbox:
            gateway, commands = self._inbox.popleft()
            if commands is None:
                self._mocked.engine.drop_gateway(gateway)
                self._results.dropped(gateway)
                continue
            for command in commands:
                self._mocked.submit(command, gateway)
        end, self._began = self._mocked.start(at), at
        if end is None:
            due = self._mocked.next_due
            self.due = None
            if due < inf:
                self._wait_for(due)
        elif self._device is not None:
            self.due = inf  # until the device says
            ready = min(end, at + self._mocked.host_s)
            self._device.begin(self, ready, end - ready)
        else:
            # Report within a multi-step: at every step, but no more often than the loop can bear.
            pace_s = self._pacer.pace_s
            self._wait_for(self._mocked.cut(at + pace_s) if end - at > pace_s else end)

    def _wait_for(self, due: float) -> None:
        self.due = due
        self._pacer.at(due, self)

    def _answer(self) -> None:
        """Answer the open requests for snapshots and the load, between two steps."""
        engine = self._mocked.engine
        for answer in self._snapshots:
            if not answer.done():
                answer.set_result(engine.snapshot())
        self._snapshots.clear()
        if self._load is not None and not self._load.done():
            self._load.set_result(engine.load())

    def _end(self) -> None:
        self.is_alive = False
        self.due = None
        self._inbox.clear()
        if self._device is not None:
            self._device.leave(self)
