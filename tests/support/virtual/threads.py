"""Time and threads as a program sees them in a loop of virtual time: for tests.

`install` puts these in the place of functions of `time`, `threading`, `concurrent.futures`, `anyio` and
`httpx`. Outside a virtual loop they do as ever. In one, the clocks tell the loop's time, and a thread is a
greenlet that gives way to the loop whenever it would wait: for a time, a condition (and so for an event, a
queue, a future), another thread's end, or an answer over HTTP. Locks are not among them: who waits with a
lock held, holds up all.
"""

import asyncio
import contextvars
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

import anyio.from_thread
import anyio.to_thread
import httpx
import httpx2
from greenlet import getcurrent, greenlet

from support.virtual.loop import REAL_MONOTONIC, REAL_TIME, VirtualLoop, virtual_loop

T = TypeVar("T")

CALL_S: Final = 0.0001  # of virtual time, until a thread runs what it was given
TURN_S: Final = 0.001  # of virtual time, that each turn of an engine takes


class _Thread(greenlet):
    """A function that runs in the loop's thread and gives way to the loop where it waits."""


def _is_thread() -> bool:
    return isinstance(getcurrent(), _Thread)


def wait_for(awaitable: Awaitable[T]) -> T:
    """In a thread of the loop's: what `awaitable` gives, while the loop goes on."""
    result: T = getcurrent().parent.switch(awaitable)
    return result


async def in_thread(work: Callable[[], T]) -> T:
    """The result of `work`, which runs as a thread of the loop's."""
    thread = _Thread(work)
    thread.gr_context = contextvars.copy_context()
    given = thread.switch()
    while not thread.dead:
        try:
            value = await given
        except BaseException as error:
            given = thread.throw(error)
        else:
            given = thread.switch(value)
    result: T = given
    return result


async def _holds(claim: Callable[[], bool], timeout_s: float | None) -> bool:
    loop = virtual_loop()
    assert loop is not None
    try:
        async with asyncio.timeout(timeout_s):
            await loop.came_true(claim)
    except TimeoutError:
        return claim()
    return True


# --- time ---


def _monotonic() -> float:
    loop = virtual_loop()
    return REAL_MONOTONIC() if loop is None else loop.time()


def _time() -> float:
    loop = virtual_loop()
    return REAL_TIME() if loop is None else loop.wall_time()


def _sleep(seconds: float, _real: Callable[[float], None] = time.sleep) -> None:
    if (loop := virtual_loop()) is None:
        _real(seconds)
    elif _is_thread():
        wait_for(asyncio.sleep(seconds))
    else:
        loop.fall_behind(seconds)
        for answer in [
            each for here, pool in _pools.values() if here is loop for each in pool.waiting
        ]:
            answer.begin()


# --- threads ---

_threads: WeakKeyDictionary[threading.Thread, asyncio.Task[None]] = WeakKeyDictionary()


def _start(self: threading.Thread, _real: Any = threading.Thread.start) -> None:
    if (loop := virtual_loop()) is None:
        _real(self)
        return
    if self in _threads:
        raise RuntimeError("threads can only be started once")
    self._started.set()  # type: ignore[attr-defined]

    async def live() -> None:
        await asyncio.sleep(CALL_S)
        await in_thread(self.run)

    _threads[self] = loop.keep(live())


def _is_alive(self: threading.Thread, _real: Any = threading.Thread.is_alive) -> bool:
    task = _threads.get(self)
    return bool(_real(self)) if task is None else not task.done()


def _join(
    self: threading.Thread, timeout: float | None = None, _real: Any = threading.Thread.join
) -> None:
    task = _threads.get(self)
    if task is None:
        _real(self, timeout)
    elif not task.done():
        assert _is_thread(), f"{self} ends in the loop, which this call would hold up"
        wait_for(_holds(task.done, timeout))


