"""Calls and reasoning of answers that went on at another worker: those of an undisturbed one."""

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from mallee.actors.text.chat import ChatTemplate
from mallee.actors.text.families import FAMILIES
from mallee.mocker.passes import mock_spec
from mallee.router.config import RouterConfig
from mallee.testing.forward import MockForward
from mallee.worker.forward import Draw
from support.live_api import served
from support.live_fleet import LiveFleet, lose, running
from support.tiny_fleet import chunks_of

PATH = "x" * 300
CALL = f'<tool_call>\n{{"name": "read_file", "arguments": {{"path": "{PATH}"}}}}\n</tool_call>'
THOUGHTS = "<think>\n" + "I look at the file. " * 5 + "\n</think>\n\n"
END = "\n<tool_call>"  # which breaks off
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Fix the bug."}],
    "tools": [{"type": "function", "function": {"name": "read_file", "parameters": SCHEMA}}],
    "temperature": 0,
    "ignore_eos": True,
}


class Script(MockForward):
    """Draws the characters of `text` behind a prompt of `begin` tokens, one each pass."""

    text = ""
    begin = 0

    def sample(self, draws: Sequence[Draw]) -> list[int]:
        return [ord(self.text[draw.position - self.begin]) for draw in draws]


async def streamed(
    client: httpx.AsyncClient, body: dict[str, Any], *, fleet: LiveFleet, lose_at: int | None
) -> tuple[dict[str, Any], str]:
    """The message as a client puts it together, and its last worker; the first is lost at that chunk."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": [], "logprobs": []}
    worker, num = "", 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for chunk in chunks_of(response):
            (choice,) = chunk["choices"]
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning"] += delta.get("reasoning") or ""
            for part in delta.get("tool_calls", ()):
                if "id" in part:
                    message["tool_calls"].append({"name": "", "arguments": ""})
                call = message["tool_calls"][part["index"]]
                for field, more in part["function"].items():
                    call[field] += more
            message["logprobs"] += [each["token"] for each in choice["logprobs"]["content"]]
            num += 1
            if num == lose_at:
                await lose(fleet, response.headers["x-mallee-worker"])
            if choice["finish_reason"] is not None:
                message["finish_reason"] = choice["finish_reason"]
                worker = choice["mallee"]["worker"]
    return message, worker


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "lose_at"),
    [("", 80), (THOUGHTS, 30), (THOUGHTS, 180)],
    ids=["in the call", "in the reasoning", "in the call after it"],
)
async def test_a_call_goes_on_at_another_worker(
    monkeypatch: pytest.MonkeyPatch, before: str, lose_at: int
) -> None:
    """X4, I17, part: its worker is lost while the call streams: message and tokens are the same."""
    text = f"{before}Let me see.\n{CALL}{END}"
    made = LiveFleet(
        mock_spec(vocab_size=128, max_model_len=8192),
        RouterConfig(block_size=16),
        forward=Script,
        num_blocks=1024,
    )
    family = next(each for each in FAMILIES if each.name == "qwen3")
    async with (
        running(made, 2) as fleet,
        served(fleet.gateways[0], chat=ChatTemplate(None, family=family)) as (url, _),
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        asked = {name: ASKED[name] for name in ("messages", "tools")}
        begin = (await client.post("/tokenize", json=asked)).json()["count"]
        monkeypatch.setattr(Script, "begin", begin)
        monkeypatch.setattr(Script, "text", text)
        body = ASKED | {"stream": True, "max_tokens": len(text), "logprobs": True}
        found, last = await streamed(client, body, fleet=fleet, lose_at=lose_at)
        assert last in fleet.engines
        assert len(fleet.engines) == 1, "the first worker is lost"
        whole, _ = await streamed(client, body, fleet=fleet, lose_at=None)
    assert found == whole
    assert found["tool_calls"] == [
        {"name": "read_file", "arguments": json.dumps({"path": PATH}, ensure_ascii=False)}
    ]
    assert found["reasoning"] == before.removeprefix("<think>\n").removesuffix("\n</think>\n\n")
    assert "".join(found["logprobs"]) == text
    assert found["finish_reason"] == "length"
