"""Traces of clients: none of those that hung up, and of others no more than limits allow."""

import asyncio
import json
import random
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpx
import psutil
import pytest

from mallee.api.serve import prefill
from mallee.gateway.requests.deltas import Delta, DeltaQueue
from mallee.protocol.errors import StoreAway
from mallee.protocol.ids import COMMON, CapsuleId, RequestId
from mallee.runtime.proxy.server import Server
from support.live_api import served
from support.mock_scene import MockScene, make_folder, mock_config, mocked
from support.waiting import elapse, until, until_asked

HEAD = "POST {} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n"
PATHS = ("/v1/completions", "/v1/capsules")


async def leave(url: str, rng: random.Random) -> None:
    """A client that hangs up somewhere on its way."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    prompt = "".join(rng.choices("abcdefgh ", k=rng.randrange(1, 300)))
    asked: dict[str, Any] = {"prompt": prompt, "ttl_s": 3600}
    path = PATHS[rng.random() < 0.2]
    if path == PATHS[0]:
        asked = {
            "prompt": [prompt] * rng.choice((1, 1, 2)),
            "n": rng.choice((1, 2, 5)),
            "max_tokens": 400,
            "ignore_eos": True,
            "stream": rng.random() < 0.7,
            "stop": ["zzz"],
        }
    raw = json.dumps(asked).encode()
    sent = HEAD.format(path, len(raw)).encode() + raw
    writer.write(sent[: rng.choice((20, len(sent) - 5, *[len(sent)] * 8))])
    await writer.drain()
    if rng.random() < 0.5:
        try:
            async with asyncio.timeout(0.3):
                await reader.read(rng.randrange(1, 5000))
        except (TimeoutError, ConnectionError):
            pass
    else:
        await elapse(rng.choice((0.0, 0.001, 0.01, 0.05)))
    if rng.random() < 0.5:  # by a reset
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    writer.transport.abort()


def engines(scene: MockScene) -> list[Any]:
    return [w.runner._mocked.engine for w in scene.fleet.host.workers.values()]  # type: ignore[attr-defined]


def is_quiet(scene: MockScene, server: Server) -> bool:
    """Nobody is connected, nothing runs, waits or is booked."""
    return (
        not server.server_state.connections
        and not server.server_state.tasks
        and not scene.gateway.shell.running
        and scene.gateway.requests.num_waiting == 0
        and all(engine.stats().jobs == 0 for engine in engines(scene))
        and all(w.rows == 0 and w.active_blocks == 0 for w in scene.router.workers())
    )


@pytest.mark.slow
async def test_disconnects_leave_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """F30, part, I26: in heads, bodies, prefills, queues and streams, by close and by reset."""
    config = mock_config(
        make_folder(tmp_path), scheduler__max_rows=8, mock__speedup=2.0, engine__kv_tokens=16384
    )
    rng = random.Random(300)
    process = psutil.Process()
    async with mocked(config) as scene, served(scene.gateway) as (url, server):
        await leave(url, rng)
        await until(lambda: is_quiet(scene, server))
        num_tasks, num_fds = len(asyncio.all_tasks()), process.num_fds()
        for _ in range(6):
            await asyncio.gather(*(leave(url, rng) for _ in range(50)))
        await until(lambda: is_quiet(scene, server), timeout_s=30)
        scene.gateway.check()
        scene.router.check()
        scene.fleet.check()
        await until(lambda: len(asyncio.all_tasks()) <= num_tasks)
        await until(lambda: process.num_fds() <= num_fds + 4)  # not one for each client
        text = scene.gateway.operator.metrics().decode()
        assert "mallee_branches_in_flight 0.0" in text
        # A capsule of an answer that was written lives on, read or not: it has a time to live.
        made = re.search(r'http_answers_total.*"/v1/capsules",status="200"} (\d+)', text)
        assert made is not None
        assert sum(engine.stats().capsules.kept for engine in engines(scene)) == int(made[1])
    assert "failed" not in caplog.text, "clients that hang up are nobody's bug"


CAPSULES, COMPLETIONS = "/v1/capsules", "/v1/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tiny"))


@asynccontextmanager
async def api(folder: Path, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, MockScene]]:
    """One engine with 4096 tokens of KV memory."""
    config = mock_config(folder, mock__engines_per_worker=1, **settings)
    async with (
        mocked(config) as scene,
        served(scene.gateway) as (url, _),
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        await until(lambda: any(view.is_whole for view in scene.router.workers()))
        yield client, scene


async def talk(client: httpx.AsyncClient, session: str) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 2, "ignore_eos": True}
    answer = await client.post(COMPLETIONS, json={**body, "mallee": {"session": session}})
    assert answer.status_code == 200, answer.text


async def test_capsules_give_their_memory_back_when_nobody_used_them_for_their_time(
    folder: Path,
) -> None:
    """F30, part: while they are there, more is 503 before it is computed; afterwards they are 404."""
    async with api(folder) as (client, _):
        kept = []
        for first in (1, 2):
            asked = {"prompt": [first] * 1700, "ttl_s": 3}
            answer = await client.post(CAPSULES, json=asked)
            assert answer.status_code == 200, answer.text
            kept.append(answer.json()["id"])
        more = {"prompt": [3] * 1700, "ttl_s": 60}
        full = await client.post(CAPSULES, json=more)
        assert (full.status_code, full.json()["error"]["code"]) == (503, "capsules_full")
        assert int(full.headers["retry-after"]) >= 1

        async def are_gone() -> bool:
            return bool((await client.get(f"{CAPSULES}/count")).json()["count"] == 0)

        await until_asked(are_gone)
        for capsule in kept:
            late = await client.post(f"{CAPSULES}/{capsule}/fork", json={"max_tokens": 2})
            assert (late.status_code, late.json()["error"]["code"]) == (404, "capsule_not_found")
        assert (await client.post(CAPSULES, json=more)).status_code == 200


async def test_sessions_end_by_their_number_and_their_time(folder: Path) -> None:
    """F30, part: the idlest make room, so that no request is refused for it; a name is 404 then, and free."""
    settings = {"sessions__max_nodes": 12, "sessions__ttl_s": 3.0, "engine__max_answer_capsules": 0}
    async with api(folder, **settings) as (client, _):
        for i in range(40):
            await talk(client, f"s{i:02}")
        names = [each["id"] for each in (await client.get("/v1/sessions?limit=100")).json()["data"]]
        assert 1 <= len(names) <= 12
        assert names == [f"s{i:02}" for i in range(40 - len(names), 40)]
        assert (await client.get("/v1/sessions/s00")).status_code == 404

        async def is_forgotten() -> bool:
            return (await client.get("/v1/sessions/s39")).status_code == 404

        await until_asked(is_forgotten)
        await talk(client, "s39")
        assert (await client.get("/v1/sessions/s39")).status_code == 200


async def test_a_prefill_that_is_given_up_ends_though_its_capsule_can_not_be_released() -> None:
    """The store is away: its time will end."""

    class Stream(DeltaQueue):
        aclose = AsyncMock()

    stream, gateway = Stream(), Mock()
    gateway.requests.start = AsyncMock(return_value=stream)
    gateway.capsules.release = AsyncMock(side_effect=StoreAway("the broker is away"))
    running = asyncio.ensure_future(prefill(gateway, Mock(scope=COMMON), 0.0, RequestId("r")))
    await asyncio.sleep(0)
    stream.put(Delta.end(0, "stop")._replace(capsule=CapsuleId("c")), 0.0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    gateway.capsules.release.assert_awaited_once()