def _wait(
    self: threading.Condition,
    timeout: float | None = None,
    _real: Any = threading.Condition.wait,
) -> bool:
    if not _is_thread():
        if virtual_loop() is not None and timeout is None:
            raise RuntimeError("a wait in the loop, which nothing could end")
        return bool(_real(self, timeout))
    waiter = threading.Lock()
    waiter.acquire()
    self._waiters.append(waiter)  # type: ignore[attr-defined]
    saved = self._release_save()  # type: ignore[attr-defined]
    told = wait_for(_holds(lambda: not waiter.locked(), timeout))
    self._acquire_restore(saved)  # type: ignore[attr-defined]
    if not told and waiter in self._waiters:  # type: ignore[attr-defined]
        self._waiters.remove(waiter)  # type: ignore[attr-defined]
    return told


# --- pools ---


class _Pool:
    """Work of one executor: as many at a time as it has threads, in order."""

    def __init__(self, num_threads: int) -> None:
        self.turns = asyncio.Semaphore(num_threads)
        self.waiting: dict[_Answer, None] = {}
        self.num = 0  # that wait or run


_pools: WeakKeyDictionary[Executor, tuple[VirtualLoop, _Pool]] = WeakKeyDictionary()


def _pool_of(executor: Executor | None, loop: VirtualLoop) -> _Pool:
    if not isinstance(executor, ThreadPoolExecutor):
        return _Pool(1)
    if executor._shutdown:
        raise RuntimeError("cannot schedule new futures after shutdown")
    known = _pools.get(executor)
    if known is None or known[0] is not loop:
        _pools[executor] = known = loop, _Pool(executor._max_workers)
    return known[1]


