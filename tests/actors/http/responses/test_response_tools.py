"""Tools of types `namespace`, `custom` and `web_search`, in shapes that Codex sends."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.actors.config import HttpSettings
from mallee.actors.http.responses.tools import InputText

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
    raw = call.raw("POST", PATH, json={"input": "hi", "stream": True, **fields}).text
    lines = [line for line in raw.splitlines() if line.startswith("data: ")]
    *events, last = [json.loads(line[6:]) for line in lines]
    return last["response"], events


@pytest.fixture
def roomy(call_with: Callable[..., Any], service: Any) -> Any:
    service.model = msgspec.structs.replace(service.model, max_model_len=4096)
    return call_with(HttpSettings(max_body_bytes=100_000))


def calling(name: str) -> str:
    given = json.dumps({"name": name, "arguments": {"path": "a.py"}})
    return f"<tool_call>{given}</tool_call>"


def prompt(service: Any) -> str:
    return bytes(service.job.tokens.tolist()).decode()


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_names_its_namespace_apart(roomy: Any, service: Any, stream: bool) -> None:
    """F31, part: an agent with MCP servers: calls come back with both names, and the turn after has them."""
    service.reply = lambda branch: calling("mcp__files.write")
    tools = [SHELL, FILES]
    if stream:
        body, events = streamed(roomy, tools=tools)
        done = [each for each in events if each["type"].endswith("arguments.done")]
        assert [each["name"] for each in done] == ["write"]
    else:
        body = ask(roomy, tools=tools).body
    parsed = openai.types.responses.Response.model_validate(body)
    (item,) = parsed.output
    assert item.type == "function_call"
    assert (item.namespace, item.name) == ("mcp__files", "write")
    assert body["tools"][1] == FILES

    service.reply = lambda branch: "done"
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "2"}
    assert ask(roomy, input=[result], previous_response_id=body["id"], tools=tools).status == 200
    by_id = prompt(service)
    history = [{"role": "user", "content": "hi"}, *body["output"], result]
    whole = ask(roomy, input=history, tools=tools)
    assert whole.status == 200
    path = f"{PATH}/{whole.body['id']}/input_items"
    _, call, _ = roomy("GET", path).body["data"]
    assert (call["namespace"], call["name"]) == ("mcp__files", "write")
    assert prompt(service) == by_id
    assert calling("mcp__files.write") in by_id


def test_functions_outside_a_namespace_keep_their_names(roomy: Any, service: Any) -> None:
    service.reply = lambda branch: calling("shell")
    (item,) = ask(roomy, tools=[SHELL, FILES]).body["output"]
    assert item["name"] == "shell"
    assert "namespace" not in item


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([namespace("a b")], "tools[0].name"),
        ([namespace("a", description=3)], "tools[0].description"),
        ([{"type": "namespace", "name": "a"}], "tools[0].tools"),
        ([SHELL, namespace("a", {"type": "mcp", "name": "b"})], "tools[1].tools[0].type"),
        ([{"type": "custom"}], "tools[0].name"),
        ([{"type": "custom", "name": "a", "description": 3}], "tools[0].description"),
        ([{"type": "custom", "name": "a", "format": {"type": "xml"}}], "tools[0].format"),
        ([{"type": "custom", "name": "a", "format": {"type": "grammar"}}], "tools[0].format"),
        ([{"type": "custom", "name": "a"}, function("a")], "tools[1].name"),
        ([{"type": "image_generation"}], "tools[0].type"),
        ([namespace("a", function(""))], "tools[0].tools[0].name"),
        ([namespace("a", 3)], "tools[0].tools[0].type"),
        ([namespace("a", function("b")), function("a.b")], "tools[1].name"),
        ([namespace("a", namespace("b"))], "tools[0].tools[0].type"),
    ],
)
def test_a_wrong_tool_is_refused_by_its_place(roomy: Any, tools: Any, param: str) -> None:
    answer = ask(roomy, tools=tools)
    assert (answer.status, answer.body["error"]["param"]) == (400, param)


def test_a_wrong_namespace_of_a_call_or_choice_is_refused(roomy: Any) -> None:
    item = {"type": "function_call", "call_id": "c", "name": "a", "arguments": "{}"}
    answer = ask(roomy, input=[{**item, "namespace": "a b"}])
    assert (answer.status, answer.body["error"]["param"]) == (400, "input[0].namespace")
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


def test_codex_s_turns(roomy: Any, service: Any) -> None:
    """F31, part: as Codex 0.169 sends them: nothing is stored, and the second turn sends all items."""
    target = {
        "type": "object",
        "properties": {"target": {"type": "string"}},
        "required": ["target"],
    }
    close = {**function("close_agent", description="Closes an agent."), "parameters": target}
    agents = namespace(
        *("multi_agent_v1", close), description="Tools for spawning and managing sub-agents."
    )
    text = {"type": "input_text", "text": "Close it"}
    asked = {
        "tools": [SHELL, agents],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "t",
        "client_metadata": {"thread_id": "t", "x-codex-turn-metadata": '{"request_kind": "turn"}'},
    }
    items: list[Any] = [{"type": "message", "id": "msg_1", "role": "user", "content": [text]}]
    arguments = {"target": "nobody"}
    call = {"name": "multi_agent_v1.close_agent", "arguments": arguments}
    service.reply = lambda branch: f"<tool_call>{json.dumps(call)}</tool_call>"
    body, _ = streamed(roomy, input=items, **asked)
    (item,) = body["output"]
    kept = ("type", "status", "id", "name", "namespace", "arguments", "call_id")
    again = {key: item[key] for key in kept}
    assert (again["namespace"], again["name"]) == ("multi_agent_v1", "close_agent")
    first = prompt(service)
    result = {"type": "function_call_output", "id": "fco_1", "call_id": item["call_id"]}
    service.reply = lambda branch: "All done."
    body, _ = streamed(roomy, input=[*items, again, {**result, "output": "invalid id"}], **asked)
    assert body["output"][0]["content"][0]["text"] == "All done."
    second = prompt(service)
    assert second.startswith(first)
    assert second.endswith(
        f"<tool_call>{json.dumps(call)}</tool_call>|<tool>invalid id|<assistant>"
    )
