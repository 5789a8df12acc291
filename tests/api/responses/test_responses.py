"""The Responses API over a service that plays a script: bodies, events, refusals, stored answers, tools."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import openai
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.api.responses.tools import InputText
from mallee.runtime.config import HttpSettings


@pytest.fixture
def roomy(call_with: Callable[..., Any], service: Any) -> Any:
    service.model = msgspec.structs.replace(service.model, max_model_len=4096)
    return call_with(HttpSettings(max_body_bytes=8 << 20))


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
    assert service.job.grammar.source.startswith('start: ("<think>" thoughts gap)? (form)')


def test_items_are_shown_in_their_form_whatever_stood_beside_it(roomy: Any) -> None:
    odd: Any = {"id": 5, "status": {}, "phase": [1], "extra": "x"}
    call = {"type": "function_call", "call_id": "c", "name": "add"}
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
        {**call, "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "2"},
    ]
    begun = roomy("POST", "/v1/conversations", {"items": items})
    assert begun.status == 200, begun.body


@pytest.mark.parametrize("given", [{}, {"instructions": "Be brief."}])
def test_a_system_message_beside_instructions_stays_in_later_turns(
    roomy: Any, service: Any, given: dict[str, str]
) -> None:
    system = {"role": "system", "content": "Answer in Finnish."}
    first = {"input": [system, {"role": "user", "content": "hi"}], "instructions": "Be kind."}
    made = roomy("POST", PATH, first).body
    prompts = [prompt(service)]
    service.capsules.clear()
    then = {"input": "go on", "previous_response_id": made["id"], **given}
    assert roomy("POST", PATH, then).status == 200
    prompts.append(prompt(service))
    assert prompts[0].startswith("<system>Be kind.\n\nAnswer in Finnish.|<user>hi|")
    assert "Answer in Finnish." in prompts[1]
    assert prompts[1].count("<system>") == 1


def test_numbers_of_any_length_are_stored(roomy: Any) -> None:
    """Clients' own: in schemas of tools, which are gone on from, and beside what an item is."""
    schema = {"type": "object", "properties": {"n": {"maximum": 10**30}}}
    tools = [{"type": "function", "name": "f", "parameters": schema}]
    item = {"role": "user", "content": "hi", "note": -(10**40)}
    made = post(roomy, input=[item], tools=tools).body
    assert roomy("GET", f"{PATH}/{made['id']}").body == made
    then = post(roomy, input="more", tools=tools, previous_response_id=made["id"]).body
    assert then["status"] == "completed"
    talk = roomy("POST", "/v1/conversations", {"items": [item]}).body
    listed = roomy("GET", f"/v1/conversations/{talk['id']}/items").body
    assert listed["data"][0]["content"][0]["text"] == "hi"


# Tools of types `namespace`, `custom` and `web_search`, in shapes that Codex sends

PATH = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "strict": False, "parameters": SCHEMA, **more}


def namespace(name: str, *tools: Any, **more: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "tools": [*tools], **more}


FILES = namespace(
    *("mcp__files", function("read", description="Reads a file."), function("write")),
    description="Tools in the mcp__files namespace.",
)
SHELL = function("shell", description="Runs a command.")


def ask(call: Any, **fields: Any) -> Any:
    return call("POST", PATH, {"input": "hi", **fields})


def streamed(call: Any, **fields: Any) -> Any:
    """The last body, and the other events."""
    *events, last = events_of(call, **fields)
    return last["response"], events


def calling(name: str) -> str:
    given = json.dumps({"name": name, "arguments": {"path": "a.py"}})
    return f"<tool_call>{given}</tool_call>"


def prompt(service: Any) -> str:
    return bytes(service.job.tokens.tolist()).decode()


