"""The OpenAPI document, made from the operations and the types of their bodies."""

import re
from collections.abc import Iterable
from functools import cache
from inspect import cleandoc
from typing import Any, Final

import msgspec
from msgspec import inspect

from mallee.api.entry.idempotency import MAX_KEY
from mallee.api.openapi.operations import BYTES, EVENTS, JSON, OPERATIONS, Operation
from mallee.protocol.api.shared import OTHERS_HARMLESS, OTHERS_NEUTRAL, AnyBody, Body

API_VERSION: Final = "1"
HARMLESS: Final = "Changes nothing."
NOT_SUPPORTED: Final = "Not supported: it may have a value that changes nothing."
IGNORED: Final = "Not known: ignored, and named by the answer's header `warnings`."
_INNER: Final = ("type", "item_type", "value_type")
_REF: Final = "#/components/schemas/{name}"
_ALL: Final = (400, 401, 429)
_WITH_BODY: Final = (403, 408, 413, 415)
_WITH_KEY: Final = (409, 422)
_KEY: Final = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "Sent again with the same key and body, the request gets the answer of the first.",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY},
}
_MEANINGS: Final = {
    200: "Success",
    202: "Under way",
    400: "The request can't be served as it is",
    401: "No API key, or none that is valid",
    403: "The key has not the right",
    404: "There is no such thing",
    408: "The body, or its reader, is too slow",
    409: "Of other weights, still computing, a taken name, or an answer too large to be given twice",
    410: "It went with its worker",
    413: "The body is too large",
    415: "The body is compressed",
    422: "Another request was sent under this key",
    429: "A limit of the key or tenant; `retry-after` says when to come back",
    503: "Right request, wrong moment; `retry-after` says when to come back",
    529: "As 503, in Anthropic's words",
}
_DESCRIPTION: Final = (
    "OpenAI's wire formats, and capsules: prompts whose state is kept and forked. `null` means that a field"
    " is left out. Header `x-cache-salt` is the salt of a request without a body."
)


@cache
def document() -> dict[str, Any]:
    """All operations and types; not to be changed."""
    kinds = [kind for each in OPERATIONS for kind in (each.body, each.answer, each.error)]
    structs = {kind for kind in kinds if kind is not None and not isinstance(kind, str | tuple)}
    _, schemas = msgspec.json.schema_components(sorted(structs, key=str), ref_template=_REF)
    for schema in schemas.values():
        schema["description"] = cleandoc(schema.get("description", ""))
        for field in schema["properties"].values():
            if field.get("default", "") in (None, {}):
                del field["default"]  # left out
    bodies = {each.body for each in OPERATIONS if _is_struct(each.body)}
    for kind in bodies:
        _refine(schemas[kind.__name__], kind)
    for kind in _answers(structs - bodies):
        _require(schemas[kind.__name__], kind)
    paths: dict[str, Any] = {}
    for each in OPERATIONS:
        paths.setdefault(template(each.path), {})[each.method.lower()] = _operation(each)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Mallee", "version": API_VERSION, "description": _DESCRIPTION},
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def template(path: str) -> str:
    """The path as OpenAPI writes it."""
    return re.sub(r"{(\w+):path}", r"{\1}", path)


