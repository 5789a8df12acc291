"""The load generator of the gateway's benches, and their stub engines, over loopback."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from bench.gateway import backends, load
from bench.measure import run_async

pytestmark = pytest.mark.process

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[str]:
    """The URL of a server of `handler`."""
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


async def asked(url: str, number: int) -> list[load.Answer]:
    """Answers to so many requests on one connection, each sent after the answer before."""
    found: list[load.Answer] = []
    request = b"POST /v1/completions HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}"

    def on_answer(connection: load.Connection, answer: load.Answer) -> None:
        found.append(answer)
        if len(found) < number:
            connection.send(request)
        else:
            connection.close()

    connection = load.Connection(url, on_answer)
    await connection.open()
    connection.send(request)
    await asyncio.wait_for(connection.closed, 5)
    return found


async def read_body(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    return await reader.readexactly(int(head.lower().split(b"content-length:")[1].split()[0]))


async def test_whole_streams_and_failures_are_counted() -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    whole = b'6\r\ndata: \r\n1c\r\n{"a": 0}\n\ndata: [DONE]\n\n\r\n0\r\n\r\n'
    answers = [
        [head + whole],
        [head, whole[:20], whole[20:-3], whole[-3:]],
        [b"HTTP/1.1 503 No\r\ncontent-length: 2\r\n\r\n{}"],
        [head + b"6\r\ndata: \r\n0\r\n\r\n"],
    ]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            assert json.loads(await read_body(reader))["stream"] is True
            for part in answer:
                writer.write(part)
                await asyncio.sleep(0.005)
        await reader.read()
        writer.close()
        await writer.wait_closed()
        ended.set()

    ended = asyncio.Event()
    async with served(serve) as url:
        options = ["--url", url, "--stream", "--requests", "4", "--prompts", "2"]
        result = await load.run(load.parse(options))
        await ended.wait()
    assert (result["requests"], result["errors"]) == (4, 2)
    assert 0 < result["first_p50_ms"] <= result["p50_ms"]


async def test_answers_of_both_kinds_are_read() -> None:
    """A worker is named by a header, or by the fingerprint in the body; chunked bodies are read."""
    answers = [
        b"HTTP/1.1 200 OK\r\nx-mallee-worker: w7\r\ncontent-length: 2\r\n\r\n{}",
        b'HTTP/1.1 200 OK\r\ncontent-length: 28\r\n\r\n{"system_fingerprint": "w9"}',
        b"HTTP/1.1 503 No\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n1\r\n \r\n0\r\n\r\n",
    ]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await read_body(reader)
            writer.write(answer)
        writer.close()

    async with served(serve) as url:
        found = await asked(url, 3)
    assert [answer[:2] for answer in found] == [(200, "w7"), (200, "w9"), (503, "")]
    assert all(0 < answer.first_s <= answer.whole_s for answer in found)


@pytest.mark.parametrize("dies", [False, True])
async def test_what_is_sent_on_a_connection_that_closes_is_sent_again(dies: bool) -> None:
    """A server that closes after an answer costs no request; one that closes in mid-answer does."""
    num_served = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_served
        await read_body(reader)
        num_served += 1
        length = 9 if dies and num_served == 2 else 2
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n{}" % length)
        writer.close()

    async with served(serve) as url:
        if dies:
            with pytest.raises(ConnectionError):
                await asked(url, 3)
        else:
            assert [answer.status for answer in await asked(url, 3)] == [200] * 3
    assert num_served == (2 if dies else 3)


async def test_stub_engines_stream_as_many_tokens_as_are_asked_for() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(partial(backends.HttpBackend, 1, 0.0), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    options = ["--stream", "--concurrency", "3", "--requests", "6", "--max-tokens", "40", "--usage"]
    found = await load.run(load.parse(["--url", url, *options]))
    server.close()
    assert (found["requests"], found["errors"]) == (6, 0)
    assert found["tokens_per_s"] * found["seconds"] == pytest.approx(6 * 40)
    answer = load.Answer(200, "", 0.1, 0.2, is_done=True, tokens=7)
    assert answer.is_good(True, 7)
    assert not answer.is_good(True, 8), "too few tokens are an error"


def test_the_stubs_tell_of_events_after_a_garbage_collection(tmp_path: Path) -> None:
    """A gateway that heard none would send children anywhere; uvloop drops what nothing refers to."""
    events = tmp_path / "events.sock"

    async def check() -> None:
        stubs = asyncio.create_task(backends.serve([], [], 0.0, str(events)))
        while not events.exists() and not stubs.done():  # noqa: ASYNC110 - told by the file alone
            await asyncio.sleep(0.01)
        for _ in range(3):
            gc.collect()
            await asyncio.sleep(0)
        try:
            _, writer = await asyncio.open_unix_connection(events)
            writer.close()
            await writer.wait_closed()
        finally:
            stubs.cancel()
            await asyncio.wait([stubs])

    run_async(check())
