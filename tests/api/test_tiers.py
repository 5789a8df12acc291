"""Capsules below the device, over HTTP: demoted, durable, promoted, refused, back after a restart."""

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.doubles.random_model import RandomModel, random_model
from mallee.client import AsyncMallee
from mallee.protocol.errors import InvalidParameter
from mallee.protocol.ids import COMMON, WorkerId
from mallee.worker.engine import MakeTiers
from mallee.worker.storage.files import owned_capsules
from support.live_fleet import LiveFleet, lose
from support.tiny_fleet import post, tiny_api
from support.volumes import volume_tiers
from support.waiting import until

MODEL, HYBRID = (
    random_model(family, 5, max_position_embeddings=2048) for family in ("llama", "qwen3_5_text")
)
PROMPT = "".join(chr(33 + 7 * i % 90) for i in range(50))
SAMPLED = {"ignore_eos": True, "seed": 3, "temperature": 1.0, "max_tokens": 12}


def api(
    folder: Path | None, *, host_blocks: int = 64, workers: int = 1, model: RandomModel = MODEL
) -> AbstractAsyncContextManager[tuple[httpx.AsyncClient, LiveFleet]]:
    """One gateway and its workers, behind a real server. Without a `folder` there is no disk."""

    def below(worker: str) -> MakeTiers:
        own = None if folder is None else folder / worker
        return volume_tiers(own, host_blocks=host_blocks)

    return tiny_api(model, workers, num_blocks=256, below=below)


async def forked(client: httpx.AsyncClient, capsule: str, **options: Any) -> tuple[str, int]:
    """The answer of a fork, and the prompt tokens that were computed for it."""
    answer = await post(client, f"/v1/capsules/{capsule}/fork", n=1, **{**SAMPLED, **options})
    choice = answer["choices"][0]
    return choice["text"], choice["mallee"]["prefill_tokens"]


async def tier(client: httpx.AsyncClient, capsule: str) -> str:
    shown: str = (await client.get(f"/v1/capsules/{capsule}")).json()["tier"]
    return shown


async def refused(client: httpx.AsyncClient, path: str, body: Any) -> tuple[int, str, str | None]:
    response = await client.post(path, json=body)
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


