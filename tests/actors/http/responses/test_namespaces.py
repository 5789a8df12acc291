"""Tools of type `namespace`, in shapes that Codex sends."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import openai
import pytest

from mallee.actors.config import HttpSettings

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
        ([SHELL, namespace("a", {"type": "custom", "name": "b"})], "tools[1].tools[0].type"),
        ([namespace("a", function(""))], "tools[0].tools[0].name"),
        ([namespace("a", 3)], "tools[0].tools[0].type"),
        ([namespace("a", function("b")), function("a.b")], "tools[1].name"),
        ([namespace("a", namespace("b"))], "tools[0].tools[0].type"),
    ],
)
def test_a_wrong_namespace_is_refused_by_its_place(roomy: Any, tools: Any, param: str) -> None:
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
