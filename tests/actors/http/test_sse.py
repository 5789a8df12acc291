"""Streams of events against clients that read slowly, or not at all."""

import asyncio
import logging
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message

from mallee.actors.http.sse import DONE, EventStream
from support.waiting import elapse


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_client_that_takes_nothing_loses_its_stream(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its branches are closed, the answer stays incomplete: the server then cuts the connection."""
    sent: list[Message] = []
    closed = asyncio.Event()
    is_ended = False

    async def events() -> AsyncGenerator[bytes, None]:
        nonlocal is_ended
        try:
            for number in range(10):
                yield b"data: %d\n\n" % number
        finally:
            is_ended = True

    async def send(message: Message) -> None:
        sent.append(message)
        if len(sent) == 4:
            await asyncio.Event().wait()

    async def close() -> None:
        closed.set()

    stream = EventStream(events(), close, {}, max_write_s=0.02)
    with caplog.at_level(logging.WARNING):
        await stream({}, never, send)
    assert closed.is_set()
    assert is_ended
    assert [message.get("body") for message in sent[1:]] == [b"data: %d\n\n" % i for i in range(3)]
    assert all(message["more_body"] for message in sent[1:])
    assert "took nothing of its stream for 0.02 s" in caplog.text


async def test_short_waits_are_no_long_one_together() -> None:
    """Each write waits half of the limit: the stream takes several times as long as it."""
    sent: list[Message] = []

    async def events() -> AsyncGenerator[bytes, None]:
        for number in range(6):
            yield b"data: %d\n\n" % number

    async def send(message: Message) -> None:
        sent.append(message)
        await elapse(0.02)

    async def close() -> None: ...

    await EventStream(events(), close, {}, max_write_s=0.04)({}, never, send)
    assert len(sent) == 8
    assert not sent[-1]["more_body"]
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


async def test_the_end_mark_ends_the_body_in_the_same_write() -> None:
    sent: list[Message] = []

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n" + DONE

    async def send(message: Message) -> None:
        sent.append(message)

    async def close() -> None: ...

    await EventStream(events(), close, {})({}, never, send)
    assert sent[1:] == [
        {"type": "http.response.body", "body": b"data: 1\n\n" + DONE, "more_body": False}
    ]


async def test_a_silent_stream_tells_that_it_lives() -> None:
    """Between events alone, and no more once it has ended."""
    sent: list[bytes] = []

    async def events() -> AsyncGenerator[bytes, None]:
        for pause_s, number in ((0.0, 0), (0.0, 1), (0.13, 2), (0.07, 3)):
            await elapse(pause_s)
            yield b"data: %d\n\n" % number

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))

    async def close() -> None: ...

    await EventStream(events(), close, {}, idle=b"?", idle_s=0.05)({}, never, send)
    assert b"".join(sent) == b"data: 0\n\ndata: 1\n\n??data: 2\n\n?data: 3\n\n"
    await elapse(0.12)
    assert b"".join(sent).endswith(b"3\n\n")


async def test_an_event_waits_for_what_is_written_of_silence() -> None:
    sent: list[bytes] = []
    is_writing = False

    async def events() -> AsyncGenerator[bytes, None]:
        await elapse(0.05)
        yield b"data: 1\n\n"

    async def send(message: Message) -> None:
        nonlocal is_writing
        assert not is_writing, "two writes at once"
        is_writing = True
        await elapse(0.06)
        is_writing = False
        sent.append(message.get("body", b""))

    async def close() -> None: ...

    await EventStream(events(), close, {}, idle=b"?", idle_s=0.03)({}, never, send)
    assert sent == [b"", b"?", b"data: 1\n\n", b""]


async def test_a_client_that_takes_nothing_of_silence_is_cut_at_the_next_event() -> None:
    tried = 0

    async def events() -> AsyncGenerator[bytes, None]:
        await elapse(0.1)
        yield b"data: 1\n\n"

    async def send(message: Message) -> None:
        nonlocal tried
        tried += 1
        if tried > 1:
            await asyncio.Event().wait()

    async def close() -> None: ...

    stream = EventStream(events(), close, {}, idle=b"?", idle_s=0.02, max_write_s=0.05)
    async with asyncio.timeout(5):
        await stream({}, never, send)
    assert tried == 2, "one write at a time"