# What Codex 0.169 sends with each turn.
CODEX = {
    "tools": [SHELL, FILES],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "t",
    "client_metadata": {"thread_id": "t", "x-codex-turn-metadata": '{"request_kind": "turn"}'},
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_names_its_namespace_apart(roomy: Any, service: Any, stream: bool) -> None:
    """F31, part: an agent with MCP servers: calls come back with both names, and the turn after has them.

    As Codex sends it: that turn may have all items, where nothing is stored.
    """
    service.reply = lambda branch: calling("mcp__files.write")
    text = {"type": "input_text", "text": "hi"}
    items = [{"type": "message", "id": "msg_1", "role": "user", "content": [text]}]
    if stream:
        body, events = streamed(roomy, input=items, **CODEX)
        done = [each for each in events if each["type"].endswith("arguments.done")]
        assert [each["name"] for each in done] == ["write"]
    else:
        body = ask(roomy, input=items, **CODEX).body
    first = prompt(service)
    parsed = openai.types.responses.Response.model_validate(body)
    (item,) = parsed.output
    assert item.type == "function_call"
    assert (item.namespace, item.name) == ("mcp__files", "write")
    assert body["tools"][1] == FILES

    service.reply = lambda branch: calling("shell")
    result = {"type": "function_call_output", "id": "fco_1", "call_id": item.call_id, "output": "2"}
    assert ask(roomy, input=[result], previous_response_id=body["id"], **CODEX).status == 200
    by_id = prompt(service)
    assert by_id.startswith(first)
    assert by_id.endswith(f"{calling('mcp__files.write')}|<tool>2|<assistant>")
    kept = ("type", "status", "id", "name", "namespace", "arguments", "call_id")
    again = {key: body["output"][0][key] for key in kept}
    for store in (False, True):
        whole = ask(roomy, input=[*items, again, result], store=store, **CODEX)
        assert whole.status == 200
        assert prompt(service) == by_id
    (plain,) = whole.body["output"]
    assert plain["name"] == "shell"
    assert "namespace" not in plain
    path = f"{PATH}/{whole.body['id']}/input_items"
    _, call, _ = roomy("GET", path).body["data"]
    assert (call["namespace"], call["name"]) == ("mcp__files", "write")


def test_a_choice_names_its_namespace_apart(roomy: Any) -> None:
    choice = {"type": "function", "name": "read", "namespace": "mcp__files"}
    assert ask(roomy, tools=[FILES], tool_choice=choice).status == 200
    bare = {"type": "function", "name": "read"}
    assert ask(roomy, tools=[FILES], tool_choice=bare).status == 400


PATCH = '*** Begin Patch\n+say = "å\\n"\n*** End Patch'
RULES = "start: begin_patch hunk+ end_patch"
APPLY = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": RULES},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("space", ["", "edits"])
def test_a_custom_tool_is_called_with_text(
    roomy: Any, service: Any, stream: bool, space: str
) -> None:
    """F31, part: its call is an item with `input`, also in a namespace, and the turn after has it."""
    made = {"name": f"{space}.apply_patch".lstrip("."), "arguments": {"input": PATCH}}
    written = f"<tool_call>{json.dumps(made, ensure_ascii=False)}</tool_call>"
    service.reply = lambda branch: written
    tools = [SHELL, namespace(space, APPLY) if space else APPLY]
    if stream:
        body, events = streamed(roomy, tools=tools)
        told = [e for e in events if e["type"].startswith("response.custom_tool_call_input")]
        assert "".join(each["delta"] for each in told[:-1]) == told[-1]["input"] == PATCH
        assert len(told) > 20
    else:
        body = ask(roomy, tools=tools).body
    parsed = openai.types.responses.Response.model_validate(body)
    (item,) = parsed.output
    assert item.type == "custom_tool_call"
    assert (item.name, item.namespace or "", item.input) == ("apply_patch", space, PATCH)
    assert RULES in prompt(service)
    service.reply = lambda branch: "done"
    result = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "ok"}
    assert ask(roomy, input=[result], previous_response_id=body["id"], tools=tools).status == 200
    by_id = prompt(service)
    assert written in by_id
    history = [{"role": "user", "content": "hi"}, *body["output"], result]
    whole = ask(roomy, input=history, tools=tools)
    assert prompt(service) == by_id
    listed = roomy("GET", f"{PATH}/{whole.body['id']}/input_items").body["data"]
    assert [each["type"] for each in listed[:2]] == ["custom_tool_call_output", "custom_tool_call"]
    assert listed[1]["input"] == PATCH


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_s_call_that_broke_off_is_incomplete(
    roomy: Any, service: Any, stream: bool
) -> None:
    """A patch is not to be applied by halves."""
    made = {"name": "apply_patch", "arguments": {"input": PATCH}}
    service.reply = lambda branch: f"<tool_call>{json.dumps(made)}"[:-20]
    body = streamed(roomy, tools=[APPLY])[0] if stream else ask(roomy, tools=[APPLY]).body
    (item,) = body["output"]
    assert (item["type"], item["status"]) == ("custom_tool_call", "incomplete")
    assert PATCH.startswith(item["input"])


