"""Clients that send their history again: what each turn computes, by client, template and namespace."""

import json
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from bench.doubles.random_model import random_model
from mallee.api.text.chat import ChatTemplate
from mallee.api.text.families import FAMILIES, Family
from support.tiny_fleet import BLOCK, post, tiny_api

MODEL = random_model("llama", 5, max_position_embeddings=16384)
SYSTEM = "You are a coding agent. Read before you write, and run the tests. " * 40
FILE = "x = 1\n" * 5
REASONING = "The test reads a file that is not there. " * 20
NAMES = ["read_file", "write_file", "run"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
    for name in NAMES
]


def opencode(turn: int) -> list[Any]:
    """As the AI SDK sends it: no content beside calls, arguments as the model wrote them, no reasoning."""
    arguments = f'{{"path":"src/{turn}.py"}}'
    return _turn(turn, None, arguments, [{"type": "text", "text": FILE}])


def langchain(turn: int) -> list[Any]:
    """Empty content beside calls, arguments written again, results with a name; no reasoning."""
    call, result = _turn(turn, "", json.dumps({"path": f"src/{turn}.py"}), FILE)
    return [call, {**result, "name": NAMES[0]}]


def reasoning_kept(turn: int) -> list[Any]:
    """As clients of open models do: the reasoning comes back with its call."""
    call, result = _turn(turn, None, json.dumps({"path": f"src/{turn}.py"}), FILE)
    return [{**call, "reasoning_content": f"{turn}: {REASONING}"}, result]


def echoed(turn: int) -> list[Any]:
    """The answer's message as it came, with all its fields."""
    call, result = _turn(turn, None, json.dumps({"path": f"src/{turn}.py"}), FILE)
    extra = {"refusal": None, "annotations": [], "audio": None, "function_call": None}
    return [{**call, **extra, "mallee": {}}, result]


def _turn(turn: int, content: Any, arguments: str, result: Any) -> list[Any]:
    function = {"name": NAMES[0], "arguments": arguments}
    call = {"id": f"call_{turn}", "type": "function", "function": function}
    return [
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"call_{turn}", "content": result},
    ]


CLIENTS: list[Callable[[int], list[Any]]] = [opencode, langchain, reasoning_kept, echoed]


async def turns_of(family: Family, histories: list[list[Any]]) -> tuple[list[int], list[int]]:
    """Prompt tokens of each history in turn, and those of them that were computed."""
    asked = {"tools": TOOLS, "max_tokens": 2, "ignore_eos": True, "tool_choice": "none", "seed": 1}
    lengths, computed = [], []
    async with tiny_api(
        MODEL, 1, num_blocks=8192, settings={"chat": ChatTemplate(None, family=family)}
    ) as (client, _):
        for messages in histories:
            answer = await post(client, "/v1/chat/completions", messages=messages, **asked)
            usage = answer["usage"]
            lengths.append(usage["prompt_tokens"])
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            computed.append(usage["prompt_tokens"] - cached)
    return lengths, computed


def history(client: Callable[[int], list[Any]], num_turns: int) -> list[Any]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Fix the bug."}]
    return messages + [each for turn in range(num_turns) for each in client(turn)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "client"),
    [*product(FAMILIES, CLIENTS)],
    ids=lambda each: getattr(each, "name", getattr(each, "__name__", "")),
)
async def test_a_turn_computes_its_own_messages(
    family: Family, client: Callable[[int], list[Any]]
) -> None:
    """F31: real agents' bodies with calls and results: thousands of tokens once, then those that are new."""
    histories = [history(client, num) for num in range(5)]
    lengths, computed = await turns_of(family, histories)
    assert computed[0] == lengths[0] > 2500
    prompt_end = 40  # where the answer begins; a character is a token here
    for before, after, num in zip(lengths, lengths[1:], computed[1:], strict=False):
        assert num <= after - before + prompt_end + BLOCK


async def test_a_user_s_turn_drops_the_reasoning_before_it_once() -> None:
    """F31: hidden reasoning: the template drops that of the turns before the last question.

    The turn in which it does computes those turns once more without it; the next one computes what is new.
    """
    (family,) = (each for each in FAMILIES if each.name == "qwen3")
    loop = history(reasoning_kept, 3)
    asked = [*loop, {"role": "assistant", "content": "Done."}, {"role": "user", "content": "Why?"}]
    more = [*asked, {"role": "assistant", "content": "So."}, {"role": "user", "content": "And?"}]
    lengths, computed = await turns_of(family, [loop, asked, more])
    start, _ = await turns_of(family, [history(reasoning_kept, 0)])
    assert lengths[1] < lengths[0] - 2 * len(REASONING), "it was dropped"
    assert computed[1] <= lengths[1] - start[0] + 40 + BLOCK
    assert computed[2] <= lengths[2] - lengths[1] + 40 + BLOCK


async def test_a_salt_is_a_namespace_and_a_cache_key_only_a_place() -> None:
    """F31: prefixes are found in the same salt alone, or without one in the default; a prompt_cache_key
    parts nothing."""
    prompt = "".join(chr(33 + 7 * i % 90) for i in range(200))
    salts, keys = ("", "a", "b"), ("", "k", "l")
    async with tiny_api(MODEL, 1) as (client, _):
        for salt in salts:
            for i, key in enumerate(keys):
                named = {"cache_salt": salt, "prompt_cache_key": key}
                given = {name: value for name, value in named.items() if value}
                answer = await post(client, "/v1/completions", prompt=prompt, max_tokens=1, **given)
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert (cached == 0) == (i == 0), (salt, key)
                assert cached == 0 or cached >= len(prompt) - 2 * BLOCK
