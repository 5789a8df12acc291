"""Qwen3-Coder's form: <function=name><parameter=key>value</parameter></function> in <tool_call>.

Texts stand as they are, between two line breaks; all other values are JSON, or words of Python. So arguments
are written as JSON here, and come by parameter.
"""

from collections.abc import Mapping
from typing import Any, Final

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

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
VALUE_END: Final = "</parameter>"
_WORDS: Final = {"True": True, "False": False, "None": None}


class QwenCoder(ToolFormat):
    """A call each block."""

    opens = (OPEN, "<function=")
    marks = (OPEN, CLOSE)

    def block(self, source: Source, functions: Functions) -> Block:
        is_wrapped = bool((yield from source.literal(OPEN)))
        yield from source.space()
        if not (yield from source.literal("<function=")):
            return False
        name = yield from source.until(">")
        if name is None or name not in functions:
            return False
        yield from source.literal(">")
        kinds = functions[name].parameters.get("properties")
        begin = "{"
        while True:
            yield from source.space()
            mark = yield from source.literal("<parameter=", "</function>")
            if mark == "</function>":
                yield Call(name, "{}" if begin == "{" else "}")
                break
            key = (yield from source.until(">")) if mark else None
            if key is None:
                return False
            yield from source.literal(">")
            text = yield from _text(source)
            if text is None:
                return False
            kind = kinds.get(key) if isinstance(kinds, Mapping) else None
            member = written_json({key: _value(text, kind)})
            if member is None:
                return False
            yield Call(name, begin + member[1:-1])
            name, begin = "", ", "
        if not is_wrapped:
            return True
        yield from source.space()
        return bool((yield from source.literal(CLOSE))) or source.pos == len(source.text)

    def grammar(self, lark: Lark, functions: Functions, *, several: bool) -> str:
        text = lark.text_until("text", "\n" + VALUE_END)
        end = lark.literal("</function>\n" + CLOSE)
        calls = []
        if free := [name for name, each in functions.items() if each.parameters == FREE]:
            key = lark.literal("<parameter=") + r" /[^<>\n]+/ " + lark.literal(">\n")
            head = lark.literal("\n<function="), lark.name(free), lark.literal(">\n")
            newline = lark.literal("\n")
            values = f"({key} {text} {newline})*"
            calls.append(lark.add("free_call", " ".join((*head, values, end))))
        for i, function in enumerate(functions.values()):
            if function.name in free:
                continue
            body = [lark.literal(f"\n<function={function.name}>\n")]
            kinds = function.parameters.get("properties")
            required = function.parameters.get("required")
            for j, (key, kind) in enumerate(kinds.items() if isinstance(kinds, Mapping) else ()):
                parts = (
                    lark.literal(f"<parameter={key}>\n"),
                    _value_rule(lark, f"value_{i}_{j}", kind, function.parameters, text),
                    lark.literal("\n"),
                )
                is_needed = isinstance(required, list) and key in required
                body.append(f"({' '.join(parts)})" + ("" if is_needed else "?"))
            calls.append(lark.add(f"call_{i}", " ".join((*body, end))))
        lark.calls(calls, lark.literal("\n" + OPEN) if several else None)
        return OPEN


def _text(source: Source) -> Wait[str | None]:
    """The text of a value, on lines of its own or not; what ends it is passed."""
    if not (yield from source.literal("\n")):
        text = yield from source.until(VALUE_END)
        yield from source.literal(VALUE_END)
        return text
    begin = source.pos
    if (yield from source.literal(VALUE_END)):
        yield from source.space()
        if (yield from source.stands("<parameter=", "</function>")):
            return ""
        source.pos = begin  # a text that begins like that
    text = yield from source.until("\n" + VALUE_END)
    yield from source.literal("\n" + VALUE_END)
    return text


def _value(text: str, kind: object) -> Any:
    types = kind.get("type") if isinstance(kind, Mapping) else None
    types = types if isinstance(types, list) else [types]
    is_text = "string" in types
    if is_text and not ("null" in types and text in ("null", "None")):
        return text
    if text in _WORDS:
        return _WORDS[text]
    value = read_json(text)
    return text if value is None and text != "null" else value


def _value_rule(
    lark: Lark, name: str, kind: object, parameters: Mapping[str, Any], text: str
) -> str:
    """Of a value and what ends it. Of texts an enumeration counts, and no other condition."""
    end = lark.literal("\n" + VALUE_END)
    given = dict(kind) if isinstance(kind, Mapping) else {} if kind is not False else {"enum": []}
    choices = given.get("enum", [given["const"]] if "const" in given else None)
    if given.get("type") == "string":
        if isinstance(choices, list) and choices and all(isinstance(c, str) for c in choices):
            return f"({' | '.join(map(lark.literal, choices))}) {end}"
        return text
    shared = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    return f"{lark.json(name, {**shared, **given})} {end}"
