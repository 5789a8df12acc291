# ruff: noqa: RUF001 - DeepSeek's tokens have a wide bar
"""Forms whose arguments come one by one between tags: Qwen3-Coder's, GLM's, MiniMax', DeepSeek V3.2's.

Texts stand as they are; all other values are JSON, or words of Python. So arguments are written as JSON here,
and come by parameter.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from mallee.api.text.conversation import Function
from mallee.api.text.tools.lark import FREE, Lark
from mallee.api.text.tools.parser import ToolFormat
from mallee.api.text.tools.source import (
    Block,
    Call,
    Functions,
    Source,
    Wait,
    read_json,
    written_json,
)

_WORDS: Final = {"True": True, "False": False, "None": None}
_LINE: Final = "\n"
_IS_TEXT: Final = ' string="true">'
_IS_JSON: Final = ' string="false">'


class Tags(NamedTuple):
    """The parts of a block of calls.

    `call` is what stands before a name, behind it and at the call's end. A name with nothing behind it ends
    at the next tag, and a call without an end with its block. `values` may begin a value; the first of them
    is written, or that which says whether the value is a text. `gap` is written between parts. `marks` are
    those that are tokens, without any the two of `block`.
    """

    block: tuple[str, str]
    call: tuple[str, str, str]
    key: tuple[str, str]
    values: tuple[str, ...]
    value_end: str
    gap: str = "\n"
    holds_several: bool = False
    marks: tuple[str, ...] = ()


QWEN_CODER: Final = Tags(
    block=("<tool_call>", "</tool_call>"),
    call=("<function=", ">", "</function>"),
    key=("<parameter=", ">"),
    values=(_LINE, ""),
    value_end="</parameter>",
)
GLM45: Final = Tags(
    block=("<tool_call>", "</tool_call>"),
    call=("", "", ""),
    key=("<arg_key>", "</arg_key>"),
    values=("\n<arg_value>", "<arg_value>"),
    value_end="</arg_value>",
    marks=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
GLM47: Final = GLM45._replace(values=GLM45.values[::-1], gap="")
MINIMAX: Final = Tags(
    block=("<minimax:tool_call>", "</minimax:tool_call>"),
    call=('<invoke name="', '">', "</invoke>"),
    key=('<parameter name="', '">'),
    values=("",),
    value_end="</parameter>",
    holds_several=True,
)
DSML: Final = Tags(
    block=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    call=('<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>"),
    key=('<｜DSML｜parameter name="', '"'),
    values=(_IS_TEXT, _IS_JSON, ">"),
    value_end="</｜DSML｜parameter>",
    holds_several=True,
    marks=("｜DSML｜",),
)


class Tagged(ToolFormat):
    """Calls between `tags`, a block of which may lack its outer ones."""

    def __init__(self, tags: Tags) -> None:
        self._tags = tags
        self.opens = tuple(filter(None, (tags.block[0], tags.call[0])))
        self.marks = tags.marks or tags.block

    def block(self, source: Source, functions: Functions) -> Block:
        (opening, close), (head, name_end, call_end) = self._tags[:2]
        is_wrapped = bool((yield from source.literal(opening)))
        is_empty = True
        while True:
            yield from source.space()
            if head and not (yield from source.literal(head)):
                break
            name = ((yield from source.until(name_end or "<")) or "").strip()
            yield from source.literal(name_end)
            if name not in functions or not (yield from self._arguments(source, functions[name])):
                return False
            if not call_end or not is_wrapped:
                return True
            is_empty = False
        if is_empty:
            return False
        return bool((yield from source.literal(close))) or source.pos == len(source.text)

    def _arguments(self, source: Source, function: Function) -> Block:
        """The arguments up to the call's end."""
        tags, name, begin = self._tags, function.name, "{"
        kinds = function.parameters.get("properties")
        end = tags.call[-1] or tags.block[-1]
        while True:
            yield from source.space()
            mark = yield from source.literal(tags.key[0], end)
            if mark == end:
                yield Call(name, "{}" if begin == "{" else "}")
                return True
            key = (yield from source.until(tags.key[1])) if mark else None
            if key is None:
                return False
            yield from source.literal(tags.key[1])
            opened = yield from source.literal(*tags.values)
            if not opened and "" not in tags.values:
                return False
            text = yield from self._text(source, has_lines=opened == _LINE)
            if text is None:
                return False
            kind = kinds.get(key) if isinstance(kinds, Mapping) else None
            kind = {"type": "string"} if opened == _IS_TEXT else {} if opened == _IS_JSON else kind
            member = written_json({key: _value(text, kind)})
            if member is None:
                return False
            yield Call(name, begin + member[1:-1])
            name, begin = "", ", "

    def _text(self, source: Source, *, has_lines: bool) -> Wait[str | None]:
        """The text of a value, `has_lines`: on lines of its own; what ends it is passed."""
        value_end, begin = self._tags.value_end, source.pos
        if has_lines:
            if (yield from source.literal(value_end)):
                yield from source.space()
                if (yield from source.stands(self._tags.key[0], self._tags.call[-1])):
                    return ""
                source.pos = begin  # a text that begins like that
            value_end = "\n" + value_end
        text = yield from source.until(value_end)
        yield from source.literal(value_end)
        return text

    def grammar(self, lark: Lark, functions: Functions, *, several: bool) -> str:
        tags = self._tags
        (opening, close), (head, name_end, end) = tags.block, tags.call
        before, after = (tags.gap if head else "") + head, name_end + tags.gap
        if not tags.holds_several:
            end += (tags.gap if end else "") + close
        text = lark.text_until("text", self._written_end())
        calls = []
        if free := [name for name, each in functions.items() if each.parameters == FREE]:
            begins = tags.values[:2] if _IS_TEXT in tags.values else tags.values[:1]
            values = " | ".join(lark.literal(tags.key[1] + each) for each in begins)
            key = f'{lark.literal(tags.key[0])} /[^<>"\\n]+/ ({values})'
            named = f"{lark.literal(before)} {lark.name(free)} {lark.literal(after)}"
            rule = f"{named} ({key} {text} {lark.literal(tags.gap)})* {lark.literal(end)}"
            calls.append(lark.add("free_call", rule))
        for i, function in enumerate(functions.values()):
            if function.name not in free:
                members = self._members(lark, function.parameters, f"value_{i}", text)
                body = (lark.literal(before + function.name + after), *members, lark.literal(end))
                calls.append(lark.add(f"call_{i}", " ".join(body)))
        if tags.holds_several:
            lark.add("call", " | ".join(calls))
            lark.add("calls", f"call{'+' if several else ''} {lark.literal(tags.gap + close)}")
        else:
            lark.calls(calls, lark.literal(tags.gap + opening) if several else None)
        return opening

    def _written_end(self) -> str:
        """The end of a value, with the line break before it where values stand on lines of their own."""
        return ("\n" if _LINE in self._tags.values else "") + self._tags.value_end

    def _members(
        self, lark: Lark, parameters: Mapping[str, Any], name: str, text: str
    ) -> Iterator[str]:
        """Rules of the arguments, in the order of their schema. `text`: the rule of a text with its end."""
        tags, end = self._tags, lark.literal(self._written_end())
        kinds, required = parameters.get("properties"), parameters.get("required")
        for i, (key, kind) in enumerate(kinds.items() if isinstance(kinds, Mapping) else ()):
            types = _types(kind)
            # Where a tag says that a value is a text, null is none.
            is_text = types == ["string"] if _IS_TEXT in tags.values else _is_text(types)
            is_json = _IS_JSON in tags.values and not is_text
            begin = lark.literal(tags.key[0] + key + tags.key[1] + tags.values[is_json])
            if is_text:
                choices = _choices(kind)
                options = [] if choices is None else [c for c in choices if isinstance(c, str)]
                if choices and None in choices:
                    options.append("null")
                value = f"({' | '.join(map(lark.literal, options))}) {end}" if options else text
            else:
                given = dict(kind) if isinstance(kind, Mapping) else {}
                given = {"enum": []} if kind is False else given
                shared = {k: parameters[k] for k in ("$defs", "definitions") if k in parameters}
                value = f"{lark.json(f'{name}_{i}', {**shared, **given})} {end}"
            is_needed = isinstance(required, list) and key in required
            yield f"({begin} {value} {lark.literal(tags.gap)})" + ("" if is_needed else "?")


