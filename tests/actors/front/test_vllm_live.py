"""A live vLLM, where MALLEE_VLLM_PYTHON names a Python that has it."""

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq.asyncio

from mallee.actors.front.http.backends import Backends
from mallee.actors.front.pods.endpoints import Endpoint
from mallee.actors.front.pods.pods import PodLimits, Pods
from mallee.protocol.hashing import block_hashes
from mallee.router.config import RouterConfig
from mallee.router.router import Router
from mallee.runtime.addresses import free_port
from support.vllm_driving import (
    PYTHON,
    SETUPS,
    TINY,
    Mirror,
    drive,
    server_command,
    vllm_environment,
)
from support.waiting import until

SIZE = 32
START_S = 180
pytestmark = [
    pytest.mark.process,
    pytest.mark.vllm,
    pytest.mark.skipif(PYTHON not in os.environ, reason=f"{PYTHON} names no Python with vLLM"),
]


@pytest.mark.parametrize("name", ["plain", "offloaded"])
def test_the_index_equals_what_a_live_vllm_holds(name: str) -> None:
    """Random requests with evictions, and a crash; MALLEE_VLLM_REQUESTS of them (by default 200)."""
    num = int(os.environ.get("MALLEE_VLLM_REQUESTS", "200"))
    mirror = Mirror(SIZE)
    for step in drive(SETUPS[name], num, num_lives=2, more=TINY, seed=3):
        mirror.take(step)
    assert mirror.num_held
    assert len(mirror.wrong) <= mirror.num_requests / 100 + 1, mirror.wrong


async def test_a_live_server_is_followed_by_its_address_alone(tmp_path: Path) -> None:
    """It tells where it publishes; killed and started again it is known whole again, and nothing else."""
    rng = random.Random(4)
    prompts = [rng.choices(range(1000, 2000), k=5 * SIZE) for _ in range(6)]
    port = free_port()
    router = Router(RouterConfig(block_size=SIZE), clock=asyncio.get_running_loop().time)
    async with httpx.AsyncClient(timeout=60) as client, _server(port, tmp_path) as server:
        limits = PodLimits(SIZE, 64, 16, 0.2, events_port=None, replay_port=None, topic="")
        with zmq.asyncio.Context() as context:
            pods = Pods(router, Backends(2.0), context, limits, max_pods=4, on_join=lambda *_: None)
            pods.start_up()
            try:
                pods.update([Endpoint(f"127.0.0.1:{port}")])
                await _ask_all(client, router, pods, port, prompts, rng)
                server.kill()
                await server.wait()
                await until(lambda: not router.workers(), timeout_s=30)
                async with _server(port, tmp_path):
                    await _ask_all(client, router, pods, port, prompts, rng)
            finally:
                await pods.close()


async def _ask_all(
    client: httpx.AsyncClient,
    router: Router,
    pods: Pods,
    port: int,
    prompts: list[list[int]],
    rng: random.Random,
) -> None:
    """Requests one after the other, each with the tokens cached that the router knows of."""
    await until(lambda: bool(router.workers()), timeout_s=30)
    await until(lambda: pods.views()[0].knowledge.state == "exact", timeout_s=30)
    assert pods.views()[0].num_blocks_known == 0
    for _ in range(40):
        tokens = rng.choice(prompts)[: rng.randint(SIZE, 5 * SIZE)]
        tokens = tokens + rng.choices(range(1000), k=rng.randint(1, SIZE))
        num = (len(tokens) - 1) // SIZE  # one token is computed
        promised = min(_overlap(router, tokens), num) * SIZE
        body = {"prompt": tokens, "max_tokens": 1, "model": "m"}
        url = f"http://127.0.0.1:{port}/v1/completions"
        answer = (await client.post(url, json=body)).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == promised
        await until(partial(_is_known, router, tokens, num))
    (view,) = pods.views()
    assert view.knowledge.state == "exact"
    assert not view.left_out


def _overlap(router: Router, tokens: list[int]) -> int:
    """Leading blocks of a prompt that the only pod holds."""
    slot = router._placer.slot_of(router.workers()[0].worker)
    return int(router._placer.match(block_hashes(tokens, SIZE)).held[0, slot])


def _is_known(router: Router, tokens: list[int], num_blocks: int) -> bool:
    return _overlap(router, tokens) >= num_blocks


@asynccontextmanager
async def _server(port: int, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """vLLM's own server, ready."""
    python = Path(os.environ[PYTHON])
    environment: dict[str, Any] = vllm_environment(python)
    with (folder / "server.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *server_command(python, port, block_size=SIZE),
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        async with httpx.AsyncClient() as client:

            async def is_ready() -> bool:
                try:
                    return (await client.get(f"http://127.0.0.1:{port}/health")).is_success
                except httpx.TransportError:
                    return False

            async with asyncio.timeout(START_S):
                while not await is_ready():
                    assert process.returncode is None, (folder / "server.log").read_text()[-4000:]
                    await asyncio.sleep(0.5)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
