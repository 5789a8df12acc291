"""Anthropic's tools and their choice, as functions and OpenAI's choice."""

from typing import Any, Final, NamedTuple

from mallee.api.text.conversation import Declared, Function
from mallee.protocol.errors import BadRequest, InvalidParameter

_SHAPES: Final = 'give {"type": "auto"}, "any", "none", or {"type": "tool", "name": ...}'


class Choice(NamedTuple):
    """`value` is OpenAI's `tool_choice`; `several`: an answer may have more than one call."""

    value: Any
    several: bool


def marks_of(tools: Any) -> list[Any]:
    """Every `cache_control` of tools that were read."""
    marks = [tool.get("cache_control") for tool in tools or ()]
    return [mark for mark in marks if mark is not None]


def custom_tool(tool: Any, param: str) -> Declared:
    """A tool that the client runs; those of Anthropic's servers are refused. Raises InvalidParameter."""
    if not isinstance(tool, dict):
        raise InvalidParameter(param, tool, 'a tool is {"name": ..., "input_schema": {...}}')
    kind = tool.get("type")
    if kind not in (None, "custom"):
        remedy = "this server runs no tools itself; give tools with an input_schema"
        raise InvalidParameter(f"{param}.type", kind, remedy)
    if tool.get("input_schema") is None:
        raise InvalidParameter(f"{param}.input_schema", None, "give a JSON schema")
    return Declared(tool, param, "input_schema")


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