def _value(text: str, kind: object) -> Any:
    types = _types(kind)
    if _is_text(types) and not ("null" in types and text in ("null", "None")):
        return text
    if text in _WORDS:
        return _WORDS[text]
    value = read_json(text)
    return text if value is None and text != "null" else value


def _types(kind: object) -> list[object]:
    """The types that a schema names, itself or in the options of `anyOf`, if none of these is enumerated."""
    if not isinstance(kind, Mapping):
        return []
    options = kind.get("anyOf")
    parts = [kind]
    if isinstance(options, list) and "type" not in kind:
        parts = [each for each in options if isinstance(each, Mapping) and _choices(each) is None]
        if len(parts) < len(options):
            return []
    types = [each.get("type") for each in parts]
    return [name for each in types for name in (each if isinstance(each, list) else [each])]


def _is_text(types: list[object]) -> bool:
    """Whether values of `types` stand as texts: strings, and null beside them."""
    return "string" in types and all(name in ("string", "null") for name in types)


def _choices(kind: object) -> list[Any] | None:
    """The values that a schema enumerates. Of texts these count, and no other condition."""
    found = None
    if isinstance(kind, Mapping):
        found = kind.get("enum", [kind["const"]] if "const" in kind else None)
    return found if isinstance(found, list) else None
