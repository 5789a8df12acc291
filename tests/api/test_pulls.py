"""KV that workers pull from each other over real sockets, as a client over HTTP finds it: it does not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from mallee.actors.hosting.lending import HostLender
from mallee.actors.lending.borrower import Borrower
from mallee.actors.lending.server import LendingServer
from mallee.protocol.ids import WorkerId
from mallee.runtime.addresses import socket_path
from mallee.runtime.transport.greeting import Secret
from mallee.testing.random_model import random_model
from mallee.worker.engine import MakeTiers
from mallee.worker.transfer.prices import MeasuredPrices
from support.live_fleet import LiveFleet
from support.tiny_fleet import post, tiny_api
from support.volumes import volume_tiers
from support.waiting import until

pytestmark = pytest.mark.real_time  # loans cross sockets between threads

MODEL = random_model("llama", 5, max_position_embeddings=2048)
SECRET = Secret(b"the secret of this app")
SAMPLED = {"ignore_eos": True, "seed": 3, "temperature": 1.0, "max_tokens": 12}
ROWS = 2  # that a worker says it runs
FAN_OUT = 6


def prompt(number: int) -> str:
    return "".join(chr(33 + (7 * i + number) % 90) for i in range(50))


def _lends(router: Any, name: str) -> bool:
    """Whether the router knows that a worker lends, and at what price it takes loans."""
    member = router._fleet.members.get(WorkerId(name))
    if member is None or not member.is_lending:
        return False
    load = member.lease.load
    return load is not None and load.fetch is not None


@pytest.fixture(autouse=True)
def _worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of so small a model no KV is worth fetching."""
    monkeypatch.setattr(MeasuredPrices, "compute_s", lambda self, num_tokens: float(num_tokens))


class Lending:
    """Workers of a fleet that lend to each other over sockets."""

    def __init__(self) -> None:
        self.borrowers: dict[str, Borrower] = {}
        self.servers: list[LendingServer] = []

    def below(self, worker: str) -> MakeTiers:
        borrower = self.borrowers[worker] = Borrower(worker, SECRET)
        return volume_tiers(None, peers=borrower)

    async def lend(self, fleet: LiveFleet) -> None:
        """Have the worker that came last lend what it holds."""
        *_, host = fleet.hosts.values()
        server = LendingServer(HostLender(host.workers), SECRET)
        self.servers.append(server)
        server.listen_unix(socket_path(f"{host.name}-loans"))
        host.lends_at = str(server.address)
        (name,) = host.workers
        await until(lambda: all(_lends(router, name) for router in fleet.routers))

    async def close(self) -> None:
        for borrower in self.borrowers.values():
            borrower.close()
        for server in self.servers:
            await asyncio.to_thread(server.close)

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes that were lent, and those that were borrowed."""
        lent = sum(server.counts.use.nbytes for server in self.servers)
        return lent, sum(borrower.counts.use.nbytes for borrower in self.borrowers.values())


@asynccontextmanager
async def api(workers: int) -> AsyncIterator[tuple[httpx.AsyncClient, LiveFleet, Lending]]:
    lending = Lending()
    try:
        async with tiny_api(MODEL, 1, rows=ROWS, below=lending.below) as (client, fleet):
            await lending.lend(fleet)
            for number in range(1, workers):
                await fleet.add_worker(f"w{number}")
                await lending.lend(fleet)
            await fleet.ready(workers)
            yield client, fleet, lending
    finally:
        await lending.close()


async def capsule(client: httpx.AsyncClient, number: int = 0) -> dict[str, Any]:
    return await post(client, "/v1/capsules", prompt=prompt(number))


async def fork(client: httpx.AsyncClient, made: dict[str, Any], n: int) -> list[tuple[str, int]]:
    """The texts of `n` forks, and the prompt tokens that were computed for each."""
    answer = await post(client, f"/v1/capsules/{made['id']}/fork", n=n, **SAMPLED)
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    return [(choice["text"], choice["mallee"]["prefill_tokens"]) for choice in choices]


async def undisturbed(*numbers: int, n: int) -> list[list[tuple[str, int]]]:
    """The forks of such capsules on one worker."""
    async with api(1) as (client, *_):
        return [await fork(client, await capsule(client, number), n) for number in numbers]


async def test_a_hot_capsules_fan_out_is_pulled_by_other_workers() -> None:
    """X6: beyond its worker's rows; bytes are counted, nothing is computed, and the texts are the same."""
    (want,) = await undisturbed(0, n=FAN_OUT)
    async with api(3) as (client, fleet, lending):
        assert await fork(client, await capsule(client), FAN_OUT) == want
        assert all(computed == 0 for _, computed in want)
        stats = fleet.routers[0].stats()
        assert (stats.spilled, stats.pulls) == ({("migrate", "full"): 2}, {"spill": 2})
        lent, borrowed = lending.nbytes
        assert lent == borrowed == stats.pulled_nbytes["spill"] + 2 * _block_nbytes(fleet)
        metrics = (await client.get("/metrics")).text
        assert 'mallee_pulls_total{reason="spill"} 2.0' in metrics
        shown = (await client.get("/v1/router/explain")).json()["data"]
        pulls = [each["pull"] for each in shown if "pull" in each]
        assert [each["from"][0]["worker"] for each in pulls] == [shown[-1]["worker"]] * 2


def _block_nbytes(fleet: LiveFleet) -> int:
    """Bytes of a block: the last of a capsule is in part full, and goes with it."""
    tiers = fleet.engines["w0"].stats().tiers
    assert tiers is not None
    return tiers.block_nbytes


async def test_a_worker_that_drains_hands_over_its_capsules() -> None:
    """X6, part: by pulls, and not a token of them is computed."""
    numbers = range(3)
    want = await undisturbed(*numbers, n=2)
    async with api(1) as (client, fleet, lending):
        made = [await capsule(client, number) for number in numbers]
        await fleet.add_worker("w1")
        await lending.lend(fleet)
        await fleet.ready(2)
        await fleet.gateways[0].operator.drain_worker(WorkerId("w0"))
        await until(lambda: [w.worker for w in fleet.routers[0].all_workers()] == ["w1"])
        new = fleet.engines["w1"].stats()
        assert new.num_prefill_tokens == 0
        assert fleet.routers[0].stats().pulls == {"drain": 3}
        await until(lambda: lending.nbytes[0] == lending.nbytes[1] > 0)  # the lender counts after
        for each, texts in zip(made, want, strict=True):
            assert (await client.get(f"/v1/capsules/{each['id']}")).json()["worker"] == "w1"
            assert await fork(client, each, 2) == texts
