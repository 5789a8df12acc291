"""F9, part: answers, explain and metrics say how prompts were served, and nothing of other tenants."""

from pathlib import Path
from typing import Any

import httpx
import yaml

from mallee.actors.access.keys import NewKey, new_key
from support.mock_scene import make_folder, mock_config
from support.mock_stack import mock_stack

ACME, EVIL = new_key("acme", "client", None), new_key("evil", "client", None)
ROOT = new_key("root", "operator", None)
TEXT = "many trunks from one root, which sprout again after fire and after frost " * 4


async def test_answers_say_how_their_prompts_were_served(tmp_path: Path) -> None:
    """X18: also the first token that differs, other salts, and prompts that were never seen."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(yaml.safe_dump({"keys": [key.entry for key in (ACME, EVIL, ROOT)]}))
    config = mock_config(
        make_folder(tmp_path), mock__engines_per_worker=1, http__keys_file=str(keys)
    )
    async with (
        mock_stack(config) as stack,
        httpx.AsyncClient(base_url=stack.base_url, timeout=20) as client,
    ):

        async def ask(key: NewKey, method: str, path: str, body: Any = None) -> httpx.Response:
            headers = {"authorization": f"Bearer {key.token}"}
            return await client.request(method, path, json=body, headers=headers)

        async def served(prompt: str, key: NewKey = ACME, **more: Any) -> dict[str, Any]:
            body = {"prompt": prompt, "max_tokens": 2, "mallee": {"diagnostics": True}, **more}
            answer = await ask(key, "POST", "/v1/completions", body)
            found: dict[str, Any] = answer.json()["choices"][0]["mallee"]["cache"]
            return found | {"id": answer.json()["id"]}

        first = await served(TEXT)
        assert (first["served"], first["status"], first["reason"]) == (
            *("rebuild", "cache_miss"),
            "never_seen",
        )
        again = await served(TEXT)
        assert (again["served"], again["status"], again["reason"]) == ("exact", "cache_hit", None)
        assert again["comparison_response_id"] == first["id"]
        assert (await served(TEXT + " and more"))["served"] == "append"
        left = await served(TEXT[:150] + " x" * 60)
        assert (left["served"], left["reason"]) == ("fork", "input_changed")
        assert 16 < left["first_difference"]["token"] < 150
        salted = await served(TEXT, cache_salt="ann")
        assert (salted["served"], salted["reason"]) == ("rebuild", "prompt_cache_key_changed")
        # Of another tenant nothing is told, whatever salt it gives.
        for more in ({}, {"cache_salt": "ann"}):
            stranger = await served(TEXT, EVIL, **more)
            if not more:
                assert stranger["reason"] == "never_seen"
                assert "comparison_response_id" not in stranger
            else:
                assert stranger.get("comparison_response_id", "").startswith("req_")
        plain = {"prompt": TEXT, "max_tokens": 2}
        answer = await ask(ACME, "POST", "/v1/completions", plain)
        assert "cache" not in answer.json()["choices"][0]["mallee"]
        capsule = (await ask(ACME, "POST", "/v1/capsules", {"prompt": TEXT})).json()["id"]
        body = {"n": 3, "max_tokens": 2, "mallee": {"diagnostics": True}}
        fork = (await ask(ACME, "POST", f"/v1/capsules/{capsule}/fork", body)).json()
        assert fork["choices"][0]["mallee"]["cache"]["served"] == "fork"
        assert "cache" not in fork["choices"][1]["mallee"]
        told = await ask(ROOT, "GET", f"/v1/router/explain?request={first['id']}")
        assert told.json()["life"]["cache"]["reason"] == "never_seen"
        metrics = (await ask(ROOT, "GET", "/metrics")).text
        line = 'mallee_prompts_served_total{gateway="g0",reason="never_seen",served="rebuild"} 2.0'
        assert line in metrics
