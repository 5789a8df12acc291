"""The functions that an answer may call, must call, or must not."""

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from mallee.api.text.conversation import Function
from mallee.protocol.errors import BadRequest, InvalidParameter

Mode: TypeAlias = Literal["none", "auto", "required"]
_SHAPES: Final = (
    'give none, auto, required, {"type": "function", "function": {"name": ...}} or'
    ' {"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}'
)


class ToolChoice(NamedTuple):
    """`functions` are those that may be called; the prompt may show more."""

    mode: Mode
    functions: Mapping[str, Function]


def read_choice(value: Any, functions: tuple[Function, ...]) -> ToolChoice:
    """OpenAI's `tool_choice`, by default auto where there are functions. Raises BadRequest."""
    known = {function.name: function for function in functions}
    if value is None:
        return ToolChoice("auto" if known else "none", known)
    if not known and value not in ("none", "auto"):
        raise BadRequest("tool_choice needs tools", param="tool_choice")
    if value in ("none", "auto", "required"):
        return ToolChoice(value if known else "none", known)
    match value:
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice("required", _chosen([name], known))
        case {"type": "allowed_tools", "allowed_tools": {"tools": list(tools), **more}}:
            mode = more.get("mode", "auto")
            if mode not in ("auto", "required"):
                raise InvalidParameter("tool_choice.allowed_tools.mode", mode, "auto or required")
            names = [_name(tool) for tool in tools]
            return ToolChoice(mode, _chosen(names, known))
    raise InvalidParameter("tool_choice", value, _SHAPES)


def _name(tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise InvalidParameter("tool_choice.allowed_tools.tools", tool, _SHAPES)


def _chosen(names: list[str], known: Mapping[str, Function]) -> Mapping[str, Function]:
    for name in names:
        if name not in known:
            remedy = f"give one of tools: {', '.join(known)}"[:400]
            raise InvalidParameter("tool_choice.function.name", name, remedy)
    if not names:
        raise InvalidParameter("tool_choice.allowed_tools.tools", [], "give at least one tool")
    return {name: known[name] for name in names}
