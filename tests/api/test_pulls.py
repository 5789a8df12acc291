"""KV that workers pull from each other over real sockets, as a client over HTTP finds it: it does not."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from bench.doubles.random_model import random_model
from mallee.actors.kv_transfer.client import KvClient
from mallee.protocol.ids import WorkerId
from mallee.runtime.transport.greeting import Secret
from mallee.worker.engine import MakeTiers
from mallee.worker.transfer.prices import MeasuredPrices
from support.any_gateway import one_gateway
from support.kv import ServedKv
from support.live_fleet import LiveFleet
from support.tiny_fleet import post, tiny_api
from support.volumes import volume_tiers
from support.waiting import until

pytestmark = pytest.mark.real_time  # KV crosses sockets between threads

MODELS = pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
SECRET = Secret(b"the secret of this app")
SAMPLED = {"ignore_eos": True, "seed": 3, "temperature": 1.0, "max_tokens": 12}
ROWS = 2  # that a worker says it runs
FAN_OUT = 6


def prompt(number: int) -> str:
    return "".join(chr(33 + (7 * i + number) % 90) for i in range(50))


@pytest.fixture(autouse=True)
def _worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of so small a model no KV is worth fetching."""
    monkeypatch.setattr(MeasuredPrices, "compute_s", lambda self, num_tokens: float(num_tokens))


class Transfers:
    """Both ends of the KV transfers between the workers of a fleet."""

    def __init__(self) -> None:
        self.clients: dict[str, KvClient] = {}
        self.served: list[ServedKv] = []

    def below(self, worker: str) -> MakeTiers:
        client = self.clients[worker] = KvClient(worker, SECRET)
        return volume_tiers(None, peers=client)

    async def serve(self, fleet: LiveFleet) -> None:
        """Have others read the KV of the worker that came last."""
        self.served.append(await ServedKv.of(fleet, SECRET))

    async def close(self) -> None:
        for client in self.clients.values():
            client.close()
        for each in self.served:
            await each.listener.close()

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes that were sent, and those that were received."""
        sent = sum(each.server.counts.use.nbytes for each in self.served)
        return sent, sum(client.counts.use.nbytes for client in self.clients.values())


@asynccontextmanager
async def api(
    family: str, workers: int
) -> AsyncIterator[tuple[httpx.AsyncClient, LiveFleet, Transfers]]:
    transfers, model = Transfers(), random_model(family, 5, max_position_embeddings=2048)
    try:
        async with tiny_api(model, 1, rows=ROWS, below=transfers.below) as (client, fleet):
            await transfers.serve(fleet)
            for number in range(1, workers):
                await fleet.add_worker(f"w{number}")
                await transfers.serve(fleet)
            await fleet.ready(workers)
            yield client, fleet, transfers
    finally:
        await transfers.close()


async def capsule(client: httpx.AsyncClient, number: int = 0) -> dict[str, Any]:
    return await post(client, "/v1/capsules", prompt=prompt(number))


async def fork(client: httpx.AsyncClient, made: dict[str, Any], n: int) -> list[tuple[str, int]]:
    """The texts of `n` forks, and the prompt tokens that were computed for each."""
    answer = await post(client, f"/v1/capsules/{made['id']}/fork", n=n, **SAMPLED)
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    return [(choice["text"], choice["mallee"]["prefill_tokens"]) for choice in choices]


async def undisturbed(family: str, *numbers: int, n: int) -> list[list[tuple[str, int]]]:
    """The forks of such capsules on one worker."""
    async with api(family, 1) as (client, *_):
        return [await fork(client, await capsule(client, number), n) for number in numbers]


@one_gateway
@MODELS
async def test_a_hot_capsules_fan_out_is_pulled_by_other_workers(family: str) -> None:
    """X6: beyond its worker's rows; bytes are counted, nothing is computed, and the texts are the same."""
    (want,) = await undisturbed(family, 0, n=FAN_OUT)
    async with api(family, 3) as (client, fleet, transfers):
        assert await fork(client, await capsule(client), FAN_OUT) == want
        assert all(computed == 0 for _, computed in want)
        stats = fleet.routers[0].stats()
        assert (stats.spilled, stats.pulls) == ({("migrate", "full"): 2}, {"spill": 2})
        sent, received = transfers.nbytes
        assert sent == received == stats.pulled_nbytes["spill"] + 2 * _block_nbytes(fleet)
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


@one_gateway
@MODELS
async def test_a_worker_that_drains_hands_over_its_capsules(family: str) -> None:
    """X6, part: by pulls, and not a token of them is computed."""
    numbers = range(3)
    want = await undisturbed(family, *numbers, n=2)
    async with api(family, 1) as (client, fleet, transfers):
        made = [await capsule(client, number) for number in numbers]
        await fleet.add_worker("w1")
        await transfers.serve(fleet)
        await fleet.ready(2)
        await fleet.gateways[0].operator.drain_worker(WorkerId("w0"))
        await until(lambda: [w.worker for w in fleet.routers[0].all_workers()] == ["w1"])
        new = fleet.engines["w1"].stats()
        assert new.num_prefill_tokens == 0
        assert fleet.routers[0].stats().pulls == {"drain": 3}
        await until(
            lambda: transfers.nbytes[0] == transfers.nbytes[1] > 0
        )  # its server counts after
        for each, texts in zip(made, want, strict=True):
            assert (await client.get(f"/v1/capsules/{each['id']}")).json()["worker"] == "w1"
            assert await fork(client, each, 2) == texts
