"""Values of JSON schemas, wrong ones beside them, and the API over a mocked fleet that is asked with them."""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import jsonschema
from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import strategies as st

from mallee.api.api import ApiSettings, Draws, Entry, ServedModel, build_api
from mallee.api.openapi.document import document, statuses, template
from mallee.api.openapi.operations import EVENTS, JSON, OPERATIONS, Operation
from mallee.api.text.chat import ChatTemplate
from mallee.api.text.tokenizer import Tokenizer
from mallee.gateway.access.access import Access
from mallee.runtime.config import HttpSettings
from support.mock_scene import MockScene, make_folder, mock_config, mocked
from support.plain_ids import SCOPES
from support.waiting import wait_until

CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SCHEMAS: Mapping[str, Any] = document()["components"]["schemas"]
MODEL_LEN = 192  # a graph leaves 128 free
MAX_WAIT_S = 20.0

INTS = st.sampled_from([0, 1, 2, 3, 7, -1, 129, 10**9, 2**31, -(2**63), 2**63, 2**64, 10**30])
FLOATS = st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0, 1e-9, 1e300, -0.0, 77.7])
TEXTS = st.one_of(
    st.sampled_from(["", "a", "w0", "inherit", "json_object", "text", "ephemeral", "5m", "system"]),
    st.text(max_size=20),
)
JUNK: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | INTS | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def values(schema: Mapping[str, Any], depth: int = 4) -> st.SearchStrategy[Any]:
    """Values that the schema mostly allows: ranges and lengths are now and then left."""
    if "$ref" in schema:
        return st.deferred(lambda: values(SCHEMAS[schema["$ref"].rpartition("/")[2]], depth))
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "anyOf" in schema:
        return st.one_of([values(each, depth) for each in schema["anyOf"]])
    kinds = schema.get("type", ["object", "string", "integer", "null"])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return st.one_of([_of_kind(kind, schema, depth) for kind in kinds])


def _of_kind(kind: str, schema: Mapping[str, Any], depth: int) -> st.SearchStrategy[Any]:
    match kind:
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            low = schema.get("minimum", -5)
            return st.integers(low, low + 6) | INTS
        case "number":
            low = schema.get("minimum", schema.get("exclusiveMinimum", -1))
            return st.floats(low, schema.get("maximum", low + 4)) | FLOATS
        case "string":
            return TEXTS
        case "array":
            return st.lists(values(schema.get("items", {}), depth - 1), max_size=3)
    if depth <= 0 or not schema.get("properties"):
        more = schema.get("additionalProperties")
        inner = values(more, depth - 1) if isinstance(more, dict) else JUNK
        return st.dictionaries(TEXTS, inner, max_size=2) | MESSAGES
    fields = schema["properties"]
    required = schema.get("required", ())
    return objects(fields, required, depth)


MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool"]), "content": TEXTS | JUNK}
)


@st.composite
def objects(
    draw: st.DrawFn, fields: Mapping[str, Any], required: tuple[str, ...] = (), depth: int = 4
) -> dict[str, Any]:
    """Some of the fields: seldom one whose every value but a few is refused."""
    names = sorted(name for name in fields if "enum" not in fields[name] or len(fields) < 12)
    chosen = draw(st.lists(st.sampled_from(names), max_size=5, unique=True))
    rare = sorted(set(fields) - set(names))
    if rare and draw(st.integers(0, 9)) == 0:
        chosen.append(draw(st.sampled_from(rare)))
    return {name: draw(values(fields[name], depth - 1)) for name in {*required, *chosen}}


@st.composite
def bodies(draw: st.DrawFn, operation: Operation) -> Any:
    """Bodies of an operation: its example changed here and there, fields at random, junk."""
    schema = SCHEMAS[operation.body.__name__]
    body = {**operation.example, **draw(objects(schema["properties"]))}
    if draw(st.integers(0, 4)) == 0:
        body[draw(st.sampled_from(sorted(schema["properties"])) | TEXTS)] = draw(JUNK)
    if draw(st.integers(0, 4)) == 0 and body:
        del body[draw(st.sampled_from(sorted(body)))]
    return draw(JUNK) if draw(st.integers(0, 30)) == 0 else body


class Ask(NamedTuple):
    """One call. `content` is its body."""

    operation: Operation
    path: str
    query: dict[str, Any]
    content: bytes
    headers: dict[str, str]


