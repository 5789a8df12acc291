"""Backends that answer at once (or after a delay), for benches of what stands in front of them.

    python -m bench.gateway.backends --http 9001 9002 ... [--workers w0.sock ... --events e.sock]

Each HTTP port is an OpenAI-compatible engine, its answers name the port in `system_fingerprint`; a stream
gets as many tokens as it asks for, each in a turn of the loop and a write of its own. Each worker socket is
a Mallee worker without an engine, behind the links of real ones: it answers each request with one frame.
Events of the blocks that it would now hold go to every connection to `--events`.
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
from mallee.runtime.transport.greeting import Secret
from mallee.runtime.transport.listener import Listener
from mallee.runtime.transport.server import CommandServer, Sink

ANSWER_TOKENS = 8
LIFE_SIGN_S = 1.0
SPEC = mock_spec(vocab_size=1 << 17)
BLOCK_SIZE = 16

SECRET = Secret(b"of benches, on one machine")
_HEAD = struct.Struct("<I")
_STREAM = re.compile(rb'"stream"\s*:\s*true')
_MAX_TOKENS = re.compile(rb'"max_tokens"\s*:\s*(\d+)')
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


async def read_events(reader: asyncio.StreamReader) -> bytes:
    """An encoded `EventBatch` of a stub worker. Raises IncompleteReadError at the end."""
    (size,) = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    return await reader.readexactly(size)


class Events:
    """The stub workers' bus: passes on to every connection."""

    def __init__(self) -> None:
        self._writers: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One listener's connection, until it ends."""
        self._writers.add(writer)
        await reader.read()
        self._writers.discard(writer)
        writer.close()

    def publish(self, raw: bytes) -> None:
        for writer in self._writers:
            writer.write(_HEAD.pack(len(raw)) + raw)


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
    """A host of one worker, whose engine answers each request with the same tokens after `delay_s`."""

    def __init__(self, name: str, delay_s: float, events: Events) -> None:
        self._name = name
        self._delay_s = delay_s
        self._events = events
        self._held: set[int] = set()
        self._next_seq = 0
        self._step = 0

    def open(self, gateway: str, sink: Sink) -> "Stream":
        return Stream(self, sink)

    def take(self, command: Generate, sink: Sink) -> None:
        tokens = unpack_tokens(command.tokens)
        hashes = block_hashes(tokens, BLOCK_SIZE, salt=SPEC.salt(command.salt)).tolist()
        known = next((i for i, h in enumerate(hashes) if h not in self._held), len(hashes))
        if new := hashes[known:]:
            self._held.update(new)
            stored = Stored(pack_hashes(np.array(new, dtype=np.uint64)))
            batch = EventBatch(self._name, 1, self._next_seq, (stored,))
            self._next_seq += 1
            self._events.publish(encode(batch))
        cached = min(known * BLOCK_SIZE, len(tokens) - 1)
        updates = tuple(
            Update(
                request=command.request,
                branch=branch,
                tokens=tuple(range(100, 100 + ANSWER_TOKENS)),
                finish="length",
                cached_tokens=cached,
                prefill_tokens=len(tokens) - cached if branch == 0 else 0,
                capsule=f"{command.request}.{branch}",
                boundary=len(tokens) + ANSWER_TOKENS,
            )
            for branch in range(command.n)
        )
        self._step += 1
        report = Report(self._name, 1, Frame(self._step, updates))
        raw = encode((report,))
        if self._delay_s:
            asyncio.get_running_loop().call_later(self._delay_s, sink.send, raw)
        else:
            sink.send(raw)


class Stream:
    """A gateway's stream at a stub worker. An `Inlet`."""

    def __init__(self, worker: Worker, sink: Sink) -> None:
        self._worker = worker
        self._sink = sink
        self._timer = asyncio.get_running_loop().call_later(0, self._beat)

    def submit(self, raw: bytes) -> None:
        for parcel in decode_parcels(raw):
            for command in parcel.commands:
                if isinstance(command, Generate):
                    self._worker.take(command, self._sink)

    def resume(self) -> None:
        pass

    def close(self) -> None:
        self._timer.cancel()

    def _beat(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LIFE_SIGN_S, self._beat)
        self._sink.send(encode(()))


async def serve(
    http: list[int], workers: list[str], delay_s: float, events_path: str | None
) -> None:
    """Listen on all of them until cancelled. Loopback only."""
    loop = asyncio.get_running_loop()
    # Kept: uvloop closes a Unix server that nothing refers to, at the next garbage collection.
    listeners: list[asyncio.AbstractServer] = [
        await loop.create_server(partial(HttpBackend, port, delay_s), "127.0.0.1", port)
        for port in http
    ]
    events = Events()
    if events_path is not None:
        listeners.append(await asyncio.start_unix_server(events.serve, events_path))
    servers = [
        Listener(CommandServer(Worker(f"w{number}", delay_s, events), SECRET))
        for number in range(len(workers))
    ]
    for server, path in zip(servers, workers, strict=True):
        await server.listen_unix(path)
    print("ready", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        for listener in listeners:
            listener.close()
        for server in servers:
            await server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--http", type=int, nargs="*", default=[])
    parser.add_argument("--workers", nargs="*", default=[])
    parser.add_argument("--events")
    parser.add_argument("--delay-ms", type=float, default=0.0)
    args = parser.parse_args()
    run_async(serve(args.http, args.workers, args.delay_ms / 1000, args.events))


if __name__ == "__main__":
    main()
