"""Forks of sessions by coding agents, in the requests that they sent: two turns, a fork, its first turn.

`client_forks/` has the recordings. Each answer goes into the next request where the client had put its own.
"""

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from starlette.datastructures import Headers

from mallee.api.sessions.names import read_session
from mallee.api.text.families import FOLDER as TEMPLATES
from mallee.protocol.api.responses import ResponseRequest
from support.mock_scene import TEXT, make_folder, mock_config
from support.mock_stack import mock_stack
from support.tokenizers_made import byte_level

RECORDINGS = Path(__file__).parent / "client_forks"
BLOCK = 16
WINDOW = 1 << 16
LIMITS = ("max_tokens", "max_completion_tokens")  # Codex sends none
NUM_DRAWN = 24


class Turn(NamedTuple):
    """An answer: its text, and the tokens of its prompt and of itself."""

    text: str
    num_prompt: int
    num_cached: int
    num_drawn: int

    @property
    def num_computed(self) -> int:
        return self.num_prompt - self.num_cached


def requests_of(client: str) -> list[dict[str, Any]]:
    """With whole bodies: the file has of each the fields that differ from the one before."""
    found, body = [], dict[str, Any]()
    for each in json.loads((RECORDINGS / f"{client}.json").read_text())["requests"]:
        body = body | each["body"]
        found.append({**each, "body": body})
    return found


def read_turn(events: Iterable[str]) -> Turn:
    """Of a stream of any of the three APIs."""
    text, usage = "", dict[str, Any]()
    for event in (json.loads(each[6:]) for each in events if each.startswith("data: {")):
        match event:
            case {"type": "content_block_delta", "delta": {"text": str(part)}}:
                text += part
            case {"type": "response.output_text.delta", "delta": str(part)}:
                text += part
            case {"choices": [{"delta": {"content": str(part)}}]}:
                text += part
        match event:
            case {"type": "message_start", "message": {"usage": dict(found)}}:
                usage |= found
            case {"response": {"usage": dict(found)}} | {"usage": dict(found)}:
                usage |= found
    if "cache_read_input_tokens" in usage:
        cached = usage["cache_read_input_tokens"]
        prompt = usage["input_tokens"] + cached + usage["cache_creation_input_tokens"]
        return Turn(text, prompt, cached, usage["output_tokens"])
    kind = "prompt" if "prompt_tokens" in usage else "input"
    cached = usage[f"{kind}_tokens_details"]["cached_tokens"]
    drawn = usage["completion_tokens" if kind == "prompt" else "output_tokens"]
    return Turn(text, usage[f"{kind}_tokens"], cached, drawn)


async def send(client: httpx.AsyncClient, asked: dict[str, Any], answers: list[str]) -> Turn:
    """The answer to a recorded request, with `answers` in the places of the recorded ones."""
    limits = {key: NUM_DRAWN for key in LIMITS if key in asked["body"]}
    raw = json.dumps({**asked["body"], **(limits or {"max_output_tokens": NUM_DRAWN})})
    for i, answer in enumerate(answers):
        assert f'"ANSWER {i}"' in raw
        raw = raw.replace(f'"ANSWER {i}"', json.dumps(answer))
    headers = {**asked["headers"], "content-type": "application/json"}
    got = await client.post(asked["path"], content=raw, headers=headers)
    assert got.status_code == 200, got.text
    return read_turn(got.text.splitlines())


@asynccontextmanager
async def agent_api(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Four mocked engines of a model that speaks Qwen 3's template."""
    tokens = ["<end>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    byte_level([TEXT] * 4, 340, tokens).save(str(make_folder(folder) / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"max_position_embeddings": WINDOW}
    (folder / "config.json").write_text(json.dumps(config))
    settings = {
        "mock__engines_per_worker": 4,
        "engine__kv_tokens": 2 * WINDOW,
        "chat__template": str(TEMPLATES / "qwen3.jinja"),
        "served_model_name": "mallee-test",
    }
    async with (
        mock_stack(mock_config(folder, **settings)) as stack,
        httpx.AsyncClient(base_url=stack.base_url, timeout=20) as client,
    ):
        yield client


async def forked(client: str, folder: Path) -> tuple[Turn, Turn, Turn]:
    """The turns of a recorded session, the last of them of its fork."""
    first, second, fork = requests_of(client)
    async with agent_api(folder) as api:
        one = await send(api, first, [])
        two = await send(api, second, [one.text])
        return one, two, await send(api, fork, [one.text, two.text])


@pytest.mark.parametrize("client", ["claude_code", "codex", "acp", "pi"])
async def test_a_clients_fork_computes_its_new_tokens_alone(client: str, tmp_path: Path) -> None:
    """F31, part: all whole blocks that a fork shares with its session come from the cache.

    Among four workers, though the fork has another session, and Codex's another `prompt_cache_key`.
    """
    first, second, fork = await forked(client, tmp_path)
    assert first.num_cached == 0
    assert second.num_cached == (first.num_prompt + first.num_drawn) // BLOCK * BLOCK
    assert fork.num_cached == (second.num_prompt + second.num_drawn) // BLOCK * BLOCK


def test_codex_names_the_thread_of_its_fork_in_its_metadata() -> None:
    """F31, part: the recorded fork's session is below that of its session."""
    found = []
    for asked in requests_of("codex"):
        body = ResponseRequest(client_metadata=asked["body"]["client_metadata"])
        found.append(read_session(body, Headers(asked["headers"])))
    assert found == [("id-1", "", False), ("id-1", "", False), ("id-7", "id-1", False)]


async def test_opencodes_run_with_fork_has_a_tool_more_and_shares_less(tmp_path: Path) -> None:
    """A session of `opencode run` lacks the tool `question`, its fork has it.

    What the template writes behind that tool is computed again, as docs/clients.md says.
    """
    _, second, fork = await forked("opencode", tmp_path)
    assert second.num_computed < 4 * BLOCK
    assert 0 < fork.num_cached < second.num_prompt // 2
    named = [
        [tool["function"]["name"] for tool in each["body"]["tools"]]
        for each in requests_of("opencode")
    ]
    assert named[0] == named[1] == [name for name in named[2] if name != "question"]
    assert len(named[2]) == len(named[1]) + 1
