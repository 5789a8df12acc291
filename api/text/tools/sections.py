# ruff: noqa: RUF001 - the tokens have a wide bar
"""Sections of calls, each of them a head, a separator and JSON: DeepSeek's, in V3 within a fence, and Kimi's.

Kimi's head is the id of the call, `functions.NAME:NUMBER`, which its template writes again.
"""

import re
from typing import Final, NamedTuple

from mallee.api.text.tools.lark import Lark
from mallee.api.text.tools.parser import ToolFormat
from mallee.api.text.tools.source import Block, Call, Functions, Source


class Marks(NamedTuple):
    """The tokens around calls."""

    begin: str
    end: str
    call: str
    call_end: str
    separator: str


DEEPSEEK: Final = Marks(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
KIMI: Final = Marks(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)
_KIND: Final = "functions."
_NUMBER: Final = "[0-9]{1,9}"
_OWN_ID: Final = re.compile(rf"(?:functions\.)?(\S+):{_NUMBER}")


class Sections(ToolFormat):
    """DeepSeek's of V3 and V3.1 are both read; `is_fenced`: V3's is written."""

    def __init__(self, marks: Marks, *, is_fenced: bool = False) -> None:
        self._marks = self.marks = marks
        self._has_ids = marks is KIMI
        self._is_fenced = is_fenced
        self.opens = (marks.begin, marks.call)

    def block(self, source: Source, functions: Functions) -> Block:
        marks = self._marks
        yield from source.literal(marks.begin)
        while True:
            yield from source.space()
            if not (yield from source.literal(marks.call)):
                break
            head = yield from source.until(marks.separator)
            if head is None:
                return False
            yield from source.literal(marks.separator)
            yield from source.space()
            name, own_id, is_fenced = head.strip(), "", not (yield from source.stands("{"))
            if self._has_ids:
                found = _OWN_ID.fullmatch(name)
                own_id, name = name, found[1] if found else ""
            elif is_fenced:
                name = ((yield from source.until("```json")) or "").strip()
                yield from source.literal("```json")
                yield from source.space()
            if name not in functions or not (yield from source.stands("{")):
                return False
            yield Call(name, "", own_id)
            if not (yield from source.arguments()):
                return False
            yield from source.space()
            if is_fenced:
                yield from source.literal("```")
                yield from source.space()
            if not (yield from source.literal(marks.call_end)) and source.pos < len(source.text):
                return False
        yield from source.literal(marks.end)
        return True

    def grammar(self, lark: Lark, functions: Functions, *, several: bool) -> str:
        marks, number = self._marks, ""

        def head(name: str) -> str:
            if self._has_ids:
                return f"{marks.call}{_KIND}{name}:"
            fenced = f"{marks.call}function{marks.separator}{name}\n```json\n"
            return fenced if self._is_fenced else f"{marks.call}{name}{marks.separator}"

        if self._has_ids:
            number = f"/{_NUMBER}/ {lark.literal(marks.separator)}"
        end = "\n```" + marks.call_end if self._is_fenced else marks.call_end
        lark.add("call", " | ".join(lark.each_call(functions, head, end, number)))
        between = lark.literal("\n") + " " if self._is_fenced else ""
        more = f"({between}call)*" if several else ""
        lark.add("calls", f"call {more} {lark.literal(marks.end)}")
        return marks.begin
