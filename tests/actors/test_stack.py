"""The whole service but Ray: SmolLM2, a real nats-server, real HTTP, the official openai client.

Two workers and a gateway in one process. Only Ray adds replicas and restarts: test_front, test_deploy.
"""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pydantic
import pytest
from anyio.from_thread import start_blocking_portal

from mallee.api.text.chat import ChatTemplate
from mallee.api.text.tokenizer import Tokenizer
from mallee.client import Mallee
from mallee.protocol.errors import ModelError
from mallee.router.config import RouterConfig
from mallee.runtime.bus.broker import Broker
from mallee.runtime.bus.nats import NatsBus
from mallee.worker.model.loading.source import resolve_model
from mallee.worker.model.runner import load
from mallee.worker.model.sampling.grammar import TokenGrammars
from support.live_api import served
from support.live_fleet import LiveFleet, running

pytestmark = [pytest.mark.process, pytest.mark.model, pytest.mark.nats, pytest.mark.slow]

MODEL = "m"
NUM_BLOCKS = 512
PROMPT = "The capital of France is"


@asynccontextmanager
async def stack(path: Path) -> AsyncIterator[str]:
    """The address of a gateway with two workers."""
    # "auto" is bfloat16 on some CPUs, where a cached and a cold prompt may differ in a last bit.
    forwards = [
        load(path, num_blocks=NUM_BLOCKS, threads=2, name=MODEL, dtype="float32") for _ in "ab"
    ]
    spec, tokenizer = forwards[0].spec, Tokenizer.load(path)
    broker = Broker(fleet="test")
    await broker.start()
    made = LiveFleet(
        spec,
        RouterConfig(),
        forward=lambda *_, **__: forwards.pop(),  # type: ignore[arg-type,return-value]
        num_blocks=NUM_BLOCKS,
        make_bus=lambda role: NatsBus(broker.access(role), fleet="test", name="test"),
        structures=lambda: TokenGrammars(
            path / "tokenizer.json", spec.vocab_size, spec.eos_token_ids
        ),
    )
    chat = ChatTemplate.load(path, special_tokens=tokenizer.special_tokens)
    try:
        async with (
            running(made, 2) as fleet,
            served(fleet.gateways[0], tokenizer=tokenizer, chat=chat) as (url, _),
        ):
            yield url
    finally:
        await broker.stop()


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    try:
        path = resolve_model("smollm2")
    except ModelError as error:
        pytest.skip(f"no SmolLM2 weights: {error}")
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(stack(path)) as url,
    ):
        yield url


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_completion_is_the_models_greedy_text(client: openai.OpenAI) -> None:
    """I17: completion through the official client, usage counted."""
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0)
    assert answer.choices[0].text.startswith(" Paris")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 8)
    tokens = [504, 3575, 282, 4649, 314]  # the same prompt as ids
    again = client.completions.create(model=MODEL, prompt=tokens, max_tokens=8, temperature=0)
    assert again.choices[0].text == answer.choices[0].text


def test_a_small_model_calls_what_it_must(client: openai.OpenAI) -> None:
    """I16, part, I17: SmolLM2, whose own template has no tools, makes calls that conform."""
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Bergen"]}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    names = ("get_weather", "get_tides")
    tools: Any = [
        {"type": "function", "function": {"name": name, "parameters": schema}} for name in names
    ]
    asked: Any = {"model": MODEL, "tools": tools, "max_tokens": 120, "seed": 1}
    question: Any = {"role": "user", "content": "Will it rain in Bergen on two days?"}
    named = {"type": "function", "function": {"name": "get_tides"}}
    for choice in ("required", named):
        made = client.chat.completions.create(
            messages=[question], tool_choice=choice, parallel_tool_calls=False, **asked
        ).choices[0]
        assert made.finish_reason == "tool_calls"
        assert made.message.content is None
        assert made.message.tool_calls is not None
        (call,) = made.message.tool_calls
        assert call.type == "function"
        assert call.function.name in (names if choice == "required" else names[1:])
        given = json.loads(call.function.arguments)
        assert given.keys() == {"city", "days"}
        assert given["city"] in ("Oslo", "Bergen")
        assert given["days"] in (1, 2, 3)
    result = {"role": "tool", "tool_call_id": call.id, "content": "high at 9"}
    history: Any = [question, made.message.model_dump(), result]
    after = client.chat.completions.create(messages=history, **asked)
    assert after.usage is not None
    assert after.usage.prompt_tokens_details is not None
    new = after.usage.prompt_tokens - (after.usage.prompt_tokens_details.cached_tokens or 0)
    # The call that it wrote and the result are new, not the tools and the question: tens, not hundreds.
    assert new < 100 < after.usage.prompt_tokens


class City(pydantic.BaseModel):
    """The object that the parse test asks for."""

    model_config = pydantic.ConfigDict(extra="forbid")

    name: str = pydantic.Field(max_length=12)
    millions: int = pydantic.Field(ge=0, le=40)
    tags: list[str] = pydantic.Field(max_length=2)


SCHEMA = {
    "type": "object",
    "properties": {
        # ASCII: a cut may fall inside any other character, whose halves are no text.
        "city": {"type": "string", "pattern": "^[A-Za-z ]{1,10}$"},
        "river": {"enum": ["Seine", "Danube"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "river", "size"],
    "additionalProperties": False,
}
MESSAGES: Any = [{"role": "user", "content": "Describe the capital of France as JSON."}]


def test_the_official_client_gets_objects_of_its_schema_with_logprobs(
    client: openai.OpenAI,
) -> None:
    """I16, part, I17, D9: response_format json_schema, n, logprobs, whole and streamed; `.parse()`."""
    asked: Any = {"name": "capital", "strict": True, "schema": SCHEMA}
    form: Any = {"type": "json_schema", "json_schema": asked}
    more: Any = {"model": MODEL, "messages": MESSAGES, "seed": 4, "max_tokens": 200}
    more["response_format"] = form
    whole = client.chat.completions.create(**more, n=4, logprobs=True, top_logprobs=3)
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
        assert choice.logprobs is not None
        content = choice.logprobs.content or []
        assert "".join(entry.token for entry in content) == choice.message.content
        assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in content)
    chunks = client.chat.completions.create(**more, stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == whole.choices[0].message.content
    parsed = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=City, seed=4, max_tokens=300
    )
    assert isinstance(parsed.choices[0].message.parsed, City)


def test_an_object_that_was_cut_is_finished_by_its_forks(base_url: str) -> None:
    """D9, F1, part: over HTTP: cut in mid-object, forked, every child valid; a bad grammar is a 400."""
    with Mallee(base_url) as client:
        branches = client.stream(
            "A capital: ", max_tokens=9, guided_json=SCHEMA, seed=5, logprobs=1
        )
        (cut,) = branches.wait()
        assert cut.finish_reason == "length"
        assert len(cut.logprobs["tokens"]) == 9
        more = {"max_tokens": 80, "seed": 1, "response_format": {"type": "inherit"}}
        children = cut.fork(4, **more).wait()
        texts = [cut.text + child.text for child in children]
        for text in texts:
            jsonschema.validate(json.loads(text), SCHEMA)
        assert len(set(texts)) > 1
        body = {"prompt": "x", "guided_regex": "[a"}
        answer = httpx.post(f"{base_url}/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "guided_regex")
        assert "unclosed" in answer.json()["error"]["message"]
