"""One process of mocked engines: `python -m mallee.actors.mock.process`, as `mock_stack` starts it.

Its first line of input is its `Task`. It writes one line, "ready", when its engines are registered, and
ends when its input does, or at SIGTERM.
"""

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from typing import Any

import msgspec

from mallee.actors.bus.nats import NatsBus
from mallee.actors.config import AppConfig
from mallee.actors.mock.fleet import MockFleet, MockPlan
from mallee.actors.transport.sockets import SocketServer
from mallee.protocol.errors import MalleeError


class Task(msgspec.Struct, frozen=True):
    """What one process does: `workers` behind the socket `path`. `config` is an `AppConfig` as JSON."""

    host: str
    workers: tuple[str, ...]
    path: str
    nats_url: str
    config: str


async def serve(task: Task) -> None:
    """Until the parent has gone or a signal comes. Raises MalleeError."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    plan = MockPlan.of(AppConfig.model_validate_json(task.config))
    bus = NatsBus(task.nats_url, name=f"mallee-{task.host}")
    fleet = MockFleet(task.host, plan, bus, address=task.path)
    server = SocketServer(fleet.host, task.path)

    def listen() -> None:
        if not os.read(sys.stdin.fileno(), 1 << 16):
            stop.set()  # the parent has gone

    loop.add_reader(sys.stdin.fileno(), listen)
    try:
        await bus.connect()
        await server.start()
        await fleet.start(task.workers)
        gc.collect()
        gc.freeze()  # a full collection would look at every engine, and stop the loop meanwhile
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await stop.wait()
    finally:
        await fleet.close()
        await server.close()
        await bus.close()


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, in uvloop's loop where it is installed: half the cost of a message."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)


def main() -> int:
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=Task)
    try:
        run(serve(task))
    except MalleeError as error:
        sys.stderr.write(f"{task.host}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
