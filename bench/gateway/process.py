"""Our gateway as one process, for `bench/gateway/__main__.py`: the real HTTP API, service and router.

    python -m bench.gateway.process --port 8000 --workers 9101 9102 [--tokenizer FOLDER]

What Ray and NATS carry in a deployment is carried over TCP here, to the stub workers of
`bench/gateway/backends.py`: the same batches and frames, and their events on a bus within this process.
"""

import argparse
import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

from bench.gateway.backends import BLOCK_SIZE, EVENTS, FRAME, SPEC, message, read_message
from bench.measure import run_async
from mallee.actors.config import HttpSettings
from mallee.actors.gateway.gateway import GatewayService
from mallee.actors.http.api import build_api
from mallee.actors.telemetry.metrics import GatewayMetrics
from mallee.actors.transport.link import ChannelTransport
from mallee.protocol.codec import encode
from mallee.protocol.events import Lease
from mallee.protocol.subjects import Subjects
from mallee.router.config import RouterConfig
from mallee.router.router import Router
from mallee.testing.bus import LocalBus, LocalHub

FLEET = "bench"
LEASE_PERIOD_S = 1.0


def tcp_transport(bus: LocalBus) -> ChannelTransport:
    """A `Transport` to stub workers; an address is a port. Their events go to `bus`."""
    return ChannelTransport(lambda address: _TcpChannel(int(address), bus))


class _TcpChannel:
    def __init__(self, port: int, bus: LocalBus) -> None:
        self._port = port
        self._bus = bus
        self._subject = Subjects.of(FLEET).events(f"w{port}")
        self._writer: asyncio.StreamWriter | None = None

    async def submit(self, raw: bytes) -> None:
        if self._writer is None:
            raise ConnectionError(f"not connected to port {self._port}")
        self._writer.write(message(FRAME, raw))
        await self._writer.drain()

    async def frames(self) -> AsyncGenerator[bytes, None]:
        reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            while True:
                kind, raw = await read_message(reader)
                if kind == EVENTS:
                    self._bus.publish(self._subject, raw)
                else:
                    yield raw
        finally:
            self._writer.close()


class ByteCodec:
    """A tokenizer that costs next to nothing: one token for each four bytes of text, and none back."""

    longest_token: int | None = None

    def encode(self, text: str, *, add_special_tokens: bool = False, scope: str = "") -> list[int]:
        raw = text.encode()
        words = np.frombuffer(raw[: len(raw) // 4 * 4] or b"\0\0\0\0", dtype="<u4")
        tokens: list[int] = (words * np.uint32(2654435761) >> np.uint32(15)).tolist()
        return tokens

    def token_bytes(self, token: int) -> bytes:
        return b" word"

    def detokenizer(self) -> "ByteCodec":
        return self

    def push(self, tokens: Sequence[int]) -> str:
        return " word" * len(tokens)

    def flush(self) -> str:
        return ""


def _text_side(path: Path | None) -> tuple[Any, Any]:
    """(tokenizer, chat template): of the checkpoint at `path`, or next to free ones."""
    from mallee.actors.text.chat import ChatTemplate
    from mallee.actors.text.tokenizer import Tokenizer

    if path is None:
        return ByteCodec(), None
    return Tokenizer.load(path), ChatTemplate.load(path)


async def serve(port: int, workers: list[int], path: Path | None) -> None:
    """Serve on loopback until the process is told to end."""
    hub = LocalHub()
    bus, worker_bus = LocalBus(hub), LocalBus(hub)
    await bus.connect()
    await worker_bus.connect()
    ids, metrics = count(), GatewayMetrics()
    service = GatewayService(
        "g0",
        bus=bus,
        transport=tcp_transport(worker_bus),
        router=Router(RouterConfig(block_size=BLOCK_SIZE), clock=time.monotonic),
        model=SPEC,
        fleet=FLEET,
        metrics=metrics,
        new_request_id=lambda: f"req_{next(ids)}",
        expected_workers=len(workers),
    )
    tokenizer, chat = _text_side(path)
    api = build_api(
        service,
        tokenizer,
        chat,
        model_name="m",
        limits=HttpSettings(),
        created=int(time.time()),
        clock=time.time,
        new_id=lambda: uuid.uuid4().hex,
        draw_seed=lambda: secrets.randbits(64),
        count_answer=metrics.answered,
    )
    await service.start_up()
    beat = asyncio.create_task(_lease(worker_bus, workers))
    config = uvicorn.Config(api, host="127.0.0.1", port=port, log_level="error", access_log=False)
    await uvicorn.Server(config).serve()
    beat.cancel()
    await service.close()


async def _lease(bus: LocalBus, workers: list[int]) -> None:
    """The stub workers' leases: they don't know the bus."""
    while True:
        for port in workers:
            name = f"w{port}"
            lease = Lease(
                worker=name,
                incarnation=1,
                address=str(port),
                model=SPEC.name,
                fingerprint=SPEC.fingerprint,
                block_size=BLOCK_SIZE,
                num_blocks=100_000,
                max_rows=256,
                max_model_len=SPEC.max_model_len,
                next_seq=0,
            )
            bus.publish(Subjects.of(FLEET).lease(name), encode(lease))
        await asyncio.sleep(LEASE_PERIOD_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--workers", type=int, nargs="+", required=True)
    parser.add_argument(
        "--tokenizer", type=Path, help="a checkpoint's folder; else a free stand-in"
    )
    args = parser.parse_args()
    run_async(serve(args.port, args.workers, args.tokenizer))


if __name__ == "__main__":
    main()
