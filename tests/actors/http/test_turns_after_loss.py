"""An agent's turns over all three APIs, and workers that die between two of them."""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from mallee.actors.text.chat import ChatTemplate
from mallee.actors.text.families import FAMILIES
from mallee.testing.random_model import random_model
from support.live_fleet import lose
from support.tiny_fleet import BLOCK, tiny_api

MODEL = random_model("llama", 5, max_position_embeddings=8192)
(QWEN,) = (family for family in FAMILIES if family.name == "qwen3")
NUM_TURNS = 20
LOSSES = (7, 8, 15)  # the turns before which the worker of the last one dies
OPTIONS = {"ignore_eos": True, "seed": 1}
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOL = {"name": "read_file", "description": "Reads a file. " * 4}
# A turn's own end, which the next turn's prompt may replace: the beginning of an answer without reasoning.
END = len("<|im_start|>assistant\n<think>\n\n</think>\n\n")


class Answer(NamedTuple):
    """One turn's; `body` as the API has it."""

    body: Any
    worker: str
    text: str
    prompt: int
    computed: int


class Chat:
    """The whole history is sent again, with the model's text and a call beside it."""

    path = "/v1/chat/completions"

    def __init__(self) -> None:
        self._messages: list[Any] = [
            {"role": "system", "content": "You are an agent."},
            {"role": "user", "content": "Fix the bug."},
        ]

    def body(self) -> dict[str, Any]:
        tool = {"type": "function", "function": {**TOOL, "parameters": SCHEMA}}
        shared = {"tools": [tool], "tool_choice": "none", "max_tokens": 6}
        return {**OPTIONS, **shared, "messages": self._messages, "reasoning_effort": "none"}

    def read(self, body: Any) -> tuple[str, int, int]:
        usage = body["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        text = body["choices"][0]["message"]["content"] or ""
        return text, usage["prompt_tokens"], usage["prompt_tokens"] - cached

    def go_on(self, body: Any, turn: int) -> None:
        call = {"name": "read_file", "arguments": json.dumps({"path": f"src/{turn}.py"})}
        calls = [{"id": f"c{turn}", "type": "function", "function": call}]
        text = body["choices"][0]["message"]["content"]
        self._messages += [
            {"role": "assistant", "content": text, "tool_calls": calls},
            {"role": "tool", "tool_call_id": f"c{turn}", "content": f"{turn}: x = 1\n" * 5},
        ]


class Messages:
    """Anthropic's blocks, all of them again."""

    path = "/v1/messages"

    def __init__(self) -> None:
        self._messages: list[Any] = [{"role": "user", "content": "Fix the bug."}]

    def body(self) -> dict[str, Any]:
        tool = {**TOOL, "input_schema": SCHEMA}
        shared = {"tools": [tool], "tool_choice": {"type": "none"}, "max_tokens": 6}
        return {**OPTIONS, **shared, "system": "You are an agent.", "messages": self._messages}

    def read(self, body: Any) -> tuple[str, int, int]:
        usage = body["usage"]
        computed = usage["input_tokens"] + usage["cache_creation_input_tokens"]
        text = "".join(block["text"] for block in body["content"])
        return text, computed + usage["cache_read_input_tokens"], computed

    def go_on(self, body: Any, turn: int) -> None:
        use = {"type": "tool_use", "id": f"c{turn}", "name": "read_file"}
        result = {"type": "tool_result", "tool_use_id": f"c{turn}", "content": f"{turn}: x\n" * 5}
        self._messages += [
            {
                "role": "assistant",
                "content": [*body["content"], {**use, "input": {"path": f"src/{turn}.py"}}],
            },
            {"role": "user", "content": [result]},
        ]


class Responses:
    """The last response is named, and only a call and its output are sent."""

    path = "/v1/responses"

    def __init__(self) -> None:
        self._input: Any = "Fix the bug."
        self._last: str | None = None

    def body(self) -> dict[str, Any]:
        tool = {**TOOL, "type": "function", "parameters": SCHEMA, "strict": False}
        shared = {"tools": [tool], "tool_choice": "none", "max_output_tokens": 6}
        head = {"instructions": "You are an agent.", "reasoning": {"effort": "none"}}
        asked = {"input": self._input, "previous_response_id": self._last}
        return {**OPTIONS, **shared, **head, **asked}

    def read(self, body: Any) -> tuple[str, int, int]:
        usage = body["usage"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        parts = [part for item in body["output"] for part in item["content"]]
        text = "".join(part["text"] for part in parts)
        return text, usage["input_tokens"], usage["input_tokens"] - cached

    def go_on(self, body: Any, turn: int) -> None:
        self._last = body["id"]
        call = {"type": "function_call", "call_id": f"c{turn}", "name": "read_file"}
        output = {"type": "function_call_output", "call_id": f"c{turn}"}
        self._input = [
            {**call, "arguments": json.dumps({"path": f"src/{turn}.py"})},
            {**output, "output": f"{turn}: x = 1\n" * 5},
        ]


async def run(make: Callable[[], Any], workers: int, losses: Sequence[int] = ()) -> list[Answer]:
    """The answers of one agent; before the turns in `losses` the worker of the turn before dies."""
    agent, found = make(), list[Answer]()
    async with tiny_api(
        MODEL, workers, num_blocks=4096, settings={"chat": ChatTemplate(None, family=QWEN)}
    ) as (client, fleet):
        for turn in range(NUM_TURNS):
            if turn in losses:
                await lose(fleet, found[-1].worker)
                assert not any(address.startswith(found[-1].worker) for address in fleet.hosts)
            answer = await client.post(agent.path, json=agent.body())
            body = answer.json()
            assert answer.status_code == 200, body
            found.append(Answer(body, answer.headers["x-mallee-worker"], *agent.read(body)))
            agent.go_on(body, turn)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("make", [Chat, Messages, Responses])
async def test_a_lost_worker_costs_its_prompt_once_and_no_token(make: Callable[[], Any]) -> None:
    """F31, part, X4, part: turns with tools compute what is new; a dead worker's are computed again, once.

    The texts are those of an agent whose worker lives, as tokens are characters here.
    """
    calm = await run(make, 1)
    rough = await run(make, 1 + len(LOSSES), LOSSES)
    assert all(each.text for each in calm)
    assert [each.text for each in rough] == [each.text for each in calm]
    assert [each.prompt for each in rough] == [each.prompt for each in calm]
    for turn in range(1, NUM_TURNS):
        before = calm[turn - 1].prompt - END
        most = calm[turn].prompt - before + BLOCK
        assert calm[turn].computed <= most, turn
        if turn in LOSSES:
            assert rough[turn].worker != rough[turn - 1].worker
            assert most < rough[turn].computed <= rough[turn].prompt, turn
        else:
            assert rough[turn].worker == rough[turn - 1].worker
            assert rough[turn].computed <= most, turn
    num_new = sum(each.computed for each in calm)
    num_lost = sum(calm[turn].prompt for turn in LOSSES)
    assert sum(each.computed for each in rough) <= num_new + num_lost