@st.composite
def asks(draw: st.DrawFn, operation: Operation, api: "FuzzedApi") -> Ask:
    """A call of the operation, in half of them of things that exist."""
    path = template(operation.path)
    ids = api.made(operation) if "{" in path and draw(st.booleans()) else {}
    for name in re.findall(r"{(\w+)}", path):
        text = ids.get(name) or draw(TEXTS.filter(lambda t: t[:1] != "w"))
        path = path.replace(f"{{{name}}}", _quoted(text))
    fields = {name: values(schema) for name, schema in operation.query.items()}
    query = draw(st.fixed_dictionaries({}, optional={**fields, "extra": TEXTS}))
    headers = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "x-cache-salt": st.sampled_from(["", "s", "s" * 300]),
                "x-tenant-id": st.sampled_from(["", "t"]),
            },
        )
    )
    content = b""
    if isinstance(operation.body, str):
        content = draw(st.binary(max_size=200))
    elif operation.body is not None:
        content = written(draw(bodies(operation)))
        if draw(st.integers(0, 40)) == 0:
            at = draw(st.integers(0, len(content)))
            content = content[:at] + draw(st.binary(max_size=3)) + content[at + 1 :]
    asked = {n: _text(v) for n, v in query.items()}
    if operation.handler == "ui.watch" and asked.get("seconds", "25").isdecimal():
        asked["seconds"] = "1"  # a short one is like a long one
    return Ask(operation, path, asked, content, headers)


def _quoted(text: str) -> str:
    from urllib.parse import quote

    if text in (".", ".."):  # clients take such parts out of a path
        return "-"
    return quote(text.encode(errors="replace"), safe="") or "-"


def _text(value: Any) -> str:
    text = json.dumps(value) if not isinstance(value, str) else value
    return text.encode(errors="replace").decode()


def written(body: Any) -> bytes:
    return json.dumps(body).encode()


def closed(schema: Any) -> Any:
    """The schema, of which objects with known fields have no others."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: closed(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        made.setdefault("additionalProperties", False)
    return made


class Oracle:
    """Holds answers against the document."""

    def __init__(self) -> None:
        described = document()
        self._paths = described["paths"]
        self._components = {"components": closed(described["components"])}
        self._validators: dict[tuple[str, str, int], Any] = {}

    def problem(self, operation: Operation, answer: httpx.Response) -> str | None:
        """The document's objection, if it has one; any 500 is a bug."""
        status, kind = answer.status_code, answer.headers.get("content-type", "").split(";")[0]
        if status not in statuses(operation):
            return f"status {status} is not in the document: {answer.text[:300]}"
        path = self._paths[template(operation.path)][operation.method.lower()]
        content = path["responses"][str(status)]["content"]
        if kind not in content:
            return f"content-type {kind!r} of {status} is not in the document"
        if kind == EVENTS:
            return self._stream_problem(answer.text)
        if kind != JSON:
            return None
        schema = {**closed(content[kind]["schema"]), **self._components}
        key = (operation.method, operation.path, status)
        if key not in self._validators:
            self._validators[key] = jsonschema.Draft202012Validator(schema)
        errors = list(self._validators[key].iter_errors(answer.json()))
        return str(errors[0])[:600] if errors else None

    def _stream_problem(self, text: str) -> str | None:
        events = text.split("\n\n")[:-1]
        if events and events[0].startswith("event: message_start"):
            return _messages_problem(events)
        if events and events[0].startswith("event: "):
            return self._named_problem(events)
        if not all(event.startswith("data: ") for event in events):
            return f"no events: {text[:200]!r}"
        if events[-1] == "data: [DONE]":
            return None
        error = json.loads(events[-1][6:]).get("error")
        if error is None or error["code"] == "internal_error":
            return f"a stream ends with {events[-1][:300]}"
        return None

    def _named_problem(self, events: list[str]) -> str | None:
        """Of a stream of responses."""
        found = []
        for event in events:
            name, data = event.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            if name != f"event: {found[-1]['type']}":
                return f"an event of another name: {event[:200]}"
        if [each["sequence_number"] for each in found] != list(range(len(found))):
            return "events are not numbered in order"
        ends = ("response.completed", "response.incomplete", "response.failed")
        is_ended = found[-1]["type"] in ends and "internal error" not in events[-1]
        return None if is_ended else f"a stream ends with {events[-1][:300]}"


def _messages_problem(events: list[str]) -> str | None:
    """The objection to a stream of Anthropic's events."""
    found = []
    for each in events:
        name, _, data = each.partition("\ndata: ")
        found.append(json.loads(data))
        if name != f"event: {found[-1].get('type')}":
            return f"an event of another name: {each[:200]!r}"
    last = found[-1]
    if last["type"] == "message_stop" or last.get("error", {}).get("type") == "overloaded_error":
        return None
    return f"a stream ends with {events[-1][:300]}"


OF_READINESS = (
    "health",
    "ready",
    "models",
    "model",
)  # handlers that refuse while no worker is alive


