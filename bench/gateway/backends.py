"""Backends that answer at once (or after a delay), for benches of what stands in front of them.

    python -m bench.gateway.backends --http 9001 9002 ... [--workers 9101 9102 ...] [--delay-ms 0]

Each HTTP port is an OpenAI-compatible engine, its answers name the port in `system_fingerprint`; a stream
gets as many tokens as it asks for, each in a turn of the loop and a write of its own. Each
worker port is a Mallee worker without an engine: it takes batches of commands and answers with one
frame a request, over TCP with length prefixes, and reports the blocks that it would now hold.
"""

import argparse
import asyncio
import json
import re
import struct
from collections.abc import Mapping
from functools import partial
from typing import cast

import numpy as np

from bench.measure import run_async
from mallee.mocker.passes import mock_spec
from mallee.protocol.codec import encode
from mallee.protocol.events import EventBatch, Stored, pack_hashes
from mallee.protocol.hashing import block_hashes
from mallee.protocol.messages import (
    Frame,
    Generate,
    Update,
    unpack_tokens,
)
from mallee.protocol.parcels import Report, decode_parcels

ANSWER_TOKENS = 8
LIFE_SIGN_S = 1.0
SPEC = mock_spec(vocab_size=1 << 17)
BLOCK_SIZE = 16

FRAME, EVENTS = b"f", b"e"
_HEAD = struct.Struct("<I")
_STREAM = re.compile(rb'"stream"\s*:\s*true')
_MAX_TOKENS = re.compile(rb'"max_tokens"\s*:\s*(\d+)')
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


def message(kind: bytes, raw: bytes) -> bytes:
    """`raw` with its length and kind before it."""
    return _HEAD.pack(len(raw) + 1) + kind + raw


async def read_message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """(kind, payload). Raises IncompleteReadError at the end."""
    (size,) = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    body = await reader.readexactly(size)
    return body[:1], body[1:]


class HttpBackend(asyncio.Protocol):
    """One connection to the engine at `port`. Answers requests in their order."""

    def __init__(self, port: int, delay_s: float) -> None:
        self._delay_s = delay_s
        self._buffer = b""
        name = f"w{port}"
        self._envelope: dict[str, object] = {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 1,
            "model": "m",
            "system_fingerprint": name,
        }
        body = self._envelope | {
            "choices": [{"index": 0, "text": " word" * ANSWER_TOKENS, "finish_reason": "length"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 8, "total_tokens": 9},
        }
        self._answer = _response(body)
        self._token, self._last = self._chunk(None), self._chunk("length")
        about: dict[str, object] = {
            "status": "ok",
            "object": "list",
            "data": [{"id": "m", "object": "model"}],
        }
        self._about = _response(about | {"model_path": "m", "served_model_name": "m"})

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            body = self._buffer[end + 4 : end + 4 + length]
            self._buffer = self._buffer[end + 4 + length :]
            if not head.startswith(b"post"):
                self._transport.write(self._about)
            elif _STREAM.search(body):
                asked = _MAX_TOKENS.search(body)
                tokens = int(asked.group(1)) if asked else ANSWER_TOKENS
                self._transport.write(_STREAM_HEAD)
                self._stream(tokens, self._end(tokens if b"include_usage" in body else None))
            else:
                self._reply(self._answer)

    def _stream(self, left: int, end: bytes) -> None:
        """Write the next token's event, then the others, then `end`."""
        if self._transport.is_closing():
            return
        if not left:
            self._transport.write(end)
            return
        self._transport.write(self._last if left == 1 else self._token)
        asyncio.get_running_loop().call_soon(self._stream, left - 1, end)

    def _end(self, tokens: int | None) -> bytes:
        """The end of a stream; with `tokens`, their count before it."""
        end = _event(b"[DONE]") + b"0\r\n\r\n"
        if tokens is None:
            return end
        usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}
        return _event(json.dumps(self._envelope | {"choices": [], "usage": usage}).encode()) + end

    def _chunk(self, finish: str | None) -> bytes:
        choice = {"index": 0, "text": " word", "finish_reason": finish}
        return _event(json.dumps(self._envelope | {"choices": [choice]}).encode())

    def _reply(self, raw: bytes) -> None:
        if self._delay_s:
            asyncio.get_running_loop().call_later(self._delay_s, self._transport.write, raw)
        else:
            self._transport.write(raw)


def _event(body: bytes) -> bytes:
    """An event, as a chunk of a chunked body."""
    raw = b"data: " + body + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(raw), raw)


def _response(body: Mapping[str, object]) -> bytes:
    raw = json.dumps(body).encode()
    head = (
        f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw


class Worker:
    """A worker whose engine answers each request with the same tokens after `delay_s`."""

    def __init__(self, name: str, delay_s: float) -> None:
        self._name = name
        self._delay_s = delay_s
        self._held: set[int] = set()
        self._next_seq = 0
        self._step = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One gateway's connection, until it ends."""
        beat = asyncio.create_task(self._beat(writer))
        try:
            while True:
                _, raw = await read_message(reader)
                for parcel in decode_parcels(raw):
                    for command in parcel.commands:
                        if isinstance(command, Generate):
                            self._take(command, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the gateway has gone
        finally:
            beat.cancel()
            writer.close()

    async def _beat(self, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(message(FRAME, encode(())))
            await asyncio.sleep(LIFE_SIGN_S)

    def _take(self, command: Generate, writer: asyncio.StreamWriter) -> None:
        tokens = unpack_tokens(command.tokens)
        hashes = block_hashes(tokens, BLOCK_SIZE, salt=SPEC.salt(command.salt)).tolist()
        known = next((i for i, h in enumerate(hashes) if h not in self._held), len(hashes))
        if new := hashes[known:]:
            self._held.update(new)
            stored = Stored(pack_hashes(np.array(new, dtype=np.uint64)))
            batch = EventBatch(self._name, 1, self._next_seq, (stored,))
            self._next_seq += 1
            writer.write(message(EVENTS, encode(batch)))
        cached = min(known * BLOCK_SIZE, len(tokens) - 1)
        updates = tuple(
            Update(
                command.request,
                branch,
                tuple(range(100, 100 + ANSWER_TOKENS)),
                "length",
                cached,
                len(tokens) - cached if branch == 0 else 0,
                f"{command.request}.{branch}",
                len(tokens) + ANSWER_TOKENS,
            )
            for branch in range(command.n)
        )
        self._step += 1
        report = Report(self._name, 1, Frame(self._step, updates))
        raw = message(FRAME, encode((report,)))
        if self._delay_s:
            asyncio.get_running_loop().call_later(self._delay_s, writer.write, raw)
        else:
            writer.write(raw)


async def serve(http: list[int], workers: list[int], delay_s: float) -> None:
    """Listen on all of them until cancelled. Loopback only."""
    loop = asyncio.get_running_loop()
    for port in http:
        await loop.create_server(partial(HttpBackend, port, delay_s), "127.0.0.1", port)
    for port in workers:
        await asyncio.start_server(Worker(f"w{port}", delay_s).serve, "127.0.0.1", port)
    print("ready", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--http", type=int, nargs="*", default=[])
    parser.add_argument("--workers", type=int, nargs="*", default=[])
    parser.add_argument("--delay-ms", type=float, default=0.0)
    args = parser.parse_args()
    run_async(serve(args.http, args.workers, args.delay_ms / 1000))


if __name__ == "__main__":
    main()
