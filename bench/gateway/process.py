"""Our gateway as one process, for `bench/gateway/__main__.py`: the real HTTP API, service and router.

    python -m bench.gateway.process --port 8000 --workers w0.sock w1.sock --events e.sock [--tokenizer FOLDER]

Its workers are the stubs of `bench/gateway/backends.py`, over the same sockets as real ones; what NATS
carries in a deployment is on a bus within this process.
"""

import argparse
import asyncio
import secrets
import time
import uuid
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import uvicorn

from bench.doubles.bus import LocalBus, LocalHub
from bench.gateway.backends import BLOCK_SIZE, SECRET, SPEC, read_events
from bench.measure import run_async
from mallee.api.api import ApiSettings, Draws, Entry, ServedModel, build_api
from mallee.gateway.access.access import Access
from mallee.gateway.access.scopes import Scopes
from mallee.gateway.gateway import Gateway
from mallee.gateway.metrics import GatewayMetrics
from mallee.gateway.shell import GatewayContext
from mallee.protocol.codec import encode
from mallee.protocol.events import Lease, decode_batch
from mallee.protocol.hashing import Tokens
from mallee.protocol.subjects import Subjects
from mallee.router.config import RouterConfig
from mallee.router.router import Router
from mallee.runtime.tasks import Tasks
from mallee.runtime.transport.address import Address
from mallee.runtime.transport.link import Transport

FLEET = "bench"
LEASE_PERIOD_S = 1.0


class ByteCodec:
    """A tokenizer that costs next to nothing: one token for each four bytes of text, and none back."""

    longest_token: int | None = None
    added_tokens: ClassVar[dict[str, int]] = {}

    def delimiters(self, among: Collection[str]) -> tuple[str, ...]:
        return ()

    def encode(self, text: str, *, add_special_tokens: bool = False, scope: str = "") -> list[int]:
        ids: list[int] = self.tokens(text).tolist()
        return ids

    def tokens(self, text: str, *, add_special_tokens: bool = False, scope: str = "") -> Tokens:
        raw = text.encode()
        words = np.frombuffer(raw[: len(raw) // 4 * 4] or b"\0\0\0\0", dtype="<u4")
        return words * np.uint32(2654435761) >> np.uint32(15)

    def token_bytes(self, token: int) -> bytes:
        return b" word"

    def detokenizer(self, shown: Sequence[str] = ()) -> "ByteCodec":
        return self

    def push(self, tokens: Sequence[int], *, is_last: bool = False) -> str:
        return " word" * len(tokens)


def _text_side(path: Path | None) -> tuple[Any, Any]:
    """(tokenizer, chat template): of the checkpoint at `path`, or next to free ones."""
    from mallee.api.text.chat import ChatTemplate
    from mallee.api.text.tokenizer import Tokenizer

    if path is None:
        return ByteCodec(), ChatTemplate(None)
    return Tokenizer.load(path), ChatTemplate.load(path)


async def serve(port: int, workers: list[str], events: str, path: Path | None) -> None:
    """Serve on loopback until the process is told to end."""
    hub = LocalHub()
    bus, worker_bus = LocalBus(hub), LocalBus(hub)
    await bus.connect()
    await worker_bus.connect()
    scopes, metrics = Scopes(b"bench", draw=secrets.token_bytes), GatewayMetrics()
    process = GatewayContext(
        gateway="g0",
        fleet=FLEET,
        model=SPEC,
        bus=bus,
        router=Router(RouterConfig(block_size=BLOCK_SIZE), clock=time.monotonic),
        metrics=metrics,
        ids=scopes,
        clock=time.monotonic,
        wall_clock=time.time,
    )
    gateway = Gateway(process, Transport("g0", SECRET), expected_workers=len(workers))
    tokenizer, chat = _text_side(path)
    api = build_api(
        gateway,
        ServedModel("m", tokenizer, chat, created=int(time.time())),
        Entry(Access(None, {}), scopes),
        ApiSettings(),
        Draws(lambda: uuid.uuid4().hex, lambda: secrets.randbits(64)),
    )
    await gateway.start_up()
    reader, writer = await asyncio.open_unix_connection(events)  # without it nothing is measured
    tasks = Tasks("the stub workers' bus")
    tasks.spawn(_lease(worker_bus, workers))
    tasks.spawn(_pass_events(worker_bus, reader))
    config = uvicorn.Config(api, host="127.0.0.1", port=port, log_level="error", access_log=False)
    await uvicorn.Server(config).serve()
    await tasks.close()
    writer.close()
    await gateway.close()


async def _pass_events(bus: LocalBus, reader: asyncio.StreamReader) -> None:
    while True:
        raw = await read_events(reader)
        bus.publish(Subjects.of(FLEET).events(decode_batch(raw).worker), raw)


async def _lease(bus: LocalBus, workers: list[str]) -> None:
    """The stub workers' leases: they don't know the bus."""
    while True:
        for number, path in enumerate(workers):
            name = f"w{number}"
            lease = Lease(
                worker=name,
                incarnation=1,
                address=str(Address(path=path)),
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
    parser.add_argument("--workers", nargs="+", required=True)
    parser.add_argument("--events", required=True)
    parser.add_argument(
        "--tokenizer", type=Path, help="a checkpoint's folder; else a free stand-in"
    )
    args = parser.parse_args()
    run_async(serve(args.port, args.workers, args.events, args.tokenizer))


if __name__ == "__main__":
    main()