class FuzzedApi:
    """The API over mocked engines, in a loop of its own thread: leases are told also between calls."""

    def __init__(self, portal: BlockingPortal, scene: MockScene, folder: Path) -> None:
        self._portal = portal
        self.scene = scene
        self.oracle = Oracle()
        self.num_calls = 0
        self.counts: dict[int, int] = {}
        app = build_api(
            scene.gateway,
            ServedModel("tiny", Tokenizer.load(folder), ChatTemplate(CHATML), created=1),
            Entry(Access(None, {}), SCOPES),
            ApiSettings(HttpSettings(max_branches=8, max_body_bytes=100_000)),
            Draws(lambda: "err_1", lambda: 1),
        )
        transport = httpx.ASGITransport(app=app)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://test")

    def send(self, ask: Ask) -> httpx.Response:
        async def answer() -> httpx.Response:
            async with asyncio.timeout(MAX_WAIT_S):
                return await self._client.request(
                    ask.operation.method,
                    ask.path,
                    params=ask.query,
                    content=ask.content,
                    headers=ask.headers,
                )

        self.num_calls += 1
        found: httpx.Response = self._portal.call(answer)
        self.counts[found.status_code] = self.counts.get(found.status_code, 0) + 1
        return found

    def check(self, ask: Ask) -> httpx.Response:
        answer = self.send(ask)
        problem = self.oracle.problem(ask.operation, answer)
        assert problem is None, f"{ask.operation.method} {ask.path}: {problem}"
        if answer.status_code in (503, 529) and ask.operation.handler not in OF_READINESS:
            code = answer.json()["error"]["code"]
            assert code == "capsules_full", answer.text
            self.make_room()
        return answer

    def wait_for_weights(self, label: str) -> None:
        """Return once the only worker serves these weights."""
        gateway = self.scene.gateway
        wait_until(
            lambda: gateway.operator.is_serving and gateway.operator.weights()["serving"] == label,
            timeout_s=10,
        )

    def capsule(self) -> str:
        """One that exists."""
        return str(self._posted("/v1/capsules")["id"])

    def made(self, operation: Operation) -> dict[str, str]:
        """Names for the path's parameters, of things that exist."""
        found = {"model": "tiny", "session": "s", "branch": "0"}
        names = re.findall(r"{(\w+)}", template(operation.path))
        if "capsule" in names:
            found["capsule"] = self.capsule()
            if operation.handler == "capsules.restore":  # one of an answer
                choice = self._posted("/v1/completions")["choices"][0]
                found["capsule"] = choice["mallee"]["capsule"]
        if "request" in names:
            found["request"] = self._posted("/v1/completions")["id"]
        if "session" in names:
            self._posted("/v1/completions", session_id="s")
        if "response" in names:
            found["response"] = self._posted("/v1/responses")["id"]
        if "conversation" in names:
            path = f"/v1/conversations/{self._posted('/v1/conversations')['id']}"
            found["conversation"] = path.rpartition("/")[2]
            items = ask_of("GET", "/v1/conversations/{conversation}/items")
            found["item"] = self.send(items._replace(path=f"{path}/items")).json()["data"][0]["id"]
        return found

    def _posted(self, path: str, **more: Any) -> Any:
        """The answer to the operation's example."""
        ask = ask_of("POST", path)
        ask = ask._replace(content=written({**ask.operation.example, **more}))
        answer = self.send(ask)
        if answer.status_code in (503, 529):
            self.make_room()
            answer = self.send(ask)
        if answer.status_code == 409 and "session_id" in more:  # an earlier call has bound it
            self.send(ask_of("DELETE", "/v1/sessions/{session}", session=more["session_id"]))
            answer = self.send(ask)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def make_room(self) -> None:
        self.send(
            Ask(OPERATION["DELETE", "/v1/capsules"], "/v1/capsules", {"all": "true"}, b"", {})
        )


OPERATION = {(each.method, each.path): each for each in OPERATIONS}


def ask_of(method: str, path: str, **names: str) -> Ask:
    """An operation's example."""
    operation = OPERATION[method, path]
    where = template(path)
    for name, value in names.items():
        where = where.replace(f"{{{name}}}", value)
    return Ask(operation, where, {}, written(dict(operation.example)), {})


@contextmanager
def fuzzed_api(folder: Path) -> Iterator[FuzzedApi]:
    config = mock_config(make_folder(folder), engine__max_model_len=MODEL_LEN)
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(mocked(config)) as scene,
    ):
        wait_until(lambda: len(scene.names()) == config.mock.engines_per_worker, timeout_s=10)
        yield FuzzedApi(portal, scene, folder)
