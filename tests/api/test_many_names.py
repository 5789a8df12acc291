"""Many names that come once: nothing of them stays at a gateway."""

import asyncio
import gc
import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from mallee.router.dispatch.verdicts import RecentPrompts
from support.live_api import api_over
from support.mock_scene import make_folder, mock_config, mocked

pytestmark = pytest.mark.process  # a minute of computing


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


async def test_names_that_come_once_cost_no_memory(tmp_path: Path) -> None:
    """F30, part: sessions, tenants, salts, users and unknown paths; rows are few, so that they wait."""
    config = mock_config(
        make_folder(tmp_path),
        scheduler__max_rows=2,
        engine__max_answer_capsules=0,
        engine__kv_tokens=1024,
        sessions__max_nodes=1000,
    )
    num = 20_000
    async with mocked(config) as scene:
        app = api_over(scene.gateway)
        # What it remembers of prompts is full before the first count.
        scene.gateway.requests._recent = RecentPrompts(config.engine.block_size, 1 << 20)
        await play(app, 0, num)
        gc.collect()
        before, memory = sys.getallocatedblocks(), psutil.Process().memory_info().rss
        assert await play(app, num, 2 * num) == {200, 404}
        gc.collect()
        grown = sys.getallocatedblocks() - before
        assert grown < num / 20, f"{grown} blocks more after {num} requests"
        assert psutil.Process().memory_info().rss - memory < 20 << 20
        scene.gateway.check()
        assert len(scene.gateway.operator.metrics()) < 100_000
