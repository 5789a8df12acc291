"""Bodies that do not come, and streams that are not read. Heads and unread answers are HAProxy's to cut."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import psutil
import pytest
from starlette.types import Message

from mallee.api.entry.middleware import BODY_S
from mallee.api.sse import EventStream
from support.waiting import elapse, until

BODY = json.dumps({"prompt": "abc"}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
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


async def test_half_a_body_is_cut_and_the_service_goes_on(live: Any) -> None:
    """F30, part, I26, part: others are answered meanwhile, files come back."""
    assert await ask(live) == 200
    process = psutil.Process()
    before, began = process.num_fds(), now()
    async with crowd(live, NUM, HEAD % 100 + b'{"prompt"') as conns:
        assert await ask(live) == 200
        endings = await asyncio.gather(*(conn.read_rest() for conn in conns))
        assert BODY_S <= now() - began <= BODY_S + 0.1
        assert all(raw.startswith(b"HTTP/1.1 408") for raw in endings)
        assert all(b"slow_body" in raw and b"9 bytes" in raw for raw in endings)
        assert all(b"connection: close" in raw for raw in endings)
        assert await ask(live) == 200
    await until(lambda: process.num_fds() <= before + 2)
    assert len(live.service.streams) == 3  # those of `ask`


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
