"""Tools of the Responses API: the functions that a model sees of them, and how calls of these are shown.

A model sees plain functions. Those of a namespace, as Codex declares each MCP server, are named
`namespace.function`. A custom tool, whose input is text of any form, is a function of one text, `input`.
"""

import json
import re
from typing import Any, Final, NamedTuple

from mallee.api.text.conversation import NAME, Declared, is_object
from mallee.protocol.errors import InvalidParameter

NAME_RULE: Final = "give 1 to 128 letters, digits, and _ . : / -"
INPUT: Final = "input"  # the argument of a custom tool's function
SYNTAXES: Final = ("lark", "regex")
_SCHEMA: Final = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}


class Placed(NamedTuple):
    """A function, and its tool's place in the request."""

    tool: Any
    param: str


class Shown(NamedTuple):
    """The tool that a call is of, as the call's item names it."""

    name: str
    namespace: str = ""
    is_custom: bool = False


def full_name(namespace: str, name: str) -> str:
    """The name that the model sees."""
    return f"{namespace}.{name}" if namespace else name


def offered(tools: Any) -> Any:
    """The tools without searches of the web, which no model here must make, unlike functions."""
    if not isinstance(tools, list):
        return tools
    return [tool for tool in tools if not _is_search(tool)]


def dropped(tools: Any) -> list[str]:
    """The types of those that are not offered."""
    return [tool["type"] for tool in tools or () if _is_search(tool)]


def placed(tools: Any) -> Any:
    """A list of tools as the `Placed` functions that the model sees; else `tools`.

    A namespace's description stands before that of its first function. Raises InvalidParameter.
    """
    if not isinstance(tools, list):
        return tools
    found: list[Placed] = []
    for i, tool in enumerate(tools):
        param = f"tools[{i}]"
        if isinstance(tool, dict) and tool.get("type") == "namespace":
            found += _members(tool, param)
        elif not _is_search(tool):
            found.append(Placed(_plain(tool, param), param))
    return found


def declared(each: Placed, _: str) -> Declared:
    """A function, which names itself. Raises InvalidParameter."""
    kind = each.tool.get("type") if isinstance(each.tool, dict) else None
    if kind != "function":
        remedy = "this server runs no tools; only function, custom and namespace are supported"
        raise InvalidParameter(f"{each.param}.type", kind, remedy)
    return Declared(each.tool, each.param)


def shown_tools(tools: Any) -> dict[str, Shown]:
    """Custom tools and those of namespaces by the names that the model sees. `tools` were read before."""
    found = [
        Shown(each["name"], namespace, each["type"] == "custom")
        for tool in tools or ()
        for namespace, members in [
            (tool["name"], tool["tools"]) if tool["type"] == "namespace" else ("", [tool])
        ]
        for each in members
        if namespace or each["type"] == "custom"
    ]
    return {full_name(each.namespace, each.name): each for each in found}


def read_namespace(given: Any, param: str) -> str:
    """The namespace that `given` names, of what is at `param`; empty: none. Raises InvalidParameter."""
    if given is None:
        return ""
    if not isinstance(given, str) or NAME.fullmatch(given) is None:
        raise InvalidParameter(f"{param}.namespace", given, NAME_RULE)
    return given


def chat_choice(value: Any) -> Any:
    """`tool_choice` as chat requests have it. Raises InvalidParameter for tools that the server would run."""
    match value:
        case {"type": "function" | "custom", "name": str(name)}:
            name = full_name(read_namespace(value.get("namespace"), "tool_choice"), name)
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "tools": list(tools), **more}:
            allowed = {"tools": [chat_choice(tool) for tool in tools], **more}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        case {"type": str(kind)}:
            remedy = (
                "give none, auto, required, a function or custom tool by name, or allowed_tools"
            )
            raise InvalidParameter("tool_choice.type", kind, remedy)
    return value


def _is_search(tool: Any) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind.startswith("web_search")


def _members(tool: dict[str, Any], param: str) -> list[Placed]:
    name, text, members = tool.get("name"), tool.get("description"), tool.get("tools")
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise InvalidParameter(f"{param}.name", name, NAME_RULE)
    if text is not None and not isinstance(text, str):
        raise InvalidParameter(f"{param}.description", text, "give a text")
    if not isinstance(members, list):
        raise InvalidParameter(f"{param}.tools", members, "give a list of functions")
    found: list[Placed] = []
    for j, each in enumerate(members):
        place = f"{param}.tools[{j}]"
        found.append(Placed(_member(_plain(each, place), name, text if j == 0 else None), place))
    return found


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


def _plain(tool: Any, param: str) -> Any:
    """The function that a custom tool is; all else as it is. The form of its text is told, not enforced."""
    if not isinstance(tool, dict) or tool.get("type") != "custom":
        return tool
    text = tool.get("description") or ""
    match tool.get("format"):
        case None | {"type": "text"}:
            pass
        case {"type": "grammar", "syntax": str(syntax), "definition": str(rules)} if (
            syntax in SYNTAXES
        ):
            if isinstance(text, str):
                text = f"{text}\n\nThe input conforms to this {syntax} grammar:\n{rules}".lstrip()
        case given:
            remedy = (
                'give {"type": "text"}, or {"type": "grammar", "syntax": "lark" or "regex", '
                '"definition": ...}'
            )
            raise InvalidParameter(f"{param}.format", given, remedy)
    return {
        "type": "function",
        "name": tool.get("name"),
        "description": text,
        "parameters": _SCHEMA,
    }


# Arguments of a custom tool's function, and the text in them.

_HEAD: Final = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_HIGH: Final = r"\\u[dD][89abAB][0-9a-fA-F]{2}"  # half of a surrogate pair
_UNIT: Final = re.compile(
    rf'[^"\\]+|{_HIGH}\\u[dD][c-fC-F][0-9a-fA-F]{{2}}|\\u[0-9a-fA-F]{{4}}|\\[^u]'
    r"|\\u(?=[0-9a-fA-F]{0,3}[^0-9a-fA-F])"  # no escape of JSON
)
_MAY_GROW: Final = re.compile(rf"{_HIGH}(?:\\(?:u[0-9a-fA-F]{{0,3}})?)?")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def arguments_of(text: str) -> str:
    return json.dumps({INPUT: text}, ensure_ascii=False)


class InputText:
    """Takes the arguments of a call in parts; gives the text of `input` as it comes.

    Arguments of another form are given at the end, as they are.
    """

    __slots__ = ("_is_text", "_rest")

    def __init__(self) -> None:
        self._rest = ""
        self._is_text = False  # its head was read

    def feed(self, part: str) -> str:
        self._rest += part
        if not self._is_text:
            head = _HEAD.match(self._rest)
            if head is None:
                return ""
            self._is_text = True
            self._rest = self._rest[head.end() :]
        return self._text(is_last=False)

    @property
    def is_whole(self) -> bool:
        """Whether the text came to its end, or arguments of another form did."""
        return self._rest.startswith('"') if self._is_text else is_object(self._rest)

    def end(self) -> str:
        return self._text(is_last=True) if self._is_text else self._rest

    def _text(self, *, is_last: bool) -> str:
        found: list[str] = []
        while (unit := _UNIT.match(self._rest)) is not None:
            if not is_last and _MAY_GROW.fullmatch(self._rest):
                break
            found.append(_unescaped(unit[0]))
            self._rest = self._rest[unit.end() :]
        return "".join(found)


def _unescaped(unit: str) -> str:
    try:
        text: str = json.loads(f'"{unit}"', strict=False)
    except ValueError:
        return unit  # no escape of JSON, as models write in patterns
    return _SURROGATE.sub("\ufffd", text)
