"""The chart's NATS: three real servers by its configuration form a cluster and keep to their accounts."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import pytest
import yaml
from nats.aio.client import Client

from bench.doubles.vllm_pod import VllmPod
from mallee.runtime.bus.access import BrokerAccess
from mallee.runtime.bus.buckets import BucketSpec, Stored
from mallee.runtime.bus.nats import NatsBus
from support import pickers
from support.chart import MINIMAL, PICKERS, objects, one
from support.chart_nats import Servers, running
from support.waiting import until

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with running(objects(MINIMAL), tmp_path_factory.mktemp("nats")) as made:
        yield made


@asynccontextmanager
async def client(servers: Servers, role: str, i: int) -> AsyncIterator[tuple[Client, list[str]]]:
    """A client of one server, and what it was refused."""
    refused: list[str] = []

    async def note(error: Exception) -> None:
        refused.append(str(error))

    user, password = servers.login(role)
    made = await nats.connect(
        f"nats://127.0.0.1:{servers.clients[i]}", user=user, password=password, error_cb=note
    )
    try:
        yield made, refused
    finally:
        await made.close()


async def test_a_lease_of_any_fleet_reaches_gateways_of_other_servers(servers: Servers) -> None:
    async with client(servers, "gateways", 0) as (gateway, _):
        heard: asyncio.Queue[bytes] = asyncio.Queue(4)

        async def take(message: nats.aio.msg.Msg) -> None:
            heard.put_nowait(message.data)

        await gateway.subscribe("mallee.mallee-1234abcd.lease.*", cb=take)
        await gateway.flush()
        async with client(servers, "workers", 2) as (worker, refused), asyncio.timeout(10):
            while heard.empty():  # the other server hears of the subscription a little later
                await worker.publish("mallee.mallee-1234abcd.lease.w0", b"here")
                await worker.flush()
                await asyncio.sleep(0.1)
            assert await heard.get() == b"here"
            assert refused == []


async def test_a_worker_may_not_hear_prompts_nor_book(servers: Servers) -> None:
    async with client(servers, "workers", 1) as (worker, refused):
        await worker.subscribe("mallee.x.peers.*")
        await worker.publish("mallee.x.bookings.g1", b"mine")
        await worker.flush()
        await until(lambda: len(refused) == 2, 10)
    assert all("ermissions violation" in each.lower() for each in refused)


async def test_pickers_of_the_chart_share_bookings_by_their_login(
    servers: Servers, tmp_path: Path
) -> None:
    """X21, part: each at another server, in the fleet that the chart names."""
    made = yaml.safe_load(
        one(objects(PICKERS), "ConfigMap", "mallee-picker")["data"]["picker.yaml"]
    )
    login = tmp_path / Path(made["nats_credentials"]).name
    login.write_text(":".join(servers.login(login.name)))
    shared = {"nats_credentials": str(login), "fleet": made["fleet"]}
    urls = [f"nats://127.0.0.1:{servers.clients[i]}" for i in (0, 2)]
    async with VllmPod() as pod:
        configs = [pickers.picker_config([pod.address], nats_url=url, **shared) for url in urls]
        async with (
            pickers.running(configs[0]) as first,
            pickers.running(configs[1]) as second,
            pickers.Proxy(first.server.port) as proxy,
        ):
            exchange = proxy.stream()
            await exchange.request({"model": "m", "prompt": [1, 2, 3], "max_tokens": 4})
            await until(lambda: second.router.stats().remote_requests == 1)
            await exchange.respond(b"{}")
            await exchange.end()
            await until(lambda: second.router.stats().remote_requests == 0)


async def test_a_value_stays_when_one_of_three_servers_is_gone(servers: Servers) -> None:
    """A gateway that another server serves reads what was stored, at once and without the first."""
    spec = BucketSpec("mallee_mallee_texts", ttl_s=600.0, max_nbytes=1 << 20, num_replicas=3)

    async def bus_at(i: int) -> NatsBus:
        url = f"nats://127.0.0.1:{servers.clients[i]}"
        access = BrokerAccess(url, login=":".join(servers.login("gateways")))
        bus = NatsBus(access, fleet="mallee-1234abcd")
        await bus.connect()
        await until(lambda: bus.is_up)
        return bus

    one, two = await bus_at(0), await bus_at(1)
    try:
        async with asyncio.timeout(30):
            while True:
                try:  # the servers choose a leader first
                    await one.buckets.put(spec, "a.0", b"x")
                    break
                except (ConnectionError, TimeoutError):
                    await asyncio.sleep(0.2)
        for i in range(50):
            revision = await one.buckets.put(spec, f"a.{i}", b"%d" % i)
            assert revision is not None
            assert await two.buckets.get(spec, f"a.{i}") == Stored(b"%d" % i, revision)
        servers.processes[0].kill()
        async with asyncio.timeout(30):
            while True:
                try:
                    keys = await two.buckets.keys(spec, "a")
                    break
                except (ConnectionError, TimeoutError):
                    await asyncio.sleep(0.2)
        assert len(keys) == 50
        assert (await two.buckets.get(spec, "a.7") or Stored(b"", 0)).value == b"7"
    finally:
        await one.close()
        await two.close()


async def test_strangers_are_refused(servers: Servers) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", servers.clients[2])
    try:
        async with asyncio.timeout(10):
            assert (await reader.readline()).startswith(b"INFO ")
            writer.write(b'CONNECT {"user":"workers","pass":"wrong"}\r\nPING\r\n')
            assert b"Authorization Violation" in await reader.readline()
    finally:
        writer.close()
        await writer.wait_closed()
