"""`/v1/models/weights` over a mocked fleet, whose weights are no more than a label."""

from pathlib import Path
from typing import Any

import httpx

from support.mock_scene import make_folder, mock_config
from support.mock_stack import mock_stack
from support.waiting import until_asked

PROMPT = "many trunks from one root, which sprout again after fire " * 4


async def test_a_new_version_serves_and_old_capsules_are_stale(tmp_path: Path) -> None:
    """X16: no older KV is matched, answers carry both versions, stale capsules are refused by name."""
    config = mock_config(make_folder(tmp_path), workers=2, mock__engines_per_worker=1)
    async with (
        mock_stack(config) as stack,
        httpx.AsyncClient(base_url=stack.base_url, timeout=20) as client,
    ):

        async def complete() -> dict[str, Any]:
            body = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}
            answer = await client.post("/v1/completions", json=body)
            choice: dict[str, Any] = answer.json()["choices"][0]["mallee"]
            return choice

        before = await complete()
        assert before["weight_version"] == {"start": "base", "end": "base"}

        async def is_matched() -> bool:
            return bool((await complete())["cached_tokens"] > 0)

        await until_asked(is_matched)  # news of its blocks take a moment to the router
        capsule = (await client.post("/v1/capsules", json={"prompt": PROMPT})).json()["id"]
        asked = {"version": "step-100", "wait_s": 20}
        changed = await client.post("/v1/models/weights", json=asked)
        assert changed.status_code == 200, changed.text
        assert {w["version"] for w in changed.json()["workers"]} == {"step-100"}
        after = await complete()
        assert after["weight_version"] == {"start": "step-100", "end": "step-100"}
        assert after["cached_tokens"] == 0
        found = await client.get(f"/v1/capsules/{capsule}")
        assert found.json()["stale"] is True
        fork = await client.post(f"/v1/capsules/{capsule}/fork", json={"n": 2})
        assert (fork.status_code, fork.json()["error"]["code"]) == (409, "capsule_stale")
        workers = (await client.get("/v1/router/workers")).json()["data"]
        assert {w["weight_version"] for w in workers} == {"step-100"}
        for body, wrong in (
            ({"version": ""}, "version"),
            ({}, "version"),
            ({"version": "x", "drain_s": -1}, "drain_s"),
            ({"version": "x", "wait_s": 1e9}, "wait_s"),
            ({"version": "x", "weights": 1}, "weights"),
        ):
            refused = await client.post("/v1/models/weights", json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, wrong)
        asked = {"version": "step-200", "path": str(tmp_path), "wait_s": 20}
        failed = await client.post("/v1/models/weights", json=asked)
        assert failed.status_code == 202
        assert all("no weights to load" in w["error"] for w in failed.json()["workers"])
        assert (await client.get("/v1/models/weights")).json()["serving"] == "step-100"
