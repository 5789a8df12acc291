"""Limits of what stays without being used: capsules and sessions, on mocked engines behind the API."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.live_api import served
from support.mock_scene import MockScene, make_folder, mock_config, mocked
from support.waiting import until, until_asked

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


async def test_a_session_is_forgotten_when_nobody_used_it_for_its_time(folder: Path) -> None:
    """F30, part: the name is 404 then, and free."""
    async with api(folder, sessions__ttl_s=3.0) as (client, _):
        await talk(client, "a")
        assert (await client.get("/v1/sessions/a")).status_code == 200

        async def is_forgotten() -> bool:
            return (await client.get("/v1/sessions/a")).status_code == 404

        await until_asked(is_forgotten)
        await talk(client, "a")
        assert (await client.get("/v1/sessions/a")).status_code == 200


async def test_sessions_beyond_their_number_take_the_place_of_the_idlest(folder: Path) -> None:
    """F30, part: no request is refused for it."""
    async with api(folder, sessions__max_nodes=12, engine__max_answer_capsules=0) as (client, _):
        for i in range(40):
            await talk(client, f"s{i:02}")
        names = [each["id"] for each in (await client.get("/v1/sessions?limit=100")).json()["data"]]
        assert 1 <= len(names) <= 12
        assert names == [f"s{i:02}" for i in range(40 - len(names), 40)]
        assert (await client.get("/v1/sessions/s00")).status_code == 404
