"""A client whose every call reaches another gateway, while one gateway after the other is replaced."""

from typing import Any

import httpx

from bench.doubles.random_model import random_model
from mallee.api.text.chat import ChatTemplate
from mallee.api.text.families import FAMILIES
from mallee.gateway.gateway import Gateway
from support.any_gateway import OPTIONS, any_gateway
from support.live_api import api_over, serving
from support.tiny_fleet import post, tiny_fleet
from support.waiting import elapse, until

MODEL = random_model("llama", 5, max_position_embeddings=8192)
DRAW: dict[str, Any] = {"ignore_eos": True, "seed": 1}
NUM_TURNS = 2
LIFE_S = 2.1  # a gateway is replaced


async def test_what_a_client_names_is_there_at_every_gateway_and_after_it() -> None:
    """X24, part: responses, conversations, sessions, budgets, capsules and keys, turn by turn."""

    def make_app(gateway: Gateway) -> Any:
        return api_over(gateway, chat=ChatTemplate(None, family=FAMILIES[0]))

    async with tiny_fleet(MODEL, 1, num_blocks=4096, **OPTIONS) as fleet:
        await until(lambda: all(len(each.peers.others) == 2 for each in fleet.gateways))
        async with (
            any_gateway(fleet, make_app, seed=1) as app,
            serving(app) as (url, _),
            httpx.AsyncClient(base_url=url, timeout=60) as client,
        ):
            talk = (await post(client, "/v1/conversations"))["id"]
            told = await client.put(
                "/v1/sessions/s", json={"budget": {"tokens": 4 * NUM_TURNS + 1}}
            )
            assert told.status_code == 200
            capsule = (await post(client, "/v1/capsules", prompt="A long text. " * 4))["id"]
            last, lengths, forked, first_key = None, list[int](), set[str](), b""
            for turn in range(NUM_TURNS):
                await elapse(LIFE_S)
                body = {"input": f"question {turn}", "max_output_tokens": 4, **DRAW}
                answer = await post(client, "/v1/responses", previous_response_id=last, **body)
                last = answer["id"]
                lengths.append(answer["usage"]["input_tokens"])
                await post(client, "/v1/responses", conversation=talk, **body)
                of_session = {"session": "s"}
                await post(
                    client,
                    "/v1/completions",
                    prompt=f"turn {turn}",
                    max_tokens=4,
                    mallee=of_session,
                    **DRAW,
                )
                fork = await post(client, f"/v1/capsules/{capsule}/fork", n=1, max_tokens=4, **DRAW)
                forked.add(fork["choices"][0]["text"])
                headers = {"Idempotency-Key": "once"}
                asked = {"prompt": "once", "max_tokens": 4}
                again = await client.post("/v1/completions", json=asked, headers=headers)
                first_key = first_key or again.content
                assert again.content == first_key
            assert app.num_replaced >= NUM_TURNS - 1
            assert lengths == sorted(set(lengths)), "each goes on from the one before"
            items = (await client.get(f"/v1/conversations/{talk}/items")).json()["data"]
            assert len(items) == 2 * NUM_TURNS
            session = (await client.get("/v1/sessions/s")).json()
            assert session["budget"]["tokens"]["used"] == 4 * NUM_TURNS
            assert len(session["nodes"]) == NUM_TURNS
            assert len(forked) == 1, "the same draw at every gateway"
            listed = (await client.get("/v1/responses")).json()["data"]
            assert len(listed) == 2 * NUM_TURNS
