"""An agent's turns over Anthropic's API and a real engine: each computes what is new in it."""

from typing import Any

import httpx
import pytest

from mallee.actors.text.chat import ChatTemplate
from mallee.actors.text.families import FAMILIES, Family
from mallee.testing.random_model import random_model
from support.live_api import served
from support.tiny_fleet import BLOCK, tiny_fleet

MODEL = random_model("llama", 5, max_position_embeddings=8192)
TOOL = {
    "name": "read_file",
    "description": "Reads a file. " * 4,
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
}
# With its reasoning switched off Qwen 3's template begins an answer with an empty one.
LONGEST_BEGINNING = len("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f.name in ("qwen3", "gemma3")], ids=lambda each: each.name
)
async def test_twenty_turns_with_tools_compute_only_what_is_new(family: Family) -> None:
    """F31, part: Anthropic's blocks of calls and results, sent again each turn, as its clients do."""
    mark = {"cache_control": {"type": "ephemeral"}}
    messages: list[Any] = [{"role": "user", "content": "Fix the bug."}]
    asked = {
        "system": [{"type": "text", "text": "You are an agent.", **mark}],
        "tools": [TOOL],
        "max_tokens": 4,
        "ignore_eos": True,
        "tool_choice": {"type": "none"},
        "seed": 1,
    }
    before = 0
    async with (
        tiny_fleet(MODEL, 1, num_blocks=4096) as fleet,
        served(fleet.gateways[0], chat=ChatTemplate(None, family=family)) as (url, _),
        httpx.AsyncClient(base_url=url, timeout=20) as client,
    ):
        for turn in range(20):
            body = asked | {"messages": messages}
            answer = (await client.post("/v1/messages", json=body)).json()
            assert "usage" in answer, answer
            usage = answer["usage"]
            computed = usage["cache_creation_input_tokens"] + usage["input_tokens"]
            prompt = computed + usage["cache_read_input_tokens"]
            assert computed <= prompt - before + BLOCK, turn
            before = prompt - LONGEST_BEGINNING
            use = {"type": "tool_use", "id": f"c{turn}", "name": "read_file"}
            use["input"] = {"path": f"src/{turn}.py"}  # type: ignore[assignment]
            messages.append({"role": "assistant", "content": [use]})
            result = {"type": "tool_result", "tool_use_id": f"c{turn}", "content": "x = 1\n" * 5}
            messages.append({"role": "user", "content": [result]})
