"""The loop in virtual time, on which in-process tests run: time, threads, connections, waits without end."""

import asyncio
import gc
import queue
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from support.live_api import serving
from support.virtual import loop as virtual
from support.virtual.loop import Stuck, run, virtual_loop
from support.waiting import elapse, until


async def test_a_day_takes_no_time_and_is_exact() -> None:
    loop = asyncio.get_running_loop()
    real, began, wall = virtual.REAL_MONOTONIC(), loop.time(), time.time()
    await elapse(86400.0)
    assert loop.time() - began == 86400.0
    assert time.monotonic() == loop.time()
    assert time.time() - wall == pytest.approx(86400.0)
    assert virtual.REAL_MONOTONIC() - real < 60


async def test_timers_ring_in_their_order_and_a_claim_is_seen_when_it_comes_true() -> None:
    rung: list[float] = []
    began = time.monotonic()
    for after in (3.0, 1.0, 2.0):
        asyncio.get_running_loop().call_later(after, rung.append, after)
    await until(lambda: len(rung) == 2)
    assert rung == [1.0, 2.0]
    assert time.monotonic() - began == pytest.approx(2.0)
    with pytest.raises(TimeoutError):
        await until(lambda: len(rung) == 4, timeout_s=5.0)
    assert time.monotonic() - began == pytest.approx(7.0)


async def test_threads_wait_for_each_other_and_for_time() -> None:
    asked: queue.Queue[int] = queue.Queue()
    told: list[tuple[float, int]] = []
    began = time.monotonic()

    def work() -> None:
        while number := asked.get():
            time.sleep(number)
            told.append((time.monotonic() - began, number))

    thread = threading.Thread(target=work)
    thread.start()
    for number in (2, 1, 0):
        asked.put(number)
    await asyncio.to_thread(thread.join)
    assert not thread.is_alive()
    assert [number for _, number in told] == [2, 1]
    assert [at for at, _ in told] == pytest.approx([2.0, 3.0], abs=0.01)


async def test_a_pool_works_in_order_with_as_many_threads_as_it_has() -> None:
    def work(number: int) -> float:
        time.sleep(1.0)
        return time.monotonic() - began

    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        ends = await asyncio.gather(
            *(asyncio.get_running_loop().run_in_executor(pool, work, i) for i in range(4))
        )
        here = pool.submit(work, 5)
        assert here.result() >= 0, "whoever waits in the loop itself has it done there"
    assert ends == pytest.approx([1.0, 1.0, 2.0, 2.0], abs=0.01)


async def test_a_blocking_client_reaches_a_server_of_the_same_loop_until_it_closes() -> None:
    async def slowly(request: Request) -> PlainTextResponse:
        await elapse(5.0)
        return PlainTextResponse(request.query_params["say"])

    def ask() -> tuple[str, float]:
        began = time.monotonic()
        with httpx.Client(base_url=url) as client:
            text = client.get("/", params={"say": "tree"}, timeout=10).text
            with pytest.raises(httpx.ReadTimeout):
                client.get("/", params={"say": ""}, timeout=2)
        return text, time.monotonic() - began

    async with serving(Starlette(routes=[Route("/", slowly)])) as (url, _):
        text, seconds = await asyncio.to_thread(ask)
        assert text == "tree"
        assert seconds == pytest.approx(7.0, abs=0.1)
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(url)


async def test_a_streams_handler_goes_on_when_its_client_left_and_garbage_is_collected() -> None:
    """It waits for what nothing but itself refers to, as a relay does for its other end."""
    loop = asyncio.get_running_loop()
    ends: list[float] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.read() == b""
        moment = loop.create_future()
        loop.call_later(2.0, _arrive, weakref.ref(moment))
        await moment
        writer.close()
        ends.append(loop.time())

    began = loop.time()
    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.close()
        await elapse(1.0)
        gc.collect()
        await until(lambda: bool(ends))
    assert ends == [began + 2.0]


def _arrive(moment: "weakref.ref[asyncio.Future[None]]") -> None:
    if (future := moment()) is not None:
        future.set_result(None)


def test_a_closed_loop_keeps_nothing_of_what_it_served() -> None:
    """Nor does an executor of it, whose last loop is known for as long as the executor lives."""

    class Service:
        def __init__(self) -> None:
            self.pool = ThreadPoolExecutor(1)

        async def answer(self, *_: object) -> None: ...

    async def serve() -> "weakref.ref[Service]":
        service = Service()
        async with await asyncio.start_server(service.answer, "127.0.0.1", 0):
            await asyncio.get_running_loop().run_in_executor(service.pool, int)
        service.pool.shutdown()
        return weakref.ref(service)

    served = run(serve())
    gc.collect()
    assert served() is None


async def test_whoever_asks_again_and_again_gets_there() -> None:
    began = time.monotonic()
    while time.monotonic() < began + 0.01:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def _never() -> None:
    await asyncio.get_running_loop().create_future()


async def _ticking() -> None:
    async def tick() -> None:
        while True:
            await elapse(0.1)

    ticking = asyncio.ensure_future(tick())
    await _never()
    await ticking


@pytest.mark.parametrize(("waits", "says"), [(_never, "no timer"), (_ticking, "processor time")])
def test_a_wait_for_what_never_comes_ends_with_the_tasks(
    waits: object, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(virtual, "OUTSIDE_S", 0.05)
    monkeypatch.setattr(virtual, "LIMIT_S", 0.2)
    with pytest.raises(Stuck, match=rf"(?s){says}.*(_never|_ticking)"):
        run(waits())  # type: ignore[operator]


def test_outside_a_loop_time_is_real() -> None:
    assert virtual_loop() is None
    assert abs(time.monotonic() - virtual.REAL_MONOTONIC()) < 60
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(threading.get_ident).result() != threading.get_ident()
