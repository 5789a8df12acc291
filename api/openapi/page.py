"""The document as a page for people: one file without scripts, which loads nothing else."""

import json
from html import escape
from typing import Any, Final

from mallee.api.openapi.document import NOT_SUPPORTED

_STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font: 13px/1.45 ui-monospace, monospace; }
pre { background: var(--soft); padding: .7rem; overflow-x: auto; border-radius: 6px; }
details { border: 1px solid var(--line); border-radius: 6px; margin: .4rem 0; padding: .3rem .8rem; }
summary { cursor: pointer; }
summary b { display: inline-block; width: 4.5rem; font: 600 12px ui-monospace, monospace; }
.post b { color: #2a7; } .get b { color: #37c; } .delete b { color: #c43; }
summary span { opacity: .75; margin-left: .7rem; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0; }
td, th { text-align: left; vertical-align: top; padding: .2rem .6rem .2rem 0; }
td, th { border-bottom: 1px solid var(--line); }
"""


def page(document: dict[str, Any]) -> str:
    """HTML with all operations of `document` and the types of their bodies."""
    info, schemas = document["info"], document["components"]["schemas"]
    groups: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            made = _operation(method, path, operation)
            groups.setdefault(operation["tags"][0], []).append(made)
    operations = "".join(f"<h2>{escape(tag)}</h2>{''.join(rows)}" for tag, rows in groups.items())
    types = "".join(_type(name, schema) for name, schema in schemas.items())
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{escape(info['title'])} API</title><style>{_STYLE}</style>"
        f"<h1>{escape(info['title'])} API</h1><p>{escape(info['description'])}</p>"
        '<p>As JSON: <a href="openapi.json">openapi.json</a></p>'
        f"{operations}<h2>Types</h2>{types}</html>"
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    parts = [_parameters(operation["parameters"])]
    body = operation.get("requestBody")
    if body is not None:
        for media, content in body["content"].items():
            parts.append(f"<p>Body: <code>{escape(media)}</code>, {_shape(content['schema'])}</p>")
            if "example" in content:
                parts.append(_curl(method, path, content["example"]))
    rows = [
        f"<tr><td>{escape(status)}<td>{escape(answer['description'])}"
        f"<td>{', '.join(_media(media, each) for media, each in answer['content'].items())}"
        for status, answer in operation["responses"].items()
    ]
    parts.append(f"<table><tr><th>Status<th>Meaning<th>Body{''.join(rows)}</table>")
    return (
        f'<details class="{method}" id="{escape(operation["operationId"])}"><summary><b>{method.upper()}</b>'
        f"<code>{escape(path)}</code><span>{escape(operation['summary'])}</span></summary>"
        f"{''.join(parts)}</details>"
    )


def _parameters(parameters: list[dict[str, Any]]) -> str:
    rows = [
        f"<tr><td><code>{escape(each['name'])}</code><td>{each['in']}<td>{_shape(each['schema'])}"
        for each in parameters
    ]
    return f"<table><tr><th>Parameter<th>In<th>Type{''.join(rows)}</table>" if rows else ""


def _curl(method: str, path: str, example: dict[str, Any]) -> str:
    command = f"curl -X {method.upper()} $URL{path} -d '{json.dumps(example)}'"
    return f"<pre>{escape(command)}</pre>"


def _media(media: str, content: dict[str, Any]) -> str:
    return f"<code>{escape(media)}</code> {_shape(content['schema'])}"


def _type(name: str, schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = [
        f"<tr><td><code>{escape(field)}</code>{' *' if field in required else ''}"
        f"<td>{_shape(shape)}<td>{escape(shape.get('description', ''))}"
        for field, shape in schema.get("properties", {}).items()
        if shape.get("description") != NOT_SUPPORTED
    ]
    about = escape(schema.get("description", ""))
    return (
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary><p>{about}</p>'
        f"<table><tr><th>Field<th>Type<th>Meaning{''.join(rows)}</table></details>"
    )


def _shape(schema: dict[str, Any]) -> str:
    """A type in a few words, with links to others."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_shape(each) for each in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(json.dumps(each))}</code>" for each in schema["enum"])
    kind = schema.get("type", "anything")
    if kind == "array" and "items" in schema:
        return f"list of {_shape(schema['items'])}"
    words = " or ".join(kind) if isinstance(kind, list) else str(kind)
    names = {"minimum": "≥", "exclusiveMinimum": "&gt;", "maximum": "≤", "default": "default"}
    more = [f"{sign} {escape(json.dumps(schema[n]))}" for n, sign in names.items() if n in schema]
    return ", ".join([escape(words), *more])
