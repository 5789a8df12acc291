"""F31, part: OpenAI's `prompt_cache_key` over HTTP, against mocked engines."""

from itertools import count
from pathlib import Path
from typing import Any

import httpx
import yaml

from mallee.actors.access.keys import new_key
from support.mock_scene import make_folder, mock_config
from support.mock_stack import mock_stack

WORKERS = 6
KEYS = [f"agent-{i}" for i in range(8)]


async def worker_of(client: httpx.AsyncClient, prompt: str, key: str | None, **more: object) -> str:
    body = {"prompt": prompt, "max_tokens": 2, "prompt_cache_key": key, **more}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    (worker,) = {choice["mallee"]["worker"] for choice in answer.json()["choices"]}
    return str(worker)


async def test_prompts_of_one_key_meet_at_one_worker_and_no_tenant_moves_anothers(
    tmp_path: Path,
) -> None:
    """F7, part, F31, part: prompts without a common block; the homes of a tenant's keys are its own.

    Each prompt is longer than the one before it, whose load its worker may still tell of.
    """
    ann, eve = (new_key(name, "operator", name) for name in ("ann", "eve"))
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump({"keys": [ann.entry, eve.entry]}))
    settings = {"mock__engines_per_worker": WORKERS, "http__keys_file": str(file)}
    config = mock_config(make_folder(tmp_path), **settings)
    async with mock_stack(config) as stack:
        clients = [
            httpx.AsyncClient(
                base_url=stack.base_url, headers={"authorization": f"Bearer {key.token}"}
            )
            for key in (ann, eve)
        ]
        try:
            texts = (f"{n} of many trunks " * (10 + n) for n in count())

            async def homes(of: int, keys: list[str], **more: object) -> list[str]:
                return [await worker_of(clients[of], next(texts), key, **more) for key in keys]

            first = await homes(0, KEYS)
            assert len(set(first)) > 1
            scattered = {await worker_of(clients[0], next(texts), None) for _ in KEYS}
            assert len(scattered) > 2, "without a key they take turns"
            others = await homes(1, KEYS)
            assert others != first, "the same names of another tenant are other keys"
            assert await homes(0, KEYS * 2) == first * 2
            assert await homes(1, KEYS) == others
            assert await homes(0, KEYS, n=2) == first
            assert await homes(0, KEYS, cache_salt="s") != first
            kept = await clients[0].post(
                "/v1/capsules", json={"prompt": next(texts), "prompt_cache_key": KEYS[3]}
            )
            assert kept.json()["worker"] == first[3]
        finally:
            for client in clients:
                await client.aclose()


def test_a_key_that_is_too_long_is_refused_with_its_limit(call: Any) -> None:
    answer = call("POST", "/v1/completions", {"prompt": "a", "prompt_cache_key": "k" * 257})
    assert answer.status == 400
    assert answer.body["error"]["param"] == "prompt_cache_key"
    assert "at most 256 characters" in answer.body["error"]["message"]
    answer = call("POST", "/v1/completions", {"prompt": "a", "prompt_cache_key": 7})
    assert (answer.status, answer.body["error"]["param"]) == (400, "prompt_cache_key")
