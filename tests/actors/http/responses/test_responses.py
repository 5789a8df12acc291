"""The Responses API over a service that plays a script: bodies, events, refusals, stored answers."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import openai
import pydantic
import pytest

from mallee.actors.config import HttpSettings


@pytest.fixture
def roomy(call_with: Callable[..., Any], service: Any) -> Any:
    service.model = msgspec.structs.replace(service.model, max_model_len=4096)
    return call_with(HttpSettings(max_body_bytes=100_000))


def post(call: Any, **body: Any) -> Any:
    found = call("POST", "/v1/responses", {"input": "hi", **body})
    assert found.status == 200, found.body
    return found


def events_of(call: Any, **body: Any) -> list[Any]:
    raw = call.raw("POST", "/v1/responses", json={"input": "hi", "stream": True, **body})
    assert raw.status_code == 200, raw.text
    found = []
    for part in raw.text.split("\n\n")[:-1]:
        name, data = part.split("\n")
        found.append(json.loads(data[6:]))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_a_response_has_openais_shape(roomy: Any) -> None:
    body = post(roomy, instructions="Be brief.", metadata={"a": "b"}).body
    parsed = openai.types.responses.Response.model_validate(body)
    assert parsed.output_text == "hello 0"
    assert parsed.status == "completed"
    assert parsed.usage is not None
    assert parsed.usage.input_tokens == len("<system>Be brief.|<user>hi|<assistant>")
    assert body["mallee"]["turn"] == "new"


def test_events_come_in_openais_order(roomy: Any) -> None:
    found = events_of(roomy)
    kinds = [each["type"].removeprefix("response.") for each in found]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    assert "".join(e["delta"] for e in found if e["type"].endswith("text.delta")) == "hello 0"


def test_calls_are_items_and_their_results_come_back(roomy: Any, service: Any) -> None:
    """A loop with a tool: the call is an item of the output, its result an item of the next input."""
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    service.reply = lambda branch: call
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    found = events_of(roomy, tools=[tool])
    kinds = [each["type"].removeprefix("response.") for each in found]
    assert (kinds[2], kinds[-3:-1]) == (
        "output_item.added",
        ["function_call_arguments.done", "output_item.done"],
    )
    assert set(kinds[3:-3]) == {"function_call_arguments.delta"}
    assert "".join(each["delta"] for each in found[3:-3]) == '{"a": 1}'
    body = found[-1]["response"]
    parsed = openai.types.responses.Response.model_validate(body)
    (item,) = parsed.output
    assert item.type == "function_call"
    assert (item.name, item.arguments) == ("add", '{"a": 1}')
    service.reply = lambda branch: "two"
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "2"}
    after = post(roomy, input=[result], previous_response_id=body["id"], tools=[tool]).body
    assert after["output"][0]["content"][0]["text"] == "two"
    text = bytes(service.job.tokens.tolist()).decode()
    assert text.endswith(f"{call}|<tool>2|<assistant>")


def test_reasoning_is_an_item_that_can_be_sent_back(roomy: Any, service: Any) -> None:
    service.reply = lambda branch: "<think>hm, 1 + 1</think>two"
    found = events_of(roomy, include=["reasoning.encrypted_content"])
    kinds = list(dict.fromkeys(each["type"].removeprefix("response.") for each in found))
    assert kinds[2:7] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
    ]
    output = found[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]
    items = [{"role": "user", "content": "hi"}, *output, {"role": "user", "content": "sure?"}]
    for kept in ("content", "encrypted_content"):
        lost = {"content", "encrypted_content"} - {kept}
        items[1] = {key: value for key, value in output[0].items() if key not in lost}
        post(roomy, input=items)
        text = bytes(service.job.tokens.tolist()).decode()
        assert text == ("<user>hi|<assistant><think>hm, 1 + 1</think>two|<user>sure?|<assistant>")


def test_logprobs_are_those_of_the_text(roomy: Any) -> None:
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    body = post(roomy, **fields).body
    parsed = openai.types.responses.Response.model_validate(body)
    (part,) = parsed.output[0].content  # type: ignore[union-attr]
    assert part.logprobs is not None  # type: ignore[union-attr]
    assert [len(each.top_logprobs) for each in part.logprobs] == [2] * len(part.logprobs)  # type: ignore[union-attr]
    streamed = [each for each in events_of(roomy, **fields) if "logprobs" in each]
    assert streamed[-1]["logprobs"] == body["output"][0]["content"][0]["logprobs"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "image"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input[0].call_id"),
        (
            {"input": [{"type": "function_call", "call_id": "a", "name": "a", "arguments": [1]}]},
            "input[0].arguments",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
        ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 99}, "top_logprobs"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"background": True, "store": False}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"conversation": 3}, "conversation"),
        ({"conversation": {"id": 3}}, "conversation"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "conversation"),
        ({"temperature": 3}, "temperature"),
    ],
)
def test_a_refusal_names_the_field(roomy: Any, fields: Any, param: str) -> None:
    found = roomy("POST", "/v1/responses", {"input": "hi", **fields})
    assert found.status == 400, found.body
    assert found.body["error"]["param"] == param
    assert param.rpartition(".")[2].partition("[")[0] in found.body["error"]["message"]


def test_a_response_that_is_not_stored_is_unknown_afterwards(roomy: Any) -> None:
    body = post(roomy, store=False).body
    assert roomy("GET", f"/v1/responses/{body['id']}").status == 404
    found = roomy("POST", "/v1/responses", {"input": "x", "previous_response_id": body["id"]})
    assert found.status == 404
    assert found.body["error"]["param"] == "previous_response_id"


def test_a_form_is_parsed_by_openais_client(roomy: Any, service: Any) -> None:
    """`responses.parse` sends a schema, which becomes the grammar of the answer."""
    service.reply = lambda branch: '{"city": "Oslo"}'

    class City(pydantic.BaseModel):
        city: str

    async def parsed() -> Any:
        transport = httpx.ASGITransport(app=roomy.app)
        async with (
            httpx.AsyncClient(transport=transport) as http,
            openai.AsyncOpenAI(base_url="http://x/v1", api_key="-", http_client=http) as client,
        ):
            return await client.responses.parse(model="tiny/bytes", input="hi", text_format=City)

    found = asyncio.run(parsed())
    assert found.output_parsed == City(city="Oslo")
    assert service.job.grammar.kind == "json_schema"


def test_a_call_without_arguments_is_shown_with_none(roomy: Any) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "add"}
    items = [{"role": "user", "content": "hi"}, call]
    made = post(roomy, input=items).body
    found = roomy("GET", f"/v1/responses/{made['id']}/input_items").body["data"][0]
    assert (found["call_id"], found["name"], found["arguments"]) == ("c", "add", "{}")
    begun = roomy("POST", "/v1/conversations", {"items": items})
    assert begun.status == 200, begun.body


def test_items_are_shown_in_their_form_whatever_stood_beside_it(roomy: Any) -> None:
    odd: Any = {"id": 5, "status": {}, "phase": [1], "extra": "x"}
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi", "more": 1}], **odd},
        {"type": "reasoning", "summary": "no list", "content": {"text": "hm"}, **odd},
        {**call, **odd},
        {"type": "function_call_output", "call_id": "c", "output": "2", **odd},
    ]
    made = post(roomy, input=items).body
    found = roomy("GET", f"/v1/responses/{made['id']}/input_items?order=asc").body
    parsed = pydantic.TypeAdapter(list[openai.types.responses.ResponseItem])
    assert len(parsed.validate_python(found["data"])) == 4
    for item in found["data"]:
        assert isinstance(item.pop("id"), str)
        assert item.pop("status") == "completed"
    assert found["data"] == [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        call,
        {"type": "function_call_output", "call_id": "c", "output": "2"},
    ]
