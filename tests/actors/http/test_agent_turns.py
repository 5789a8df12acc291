"""An agent's turns over a real engine: each computes what is new in it, and nothing of the turns before."""

import json
from typing import Any

import httpx
import pytest

from mallee.actors.text.chat import ChatTemplate
from mallee.actors.text.families import FAMILIES, Family
from mallee.testing.random_model import random_model
from support.live_api import served
from support.tiny_fleet import BLOCK, tiny_fleet

MODEL = random_model("llama", 5, max_position_embeddings=8192)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Reads a file. " * 4,
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda each: each.name)
async def test_twenty_turns_with_tools_compute_only_what_is_new(family: Family) -> None:
    """F31, part: history with calls and results, sent again each turn, as clients do."""
    messages: list[Any] = [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": "Fix the bug."},
    ]
    asked = {"tools": TOOLS, "max_tokens": 4, "ignore_eos": True, "tool_choice": "none", "seed": 1}
    before = 0
    async with (
        tiny_fleet(MODEL, 1, num_blocks=4096) as fleet,
        served(fleet.gateways[0], chat=ChatTemplate(None, family=family)) as (url, _),
        httpx.AsyncClient(base_url=url, timeout=20) as client,
    ):
        for turn in range(20):
            body = asked | {"messages": messages}
            answer = (await client.post("/v1/chat/completions", json=body)).json()
            assert "usage" in answer, answer
            usage = answer["usage"]
            computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
            assert computed <= usage["prompt_tokens"] - before + BLOCK, turn
            before = usage["prompt_tokens"] - len("<|im_start|>assistant\n")
            call = {"name": "read_file", "arguments": json.dumps({"path": f"src/{turn}.py"})}
            messages.append(
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": f"c{turn}", "type": "function", "function": call}],
                }
            )
            messages.append({"role": "tool", "tool_call_id": f"c{turn}", "content": "x = 1\n" * 5})
