"""The bus over a real nats-server: what every bus does, and what only a server does to it."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from nats.aio.transport import TcpTransport

import mallee.actors.bus.nats
from bench.soak.proxy import Proxy
from mallee.actors.addresses import free_port
from mallee.actors.bus.access import BrokerAccess
from mallee.actors.bus.broker import find_binary
from mallee.actors.bus.bus import Bus
from mallee.actors.bus.children import end
from mallee.actors.bus.nats import NatsBus
from support.brokers import OpenBroker
from support.buses import *  # noqa: F403
from support.buses import settle
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


@pytest.mark.parametrize("nbytes", [1, 1 << 16], ids=["little to send", "more than sockets take"])
async def test_a_broker_that_falls_silent_is_left_for_another(
    monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    """X8, part: its connection stays open, and takes nothing of what waits to be sent."""
    monkeypatch.setattr(mallee.actors.bus.nats, "PING_S", 0.3)
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
