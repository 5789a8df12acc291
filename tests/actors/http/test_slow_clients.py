"""Connections that stay half open, and clients that read slowly or not at all."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import psutil
import pytest
from starlette.types import Message

from mallee.actors.http.entry.middleware import BODY_S
from mallee.actors.http.sse import EventStream
from mallee.actors.proxy.connections import HEAD_S, MIN_READ_RATE, REFUSED_S, WRITE_S
from support.waiting import elapse, until

BODY = json.dumps({"prompt": "abc"}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
LOOKS_S = 2.1  # the server looks once a second, and counts from the look after the last byte
NUM = 100


def now() -> float:
    return asyncio.get_running_loop().time()


async def ask(live: Any) -> int:
    """The status of an ordinary request."""
    async with await live.connect() as conn:
        conn.send(HEAD % len(BODY) + BODY)
        return int((await conn.answer())[0])


@asynccontextmanager
async def crowd(live: Any, num: int, sent: bytes) -> AsyncIterator[list[Any]]:
    async with AsyncExitStack() as stack:
        conns = [await stack.enter_async_context(await live.connect()) for _ in range(num)]
        for conn in conns:
            conn.send(sent)
        yield conns


@pytest.mark.parametrize(
    ("sent", "answer", "limit_s"),
    [
        (b"", b"", HEAD_S),
        (b"POST /v1/comp", b"HTTP/1.1 408", HEAD_S),
        (HEAD % 100 + b'{"prompt"', b"HTTP/1.1 408", BODY_S),
    ],
    ids=["nothing", "half a head", "half a body"],
)
async def test_half_open_connections_are_cut_and_the_service_goes_on(
    live: Any, sent: bytes, answer: bytes, limit_s: float
) -> None:
    """F30, part, I26, part: others are answered meanwhile, files come back."""
    assert await ask(live) == 200
    process = psutil.Process()
    before, began = process.num_fds(), now()
    async with crowd(live, NUM, sent) as conns:
        assert await ask(live) == 200
        endings = await asyncio.gather(*(conn.read_rest() for conn in conns))
        assert limit_s <= now() - began <= limit_s + LOOKS_S
        assert all(raw.startswith(answer) for raw in endings)
        if b'"prompt"' in sent:
            assert all(b"slow_body" in raw and b"9 bytes" in raw for raw in endings)
            assert all(b"connection: close" in raw for raw in endings)
        assert await ask(live) == 200
    await until(lambda: process.num_fds() <= before + 2)
    assert len(live.service.streams) == 3  # those of `ask`


@pytest.mark.parametrize(("sent", "drip"), [(b"GET /", b"x"), (b"", b"\r\n")])
async def test_a_head_that_comes_byte_by_byte_is_cut(live: Any, sent: bytes, drip: bytes) -> None:
    """F30, part: bytes win no time; an empty line before a request is no request."""
    began = now()
    async with crowd(live, NUM, sent) as conns:
        endings = [asyncio.create_task(conn.read_rest()) for conn in conns]
        while not all(each.done() for each in endings):
            assert now() - began <= HEAD_S + LOOKS_S
            for conn in conns:
                conn.send(drip)
            await elapse(0.1)
        assert now() - began >= HEAD_S
        assert await ask(live) == 200


@pytest.mark.parametrize("head", [b"GET /" + b"x" * 10**6, b"GET / HTTP/1.1\r\nX: " + b"y" * 10**6])
async def test_a_head_without_end_is_431(live: Any, head: bytes) -> None:
    """F30, part: the length of a head is bounded."""
    async with await live.connect() as conn:
        conn.send(head)
        assert (await conn.read_rest()).startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("more", [b"1;ext=" + b"e" * 10**6, b"0\r\nTrailer: " + b"t" * 10**6])
async def test_a_chunked_body_without_data_is_cut(live: Any, more: bytes) -> None:
    """Extensions of chunks and trailers are bytes of nothing."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with await live.connect() as conn:
        conn.send(head + more)
        assert b" 200 " not in await conn.read_rest()
    assert await ask(live) == 200


