"""Searches of two tenants on one engine with room for a fraction of their branches."""

import asyncio
import re
from pathlib import Path

import httpx
import yaml

from mallee.actors.access.keys import NewKey, new_key
from support.mock_scene import make_folder, mock_config
from support.mock_stack import mock_stack

MANY, ONE, ROOT = (
    new_key("many", "client", None),
    new_key("one", "client", None),
    new_key("root", "operator", None),
)
NUM_ROWS, NUM_TOKENS, NUM_SAMPLES = 32, 60, 128
FORK = NUM_SAMPLES * NUM_TOKENS  # tokens are counted when a fork has ended
OUTPUT = r'^mallee_tenant_tokens_total\{.*kind="output".*tenant="(\w+)".*\} ([\d.e+]+)$'


def headers(key: NewKey) -> dict[str, str]:
    return {"authorization": f"Bearer {key.token}"}


async def search(client: httpx.AsyncClient, key: NewKey, seed: int) -> int:
    """The tokens of its tree."""
    sizes = {"n": NUM_SAMPLES, "wave": NUM_SAMPLES, "max_tokens": NUM_TOKENS}
    body = {"prompt": f"a mallee {seed}", "policy": {"type": "best_of_n", **sizes}, "seed": seed}
    answer = await client.post("/v1/search", json=body, headers=headers(key))
    assert answer.status_code == 200, answer.text
    return int(answer.json()["tokens"])


async def test_four_searches_of_one_tenant_get_no_more_than_one_of_another(tmp_path: Path) -> None:
    """S13, part: at the end of the one they have two forks at most; by order of arrival it would be four."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(yaml.safe_dump({"keys": [key.entry for key in (MANY, ONE, ROOT)]}))
    (tmp_path / "model").mkdir()
    config = mock_config(
        make_folder(tmp_path / "model"),
        http__keys_file=str(keys),
        mock__engines_per_worker=1,
        mock__speedup=1.0,
        engine__kv_tokens=100_000,
        scheduler__max_rows=NUM_ROWS,
    )
    async with (
        mock_stack(config) as stack,
        httpx.AsyncClient(base_url=stack.base_url, timeout=60) as client,
    ):
        many = [asyncio.create_task(search(client, MANY, seed)) for seed in range(4)]
        drawn = await search(client, ONE, 4)
        told = (await client.get("/metrics", headers=headers(ROOT))).text
        assert not any(each.done() for each in many), "there was work for both all the time"
        tokens = {"many": 0.0} | {
            name: float(num) for name, num in re.findall(OUTPUT, told, re.MULTILINE)
        }
        for each in many:
            each.cancel()
        await asyncio.gather(*many, return_exceptions=True)
    assert tokens["one"] == drawn == FORK
    assert tokens["many"] <= 2 * FORK
