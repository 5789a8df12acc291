"""The API's description: as the routes are, as bodies are, and a fuzzer that reads it."""

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from operator import itemgetter
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.api.openapi.document import document, statuses, template
from mallee.api.openapi.operations import OPERATIONS, Operation
from mallee.gateway.access.access import Access
from mallee.protocol.api.shared import OTHERS_HARMLESS, OTHERS_NEUTRAL
from mallee.runtime.config import HttpSettings
from support import fields
from support.examples import examples
from support.fuzzing import SCHEMAS, FuzzedApi, Oracle, ask_of, asks, fuzzed_api


def name(operation: Operation) -> str:
    return f"{operation.method} {operation.path}"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedApi]:
    with fuzzed_api(tmp_path_factory.mktemp("model")) as made:
        yield made


def test_the_document_has_the_apps_routes(call: Any) -> None:
    routes = call.app.routes
    served = {(method, template(route.path)) for route in routes for method in route.methods} - {
        ("HEAD", template(route.path)) for route in routes
    }
    described = {
        (method.upper(), path) for path, each in document()["paths"].items() for method in each
    }
    assert described == served


def test_the_document_is_sound() -> None:
    found = document()
    text = json.dumps(found)
    for schema in found["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    refs = set(re.findall(r'"\$ref": "([^"]+)"', text))
    assert {f"#/components/schemas/{each}" for each in found["components"]["schemas"]} >= refs
    operations = [each for path in found["paths"].values() for each in path.values()]
    assert len({each["operationId"] for each in operations}) == len(operations)
    for path, methods in found["paths"].items():
        for each in methods.values():
            named = {p["name"] for p in each["parameters"] if p["in"] == "path"}
            assert named == set(re.findall(r"{(\w+)}", path))


def test_requests_are_described_field_by_field() -> None:
    kinds = [each.body for each in OPERATIONS if hasattr(each.body, "__struct_fields__")]
    for kind in kinds:
        described = SCHEMAS[kind.__name__]["properties"]
        assert set(kind.__struct_fields__) <= set(described)
        vague = [
            name for name in kind.__struct_fields__ if not set(described[name]) - {"description"}
        ]
        assert not vague, kind
        assert set(described) >= OTHERS_HARMLESS | OTHERS_NEUTRAL.keys()


def test_null_is_described_where_it_leaves_a_field_out() -> None:
    """And not where a field has to be given."""
    for kind in {each.body for each in OPERATIONS if hasattr(each.body, "__struct_fields__")}:
        schema = SCHEMAS[kind.__name__]
        for field, described in schema["properties"].items():
            may_be_null = jsonschema.Draft202012Validator(
                {**described, "components": {"schemas": SCHEMAS}}
            ).is_valid(None)
            assert may_be_null == (field not in schema.get("required", ())), (kind, field)


def test_the_page_of_fields_is_as_it_is_generated() -> None:
    """`make generate` writes it from the document."""
    assert fields.TARGET.read_text(encoding="utf-8") == fields.written(), "run `make generate`"


@pytest.mark.parametrize("operation", [e for e in OPERATIONS if e.body is not None], ids=name)
def test_examples_are_what_the_document_allows(operation: Operation) -> None:
    if isinstance(operation.body, str):
        return
    schema = {**SCHEMAS[operation.body.__name__], "components": {"schemas": SCHEMAS}}
    jsonschema.validate(dict(operation.example), schema)


@pytest.mark.parametrize(
    "item",
    [
        {"type": "message", "role": "user", "content": "a"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "r"},
        {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "r"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
    ],
    ids=itemgetter("type"),
)
def test_items_of_all_types_are_described(call: Any, item: dict[str, Any]) -> None:
    path = f"/v1/conversations/{call('POST', '/v1/conversations', {'items': [item]}).body['id']}"
    (listed,) = call("GET", f"{path}/items").body["data"]
    found = call("GET", f"{path}/items/{listed['id']}").body
    assert found == listed
    jsonschema.validate(found, SCHEMAS["ConversationItem"])
    assert set(found) <= set(SCHEMAS["ConversationItem"]["properties"])


@pytest.mark.slow
def test_every_operation_may_be_busy(api: FuzzedApi) -> None:
    """I17, part: full capsules, a stopping gateway, no worker: 503, and 529 on Anthropic's paths."""
    assert all(each.busy in statuses(each) for each in OPERATIONS)
    found = set()
    for i in range(300):
        body = {"prompt": f"{i} A mallee" * 20, "ttl_s": 600}
        ask = ask_of("POST", "/v1/capsules")._replace(content=json.dumps(body).encode())
        found.add(api.check(ask).status_code)
    api.make_room()
    assert found == {200, 503}


LATER = {
    *("capsules.demote", "capsules.take", "capsules.export"),
    *("operators.change_weights", "get_record", "delete_record"),
}
LATER |= {
    *("branches.inject", "branches.prioritize", "branches.prune"),
    "capsules.capture",
    "operators.drain_worker",
    "responses.cancel",
}  # no example of these is answered by this fleet alone; most are in mock/test_api_examples.py


@pytest.mark.parametrize("operation", OPERATIONS, ids=name)
def test_examples_are_answered_as_the_document_says(api: FuzzedApi, operation: Operation) -> None:
    """I17, part: with success, but for those that need more than a mocked fleet."""
    names = {"item": "x", "worker": "x", "file": "main.js", **api.made(operation)}
    ask = ask_of(operation.method, operation.path, **names)
    if operation.handler == "capsules.delete_many":
        ask = ask._replace(query={"all": "true"})
    if operation.handler == "ui.watch":
        ask = ask._replace(query={"seconds": "1"})
    answer = api.check(ask)
    assert answer.status_code < 500
    if operation.handler not in LATER:
        assert answer.status_code == operation.successes[0], answer.text
    if operation.handler == "operators.change_weights":
        api.wait_for_weights(operation.example["version"])
    if operation.streams and operation.body is not None:
        body = {**operation.example, "stream": True}
        streamed = api.check(ask._replace(content=json.dumps(body).encode()))
        assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"


class Offline(HTMLParser):
    """Everything that a page loads, and its links."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids.add(str(given.get("id")))
        if tag in ("script", "link", "img", "iframe", "object") or "src" in given:
            self.loads.append(tag)
        if tag == "a":
            self.links.append(str(given["href"]))


def test_the_page_has_all_operations_and_loads_nothing(call: Any) -> None:
    answer = call.raw("GET", "/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    page = Offline()
    page.feed(answer.text)
    assert page.loads == []
    assert all(link == "openapi.json" or link[1:] in page.ids for link in page.links)
    assert "url(" not in answer.text
    operations = [each for path in document()["paths"].values() for each in path.values()]
    assert {each["operationId"] for each in operations} <= page.ids


def test_the_description_is_told_without_a_key(call_with: Any) -> None:
    call = call_with(HttpSettings(), Access(None, {"MALLEE_API_KEY": "a-key-of-the-operator"}))
    for path in ("/docs", "/openapi.json"):
        assert call.raw("GET", path).status_code == 200
    assert call.raw("GET", "/v1/models").status_code == 401
    assert call("GET", "/openapi.json").body == json.loads(json.dumps(document()))


def test_the_oracle_objects(api: FuzzedApi) -> None:
    """To a status, a type and a field that are not in the document."""
    operation = next(each for each in OPERATIONS if each.handler == "models")
    good = api.send(ask_of("GET", "/v1/models"))
    oracle = Oracle()
    assert oracle.problem(operation, good) is None
    for change in ({"status_code": 500}, {"headers": {"content-type": "text/html"}}):
        told = {"status_code": 200, "headers": good.headers, "content": good.content, **change}
        assert oracle.problem(operation, type(good)(**told)) is not None
    body = json.dumps({**good.json(), "more": 1}).encode()
    headers = {"content-type": "application/json"}
    assert "more" in str(oracle.problem(operation, type(good)(200, headers=headers, content=body)))


@pytest.mark.slow
@examples(800)
@given(st.data())
def test_no_request_is_our_bug(api: FuzzedApi, data: st.DataObject) -> None:
    """I17, part, F30, part: every answer is one that the document has, and none is a 500."""
    operation = data.draw(st.sampled_from(OPERATIONS), label="operation")
    api.check(data.draw(asks(operation, api)))