def test_a_custom_tool_may_have_to_be_called(roomy: Any, service: Any) -> None:
    service.reply = lambda branch: calling("apply_patch")
    choice = {"type": "custom", "name": "apply_patch"}
    answer = ask(roomy, tools=[APPLY], tool_choice=choice)
    assert answer.status == 200, answer.body
    assert service.job.grammar is not None
    # A model that writes other arguments: they are given as they are.
    assert answer.body["output"][0]["input"] == '{"path": "a.py"}'


texts = st.text(max_size=40) | st.text(st.sampled_from('\\"/u{d8n\n😀é'), max_size=12)


@given(text=texts, ascii_only=st.booleans(), size=st.integers(1, 9))
def test_the_input_comes_as_it_is_written(text: str, ascii_only: bool, size: int) -> None:
    """I17, part: parts of any size add up to the text, and nothing waits but an escape."""
    raw = json.dumps({"input": text}, ensure_ascii=ascii_only)
    reader = InputText()
    found = "".join(reader.feed(raw[i : i + size]) for i in range(0, len(raw), size))
    assert found == text
    assert reader.end() == ""


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (r'{"input": "\d+\q\ud83d!"}', "\\d+\\q\ufffd!"),  # escapes that JSON doesn't know
        (r'{"input": "C:\users\u00zz\u12"}', r"C:\users\u00zz\u12"),
        (r'{ "input" :"a\u00e', "a"),  # broken off
        (r'{"input": "a\ud83d', "a\ufffd"),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ('{"input": 3}', '{"input": 3}'),
    ],
)
def test_other_arguments_are_kept(raw: str, text: str) -> None:
    for parts in ([raw], raw):
        reader = InputText()
        assert "".join(map(reader.feed, parts)) + reader.end() == text


def test_searches_of_the_web_are_left_out_and_named(roomy: Any, service: Any) -> None:
    """F31, part: Codex declares one in every turn; a model that never calls it keeps to `auto`."""
    search = {"type": "web_search", "external_web_access": False}
    body = ask(roomy, tools=[search, SHELL]).body
    assert [each["type"] for each in body["tools"]] == ["function"]
    assert body["mallee"]["dropped_tools"] == ["web_search"]
    assert "web_search" not in prompt(service)
    assert "dropped_tools" not in ask(roomy, tools=[SHELL]).body["mallee"]
    for choice in ({"type": "web_search"}, "required"):
        answer = ask(roomy, tools=[search], tool_choice=choice)
        assert answer.status == 400
        assert answer.body["error"]["param"].startswith("tool_choice")


CALLED = {"type": "function_call", "call_id": "a", "name": "a", "arguments": "{}"}
CUSTOM = {"type": "custom", "name": "a"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "image"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input[0].call_id"),
        ({"input": [{**CALLED, "arguments": [1]}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
        ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"reasoning": {"summary": []}}, "reasoning.summary"),
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
        ({"input": [{**CALLED, "namespace": "a b"}]}, "input[0].namespace"),
        ({"tools": [namespace("a b")]}, "tools[0].name"),
        ({"tools": [namespace("a", description=3)]}, "tools[0].description"),
        ({"tools": [{"type": "namespace", "name": "a"}]}, "tools[0].tools"),
        (
            {"tools": [SHELL, namespace("a", {"type": "mcp", "name": "b"})]},
            "tools[1].tools[0].type",
        ),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [{**CUSTOM, "description": 3}]}, "tools[0].description"),
        ({"tools": [{**CUSTOM, "format": {"type": "xml"}}]}, "tools[0].format"),
        ({"tools": [{**CUSTOM, "format": {"type": "grammar"}}]}, "tools[0].format"),
        ({"tools": [CUSTOM, function("a")]}, "tools[1].name"),
        ({"tools": [namespace("a", function(""))]}, "tools[0].tools[0].name"),
        ({"tools": [namespace("a", 3)]}, "tools[0].tools[0].type"),
        ({"tools": [namespace("a", function("b")), function("a.b")]}, "tools[1].name"),
        ({"tools": [namespace("a", namespace("b"))]}, "tools[0].tools[0].type"),
    ],
)
def test_a_refusal_names_the_field(roomy: Any, fields: Any, param: str) -> None:
    found = roomy("POST", "/v1/responses", {"input": "hi", **fields})
    assert found.status == 400, found.body
    assert found.body["error"]["param"] == param
    assert param.rpartition(".")[2].partition("[")[0] in found.body["error"]["message"]
