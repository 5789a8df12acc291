"""Workers' processes that are killed."""

import asyncio
import sys
import time
from pathlib import Path

import pytest

from mallee.actors.transport.sockets import SocketTransport
from mallee.protocol.ids import Incarnation, WorkerId
from support.local_transport import SECRET
from support.waiting import until

pytestmark = pytest.mark.process

DIES = """
import asyncio, sys
from mallee.actors.transport.server import SocketServer
from support.local_transport import SECRET

class Host:
    def open(self, gateway, sink):
        return self
    def submit(self, raw):
        pass
    def close(self):
        pass

async def serve():
    server = SocketServer(Host(), SECRET)
    await server.listen_unix(sys.argv[1])
    await asyncio.Event().wait()

asyncio.run(serve())
"""


async def test_a_worker_that_is_killed_is_lost_within_milliseconds(tmp_path: Path) -> None:
    path = str(tmp_path / "h.sock")
    tests = Path(__file__).parents[2]  # where `support` is
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", DIES, path, cwd=tests)
    lost: list[float] = []
    transport = SocketTransport("g", SECRET)
    transport.link(
        WorkerId("w0"),
        Incarnation(1),
        f"unix:{path}",
        lambda frame: None,
        lambda reason: lost.append(time.monotonic()),
    )
    await until(lambda: transport._hosts[path].is_connected)
    child.kill()
    killed = time.monotonic()
    await until(lambda: bool(lost), 1.0)
    assert lost[0] - killed < 0.5
    await child.wait()
