"""The bus over a real nats-server: what every bus does, and what only a server does to it.

The embedded server starts, is restarted, and never outlives its parent.
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator

import pytest
from nats.aio.client import Client
from nats.aio.transport import TcpTransport

import mallee.runtime.bus.nats
from bench.soak.proxy import Proxy
from mallee.protocol.errors import ConfigError
from mallee.runtime.addresses import free_port
from mallee.runtime.bus.access import BrokerAccess
from mallee.runtime.bus.broker import Broker, find_binary
from mallee.runtime.bus.bus import Bus
from mallee.runtime.bus.children import end
from mallee.runtime.bus.nats import BusClient, NatsBus
from support.brokers import OpenBroker
from support.buses import *  # noqa: F403
from support.buses import BUCKET, settle
from support.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.nats]


class NatsPlace:
    def __init__(self) -> None:
        self.broker = OpenBroker()

    async def bus(self) -> Bus:
        bus = NatsBus(self.broker.open_access, fleet="f")
        await bus.connect()
        return bus

    async def down(self) -> None:
        await self.broker.stop()

    async def up(self) -> None:
        self.broker = OpenBroker(self.broker.port)
        await self.broker.start()

    async def close(self) -> None:
        await self.broker.stop()


@pytest.fixture
async def place() -> AsyncIterator[NatsPlace]:
    """Its broker is up."""
    place = NatsPlace()
    await place.up()
    yield place
    await place.close()


async def test_a_broker_that_lost_what_it_kept_repeats_no_revision(place: NatsPlace) -> None:
    """So that no copy of before is taken for what is stored since."""
    one = await place.bus()
    try:
        await until(lambda: one.is_up)
        first = await one.buckets.put(BUCKET, "a.b", b"before")
        await place.down()
        await until(lambda: not one.is_up)
        await place.up()  # in another folder
        await until(lambda: one.is_up)
        assert await one.buckets.get(BUCKET, "a.b") is None
        second = await one.buckets.put(BUCKET, "a.b", b"after", 0)
        assert first is not None
        assert second is not None
        assert second > first
        assert await one.buckets.put(BUCKET, "a.b", b"late", first) is None
    finally:
        await one.close()


@pytest.mark.parametrize("nbytes", [1, 1 << 16], ids=["little to send", "more than sockets take"])
async def test_a_broker_that_falls_silent_is_left_for_another(
    monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    """X8, part: its connection stays open, and takes nothing of what waits to be sent."""
    monkeypatch.setattr(mallee.runtime.bus.nats, "PING_S", 0.3)
    place = NatsPlace()
    await place.up()
    ports = free_port(), free_port()
    ways = [Proxy(port, place.broker.port) for port in ports]
    for each in ways:
        await each.start()
    url = ",".join(f"nats://127.0.0.1:{port}" for port in ports)
    one, two, heard = NatsBus(BrokerAccess(url), fleet="f"), await place.bus(), list[bytes]()
    await one.connect()
    try:
        await one.subscribe("a.b", heard.append)
        await until(lambda: one.is_up and two.is_up)
        await settle(one, two)
        states: list[bool] = []
        one.on_state(states.append)
        next(each for each in ways if each._connections).silence("up", "down")
        for _ in range(400):
            one.publish("c.d", bytes(nbytes))
        await until(lambda: states == [False, True])
        await settle(one)
        two.publish("a.b", b"again")
        await until(lambda: heard == [b"again"])
    finally:
        for each in ways:
            each.pass_all()
        await one.close()
        await two.close()
        for each in ways:
            await each.close()
        await place.close()


async def broker_with_a_password() -> tuple[int, asyncio.subprocess.Process]:
    port, options = free_port(), ["-a", "127.0.0.1", "--user", "u", "--pass", "right"]
    arguments = (str(find_binary()), "-p", str(port), *options)
    return port, await asyncio.create_subprocess_exec(*arguments, stderr=asyncio.subprocess.DEVNULL)


async def test_a_bus_that_is_closed_while_it_is_refused_leaves_no_connection() -> None:
    port, server = await broker_with_a_password()
    bus = NatsBus(BrokerAccess(f"nats://127.0.0.1:{port}", login="u:wrong"), fleet="f")
    try:
        await bus.connect()
        async with asyncio.timeout(10.0):
            while not bus._client.is_closed:  # noqa: ASYNC110 # as nats-py begins to close
                await asyncio.sleep(0)
        transport = bus._client._transport
    finally:
        await bus.close()
        await end(server)
    assert isinstance(transport, TcpTransport)
    assert transport._io_writer is not None
    assert transport._io_writer.transport.is_closing()


async def test_wrong_credentials_are_one_error_however_often_they_are_tried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    port, server = await broker_with_a_password()
    bus = NatsBus(BrokerAccess(f"nats://127.0.0.1:{port}", login="u:wrong"), fleet="f", name="it")
    refusals: list[Exception] = []
    log_error = bus._on_error

    async def count(error: Exception) -> None:
        refusals.append(error)
        await log_error(error)

    bus._on_error = count  # type: ignore[method-assign] # counts what is not logged
    try:
        await bus.connect()
        await until(lambda: sum("Authorization" in str(error) for error in refusals) >= 2)
    finally:
        await bus.close()
        await end(server)
    assert caplog.text.count("refuses the credentials of it") == 1
    assert "wrong" not in caplog.text


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


async def test_a_broker_serves_on_loopback_and_comes_back_on_its_port_until_it_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that cannot be started again does not count as running."""

    async def fail(_: str) -> None:
        raise OSError("no space left")

    broker = Broker(fleet="f")
    await broker.start()
    try:
        first = broker.pid
        assert first is not None
        assert not takes_connections(broker.port, "127.0.0.2")
        assert broker.url == f"nats://127.0.0.1:{broker.port}"
        os.kill(first, signal.SIGKILL)
        await until(lambda: broker.pid not in (None, first) and takes_connections(broker.port))
        assert (broker.restarts, broker.is_running) == (1, True)
        second = broker.pid
        await broker.stop()
        assert second is not None
        assert not is_alive(second)
        await broker.stop()
        await broker.start()
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
from mallee.runtime.bus.broker import Broker
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


async def test_a_connection_made_again_reads_as_the_first_one() -> None:
    """nats-py keeps its transport: reading would go one call deeper at each connection."""
    client = BusClient()
    client._transport = transport = TcpTransport()
    transport._io_reader = asyncio.StreamReader()
    client._status = Client.CLOSED  # each loop ends before it reads
    for _ in range(2000):
        await client._read_loop()
    transport._io_reader.feed_data(b"PING")
    assert await transport.read(64) == b"PING"
