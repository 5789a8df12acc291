"""One process of mocked engines: `python -m mallee.actors.mock.process`, as `mock.stack` starts it.

Its first line of input is its `ProcessSpec`. It writes one line, "ready", when its engines are
registered, and ends when its input does, or at SIGTERM.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from typing import Any

import msgspec

from mallee.actors.mock.fleet import build_mocked_workers, counted_names
from mallee.protocol.errors import MalleeError
from mallee.runtime.bus.access import BrokerAccess
from mallee.runtime.config import AppConfig
from mallee.runtime.telemetry import logs
from mallee.runtime.transport.greeting import Secret


class ProcessSpec(msgspec.Struct, frozen=True):
    """The `number`-th process of a stack, behind the socket `path`. `config`: an `AppConfig` as JSON."""

    number: int
    path: str
    secret: bytes
    broker: BrokerAccess
    config: str


async def serve(spec: ProcessSpec, config: AppConfig) -> None:
    """Serve until the parent has gone or a signal comes. Raises MalleeError."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    secret = Secret(spec.secret)
    names = counted_names(config, spec.number)
    workers = await build_mocked_workers(
        config, spec.number, names, broker=spec.broker, secret=secret
    )

    def listen() -> None:
        if not os.read(sys.stdin.fileno(), 1 << 16):
            stop.set()  # the parent has gone

    loop.add_reader(sys.stdin.fileno(), listen)
    try:
        await workers.listen(path=spec.path)
        await workers.start()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await stop.wait()
    finally:
        await workers.close()


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, in uvloop's loop where it is installed: half the cost of a message."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)


def main() -> int:
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=ProcessSpec)
    config = AppConfig.model_validate_json(spec.config)
    telemetry, name = config.telemetry, f"m{spec.number}"
    logs.set_up(telemetry.log_level, telemetry.log_format, process="worker", name=name)
    try:
        run(serve(spec, config))
    except MalleeError as error:
        sys.stderr.write(f"m{spec.number}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
