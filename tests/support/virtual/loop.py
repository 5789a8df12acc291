"""An event loop in virtual time, in which tests of what runs in one process take no real time.

When nothing is ready, time jumps to the next timer. Connections between two ends in the loop are pairs of
sockets, which deliver at once. Threads take their turns in the loop (`support.virtual.threads`). So a run
depends on its seeds alone, not on how busy the machine is.
"""

import asyncio
import errno
import heapq
import socket
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

T = TypeVar("T")

REAL_MONOTONIC: Final = time.monotonic
REAL_TIME: Final = time.time
START: Final = 1000.0  # s, of each loop's time
# Rounds of callbacks without a moment in which nothing was ready: somebody asks again and again. From then on
# each takes some time, so that what is asked for can come true.
BUSY_ROUNDS: Final = 200
ROUND_S: Final = 1e-5  # of virtual time
# Of real time, for a process or a thread outside to be heard of when no timer is left.
OUTSIDE_S: Final = 5.0
# Of processor time, for one test: it goes in a circle, or waits for what never comes while timers ring.
LIMIT_S: Final = 60.0


class Stuck(RuntimeError):
    """Nothing in the loop can ever happen again, and the test has not ended."""


class Pair(socket.socket):
    """One end of a connection within the loop, which says the addresses that TCP would."""

    def __init__(self, inner: socket.socket, here: tuple[str, int], there: tuple[str, int]) -> None:
        super().__init__(inner.family, inner.type, inner.proto, fileno=inner.detach())
        self._here = here
        self._there = there

    def getsockname(self) -> tuple[str, int]:
        return self._here

    def getpeername(self) -> tuple[str, int]:
        return self._there

    def setsockopt(self, level: int, *rest: Any) -> None:
        if level != socket.IPPROTO_TCP:
            super().setsockopt(level, *rest)


class _Listener(NamedTuple):
    server: asyncio.Server
    factory: Callable[[], Any]
    ssl: Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module. `run_thread`, which runs a function as a thread would, comes from its neighbour."""

    run_thread: Callable[..., asyncio.Future[Any]]
    test_began: ClassVar[float] = 0.0  # by the process's processor time; set before each test

    def __init__(self) -> None:
        self._now = START
        self._wall = REAL_TIME() - START
        self._listening: dict[int, _Listener] = {}  # by port
        self._last_port = 50000
        self._running: set[asyncio.Task[Any]] = set()
        self._rounds = 0
        self._busy_rounds = 0  # since nothing was ready
        self._claims: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        super().__init__()

    def time(self) -> float:
        return self._now

    def wall_time(self) -> float:
        return self._wall + self._now

    def fall_behind(self, seconds: float) -> None:
        """Let time pass as if a callback had taken it."""
        self._now += seconds

    def keep(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """A task of the loop's own, which nobody else has to hold."""
        task = self.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def came_true(self, claim: Callable[[], bool]) -> None:
        """Return as soon as `claim` holds, which is asked after each round of callbacks."""
        if claim():
            return
        entry = claim, self.create_future()
        self._claims.append(entry)
        try:
            await entry[1]
        finally:
            self._claims.remove(entry)

    def _ask_claims(self) -> None:
        for claim, waiter in self._claims:
            if waiter.done():
                continue
            try:
                if claim():
                    waiter.set_result(None)
            except Exception as error:
                waiter.set_exception(error)

    def _run_once(self) -> None:
        if not self._ready:  # type: ignore[attr-defined]
            self._process_events(self._selector.select(0))  # type: ignore[attr-defined]
        if self._ready:  # type: ignore[attr-defined]
            self._busy_rounds += 1
            if self._busy_rounds > BUSY_ROUNDS:
                self._now += ROUND_S
        else:
            self._busy_rounds = 0
            self._skip()
        self._rounds += 1
        if self._rounds % 1000 == 0 and time.process_time() - self.test_began > LIMIT_S:
            raise Stuck(f"the test takes over {LIMIT_S:g} s of processor time; {self._tasks()}")
        super()._run_once()  # type: ignore[misc]
        if self._claims:
            self._ask_claims()

    def _skip(self) -> None:
        """Go on to the next timer; without one, wait for what is outside."""
        timers: list[Any] = self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0].cancelled():
            heapq.heappop(timers)._scheduled = False
            self._timer_cancelled_count -= 1  # type: ignore[attr-defined]
        if timers:
            self._now = max(self._now, timers[0].when())
            return
        events = self._selector.select(OUTSIDE_S)  # type: ignore[attr-defined]
        if not events:
            raise Stuck(f"no timer, no callback, nothing to read; {self._tasks()}")
        self._process_events(events)  # type: ignore[attr-defined]

    def close(self) -> None:
        """End connections that are open, too: else it would be chance which later test is told of them."""
        if not self.is_closed():
            for each in [*self._transports.values()]:  # type: ignore[attr-defined]
                if each._loop is not None:  # else it has ended
                    each.abort()
            for _ in range(3):
                self.run_until_complete(asyncio.sleep(0))
        super().close()
        # An executor's last loop is known as long as the executor lives, which what is served may hold.
        self._listening.clear()

    def _tasks(self) -> str:
        return "\n".join(["tasks:", *map(repr, asyncio.all_tasks(self))])

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        return self.run_thread(executor, partial(func, *args))

    async def create_server(  # type: ignore[override]
        self, protocol_factory: Callable[[], Any], *args: Any, ssl: Any = None, **more: Any
    ) -> asyncio.Server:
        server = await super().create_server(protocol_factory, *args, ssl=ssl, **more)
        for each in server.sockets:
            if each.family in (socket.AF_INET, socket.AF_INET6):
                port = each.getsockname()[1]
                self._listening[port] = _Listener(server, protocol_factory, ssl)
        return server

    async def create_connection(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], Any],
        host: Any = None,
        port: Any = None,
        *,
        ssl: Any = None,
        server_hostname: str | None = None,
        **more: Any,
    ) -> Any:
        given = {"ssl": ssl, "server_hostname": server_hostname}
        listener = self._listening.get(port)
        if listener is None:
            return await super().create_connection(protocol_factory, host, port, **given, **more)
        if not listener.server.is_serving():
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"nothing listens at {host}:{port}")
        self._last_port += 1
        here, there = ("127.0.0.1", self._last_port), ("127.0.0.1", port)
        ours, theirs = socket.socketpair()
        ours, theirs = Pair(ours, here, there), Pair(theirs, there, here)
        self.keep(self._accept(listener, theirs))
        if ssl is not None and server_hostname is None:
            given["server_hostname"] = host
        return await super().create_connection(protocol_factory, sock=ours, **given)

    async def _accept(self, listener: _Listener, end: socket.socket) -> None:
        try:
            _, protocol = await self.connect_accepted_socket(
                listener.factory, end, ssl=listener.ssl
            )
        except OSError:  # as where TLS fails: asyncio's servers say nothing of it
            end.close()
            return
        except BaseException:
            end.close()
            raise
        # Only its connection holds a stream's handler. A relay whose client has left waits for its other end,
        # and nothing else refers to the two: garbage collection, which comes by chance, would end the relay.
        if isinstance(protocol, asyncio.StreamReaderProtocol):
            handler: asyncio.Task[None] | None = protocol._task  # type: ignore[attr-defined]
            if handler is not None:
                await asyncio.wait([handler])


def virtual_loop() -> VirtualLoop | None:
    """The one that runs in this thread."""
    loop = asyncio._get_running_loop()
    return loop if isinstance(loop, VirtualLoop) else None


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
