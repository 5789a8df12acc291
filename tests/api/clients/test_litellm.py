"""LiteLLM as a client, unchanged: `make clients` installs it."""

import json
import os
from typing import Any

import pytest

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import asks the network
litellm = pytest.importorskip("litellm", reason="needs the extra clients: make clients")

pytestmark = pytest.mark.process

MESSAGES = [{"role": "user", "content": "Weather in Oslo?"}]
TOOLS = [{"type": "function", "function": {"name": "get_weather"}}]
ARGUMENTS = '{"city": "Oslo", "days": 2}'
CALL = f'So.\n<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}</tool_call>'


@pytest.fixture
def to(live: Any) -> dict[str, Any]:
    return {
        "model": "openai/tiny/bytes",
        "api_base": f"{live.url}/v1",
        "api_key": "none",
        "max_retries": 0,
        "max_tokens": 120,
    }


def test_litellm_completes(to: Any) -> None:
    """I17, part: `completion` and `text_completion`, with their usage."""
    made = litellm.completion(messages=MESSAGES, **to)
    assert made.choices[0].message.content == "hello 0"
    assert made.usage.prompt_tokens_details.cached_tokens == 4
    texts = litellm.text_completion(
        prompt="abc", n=2, **to | {"model": "text-completion-openai/tiny/bytes"}
    )
    assert [each.text for each in texts.choices] == ["hello 0", "hello 1"]


async def test_litellm_streams(to: Any) -> None:
    """I17, part: streams, sync and async, with usage."""
    asked = {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}, **to}
    chunks = list(litellm.completion(**asked))
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content == "hello 0"
    assert [c.usage.completion_tokens for c in chunks if getattr(c, "usage", None)] == [8]
    text = ""
    async for chunk in await litellm.acompletion(**asked):
        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
    assert text == "hello 0"


@pytest.mark.parametrize("stream", [False, True])
def test_litellm_runs_a_loop_with_tools(to: Any, live: Any, stream: bool) -> None:
    """I17, part: a call, whole and streamed, its result sent back, the answer."""
    live.service.reply = lambda _: CALL
    made = litellm.completion(messages=MESSAGES, tools=TOOLS, stream=stream, **to)
    made = litellm.stream_chunk_builder(list(made)) if stream else made
    message = made.choices[0].message
    assert made.choices[0].finish_reason == "tool_calls"
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "get_weather",
        json.loads(ARGUMENTS),
    )
    live.service.reply = lambda _: "It rains."
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    history = [*MESSAGES, message.model_dump(), result]
    made = litellm.completion(messages=history, tools=TOOLS, **to)
    assert made.choices[0].message.content == "It rains."


def test_litellm_asks_for_responses(to: Any, live: Any) -> None:
    """F31, part: `responses`, whole, streamed, and gone on from by id."""
    options = {key: value for key, value in to.items() if key != "max_tokens"}
    first = litellm.responses(input="Weather in Oslo?", max_output_tokens=120, **options)
    assert first.output[0].content[0].text == "hello 0"
    events = list(
        litellm.responses(input="Why?", previous_response_id=first.id, stream=True, **options)
    )
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "hello 0"
    prompt = bytes(live.service.job.tokens.tolist()).decode()
    assert prompt.endswith("<user>Weather in Oslo?|<assistant>hello 0|<user>Why?|<assistant>")


@pytest.mark.parametrize("stream", [False, True])
def test_litellm_speaks_to_messages(to: Any, live: Any, stream: bool) -> None:
    """I17, part: `completion` by Anthropic's API, a call among its events."""
    live.service.reply = lambda _: CALL
    asked = to | {"model": "anthropic/tiny/bytes", "api_base": live.url, "stream": stream}
    made = litellm.completion(messages=MESSAGES, tools=TOOLS, **asked)
    made = litellm.stream_chunk_builder(list(made)) if stream else made
    (call,) = made.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == json.loads(ARGUMENTS)
    assert made.choices[0].message.content == "So."


def test_litellm_asks_for_a_form_for_a_form(to: Any, live: Any) -> None:
    live.service.reply = lambda _: ARGUMENTS
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    form = {"type": "json_schema", "json_schema": {"name": "w", "schema": schema}}
    made = litellm.completion(messages=MESSAGES, response_format=form, **to)
    assert json.loads(made.choices[0].message.content)["city"] == "Oslo"
    assert '"city"' in live.service.job.grammar.source


def test_litellm_maps_errors(to: Any) -> None:
    with pytest.raises(litellm.NotFoundError, match="gpt-9"):
        litellm.completion(messages=MESSAGES, **to | {"model": "openai/gpt-9"})
    with pytest.raises(litellm.BadRequestError, match="top_logprobs"):
        litellm.completion(messages=MESSAGES, logprobs=True, top_logprobs=21, **to)
