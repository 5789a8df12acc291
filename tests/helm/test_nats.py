"""The chart's NATS: three real servers by its configuration form a cluster and keep to their accounts."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import nats
import pytest
from nats.aio.client import Client

from support.chart import MINIMAL, objects
from support.chart_nats import Servers, running
from support.waiting import until

pytestmark = pytest.mark.nats


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
        await worker.subscribe("mallee.x.texts.told.*")
        await worker.publish("mallee.x.bookings.g1", b"mine")
        await worker.flush()
        await until(lambda: len(refused) == 2, 10)
    assert all("ermissions violation" in each.lower() for each in refused)


async def test_strangers_are_refused(servers: Servers) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", servers.clients[0])
    try:
        async with asyncio.timeout(10):
            assert (await reader.readline()).startswith(b"INFO ")
            writer.write(b'CONNECT {"user":"workers","pass":"wrong"}\r\nPING\r\n')
            assert b"Authorization Violation" in await reader.readline()
    finally:
        writer.close()
        await writer.wait_closed()