async def test_the_rest_of_a_refused_body_is_not_waited_for(live: Any) -> None:
    """An answer given before the body has come (an unknown path) does not hold the connection."""
    async with await live.connect() as conn:
        conn.send(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
        assert (await conn.answer())[0] == 404
        began = now()
        assert await conn.read_rest() == b""
        assert now() - began <= HEAD_S + LOOKS_S


async def test_a_client_may_wait_for_the_word_to_go_on(live: Any) -> None:
    """`Expect: 100-continue`: 100, then the answer; one of a body too long gets its 413 alone."""
    ask_first = HEAD.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n")
    async with await live.connect() as conn:
        conn.send(ask_first % len(BODY))
        assert (await conn.read_to(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        conn.send(BODY)
        assert (await conn.answer())[0] == 200
    async with await live.connect() as conn:
        conn.send(ask_first % 10**9)
        assert (await conn.read_rest()).startswith(b"HTTP/1.1 413")


@asynccontextmanager
async def large_answer(live: Any) -> AsyncIterator[tuple[asyncio.StreamReader, int]]:
    """An answer of megabytes whose head came: its reader, which takes it when it is asked, and its size."""
    live.service.reply = lambda branch: "x" * 16000
    body = json.dumps({"prompt": "abc", "max_tokens": 190, "n": 128, "logprobs": 20}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", live.port, limit=1024)
    writer.write(HEAD % len(body) + body)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    try:
        yield reader, int(head.partition(b"content-length: ")[2].split()[0])
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def unread(live: Any) -> int:
    """Bytes of answers that wait in the server."""
    found: int = sum(c.transport.get_write_buffer_size() for c in live.server._connections._open)
    return found


async def test_a_client_that_takes_nothing_of_a_whole_answer_is_cut(live: Any) -> None:
    """F30, part: though its size would give the time to take it all; the others don't notice."""
    async with large_answer(live):
        began = now()
        assert unread(live) > 2 * WRITE_S * MIN_READ_RATE
        await until(lambda: not live.server._connections._open, timeout_s=2 * WRITE_S)
        assert WRITE_S <= now() - began <= WRITE_S + LOOKS_S
        assert await ask(live) == 200
    assert live.service.closed.is_set()


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "is_cut"), [(2.0, False), (0.25, True)])
async def test_a_reader_is_left_alone_as_long_as_it_keeps_the_least_rate(
    live: Any, rate: float, is_cut: bool
) -> None:
    """Of the whole answer, though it takes something all the time."""
    async with large_answer(live) as (reader, size):
        began, num = now(), 0
        await elapse(1.1)  # the server has looked
        patience_s = WRITE_S + unread(live) / MIN_READ_RATE
        while unread(live):
            num += len(await reader.readexactly(int(rate * MIN_READ_RATE)))
            await elapse(1)
        assert (now() - began >= patience_s) == is_cut
        assert now() - began <= patience_s + LOOKS_S
        with suppress(ConnectionError):
            num += len(await reader.read())
        assert (num < size) == is_cut


async def test_connections_beyond_a_clients_share_are_503(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F30, part: with a time to come back and the numbers; room is there again at once."""
    limits = live.server._connections
    monkeypatch.setattr(limits, "_most_of_client", 5)
    async with crowd(live, 4, b""):
        async with await live.connect(), await live.connect() as refused:
            raw = await refused.read_rest()
        head, _, body = raw.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1" in head
        assert "6 connections of one client, of 5" in json.loads(body)["error"]["message"]
        await until(lambda: len(limits._open) == 4)
        assert await ask(live) == 200
    await until(lambda: not limits._by_client)


async def test_connections_beyond_all_are_refused(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F30, part: with a word as long as there are not too many even for that."""
    limits = live.server._connections
    monkeypatch.setattr(limits, "_most", 3)
    async with crowd(live, 8, b"") as conns:
        began = now()
        assert all([(await conn.answer())[0] == 503 for conn in conns[3:6]])
        assert await conns[7].read_rest() == b""
        await until(lambda: len(limits._open) == 3)
        assert now() - began <= REFUSED_S + LOOKS_S
    await until(lambda: not limits._open)
    assert await ask(live) == 200


async def numbers(*pauses_s: float) -> AsyncGenerator[bytes, None]:
    """An event after each pause."""
    for number, pause_s in enumerate(pauses_s):
        await elapse(pause_s)
        yield b"data: %d\n\n" % number


async def play(
    events: AsyncGenerator[bytes, None],
    write: Callable[[int], Awaitable[None]] | None = None,
    **options: Any,
) -> tuple[list[Message], bool]:
    """The messages that a stream tried to send, and whether it was closed. `write` waits for the client."""
    sent: list[Message] = []
    is_closed = False

    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)
        if write is not None:
            await write(len(sent))

    async def close() -> None:
        nonlocal is_closed
        is_closed = True

    async with asyncio.timeout(5):
        await EventStream(events, close, {}, **options)({}, never, send)
    return sent, is_closed


async def test_a_client_that_takes_nothing_loses_its_stream(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its branches are closed, the answer stays incomplete: the server then cuts the connection."""
    events = numbers(*[0.0] * 10)

    async def write(number: int) -> None:
        if number == 4:
            await asyncio.Event().wait()

    with caplog.at_level(logging.WARNING):
        sent, is_closed = await play(events, write, max_write_s=0.02)
    assert is_closed
    assert await anext(events, None) is None, "it is ended"
    assert [message.get("body") for message in sent[1:]] == [b"data: %d\n\n" % i for i in range(3)]
    assert all(message["more_body"] for message in sent[1:])
    assert "took nothing of its stream for 0.02 s" in caplog.text


async def test_short_waits_are_no_long_one_together() -> None:
    """Each write waits half of the limit: the stream takes several times as long as it."""
    sent, _ = await play(numbers(*[0.0] * 6), lambda _: elapse(0.02), max_write_s=0.04)
    assert len(sent) == 8
    assert not sent[-1]["more_body"]
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


async def test_a_silent_stream_tells_that_it_lives() -> None:
    """Between events alone, and no more once it has ended."""
    sent, _ = await play(numbers(0.0, 0.0, 0.13, 0.07), idle=b"?", idle_s=0.05)
    await elapse(0.12)
    text = b"".join(message.get("body", b"") for message in sent)
    assert text == b"data: 0\n\ndata: 1\n\n??data: 2\n\n?data: 3\n\n"


async def test_an_event_waits_for_what_is_written_of_silence() -> None:
    is_writing = False

    async def write(_: int) -> None:
        nonlocal is_writing
        assert not is_writing, "two writes at once"
        is_writing = True
        await elapse(0.06)
        is_writing = False

    sent, _ = await play(numbers(0.05), write, idle=b"?", idle_s=0.03)
    assert [message.get("body", b"") for message in sent] == [b"", b"?", b"data: 0\n\n", b""]


async def test_a_client_that_takes_nothing_of_silence_is_cut_at_the_next_event() -> None:
    async def write(number: int) -> None:
        if number > 1:
            await asyncio.Event().wait()

    sent, _ = await play(numbers(0.1), write, idle=b"?", idle_s=0.02, max_write_s=0.05)
    assert len(sent) == 2, "one write at a time"
