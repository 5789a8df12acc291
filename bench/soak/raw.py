"""HTTP as bytes: requests that no client library would send, and readers that hardly read."""

import asyncio
import json
import socket
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

MAX_HEAD: Final = 1 << 16
NO_ANSWER: Final = 0
HUNG: Final = -1


class Answer(NamedTuple):
    """Answer to a request. `status` NO_ANSWER: the connection ended before one; HUNG: nothing came."""

    status: int
    headers: dict[str, str]
    body: bytes


async def exchange(url: str, raw: bytes, *, timeout_s: float, ends: bool = False) -> Answer:
    """The answer to `raw`, on a connection of its own, whose sending side `ends` after it."""
    place = urlsplit(url)
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(place.hostname, place.port)
            try:
                return await _exchange(reader, writer, raw, ends)
            finally:
                writer.transport.abort()
    except TimeoutError:
        return Answer(HUNG, {}, b"")
    except (OSError, asyncio.IncompleteReadError, ValueError):
        return Answer(NO_ANSWER, {}, b"")


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, raw: bytes, ends: bool
) -> Answer:
    writer.write(raw)
    if ends:
        writer.write_eof()
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = int(head[0].split(" ")[1])
    pairs = (line.split(":", 1) for line in head[1:] if ":" in line)
    headers = {name.strip().lower(): value.strip() for name, value in pairs}
    if headers.get("transfer-encoding") == "chunked":
        return Answer(status, headers, await _chunks(reader))
    length = int(headers.get("content-length", "0"))
    return Answer(status, headers, await reader.readexactly(length) if not _is_head(raw) else b"")


def _is_head(raw: bytes) -> bool:
    return raw.startswith(b"HEAD ")


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int((await reader.readline()).strip() or b"0", 16):
        parts.append(await reader.readexactly(size))
        await reader.readline()
    return b"".join(parts)


def post(path: str, body: dict[str, Any], key: str = "") -> bytes:
    """A request, with an API key if one is given."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += f"authorization: Bearer {key}\r\n" if key else ""
    return f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw


async def leave(url: str, path: str, body: dict[str, Any], *, after_nbytes: int) -> bytes:
    """Ask, hang up once so much was read; what was. Raises OSError."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    found = b""
    try:
        writer.write(post(path, body))
        while len(found) < after_nbytes and (data := await reader.read(after_nbytes - len(found))):
            found += data
    finally:
        writer.transport.abort()
    return found


async def trickle(
    url: str, path: str, body: dict[str, Any], *, seconds: float, period_s: float, key: str = ""
) -> int:
    """Ask, read a byte each period for so long, with as little buffer as there can be; bytes read."""
    place, loop = urlsplit(url), asyncio.get_running_loop()
    num_read = 0
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        connection.setblocking(False)
        try:
            async with asyncio.timeout(seconds):
                await loop.sock_connect(connection, (place.hostname, place.port))
                await loop.sock_sendall(connection, post(path, body, key))
                while await loop.sock_recv(connection, 1):
                    num_read += 1
                    await asyncio.sleep(period_s)
        except (TimeoutError, OSError):
            pass  # long enough, or it was given up
    return num_read
