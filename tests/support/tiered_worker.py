"""A program that is one worker with a disk: a real engine over a mocked model, a socket, the broker.

    python tiered_worker.py URL_OF_BROKER SOCKET FOLDER LIFE

It prints "ready", and serves until it is killed.
"""

import asyncio
import sys
import time
from pathlib import Path

from mallee.actors.hosting.engine import add_engine
from mallee.actors.hosting.host import Host
from mallee.actors.hosting.worker import Capacity
from mallee.mocker.passes import mock_spec
from mallee.runtime.bus.access import BrokerAccess
from mallee.runtime.bus.nats import NatsBus
from mallee.runtime.transport.greeting import Secret
from mallee.runtime.transport.listener import Listener
from mallee.runtime.transport.server import CommandServer
from mallee.testing.forward import MockForward
from support.live_fleet import make_engine
from support.volumes import volume_tiers

SECRET = Secret(b"s" * 32)
SPEC = mock_spec(max_model_len=1024)


async def serve(url: str, socket: str, folder: Path, life: int) -> None:
    forward = MockForward(SPEC, num_blocks=64, block_size=4)
    engine = make_engine(forward, "w0", life, below=volume_tiers(folder, host_blocks=32))
    bus = NatsBus(BrokerAccess(url), fleet="test", name="w0")
    host = Host("w0", bus, fleet="test", clock=time.monotonic, lease_period_s=0.1)
    add_engine(host, engine, Capacity(4, 64, 64))
    listener = Listener(CommandServer(host, SECRET))
    await listener.listen_unix(socket)
    host.address = str(listener.address)
    await bus.connect()
    await host.start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    Path(sys.argv[2]).unlink(missing_ok=True)
    asyncio.run(serve(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])))
