"""Many clients that leave, and many names that come once: nothing of them stays at a gateway or a worker."""

import asyncio
import gc
import json
import random
import re
import socket
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from mallee.actors.proxy.connections import LimitedServer
from mallee.router.dispatch.verdicts import RecentPrompts
from support.live_api import api_over, served
from support.mock_scene import MockScene, make_folder, mock_config, mocked
from support.waiting import until

HEAD = "POST {} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n"
PATHS = ("/v1/completions", "/v1/capsules")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tiny"))


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
        await asyncio.sleep(rng.choice((0.0, 0.001, 0.01, 0.05)))
    if rng.random() < 0.5:  # by a reset
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    writer.transport.abort()


def engines(scene: MockScene) -> list[Any]:
    return [w.runner._mocked.engine for w in scene.fleet.host.workers.values()]  # type: ignore[attr-defined]


def is_quiet(scene: MockScene, server: LimitedServer) -> bool:
    """Nobody is connected, nothing runs, waits or is booked."""
    return (
        not server._connections._open
        and not server.server_state.tasks
        and not scene.gateway._answers
        and scene.gateway.num_waiting == 0
        and all(engine.stats().jobs == 0 for engine in engines(scene))
        and all(w.rows == 0 and w.active_blocks == 0 for w in scene.router.workers())
    )


@pytest.mark.parametrize("num", [300, pytest.param(5000, marks=pytest.mark.slow)])
async def test_disconnects_leave_nothing_behind(folder: Path, num: int) -> None:
    """F30, part, I26: in heads, bodies, prefills, queues and streams, by close and by reset."""
    config = mock_config(folder, scheduler__max_rows=8, mock__speedup=2.0, engine__kv_tokens=16384)
    rng = random.Random(num)
    process = psutil.Process()
    async with mocked(config) as scene, served(scene.gateway) as (url, server):
        await leave(url, rng)
        await until(lambda: is_quiet(scene, server))
        num_tasks, num_fds = len(asyncio.all_tasks()), process.num_fds()
        for _ in range(num // 50):
            await asyncio.gather(*(leave(url, rng) for _ in range(50)))
        await until(lambda: is_quiet(scene, server), timeout_s=30)
        scene.gateway.check()
        scene.router.check()
        scene.fleet.check()
        await until(lambda: len(asyncio.all_tasks()) <= num_tasks)
        await until(lambda: process.num_fds() <= num_fds + 4)  # not one for each client
        text = scene.gateway.metrics().decode()
        assert "mallee_branches_in_flight 0.0" in text
        # A capsule of an answer that was written lives on, read or not: it has a time to live.
        made = re.search(r'http_answers_total.*"/v1/capsules",status="200"} (\d+)', text)
        assert made is not None
        assert sum(engine.stats().capsules.kept for engine in engines(scene)) == int(made[1])


async def call(app: Any, path: str, body: Any, headers: dict[str, str]) -> int:
    """The status of one request, without a socket."""
    raw = json.dumps(body).encode()
    asked = [{"type": "http.request", "body": raw, "more_body": False}]
    statuses = []

    async def receive() -> Any:
        if not asked:
            await asyncio.Event().wait()
        return asked.pop()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = {
        **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http"},
        **{"method": "POST", "path": path, "raw_path": path.encode(), "root_path": ""},
        **{"query_string": b"", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)},
        "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
    }
    await app(scope, receive, send)
    return int(statuses[0])


async def play(app: Any, first: int, last: int) -> set[int]:
    """Requests of so many tenants, sessions, salts, users, unknown paths and capsules."""
    statuses: set[int] = set()

    async def one(i: int) -> None:
        body: dict[str, Any] = {
            "prompt": "a tree of many trunks " * 2,
            "max_tokens": 2,
            "ignore_eos": True,
            "mallee": {"session": f"session-{i}", "weight": 1 + i % 7, "priority": i % 5},
        }
        path, headers = "/v1/completions", {}
        match i % 4:
            case 0:
                headers = {"x-tenant-id": f"tenant-{i}"}
            case 1:
                body["cache_salt"] = f"salt-{i}"
            case 2:
                body["user"] = f"user-{i}"
            case 3:
                path = f"/v1/nothing-{i}" if i % 8 == 3 else f"/v1/capsules/c{i}/fork"
                body = {"n": 1, "mallee": body["mallee"]}
        statuses.add(await call(app, path, body, headers))

    for begin in range(first, last, 20):
        await asyncio.gather(*(one(i) for i in range(begin, min(begin + 20, last))))
    return statuses


@pytest.mark.slow
async def test_names_that_come_once_cost_no_memory(folder: Path) -> None:
    """F30, part: sessions, tenants, salts, users and unknown paths; rows are few, so that they wait."""
    config = mock_config(
        folder,
        scheduler__max_rows=2,
        engine__max_answer_capsules=0,
        engine__kv_tokens=1024,
        sessions__max_nodes=1000,
    )
    num = 20_000
    async with mocked(config) as scene:
        app = api_over(scene.gateway)
        # What it remembers of prompts is full before the first count.
        scene.gateway._recent = RecentPrompts(config.engine.block_size, 1 << 20)
        await play(app, 0, num)
        gc.collect()
        before, memory = sys.getallocatedblocks(), psutil.Process().memory_info().rss
        assert await play(app, num, 2 * num) == {200, 404}
        gc.collect()
        grown = sys.getallocatedblocks() - before
        assert grown < num / 20, f"{grown} blocks more after {num} requests"
        assert psutil.Process().memory_info().rss - memory < 20 << 20
        scene.gateway.check()
        assert len(scene.gateway.metrics()) < 100_000
