"""Turns over the chats' APIs: one after a turn that broke off, and an agent's, whose workers die.

After one that broke off there is nothing that the client didn't see. Each way of ending is tried in
mid-stream. The client sends the text that it has and a question; the answer is that of a service which never
saw the turn before, and what it found there is no more than the client's text.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple

import httpx
import pytest

from bench.doubles.random_model import RandomModel, random_model
from mallee.api.text.chat import ChatTemplate
from mallee.api.text.families import FAMILIES
from support.live_fleet import LiveFleet, lose
from support.plain_ids import scopes_at
from support.tiny_fleet import BLOCK, chunks_of, post, tiny_api
from support.waiting import until

MODEL = random_model("llama", 5, max_position_embeddings=8192)
HYBRID = random_model("qwen3_5_text", 5, max_position_embeddings=8192, eos_token_id=ord("|"))
(QWEN,) = (family for family in FAMILIES if family.name == "qwen3")
OPTIONS = {"ignore_eos": True, "seed": 3, "temperature": 0}
QUESTION = {"role": "user", "content": "Once upon a time, in a wood of many trunks"}
NEXT = {"role": "user", "content": "What was that?"}
NUM_SEEN = 9
# A prompt's end that the next one's may replace: the beginning of an answer without reasoning.
START = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
END = len(START)
# The same where a message ends with a token that models end by: recurrent layers leave a state there.
OF_MARKS = f"""
{{%- for tool in tools or [] %}}{{{{ tool | tojson }}}}|{{% endfor %}}
{{%- for message in messages %}}
    {{{{- '<|im_start|>' + message.role + '\n' + message.content }}}}
    {{%- for call in message.tool_calls or [] %}}{{{{ call.function | tojson }}}}{{% endfor %}}|
{{%- endfor %}}
{{%- if add_generation_prompt %}}{START}{{% endif %}}"""
salts = itertools.count()


def api_of(
    workers: int, model: RandomModel = MODEL
) -> AbstractAsyncContextManager[tuple[httpx.AsyncClient, LiveFleet]]:
    chat = ChatTemplate(None, family=QWEN) if model is MODEL else ChatTemplate(OF_MARKS)
    return tiny_api(model, workers, num_blocks=4096, ids=scopes_at, settings={"chat": chat})


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
        return str(event["response"]["id"]).replace("resp_", "req_") if is_first else ""

    def read(self, body: Any) -> tuple[str, int, int]:
        parts = [part for item in body["output"] for part in item["content"]]
        usage = body["usage"]
        found = usage["input_tokens_details"]["cached_tokens"]
        return "".join(part["text"] for part in parts), usage["input_tokens"], found


CASES = [
    *((Messages(), way) for way in ("disconnect", "prune", "stop", "length", "error")),
    # They take no stops.
    *((Responses(), way) for way in ("disconnect", "prune", "length", "error", "cancel")),
]


async def broken_off(client: httpx.AsyncClient, api: Any, way: str) -> tuple[str, str]:
    """The text that a client saw of an answer that ended in this way, and its last event's type."""
    more = {"mallee": {"session": "s"}, "stream": True}
    if way == "cancel":
        more = {"background": True, "stream": True}
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
            if way == "cancel":
                ended = await post(client, f"{api.path}/{request.replace('req_', 'resp_')}/cancel")
                assert ended["status"] == "cancelled"
            if way == "error":
                assert (await client.delete("/v1/sessions/s")).json()["cancelled"] == 1
    return seen, kind


@pytest.mark.slow
@pytest.mark.parametrize(("api", "way"), CASES)
async def test_the_turn_after_any_ending_is_a_cold_ones(api: Any, way: str) -> None:
    """F28: by the tokens that the next turn finds and computes."""
    async with api_of(1) as (client, fleet):
        first = await post(client, api.path, **api.body([QUESTION], 1, cache_salt="count"))
        _, num_first, _ = api.read(first)
        seen, kind = await broken_off(client, api, way)
        ends = {"disconnect": "delta", "error": "error"} if api.path == "/v1/messages" else {}
        ends["cancel"] = "incomplete"
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


NUM_TURNS = 20
DRAWN = {"ignore_eos": True, "seed": 1}
LOSSES = (7, 8, 15)  # the turns before which the worker of the last one dies
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOL = {"name": "read_file", "description": "Reads a file. " * 4}