class _Answer(Future[Any]):
    """Of work that waits for a thread. Whoever asks for it in the loop itself has it done at once."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self._work = work

    def result(self, timeout: float | None = None) -> Any:
        if not self.done() and virtual_loop() is not None and not _is_thread():
            self.begin()
        return super().result(timeout)

    def begin(self) -> None:
        """Do the work, unless that has begun: in a thread, or in the loop, which stands still the while."""
        if self.done() or self.running() or not self.set_running_or_notify_cancel():
            return
        try:
            self.set_result(self._work())
        except Exception as error:
            self.set_exception(error)


def _submitted(loop: VirtualLoop, pool: _Pool, work: Callable[[], Any]) -> Future[Any]:
    answer = _Answer(work)
    pool.num += 1
    pool.waiting[answer] = None

    async def go() -> None:
        try:
            async with pool.turns:
                await asyncio.sleep(CALL_S)
                pool.waiting.pop(answer, None)
                await in_thread(answer.begin)
        finally:
            pool.num -= 1

    loop.keep(go())
    return answer


def _run_thread(
    loop: VirtualLoop, executor: Executor | None, work: Callable[[], Any]
) -> asyncio.Future[Any]:
    return asyncio.wrap_future(_submitted(loop, _pool_of(executor, loop), work), loop=loop)


def _submit(
    self: ThreadPoolExecutor,
    work: Callable[..., Any],
    /,
    *args: Any,
    _real: Any = ThreadPoolExecutor.submit,
    **more: Any,
) -> Future[Any]:
    if (loop := virtual_loop()) is None:
        answer: Future[Any] = _real(self, work, *args, **more)
        return answer
    return _submitted(loop, _pool_of(self, loop), partial(work, *args, **more))


def _shutdown(
    self: ThreadPoolExecutor,
    wait: bool = True,
    *,
    cancel_futures: bool = False,
    _real: Any = ThreadPoolExecutor.shutdown,
) -> None:
    _real(self, wait, cancel_futures=cancel_futures)
    known = _pools.get(self)
    if known is None or known[0] is not virtual_loop():
        return
    pool = known[1]
    if cancel_futures:
        for each in [*pool.waiting]:
            each.cancel()
    if wait and pool.num and _is_thread():
        wait_for(_holds(lambda: not pool.num, None))


async def _run_sync(
    func: Callable[..., T], *args: Any, _real: Any = anyio.to_thread.run_sync, **more: Any
) -> T:
    if (loop := virtual_loop()) is None:
        result: T = await _real(func, *args, **more)
        return result
    answer: T = await loop.run_in_executor(None, func, *args)
    return answer


# --- event loops in threads ---


class _Portal:
    """The virtual loop, as a thread sees that of a portal."""

    def call(self, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        return wait_for(work(*args))


@contextmanager
def _portal(*args: Any, _real: Any = anyio.from_thread.start_blocking_portal) -> Iterator[Any]:
    if _is_thread():
        yield _Portal()
        return
    with _real(*args) as portal:
        yield portal


# --- HTTP without an event loop ---


def give_way(http: Any) -> None:
    """Have the synchronous clients of `http`, which is httpx or its fork, send through the loop."""
    transport = http.HTTPTransport
    inners: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    class Sent(http.AsyncByteStream):  # type: ignore[misc]
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            for part in self._stream:
                yield part

    class Received(http.SyncByteStream):  # type: ignore[misc]
        def __init__(self, stream: Any) -> None:
            self._stream = stream
            self._parts = aiter(stream)

        def __iter__(self) -> Iterator[bytes]:
            while (part := wait_for(anext(self._parts, None))) is not None:
                yield part

        def close(self) -> None:
            wait_for(self._stream.aclose())

    def handle_request(self: Any, request: Any, _real: Any = transport.handle_request) -> Any:
        if not _is_thread():
            return _real(self, request)
        if self not in inners:
            verify = self._pool._ssl_context
            inners[self] = http.AsyncHTTPTransport(verify=True if verify is None else verify)
        asked = http.Request(
            request.method,
            request.url,
            headers=request.headers,
            stream=Sent(request.stream),
            extensions=request.extensions,
        )
        got = wait_for(inners[self].handle_async_request(asked))
        return http.Response(
            got.status_code,
            headers=got.headers,
            stream=Received(got.stream),
            extensions=got.extensions,
        )

    def leave(self: Any, *error: Any, _real: Any = transport.__exit__) -> None:
        _real(self, *error)
        close_inner(self)

    def close(self: Any, _real: Any = transport.close) -> None:
        _real(self)
        close_inner(self)

    def close_inner(self: Any) -> None:
        if (inner := inners.pop(self, None)) is None:
            return
        if _is_thread():
            wait_for(inner.aclose())
        elif (loop := virtual_loop()) is not None:
            loop.keep(inner.aclose())

    transport.handle_request, transport.close = handle_request, close
    transport.__exit__ = leave


def install() -> None:
    """See the module. To be called before anything is imported that keeps one of these functions."""
    VirtualLoop.run_thread = _run_thread  # type: ignore[assignment, method-assign]
    time.monotonic, time.time, time.sleep = _monotonic, _time, _sleep  # type: ignore[assignment]
    threading.Thread.start = _start  # type: ignore[method-assign, assignment]
    threading.Thread.is_alive = _is_alive  # type: ignore[method-assign, assignment]
    threading.Thread.join = _join  # type: ignore[method-assign, assignment]
    threading.Condition.wait = _wait  # type: ignore[method-assign, assignment]
    ThreadPoolExecutor.submit = _submit  # type: ignore[method-assign, assignment]
    ThreadPoolExecutor.shutdown = _shutdown  # type: ignore[method-assign, assignment]
    anyio.to_thread.run_sync = _run_sync  # type: ignore[assignment]
    anyio.from_thread.start_blocking_portal = _portal  # type: ignore[assignment]
    for http in (httpx, httpx2):
        give_way(http)


@cache
def step_engines() -> None:
    """Have each turn of an engine take a moment, in which the loop goes on."""
    from mallee.actors.hosting.engine import EngineThread

    def turn(self: EngineThread, taken: Any, _real: Any = EngineThread._turn) -> None:
        _real(self, taken)
        if _is_thread():
            time.sleep(TURN_S)

    EngineThread._turn = turn  # type: ignore[method-assign, assignment]