def _is_struct(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


# Schemas


def _refine(schema: dict[str, Any], kind: type[AnyBody]) -> None:
    """Add what holds for the fields of every request, and others' fields that are accepted."""
    fields: dict[str, Any] = schema["properties"]
    for name in fields.keys() - schema.get("required", ()):
        fields[name] = _nullable(fields[name])
    fields.update(
        {name: {"description": HARMLESS} for name in OTHERS_HARMLESS - fields.keys()},
    )
    for name in OTHERS_NEUTRAL.keys() - fields.keys():
        fields[name] = {"description": NOT_SUPPORTED, "enum": [*OTHERS_NEUTRAL[name], None]}
    schema["properties"] = dict(sorted(fields.items()))
    schema["additionalProperties"] = {"description": IGNORED} if kind.is_others else False


def _answers(kinds: Iterable[Any]) -> set[type[Body]]:
    """The types of answers, and of all that is in them."""
    found: set[type[Body]] = set()
    left = list(inspect.multi_type_info(kinds))
    while left:
        each = left.pop()
        if isinstance(each, inspect.StructType):
            if each.cls not in found and issubclass(each.cls, Body):
                found.add(each.cls)
                left += [field.type for field in each.fields]
        elif isinstance(each, inspect.UnionType):
            left += each.types
        else:
            left += [inner for name in _INNER if (inner := getattr(each, name, None)) is not None]
    return found


def _require(schema: dict[str, Any], kind: type[Body]) -> None:
    """Say that the fields of an answer are there, but for those that may be left out."""
    fields = msgspec.structs.fields(kind)
    schema["required"] = [each.name for each in fields if each.default is not msgspec.UNSET]
    for field in schema["properties"].values():
        field.pop("default", None)


def _nullable(field: dict[str, Any]) -> dict[str, Any]:
    """null means absent."""
    null = {"type": "null"}
    if isinstance(field.get("type"), str):
        field = {**field, "type": [field["type"], "null"]}
    if "enum" in field:
        field = {**field, "enum": [*dict.fromkeys([*field["enum"], None])]}
    if "anyOf" in field:
        others = [each for each in field["anyOf"] if each != null]
        return {**field, "anyOf": [*others, null]}
    if "$ref" in field:
        rest = {name: value for name, value in field.items() if name != "$ref"}
        return {"anyOf": [{"$ref": field["$ref"]}, null], **rest}
    return field


def _schema(kind: Any) -> dict[str, Any]:
    if kind == JSON:
        return {"type": "object"}
    if isinstance(kind, str):
        return {"type": "string"}
    (made,), _ = msgspec.json.schema_components([kind], ref_template=_REF)
    return made


def _content(kind: Any) -> dict[str, Any]:
    if isinstance(kind, tuple):
        return {media: content for each in kind for media, content in _content(each).items()}
    return {kind if isinstance(kind, str) else JSON: {"schema": _schema(kind)}}


# Operations


def _operation(each: Operation) -> dict[str, Any]:
    made: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{each.method.lower()}{template(each.path)}").strip(
            "_"
        ),
        "summary": each.summary,
        "tags": [each.tag],
        "parameters": _parameters(each),
        "responses": {str(status): _answer(each, status) for status in statuses(each)},
        "security": [{}] if each.is_open else [{}, {"key": []}],
    }
    if each.body is not None:
        content = _content(each.body)
        if _is_struct(each.body):
            content[JSON]["example"] = dict(each.example)
        made["requestBody"] = {"required": True, "content": content}
    return made


def statuses(each: Operation) -> list[int]:
    """Of all its answers but those of bugs, 500."""
    with_body = _WITH_BODY if each.body is not None else ()
    with_key = _WITH_KEY if takes_key(each) else ()
    named = (404,) if "{" in each.path else ()
    refusals = (*_ALL, *with_body, *with_key, *named, *each.refusals, each.busy)
    return sorted({*each.successes, *refusals})


def _answer(each: Operation, status: int) -> dict[str, Any]:
    kind = each.answer if status in each.successes else each.error
    content = _content(kind)
    if each.streams and status in each.successes:
        content |= _content(EVENTS)
    return {"description": _MEANINGS[status], "content": content}


def _parameters(each: Operation) -> list[dict[str, Any]]:
    path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)(?::path)?}", each.path)
    ]
    query = [
        {"name": name, "in": "query", "required": False, "schema": dict(schema)}
        for name, schema in each.query.items()
    ]
    return path + query + ([_KEY] if takes_key(each) else [])


def takes_key(each: Operation) -> bool:
    """Whether it can be sent again under an `Idempotency-Key`."""
    return each.method == "POST" and each.body != BYTES
