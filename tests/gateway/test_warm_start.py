"""A worker's process with a disk is killed: its durable capsules come back, also to a new gateway."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from mallee.gateway.gateway import Gateway
from mallee.router.config import RouterConfig
from mallee.router.router import Router
from mallee.runtime.bus.access import BrokerAccess
from mallee.runtime.bus.children import death_follower
from mallee.runtime.bus.nats import NatsBus
from mallee.runtime.transport.link import Transport
from support import tiered_worker
from support.brokers import OpenBroker
from support.live_api import served
from support.live_fleet import make_gateway
from support.plain_ids import SCOPES
from support.tiered_worker import SECRET, SPEC

pytestmark = pytest.mark.process

TESTS = Path(tiered_worker.__file__).parents[1]
PROMPT = [3 + i % 29 for i in range(50)]
SAMPLED = {"ignore_eos": True, "seed": 3, "temperature": 1.0, "max_tokens": 8, "n": 1}


class WorkerProcess:
    """Its lives, one after the other, on one volume."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._folder = folder
        self._lives = 0
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._lives += 1
        path = os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))
        where = (str(self._folder / "socket"), str(self._folder / "disk"))
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, tiered_worker.__file__, self._url, *where, str(self._lives)),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            preexec_fn=death_follower(),
        )
        assert self._process.stdout is not None
        assert await self._process.stdout.readline() == b"ready\n"

    async def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        await self._process.wait()


@asynccontextmanager
async def gateway(url: str, name: str) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    """A gateway that knows a worker, and a client of its API."""
    bus = NatsBus(BrokerAccess(url), fleet="test", name=name)
    await bus.connect()
    router = Router(RouterConfig(block_size=4), clock=time.monotonic)
    made = make_gateway(name, bus, Transport(name, SECRET), router, SPEC, ids=SCOPES)
    await made.start_up()
    try:
        assert await made.wait_for_worker(10)
        async with served(made) as (url, _), httpx.AsyncClient(base_url=url, timeout=30) as client:
            yield made, client
    finally:
        await made.close()
        await bus.close()


async def forked(client: httpx.AsyncClient, capsule: str) -> tuple[list[int], int]:
    """The answer of a fork, and the prompt tokens computed for it."""
    answer = await client.post(f"/v1/capsules/{capsule}/fork", json=SAMPLED)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice["text"], choice["mallee"]["prefill_tokens"]


async def is_back(client: httpx.AsyncClient, capsule: str) -> bool:
    shown = await client.get(f"/v1/capsules/{capsule}")
    return shown.status_code == 200 and shown.json().get("tier") == "disk"


async def test_durable_capsules_survive_the_worker_and_the_whole_service(tmp_path: Path) -> None:
    """F24, S16, X28, part: kill -9 of the worker under a living gateway, then of all; others get 404."""
    broker = OpenBroker()
    await broker.start()
    worker = WorkerProcess(broker.url, tmp_path)
    try:
        await worker.start()
        async with gateway(broker.url, "g0") as (_, client):
            asked: Any = {"prompt": PROMPT, "ttl_s": 600, "cache_salt": ""}
            kept = (await client.post("/v1/capsules", json=asked)).json()["id"]
            own = (await client.post("/v1/capsules", json={**asked, "cache_salt": "a"})).json()[
                "id"
            ]
            want, _ = await forked(client, kept)
            for capsule, salt in ((kept, ""), (own, "a")):
                body = {"tier": "disk", "cache_salt": salt}
                moved = await client.post(f"/v1/capsules/{capsule}/demote", json=body)
                assert moved.json()["tier"] == "disk"
            await worker.kill()
            await worker.start()
            await eventually(client, kept)
            assert await forked(client, kept) == (want, 0)
            assert (await client.get(f"/v1/capsules/{own}")).status_code == 404
            await client.post(f"/v1/capsules/{kept}/demote", json={"tier": "disk"})
        await worker.kill()
        await worker.start()
        async with gateway(broker.url, "g1") as (_, client):  # the app's secret is the same
            await eventually(client, kept)
            assert await forked(client, kept) == (want, 0)
            salted = {"x-cache-salt": "a"}
            assert (await client.get(f"/v1/capsules/{own}", headers=salted)).status_code == 200
            assert (await client.get(f"/v1/capsules/{own}")).status_code == 404
    finally:
        await worker.kill()
        await broker.stop()


async def eventually(client: httpx.AsyncClient, capsule: str) -> None:
    async with asyncio.timeout(10):
        while not await is_back(client, capsule):
            pass  # the worker's lease and snapshot are on their way
