"""Namespaces of functions, as Codex declares each MCP server: one tool that holds functions.

A model sees plain functions named `namespace.function`. Clients give and get the two parts apart.
"""

from typing import Any, NamedTuple

from mallee.actors.text.conversation import NAME
from mallee.protocol.errors import InvalidParameter


class Placed(NamedTuple):
    """A tool, and its place in the request."""

    tool: Any
    param: str


def full_name(namespace: str, name: str) -> str:
    """The name that the model sees."""
    return f"{namespace}.{name}" if namespace else name


def flattened(tools: Any) -> Any:
    """A list of tools as `Placed` ones, with those of namespaces by their full names; else `tools`.

    A namespace's description stands before that of its first function. Raises InvalidParameter.
    """
    if not isinstance(tools, list):
        return tools
    found: list[Placed] = []
    for i, tool in enumerate(tools):
        param = f"tools[{i}]"
        if isinstance(tool, dict) and tool.get("type") == "namespace":
            found += _members(tool, param)
        else:
            found.append(Placed(tool, param))
    return found


def places_of(tools: Any) -> dict[str, dict[str, str]]:
    """The `namespace` and `name` of each function in one, by its full name. `tools` were read before."""
    return {
        full_name(tool["name"], each["name"]): {"namespace": tool["name"], "name": each["name"]}
        for tool in tools or ()
        if tool.get("type") == "namespace"
        for each in tool["tools"]
    }


def read_namespace(item: dict[str, Any], param: str) -> str:
    """The namespace that an item names; empty: none. Raises InvalidParameter."""
    given = item.get("namespace")
    if given is None:
        return ""
    if not isinstance(given, str) or NAME.fullmatch(given) is None:
        remedy = "give 1 to 128 letters, digits, and _ . : / -"
        raise InvalidParameter(f"{param}.namespace", given, remedy)
    return given


def _members(tool: dict[str, Any], param: str) -> list[Placed]:
    name, text, members = tool.get("name"), tool.get("description"), tool.get("tools")
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        remedy = "give 1 to 128 letters, digits, and _ . : / -"
        raise InvalidParameter(f"{param}.name", name, remedy)
    if text is not None and not isinstance(text, str):
        raise InvalidParameter(f"{param}.description", text, "give a text")
    if not isinstance(members, list):
        raise InvalidParameter(f"{param}.tools", members, "give a list of functions")
    return [
        Placed(_member(each, name, text if j == 0 else None), f"{param}.tools[{j}]")
        for j, each in enumerate(members)
    ]


def _member(tool: Any, namespace: str, text: str | None) -> Any:
    """A function by its full name; all else is left for the reader of functions to refuse."""
    name = tool.get("name") if isinstance(tool, dict) else None
    if not isinstance(name, str) or not name:
        return tool
    made = {**tool, "name": full_name(namespace, name)}
    own = tool.get("description") or ""
    if text and isinstance(own, str):
        made["description"] = f"{text}\n\n{own}".rstrip()
    return made