async def test_a_capsule_goes_down_and_comes_back_over_http(tmp_path: Path) -> None:
    """F6, part: GET tells where it is; what is forked is the same, and nothing is computed."""
    async with api(tmp_path) as (client, fleet):
        made = await post(client, "/v1/capsules", prompt=PROMPT)
        path = f"/v1/capsules/{made['id']}"
        want, _ = await forked(client, made["id"])
        for name, down in (("host", "host"), ("disk", "disk"), ("disk", "disk"), ("host", "disk")):
            moved = await post(client, f"{path}/demote", tier=name)
            assert (moved["id"], moved["tokens"]) == (made["id"], len(PROMPT))
            assert moved["tier"] == down
            assert await tier(client, made["id"]) == down
        assert await forked(client, made["id"]) == (want, 0)
        assert await tier(client, made["id"]) == "device"  # the fork brought it back
        await post(client, f"{path}/demote", tier="disk")
        assert (await post(client, f"{path}/promote"))["tier"] == "device"
        assert (await post(client, f"{path}/promote"))["tier"] == "device"
        assert await forked(client, made["id"]) == (want, 0)
        await client.delete(path)
        (engine,) = fleet.engines.values()

        blocks = -(-len(PROMPT) // 4)
        moved: dict[str, int] = {}
        async with asyncio.timeout(5):
            while moved.get("spill") != blocks:
                (worker,) = (await client.get("/v1/router/workers")).json()["data"]
                moved = worker["tiers"]["moved_blocks"]
        assert moved["park"] == blocks
        assert worker["use"]["capsules"] == 0
        tiers = engine.stats().tiers
        assert tiers is not None
        assert tiers.host_held == 0


async def test_an_unknown_tier_or_capsule_is_refused_clearly() -> None:
    async with api(None, host_blocks=2) as (client, _):
        made = await post(client, "/v1/capsules", prompt=PROMPT)
        path = f"/v1/capsules/{made['id']}"
        tier_refused = (400, "invalid_parameter", "tier")
        assert await refused(client, f"{path}/demote", {"tier": "disk"}) == tier_refused
        assert await refused(client, f"{path}/demote", {"tier": "device"}) == tier_refused
        assert await refused(client, f"{path}/demote", {}) == (400, "invalid_request", "tier")
        full = await client.post(f"{path}/demote", json={"tier": "host"})
        assert (full.status_code, full.json()["error"]["code"]) == (400, "tier_full")
        assert "retry-after" not in full.headers  # it is more than the whole tier
        assert "engine.host_gib" in full.json()["error"]["message"]
        unknown = (404, "capsule_not_found", None)
        for verb, body in (("demote", {"tier": "host"}), ("promote", {})):
            assert await refused(client, f"/v1/capsules/nope.0/{verb}", body) == unknown
            other = {**body, "cache_salt": "another's"}
            assert await refused(client, f"{path}/{verb}", other) == unknown
        assert await tier(client, made["id"]) == "device"
        assert (await forked(client, made["id"]))[1] == 0


@pytest.mark.parametrize("model", [MODEL, HYBRID], ids=["plain", "hybrid"])
async def test_a_durable_capsule_comes_back_with_its_worker(
    tmp_path: Path, model: RandomModel
) -> None:
    """F24, part: its owner forks it under its id at the same gateway, and nothing of it is computed."""
    async with api(tmp_path, model=model) as (client, fleet):
        kept = await post(client, "/v1/capsules", prompt=PROMPT, ttl_s=600)
        gone = await post(client, "/v1/capsules", prompt=PROMPT[::-1])
        want, _ = await forked(client, kept["id"])
        await post(client, f"/v1/capsules/{kept['id']}/demote", tier="disk")
        host = await lose(fleet, "w0")
        await host.close()
        await fleet.buses[-1].close()  # the worker's: it answers nothing any more
        await fleet.add_worker("w0")
        await fleet.ready(1)
        await until(lambda: kept["id"] in fleet.routers[0].capsules(COMMON))
        shown = (await client.get(f"/v1/capsules/{kept['id']}")).json()
        assert (shown["tier"], shown["pinned"], shown["tokens"]) == ("disk", True, len(PROMPT))
        assert 0 < shown["ttl_s"] <= 600
        assert await forked(client, kept["id"]) == (want, 0)
        assert (await forked(client, gone["id"]))[1] > 0  # it is computed again
        listed = (await client.get("/v1/capsules")).json()["data"]
        assert kept["id"] in [each["id"] for each in listed]


async def test_capsules_that_are_durable_stay_so_where_a_worker_that_drains_leaves_them(
    tmp_path: Path,
) -> None:
    """X28, part: a rolling update; one that was deleted does not come back with the old worker's name."""
    async with api(tmp_path, workers=2) as (client, fleet):
        held: dict[str, list[tuple[str, str]]] = {"w0": [], "w1": []}
        for i in range(6):
            made = await post(client, "/v1/capsules", prompt=chr(65 + i) * 3 + PROMPT, ttl_s=600)
            want, _ = await forked(client, made["id"])
            down = await post(client, f"/v1/capsules/{made['id']}/demote", tier="disk")
            held[down["worker"]].append((made["id"], want))
        leaves, stays = sorted(held, key=lambda worker: -len(held[worker]))
        gone, _ = held[leaves].pop()
        (address,) = (each for each in fleet.hosts if each.startswith(leaves))
        host = fleet.hosts.pop(address)
        async with asyncio.timeout(20):
            await host.drain(WorkerId(leaves), 20)
        await host.close()
        del fleet.engines[leaves]
        for capsule, want in held[leaves] + held[stays]:
            shown = (await client.get(f"/v1/capsules/{capsule}")).json()
            assert (shown["worker"], shown["tier"], shown["pinned"]) == (stays, "disk", True)
            assert await forked(client, capsule) == (want, 0)
        assert len(owned_capsules(tmp_path)) == 0, "one volume is in use, and the other has none"
        await client.delete(f"/v1/capsules/{gone}")
        await fleet.add_worker(leaves)
        await fleet.ready(2)
        assert (await client.get(f"/v1/capsules/{gone}")).status_code == 404


async def test_the_sdk_moves_capsules(tmp_path: Path) -> None:
    async with api(tmp_path) as (http, _), AsyncMallee(str(http.base_url)) as client:
        capsule = await client.prefill(PROMPT, cache_salt="mine")
        (want,) = await capsule.fork(1, **SAMPLED).wait()  # type: ignore[arg-type]
        down = await capsule.demote("disk")
        assert down.data.tier == "disk"
        (again,) = await down.fork(1, **SAMPLED).wait()  # type: ignore[arg-type]
        assert again.text == want.text
        assert (await down.promote()).data.tier == "device"
        with pytest.raises(InvalidParameter, match="disk or host"):
            await capsule.demote("tape")  # type: ignore[arg-type]
