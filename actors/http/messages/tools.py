"""Anthropic's tools and their choice, as functions and OpenAI's choice."""

from typing import Any, Final, NamedTuple

from mallee.actors.text.conversation import MAX_FUNCTIONS, NAME, Function
from mallee.protocol.errors import BadRequest, InvalidParameter

# Beside these a tool has hints for Anthropic's own servers, which change no answer.
_HINTS: Final = frozenset(
    ("cache_control", "eager_input_streaming", "input_examples", "allowed_callers")
)
_KEYS: Final = frozenset(("type", "name", "description", "input_schema", "strict")) | _HINTS
_SHAPES: Final = 'give {"type": "auto"}, "any", "none", or {"type": "tool", "name": ...}'


class Choice(NamedTuple):
    """`value` is OpenAI's `tool_choice`; `several`: an answer may have more than one call."""

    value: Any
    several: bool


def read_tools(value: Any, param: str = "tools") -> tuple[Function, ...]:
    """Custom tools; those that run on Anthropic's servers are refused. Raises InvalidParameter."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise InvalidParameter(param, value, "give a list of tools")
    if (num := len(value)) > MAX_FUNCTIONS:
        raise InvalidParameter(param, num, f"give at most {MAX_FUNCTIONS} tools")
    found: dict[str, Function] = {}
    for i, each in enumerate(value):
        function = _function(each, f"{param}[{i}]")
        if function.name in found:
            raise InvalidParameter(f"{param}[{i}].name", function.name, "give each tool once")
        found[function.name] = function
    return tuple(found.values())


def marks_of(tools: Any) -> list[Any]:
    """Every `cache_control` of tools that were read."""
    marks = [tool.get("cache_control") for tool in tools or ()]
    return [mark for mark in marks if mark is not None]


def _function(value: Any, param: str) -> Function:
    if not isinstance(value, dict):
        raise InvalidParameter(param, value, 'a tool is {"name": ..., "input_schema": {...}}')
    kind = value.get("type")
    if kind not in (None, "custom"):
        remedy = "this server runs no tools itself; give tools with an input_schema"
        raise InvalidParameter(f"{param}.type", kind, remedy)
    for name in value:
        if name not in _KEYS and value[name] is not None:
            if name == "defer_loading" and value[name] is False:
                continue
            remedy = f"a tool has {', '.join(sorted(_KEYS))}"
            raise InvalidParameter(f"{param}.{name}", value[name], remedy)
    name, schema = value.get("name"), value.get("input_schema")
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        remedy = "give 1 to 128 letters, digits, and _ . : / -"
        raise InvalidParameter(f"{param}.name", name, remedy)
    if not isinstance(schema, dict):
        raise InvalidParameter(f"{param}.input_schema", schema, "give a JSON schema")
    description, strict = value.get("description"), value.get("strict")
    if description is not None and not isinstance(description, str):
        raise InvalidParameter(f"{param}.description", description, "give a string")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidParameter(f"{param}.strict", strict, "give true or false")
    return Function(name, description or "", schema, bool(strict))


def read_choice(value: Any, functions: tuple[Function, ...]) -> Choice:
    """`tool_choice`. Raises BadRequest."""
    if value is None:
        return Choice(None, True)
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("auto", "any", "none", "tool"):
        raise InvalidParameter("tool_choice", value, _SHAPES)
    single = value.get("disable_parallel_tool_use")
    if single is not None and not isinstance(single, bool):
        param = "tool_choice.disable_parallel_tool_use"
        raise InvalidParameter(param, single, "give true or false")
    if kind in ("any", "tool") and not functions:
        raise BadRequest("tool_choice needs tools", param="tool_choice")
    if kind != "tool":
        return Choice("required" if kind == "any" else kind, not single)
    name = value.get("name")
    if name not in [function.name for function in functions]:
        raise InvalidParameter("tool_choice.name", name, "give the name of one of tools")
    return Choice({"type": "function", "function": {"name": name}}, not single)