class Answer(NamedTuple):
    """One turn's."""

    worker: str
    text: str
    prompt: int
    computed: int


class ChatAgent:
    """The whole history is sent again, with the model's text and a call beside it."""

    path = "/v1/chat/completions"

    def __init__(self) -> None:
        self._messages: list[Any] = [
            {"role": "system", "content": "You are an agent."},
            {"role": "user", "content": "Fix the bug."},
        ]

    def asked(self) -> dict[str, Any]:
        tool = {"type": "function", "function": {**TOOL, "parameters": SCHEMA}}
        shared = {"tools": [tool], "tool_choice": "none", "max_tokens": 6}
        return {**DRAWN, **shared, "messages": self._messages, "reasoning_effort": "none"}

    def read(self, body: Any) -> tuple[str, int, int]:
        usage = body["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        text = body["choices"][0]["message"]["content"] or ""
        return text, usage["prompt_tokens"], cached

    def go_on(self, body: Any, turn: int) -> None:
        call = {"name": "read_file", "arguments": json.dumps({"path": f"src/{turn}.py"})}
        calls = [{"id": f"c{turn}", "type": "function", "function": call}]
        text = body["choices"][0]["message"]["content"]
        self._messages += [
            {"role": "assistant", "content": text, "tool_calls": calls},
            {"role": "tool", "tool_call_id": f"c{turn}", "content": f"{turn}: x = 1\n" * 5},
        ]


class MessagesAgent(Messages):
    """Anthropic's blocks, all of them again."""

    def __init__(self) -> None:
        self._messages: list[Any] = [{"role": "user", "content": "Fix the bug."}]

    def asked(self) -> dict[str, Any]:
        tool = {**TOOL, "input_schema": SCHEMA}
        shared = {"tools": [tool], "tool_choice": {"type": "none"}, "max_tokens": 6}
        return {**DRAWN, **shared, "system": "You are an agent.", "messages": self._messages}

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


class ResponsesAgent(Responses):
    """The last response is named, and only a call and its output are sent."""

    def __init__(self) -> None:
        self._input: Any = "Fix the bug."
        self._last: str | None = None

    def asked(self) -> dict[str, Any]:
        tool = {**TOOL, "type": "function", "parameters": SCHEMA, "strict": False}
        shared = {"tools": [tool], "tool_choice": "none", "max_output_tokens": 6}
        head = {"instructions": "You are an agent.", "reasoning": {"effort": "none"}}
        asked = {"input": self._input, "previous_response_id": self._last}
        return {**DRAWN, **shared, **head, **asked}

    def go_on(self, body: Any, turn: int) -> None:
        self._last = body["id"]
        call = {"type": "function_call", "call_id": f"c{turn}", "name": "read_file"}
        output = {"type": "function_call_output", "call_id": f"c{turn}"}
        self._input = [
            {**call, "arguments": json.dumps({"path": f"src/{turn}.py"})},
            {**output, "output": f"{turn}: x = 1\n" * 5},
        ]


async def run(
    make: Callable[[], Any], model: RandomModel, workers: int, losses: Sequence[int] = ()
) -> list[Answer]:
    """The answers of one agent; before the turns in `losses` the worker of the turn before dies."""
    agent, found = make(), list[Answer]()
    async with api_of(workers, model) as (client, fleet):
        for turn in range(NUM_TURNS):
            if turn in losses:
                await lose(fleet, found[-1].worker)
                assert not any(address.startswith(found[-1].worker) for address in fleet.hosts)
            answer = await client.post(agent.path, json=agent.asked())
            body = answer.json()
            assert answer.status_code == 200, body
            text, prompt, num_found = agent.read(body)
            worker = answer.headers["x-mallee-worker"]
            found.append(Answer(worker, text, prompt, prompt - num_found))
            agent.go_on(body, turn)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "model"),
    [
        *((make, MODEL) for make in (ChatAgent, MessagesAgent, ResponsesAgent)),
        pytest.param(ChatAgent, HYBRID, id="hybrid"),
    ],
)
async def test_a_lost_worker_costs_its_prompt_once_and_no_token(
    make: Callable[[], Any], model: RandomModel
) -> None:
    """F31, part, X4, part: turns with tools compute what is new; a dead worker's are computed again, once.

    The texts are those of an agent whose worker lives, as tokens are characters here.
    """
    calm = await run(make, model, 1)
    rough = await run(make, model, 1 + len(LOSSES), LOSSES)
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
