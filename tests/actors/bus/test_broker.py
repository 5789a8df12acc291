"""The embedded nats-server: starts, is restarted, never outlives its parent."""

import asyncio
import os
import signal
import socket
import sys

import pytest

from mallee.actors.addresses import free_port
from mallee.actors.bus.broker import Broker
from mallee.protocol.errors import ConfigError
from support.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.nats]


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def takes_connections(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0


async def test_start_serves_on_loopback_and_stop_ends_it() -> None:
    broker = Broker(fleet="f")
    await broker.start()
    pid = broker.pid
    assert pid is not None
    assert takes_connections(broker.port)
    assert not takes_connections(broker.port, "127.0.0.2")
    assert broker.url == f"nats://127.0.0.1:{broker.port}"
    await broker.stop()
    assert broker.pid is None
    assert not is_alive(pid)
    await broker.stop()


async def test_a_killed_broker_is_back_on_its_port() -> None:
    broker = Broker(fleet="f")
    await broker.start()
    try:
        first = broker.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: broker.pid not in (None, first) and takes_connections(broker.port))
        assert broker.restarts == 1
        assert broker.is_running
    finally:
        await broker.stop()


async def test_a_broker_that_nobody_can_start_again_does_not_count_as_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(_: str) -> None:
        raise OSError("no space left")

    broker = Broker(fleet="f")
    await broker.start()
    try:
        assert broker.is_running
        monkeypatch.setattr(broker, "_launch", fail)
        assert broker.pid is not None
        os.kill(broker.pid, signal.SIGKILL)
        await until(lambda: not broker.is_running)
    finally:
        await broker.stop()
    assert not broker.is_running


async def test_a_taken_port_is_refused_with_its_number() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        broker = Broker(port, fleet="f")
        with pytest.raises(ConfigError, match=str(port)):
            await broker.start()
        assert broker.pid is None


PARENT = """
import asyncio, sys
from mallee.actors.bus.broker import Broker
async def main():
    broker = Broker({port}, fleet="f")
    await broker.start()
    print(broker.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs PR_SET_PDEATHSIG")
async def test_the_broker_dies_with_a_parent_that_is_killed() -> None:
    code = PARENT.format(port=free_port())
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    assert is_alive(pid)
    parent.kill()
    await parent.wait()
    await until(lambda: not is_alive(pid), 5.0)
