"""Clients: honest streams beside a fault, and sockets that hold a request back."""

import asyncio
import json
import random
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import httpx

from bench.failover.streams import MODEL, WORDS
from bench.peers.faults.sides import KEYS, bearer

PATH: Final = "/v1/completions"
NUM_BYSTANDERS: Final = 2
WARM_PIECES: Final = 8


class Stream:
    """An answer as it comes: its pieces, its longest pause, and how it ends."""

    def __init__(self, url: str, max_tokens: int, seed: int, key: str = KEYS[0]) -> None:
        words = " ".join(random.Random(seed).choices(WORDS, k=24))
        self.num_pieces = 0
        self.longest_s = 0.0
        self.end = ""
        self._last = time.monotonic()
        self._finished = self._failed = False
        body = {"model": MODEL, "prompt": words, "max_tokens": max_tokens, "stream": True}
        body |= {"ignore_eos": True, "temperature": 0}
        self._task = asyncio.create_task(self._read(url, body, key))

    @property
    def silent_s(self) -> float:
        """Seconds since the last piece, of one that goes on."""
        return 0.0 if self.end else time.monotonic() - self._last

    @property
    def pause_s(self) -> float:
        return max(self.longest_s, self.silent_s)

    def forget(self) -> None:
        """Begin to look for pauses now."""
        self.longest_s, self._last = 0.0, time.monotonic()

    async def under_way(self, num_pieces: int) -> None:
        """Returns once it has so many pieces, or has ended."""
        while self.num_pieces < num_pieces and not self.end:  # noqa: ASYNC110 - another process's pace
            await asyncio.sleep(0.01)

    async def leave(self) -> None:
        """Hang up."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def over(self, timeout_s: float) -> str:
        """Its end; "hangs" if it has none in time."""
        await asyncio.wait([self._task], timeout=timeout_s)
        end = self.end or "hangs"
        await self.leave()
        return end

    async def _read(self, url: str, body: Mapping[str, Any], key: str) -> None:
        is_done = False
        try:
            async with (
                httpx.AsyncClient(timeout=None) as client,
                client.stream("POST", url + PATH, json=body, headers=bearer(key)) as answer,
            ):
                if answer.status_code != 200:
                    self.end = f"refused, {answer.status_code}"
                    return
                async for line in answer.aiter_lines():
                    is_done |= line == "data: [DONE]"
                    if line.startswith("data: {"):
                        self._take(json.loads(line.removeprefix("data: ")))
        except (httpx.HTTPError, OSError):
            pass  # as the end says
        self.end = self._ending(is_done)

    def _take(self, event: dict[str, Any]) -> None:
        now = time.monotonic()
        self.num_pieces += 1
        self.longest_s, self._last = max(self.longest_s, now - self._last), now
        self._failed |= "error" in event
        self._finished |= any(each.get("finish_reason") for each in event.get("choices", ()))

    def _ending(self, is_done: bool) -> str:
        if self._failed:
            return "error, then [DONE]" if is_done else "error"
        if self._finished and is_done:
            return "whole"
        return "[DONE], not whole" if is_done else "cut"


class Bystanders(NamedTuple):
    """Streams of another tenant."""

    streams: list[Stream]

    def pause_s(self) -> float:
        """The longest pause of any; of one that was cut, no end."""
        ends = ("", "whole")
        return max(each.pause_s if each.end in ends else float("inf") for each in self.streams)


@asynccontextmanager
async def bystanders(url: str) -> AsyncIterator[Bystanders]:
    """Streams that are under way, and go on during the block."""
    streams = [Stream(url, 4000, -i, KEYS[1]) for i in range(1, NUM_BYSTANDERS + 1)]
    try:
        for each in streams:
            await each.under_way(WARM_PIECES)
        for each in streams:
            each.forget()
        yield Bystanders(streams)
    finally:
        for each in streams:
            await each.leave()


class Held(NamedTuple):
    """End of a connection that was held: "" if it had none, and the seconds until it."""

    answer: str
    seconds: float


async def hold(
    url: str, first: bytes, drip: bytes = b"", *, horizon_s: float, period_s: float = 1.0
) -> Held:
    """Send `first`, then a byte of `drip` a period; the end of the connection."""
    place, begin = urlsplit(url), time.monotonic()
    try:
        async with asyncio.timeout(horizon_s):
            reader, writer = await asyncio.open_connection(place.hostname, place.port)
            writer.write(first)
            dripping = asyncio.create_task(_drip(writer, drip, period_s))
            try:
                answer = await reader.read(4096)
            finally:
                dripping.cancel()
                writer.transport.abort()
    except TimeoutError:
        return Held("", horizon_s)
    except OSError:
        answer = b""
    status = answer.split(b" ", 2)[1].decode() if answer.startswith(b"HTTP/") else "cut"
    return Held(status, time.monotonic() - begin)


async def _drip(writer: asyncio.StreamWriter, drip: bytes, period_s: float) -> None:
    for byte in drip:
        await asyncio.sleep(period_s)
        writer.write(bytes([byte]))


async def read_slowly(url: str, body: Mapping[str, Any], horizon_s: float) -> Held:
    """Ask for a stream and read a byte a second into the smallest buffer there can be."""
    place, loop, begin = urlsplit(url), asyncio.get_running_loop(), time.monotonic()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        connection.setblocking(False)
        try:
            async with asyncio.timeout(horizon_s):
                await loop.sock_connect(connection, (place.hostname, place.port))
                await loop.sock_sendall(connection, request(json.dumps(body).encode()))
                while await loop.sock_recv(connection, 1):  # noqa: ASYNC110 - a pace, no condition
                    await asyncio.sleep(1.0)
        except TimeoutError:
            return Held("", horizon_s)
        except OSError:
            pass
    return Held("cut", time.monotonic() - begin)


def request(body: bytes, *, length: int | None = None) -> bytes:
    """A POST of `body`, as bytes; with `length`, so much is promised."""
    lines = [f"POST {PATH} HTTP/1.1", "host: x", "content-type: application/json"]
    lines += [f"authorization: Bearer {KEYS[0]}"]
    lines += [f"content-length: {len(body) if length is None else length}", "", ""]
    return "\r\n".join(lines).encode() + body


async def answered(url: str, body: bytes, timeout_s: float) -> tuple[str, float]:
    """Status of the answer to `body` ("none": not in time, "cut"), and its seconds."""
    begin = time.monotonic()
    headers = bearer(KEYS[0]) | {"content-type": "application/json"}
    try:
        async with asyncio.timeout(timeout_s), httpx.AsyncClient(timeout=None) as client:
            status = str((await client.post(url + PATH, content=body, headers=headers)).status_code)
    except TimeoutError:
        status = "none"
    except (httpx.HTTPError, OSError):
        status = "cut"
    return status, time.monotonic() - begin


async def first_token_s(url: str, prompt: str, key: str) -> float:
    """Seconds until an answer of one token."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    async with httpx.AsyncClient(timeout=120) as client:
        begin = time.monotonic()
        (await client.post(url + PATH, json=body, headers=bearer(key))).raise_for_status()
        return time.monotonic() - begin
