"""Budgets of reasoning over HTTP: the fields of three APIs, and the answers of a tiny real model."""

from typing import Any

import pytest
from msgspec import structs

from bench.doubles.random_model import random_model
from mallee.api.text.chat import ChatTemplate
from mallee.client import AsyncMallee
from mallee.protocol.messages import ReasoningBudget
from mallee.runtime.config import HttpSettings
from support.live_api import CharTokenizer
from support.tiny_fleet import post, tiny_api

MODEL = random_model("llama", 5, max_position_embeddings=2048)
OPEN, CLOSE = 1, 2
MARKS = {"<think>": OPEN, "</think>": CLOSE}
TEMPLATE = ChatTemplate(
    "{%- for message in messages %}{{ message.role + ':' + message.content + '|' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ 'assistant:<think>' }}{% endif %}{# </think> #}"
)
QUESTION = {"role": "user", "content": "Why?"}
ASKED = {"ignore_eos": True, "seed": 3, "temperature": 1.0}
BUDGET = 7
FIELDS: Any = [
    ("/v1/chat/completions", {"messages": [QUESTION], "thinking_token_budget": 1024}),
    ("/v1/responses", {"input": "Why?", "thinking_token_budget": 1024}),
    ("/v1/messages", {"messages": [QUESTION], "max_tokens": 2000, "thinking": "enabled"}),
]


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer in which the marks of reasoning are tokens."""
    shown = {token: mark for mark, token in MARKS.items()}

    def push(self: Any, tokens: Any, *, is_last: bool = False) -> str:
        return "".join(shown.get(int(token), chr(token)) for token in tokens)

    monkeypatch.setattr(CharTokenizer, "added_tokens", MARKS)
    monkeypatch.setattr(CharTokenizer, "push", push)


def asked_with(body: dict[str, Any]) -> dict[str, Any]:
    if body.get("thinking") == "enabled":
        return {**body, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    return {**body, "chat_template_kwargs": {"enable_thinking": True}}


def num_tokens(text: str) -> int:
    """A mark is one, and so is any other character."""
    return len(text.replace("<think>", "-").replace("</think>", "-"))


@pytest.mark.parametrize(("path", "body"), FIELDS)
def test_the_engine_gets_the_bound(
    path: str, body: Any, call_with: Any, service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts at once if the prompt ends inside of the reasoning, else from its mark on."""
    service.model = structs.replace(service.model, max_model_len=4096)
    known = {"<think>": 298, "</think>": 299}
    monkeypatch.setattr(
        type(call_with(HttpSettings()).tokenizer), "added_tokens", known | {"<|end|>": 256}
    )
    call = call_with(HttpSettings())
    assert call("POST", path, asked_with(body)).status == 200
    assert service.job.limits.reasoning == ReasoningBudget(1024, 299)
    if path == "/v1/messages":
        return
    assert call("POST", path, body).status == 200
    assert service.job.limits.reasoning == ReasoningBudget(1024, 299, 298)


@pytest.mark.parametrize(("path", "body"), FIELDS)
def test_without_a_token_for_the_end_nothing_is_promised(
    path: str, body: Any, call_with: Any, service: Any
) -> None:
    """Our own field is refused by name; Anthropic's, which clients send to any model, is only checked."""
    service.model = structs.replace(service.model, max_model_len=4096)
    answer = call_with(HttpSettings())("POST", path, asked_with(body))
    if path == "/v1/messages":
        assert answer.status == 200
        assert service.job.limits.reasoning is None
        return
    assert answer.status == 400
    assert answer.body["error"]["param"] == "thinking_token_budget"


@pytest.mark.usefixtures("marks")
async def test_each_choice_reasons_within_its_budget_and_then_answers() -> None:
    """I17, part: n choices, streamed or not, with the reasoning of the same choices without a bound."""
    async with tiny_api(MODEL, 1, settings={"chat": TEMPLATE}) as (client, _):
        body: dict[str, Any] = {**ASKED, "messages": [QUESTION], "n": 3, "max_tokens": 40}
        free = await post(client, "/v1/chat/completions", **body)
        body["thinking_token_budget"] = BUDGET
        whole = await post(client, "/v1/chat/completions", **body)
        async with AsyncMallee(str(client.base_url)) as sdk:
            branches = await sdk.complete(**body)
        parts = {branch.index: (branch.reasoning, branch.text) for branch in branches}
        for before, choice in zip(free["choices"], whole["choices"], strict=True):
            message = choice["message"]
            reasoning, text = message["reasoning_content"], message["content"]
            assert parts[choice["index"]] == (reasoning, text)
            assert 0 < num_tokens(reasoning) <= BUDGET
            assert before["message"]["reasoning_content"].startswith(reasoning)
            assert 0 < num_tokens(text) <= 40 - BUDGET - 1
            assert choice["finish_reason"] == "length"


@pytest.mark.usefixtures("marks")
async def test_turns_that_fork_a_response_keep_to_theirs() -> None:
    """I17, part: a turn from a capsule has the text and the count of tokens of one that begins anew."""
    async with tiny_api(MODEL, 1, settings={"chat": TEMPLATE}) as (client, _):
        more = {**ASKED, "max_output_tokens": 30, "thinking_token_budget": BUDGET}
        first = await post(client, "/v1/responses", input="Why?", **more)
        again = {"previous_response_id": first["id"], "input": "And?"}
        second = await post(client, "/v1/responses", **again, **more)
        assert second["mallee"]["turn"] in ("capsule", "rewritten")
        for answer in (first, second):
            assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] <= BUDGET + 1
            assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
        texts = [part["text"] for item in first["output"] for part in item["content"]]
        history = [
            {"role": "user", "content": "Why?"},
            {"role": "assistant", "content": texts[1]},
            {"role": "user", "content": "And?"},
        ]
        cold = await post(client, "/v1/responses", input=history, cache_salt="cold", **more)
        assert [i["content"][0]["text"] for i in cold["output"]] == [
            i["content"][0]["text"] for i in second["output"]
        ]
