"""One suite for both buses: in memory and over a real nats-server."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import pytest
from nats.aio.transport import TcpTransport

import mallee.actors.bus.nats
from bench.soak.proxy import Proxy
from mallee.actors.addresses import free_port
from mallee.actors.bus.access import BrokerAccess
from mallee.actors.bus.broker import find_binary
from mallee.actors.bus.bus import Bus
from mallee.actors.bus.children import end
from mallee.actors.bus.nats import BusClient, NatsBus, SendQueue
from mallee.testing.bus import LocalBus, LocalHub
from support.brokers import OpenBroker
from support.waiting import until


class Place(Protocol):
    """A meeting place of buses: its broker can go away and come back."""

    async def bus(self) -> Bus: ...

    async def down(self) -> None: ...

    async def up(self) -> None: ...

    async def close(self) -> None: ...


class LocalPlace:
    def __init__(self) -> None:
        self.hub = LocalHub()

    async def bus(self) -> Bus:
        bus = LocalBus(self.hub)
        await bus.connect()
        return bus

    async def down(self) -> None:
        self.hub.set_up(False)

    async def up(self) -> None:
        self.hub.set_up(True)

    async def close(self) -> None:
        pass


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


@pytest.fixture(params=["local", pytest.param("nats", marks=pytest.mark.nats)])
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    """A place whose broker is up."""
    place: Place = LocalPlace() if request.param == "local" else NatsPlace()
    await place.up()
    yield place
    await place.close()


@asynccontextmanager
async def connected(place: Place, n: int = 1) -> AsyncIterator[list[Bus]]:
    buses = [await place.bus() for _ in range(n)]
    try:
        for bus in buses:
            await until(lambda bus=bus: bus.is_up)
        yield buses
    finally:
        for bus in buses:
            await bus.close()


async def test_messages_reach_every_subscriber_in_order(place: Place) -> None:
    async with connected(place, 2) as (one, two):
        heard: dict[str, list[bytes]] = {"one": [], "two": []}
        await one.subscribe("mallee.f.events.*", heard["one"].append)
        await two.subscribe("mallee.f.events.w0", heard["two"].append)
        await settle(one, two)
        for i in range(100):
            one.publish("mallee.f.events.w0", b"%d" % i)
        one.publish("mallee.f.events.w1", b"other")
        await until(lambda: len(heard["one"]) == 101 and len(heard["two"]) == 100)
        assert heard["two"] == [b"%d" % i for i in range(100)]
        assert heard["one"] == [*heard["two"], b"other"]
        assert one.num_published >= 101
        assert one.num_dropped == 0


async def settle(*buses: Bus) -> None:
    """Everything that the buses asked of their broker so far has been done by it."""
    for i, bus in enumerate(buses):
        heard: list[bytes] = []
        await bus.subscribe(f"settle.{i}", heard.append)
        bus.publish(f"settle.{i}", b"x")
        await until(lambda heard=heard: bool(heard))


async def test_a_publisher_is_not_called_back_inside_its_own_call(place: Place) -> None:
    async with connected(place) as (bus,):
        heard: list[bytes] = []
        await bus.subscribe("a.b", heard.append)
        await settle(bus)
        bus.publish("a.b", b"x")
        assert heard == []
        await until(lambda: heard == [b"x"])


async def test_a_request_gets_the_servers_answer(place: Place) -> None:
    async def shout(raw: bytes) -> bytes:
        return raw.upper()

    async with connected(place, 2) as (asker, server):
        await server.serve("ask.me", shout)
        await settle(server)
        assert await asker.request("ask.me", b"tree", 5.0) == b"TREE"


async def test_a_request_does_not_wait_for_the_answer_to_another(place: Place) -> None:
    async def think(raw: bytes) -> bytes:
        if raw == b"hard":
            await asyncio.sleep(60)
        return raw

    async with connected(place, 2) as (asker, server):
        await server.serve("ask.me", think)
        await settle(server)
        hard = asyncio.ensure_future(asker.request("ask.me", b"hard", 60.0))
        await asyncio.sleep(0)
        assert await asker.request("ask.me", b"easy", 5.0) == b"easy"
        hard.cancel()


async def test_a_request_that_nobody_serves_fails_at_once(place: Place) -> None:
    async with connected(place) as (bus,):
        with pytest.raises(ConnectionError, match="nobody"):
            await bus.request("ask.nobody", b"", 5.0)


async def test_a_server_that_fails_leaves_its_asker_to_time_out(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(raw: bytes) -> bytes:
        raise ValueError(raw)

    async with connected(place) as (bus,):
        await bus.serve("ask.me", fail)
        await settle(bus)
        with pytest.raises(TimeoutError):
            await bus.request("ask.me", b"", 0.1)
        assert bus.signals.num_failed == 1


async def test_a_subscriber_that_raises_keeps_its_subscription(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[bytes] = []

    def receive(raw: bytes) -> None:
        heard.append(raw)
        if raw == b"bad":
            raise ValueError("bad message")

    async with connected(place) as (bus,):
        await bus.subscribe("a.b", receive)
        await settle(bus)
        bus.publish("a.b", b"bad")
        bus.publish("a.b", b"good")
        await until(lambda: heard == [b"bad", b"good"])
        assert bus.signals.num_failed == 1
        assert "a.b failed" in caplog.text


async def test_without_a_broker_publishing_drops_and_counts(place: Place) -> None:
    async with connected(place) as (bus,):
        await place.down()
        await until(lambda: not bus.is_up)
        before = bus.num_dropped
        bus.publish("a.b", b"lost")
        assert bus.num_dropped == before + 1
        with pytest.raises(ConnectionError):
            await bus.request("a.b", b"", 1.0)


async def test_subscriptions_and_servers_survive_the_brokers_absence(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    async def echo(raw: bytes) -> bytes:
        return raw

    async with connected(place, 2) as (one, two):
        states: list[bool] = []
        heard: list[bytes] = []
        two.on_state(states.append)
        await two.subscribe("a.b", heard.append)
        await two.serve("ask.me", echo)
        await place.down()
        await until(lambda: not one.is_up and not two.is_up)
        one.publish("a.b", b"lost")
        await place.up()
        await until(lambda: one.is_up and two.is_up)
        await settle(two)
        one.publish("a.b", b"found")
        await until(lambda: bool(heard))
        assert heard == [b"found"]
        assert await one.request("ask.me", b"x", 5.0) == b"x"
        assert states == [False, True]


async def test_a_bus_starts_before_its_broker(place: Place) -> None:
    await place.down()
    bus = await place.bus()
    heard: list[bytes] = []
    await bus.subscribe("a.b", heard.append)
    assert not bus.is_up
    await place.up()
    await until(lambda: bus.is_up)
    bus.publish("a.b", b"x")
    await until(lambda: heard == [b"x"])
    await bus.close()


@pytest.mark.parametrize("is_down", [False, True], ids=["broker up", "broker down"])
async def test_close_is_quick_and_may_be_repeated(place: Place, is_down: bool) -> None:
    async with connected(place) as (bus,):
        if is_down:
            await place.down()
            await until(lambda: not bus.is_up)
        async with asyncio.timeout(3.0):
            await bus.close()
            await bus.close()
        assert not bus.is_up


async def test_what_is_published_just_before_close_arrives(place: Place) -> None:
    async with connected(place, 2) as (one, two):
        heard: list[bytes] = []
        await two.subscribe("a.b", heard.append)
        await settle(two)
        for i in range(50):
            one.publish("a.b", b"%d" % i)
        await one.close()
        await until(lambda: len(heard) == 50)


@pytest.mark.nats
async def test_a_flush_sends_what_was_said_before_first() -> None:
    broker = OpenBroker()
    await broker.start()
    client, sent = BusClient(), list[bytes]()
    try:
        await client.connect(**broker.open_access.options())
        transport = client._transport
        assert isinstance(transport, TcpTransport)
        write, write_all = transport.write, transport.writelines
        transport.write = lambda raw: (sent.append(raw), write(raw))[1]
        transport.writelines = lambda raws: (sent.extend(raws), write_all(raws))[1]
        await client.subscribe("a.b")
        await client.publish("a.c", b"text")
        await client.flush()
    finally:
        await client.close()
        await broker.stop()
    assert [raw.split()[0] for raw in sent] == [b"SUB", b"PUB", b"PING"]


@pytest.mark.nats
async def test_a_bus_whose_task_broke_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner has to be replaced: no message leaves it any more."""

    async def fail(*_: object) -> None:
        raise TypeError("a bug")

    place = NatsPlace()
    await place.up()
    try:
        async with connected(place) as (bus,):
            assert isinstance(bus, NatsBus)
            assert bus.failure is None
            monkeypatch.setattr(bus._client, "publish", fail)
            bus.publish("a.b", b"lost")
            await until(lambda: bus.failure is not None)
            assert not bus.is_up
    finally:
        await place.close()


@pytest.mark.nats
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


@pytest.mark.nats
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


@pytest.mark.nats
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


async def test_an_outbox_refuses_what_is_beyond_its_bounds() -> None:
    outbox = SendQueue(max_messages=2, max_bytes=10)
    assert outbox.put("s", b"12345")
    assert not outbox.put("s", b"123456")
    assert outbox.put("s", b"1")
    assert not outbox.put("s", b"")
    outbox.check()
    assert await outbox.take() == ("s", b"12345")
    assert outbox.clear() == 1
    outbox.check()
