"""Limits of an API key over HTTP, at two gateways."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from bench.doubles.random_model import random_model
from mallee.api.text.chat import ChatTemplate
from mallee.api.text.families import FAMILIES
from mallee.gateway.access.access import Access
from mallee.gateway.access.keys import new_key
from support.live_api import keyed, served
from support.plain_ids import scopes_at
from support.tiny_fleet import tiny_fleet, two_gateways
from support.waiting import until

MODEL = random_model("llama", 5, max_position_embeddings=512)
KEPT = {"max_tokens": 2, "mallee": {"keep": {}}}
ASKED = {"input": "x" * 100, "max_output_tokens": 2}
MESSAGES = [{"role": "user", "content": "x" * 100}]


async def test_a_key_has_its_limits_once_and_not_at_each_gateway(tmp_path: Path) -> None:
    """Whichever gateway its requests reach; beyond them it is told when to come again."""
    key, file = new_key("k", "client", None), tmp_path / "keys.yaml"
    limits = {"requests_per_minute": 20, "max_branches": 4, "max_capsules": 3}
    file.write_text(yaml.safe_dump({"keys": [key.entry | limits]}))
    headers = {"authorization": f"Bearer {key.token}"}
    async with tiny_fleet(MODEL, 1, gateways=2, syncs=True, ids=scopes_at) as fleet:
        await until(lambda: all(len(each.peers.others) == 1 for each in fleet.gateways))
        async with (
            served(fleet.gateways[0], access=Access(file, {})) as (here, _),
            served(fleet.gateways[1], access=Access(file, {})) as (there, _),
            httpx.AsyncClient(base_url=here, headers=headers, timeout=30) as a,
            httpx.AsyncClient(base_url=there, headers=headers, timeout=30) as b,
        ):
            asked = {"prompt": "A tree"}
            kept = [await client.post("/v1/capsules", json=asked) for client in (a, b, a, b)]
            assert [answer.status_code for answer in kept] == [200, 200, 200, 429]
            deleted = await b.delete(f"/v1/capsules/{kept[1].json()['id']}")
            assert deleted.status_code == 200
            more = {"max_tokens": 2, "n": 3}  # one more of each would be too many branches at once
            ask = {**asked, **more}
            answers = [await client.post("/v1/completions", json=ask) for client in (a, b) * 12]
            codes = [answer.status_code for answer in answers]
            assert codes == sorted(codes)
            assert 15 <= codes.count(200) <= 18  # of the four before, three or four count
            refused = answers[-1]
            assert refused.json()["error"]["code"] == "quota_exceeded"
            assert 1 <= int(refused.headers["retry-after"]) <= 4


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [7] * 100, **KEPT}),
        ("/v1/chat/completions", {"messages": MESSAGES, **KEPT}),
        ("/v1/capsules", {"prompt": [7] * 100}),
        ("/v1/capsules", {"prompt": [7] * 100, "wait": False}),
        ("/v1/responses", ASKED),
        ("/v1/responses", {**ASKED, "mallee": {"keep": {}}}),
        ("/v1/responses", {**ASKED, "mallee": {"keep": {}}, "background": True}),
    ],
)
async def test_no_request_is_refused_what_its_key_has(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    """Of all that they need, also if several come at once."""
    limits = {"max_branches": 4, "max_capsules": 8, "max_capsule_tokens": 4000}
    access, headers = keyed(tmp_path, tokens_per_minute=2000, max_running=4, **limits)
    chat = ChatTemplate(None, family=FAMILIES[0])
    async with two_gateways(MODEL, access=access, chat=chat) as two:
        asked = (two.a.post(path, json=body, headers=headers) for _ in range(4))
        found = await asyncio.gather(*asked)
        assert [answer.status_code for answer in found if answer.status_code > 202] == []
