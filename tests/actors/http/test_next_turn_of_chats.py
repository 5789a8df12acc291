"""The turn after one of Anthropic's or of Responses that broke off: nothing that the client didn't see.

Each way of ending is tried in mid-stream. The client sends the text that it has and a question; the answer is
that of a service which never saw the turn before, and what it found there is no more than the client's text.
"""

import itertools
from typing import Any

import httpx
import pytest

from mallee.actors.text.chat import ChatTemplate
from mallee.actors.text.families import FAMILIES
from mallee.testing.random_model import random_model
from support.tiny_fleet import BLOCK, chunks_of, post, tiny_api
from support.waiting import until

MODEL = random_model("llama", 5, max_position_embeddings=4096)
(QWEN,) = (family for family in FAMILIES if family.name == "qwen3")
OPTIONS = {"ignore_eos": True, "seed": 3, "temperature": 0}
QUESTION = {"role": "user", "content": "Once upon a time, in a wood of many trunks"}
NEXT = {"role": "user", "content": "What was that?"}
NUM_SEEN = 9
# A prompt's end that the next one's may replace: the beginning of an answer without reasoning.
END = len("<|im_start|>assistant\n<think>\n\n</think>\n\n")
salts = itertools.count()


class Messages:
    """Anthropic's bodies and events."""

    path = "/v1/messages"

    def body(self, history: list[Any], max_tokens: int, **more: Any) -> dict[str, Any]:
        return {**OPTIONS, "messages": history, "max_tokens": max_tokens, **more}

    def text_of(self, event: Any) -> str:
        return str(event["delta"].get("text", "")) if event["type"].endswith("block_delta") else ""

    def request_of(self, event: Any) -> str:
        return str(event["message"]["id"]) if event["type"] == "message_start" else ""

    def read(self, body: Any) -> tuple[str, int, int]:
        """Text, tokens of the prompt, and how many of them were found."""
        usage = body["usage"]
        found = usage["cache_read_input_tokens"]
        computed = usage["input_tokens"] + usage["cache_creation_input_tokens"]
        return "".join(block["text"] for block in body["content"]), found + computed, found


class Responses:
    """OpenAI's newer ones; the history is sent whole, as after an answer that has no id to go on from."""

    path = "/v1/responses"

    def body(self, history: list[Any], max_tokens: int, **more: Any) -> dict[str, Any]:
        asked = {"input": history, "max_output_tokens": max_tokens, "reasoning": {"effort": "none"}}
        return {**OPTIONS, **asked, **more}

    def text_of(self, event: Any) -> str:
        return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""

    def request_of(self, event: Any) -> str:
        is_first = event["type"] == "response.created"
        return str(event["response"]["id"]).removeprefix("resp_") if is_first else ""

    def read(self, body: Any) -> tuple[str, int, int]:
        parts = [part for item in body["output"] for part in item["content"]]
        usage = body["usage"]
        found = usage["input_tokens_details"]["cached_tokens"]
        return "".join(part["text"] for part in parts), usage["input_tokens"], found


CASES = [
    *((Messages(), way) for way in ("disconnect", "prune", "stop", "length", "error")),
    *(
        (Responses(), way) for way in ("disconnect", "prune", "length", "error")
    ),  # they take no stops
]


async def broken_off(client: httpx.AsyncClient, api: Any, way: str) -> tuple[str, str]:
    """The text that a client saw of an answer that ended in this way, and its last event's type."""
    more = {"mallee": {"session": "s"}, "stream": True}
    whole = 30 if way == "length" else 3000
    if way == "stop":
        plain = api.body([QUESTION], 30, cache_salt="first")
        text, _, _ = api.read(await post(client, api.path, **plain))
        more["stop_sequences"] = [text[NUM_SEEN : NUM_SEEN + 3]]
    seen, request, kind, is_asked = "", "", "", False
    asked = api.body([QUESTION], whole, **more)
    async with client.stream("POST", api.path, json=asked) as response:
        async for event in chunks_of(response):
            kind = event["type"]
            request = request or api.request_of(event)
            seen += api.text_of(event)
            if len(seen) < NUM_SEEN or is_asked:
                continue
            is_asked = True
            if way == "disconnect":
                break
            if way == "prune":
                await post(client, f"/v1/requests/{request}/prune")
            if way == "error":
                assert (await client.delete("/v1/sessions/s")).json()["cancelled"] == 1
    return seen, kind


@pytest.mark.slow
@pytest.mark.parametrize(("api", "way"), CASES)
async def test_the_turn_after_any_ending_is_a_cold_ones(api: Any, way: str) -> None:
    """F28: by the tokens that the next turn finds and computes."""
    async with tiny_api(
        MODEL, 1, num_blocks=2048, settings={"chat": ChatTemplate(None, family=QWEN)}
    ) as (client, fleet):
        first = await post(client, api.path, **api.body([QUESTION], 1, cache_salt="count"))
        _, num_first, _ = api.read(first)
        seen, kind = await broken_off(client, api, way)
        ends = {"disconnect": "delta", "error": "error"} if api.path == "/v1/messages" else {}
        assert kind.endswith(ends.get(way, ""))
        await until(lambda: fleet.engines["w0"].stats().jobs == 0)
        assert NUM_SEEN <= len(seen) < 3000
        left = await capsules_of(client)
        assert left == ([num_first + len(seen)] if way in ("stop", "length") else [])
        await check_next(client, api, seen, num_first)
        await check_next(client, api, seen[:-3] + "~", num_first)


async def capsules_of(client: httpx.AsyncClient) -> list[int]:
    """The boundaries of the capsules that are left."""
    listed = (await client.get("/v1/capsules")).json()["data"]
    return [capsule["tokens"] for capsule in listed]


async def check_next(client: httpx.AsyncClient, api: Any, seen: str, num_first: int) -> None:
    """The next turn's text is a cold service's; it found the first prompt, and no more than was seen."""
    history = [QUESTION, {"role": "assistant", "content": seen}, NEXT]
    warm = await post(client, api.path, **api.body(history, 24))
    cold = await post(client, api.path, **api.body(history, 24, cache_salt=f"c{next(salts)}"))
    text, prompt, found = api.read(warm)
    assert api.read(cold) == (text, prompt, 0)
    assert num_first - END - BLOCK < found <= num_first + len(seen)
    assert prompt - found >= len(NEXT["content"])


async def test_a_cancelled_background_response_leaves_no_more_than_its_stream_said() -> None:
    """F28, part: cancelled by another call while its stream is read."""
    api = Responses()
    async with tiny_api(
        MODEL, 1, num_blocks=2048, settings={"chat": ChatTemplate(None, family=QWEN)}
    ) as (client, fleet):
        first = await post(client, api.path, **api.body([QUESTION], 1, cache_salt="count"))
        _, num_first, _ = api.read(first)
        seen, name, ended = "", "", None
        asked = api.body([QUESTION], 3000, stream=True, background=True)
        async with client.stream("POST", api.path, json=asked) as response:
            async for event in chunks_of(response):
                seen += api.text_of(event)
                name = name or event["response"]["id"]
                if len(seen) >= NUM_SEEN and ended is None:
                    ended = await post(client, f"{api.path}/{name}/cancel")
        assert ended is not None
        assert ended["status"] == event["response"]["status"] == "cancelled"
        assert event["type"] == "response.incomplete"
        await until(lambda: fleet.engines["w0"].stats().jobs == 0)
        assert await capsules_of(client) == []
        await check_next(client, api, seen, num_first)
