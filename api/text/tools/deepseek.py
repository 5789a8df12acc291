# ruff: noqa: RUF001 - the tokens have a wide bar
"""DeepSeek's form: a block of calls, each of them a name, a separator and JSON; in V3 within a fence."""

from typing import Final

from mallee.api.text.tools.lark import Lark
from mallee.api.text.tools.parser import ToolFormat
from mallee.api.text.tools.source import Block, Call, Functions, Source

BEGIN: Final = "<｜tool▁calls▁begin｜>"
END: Final = "<｜tool▁calls▁end｜>"
CALL: Final = "<｜tool▁call▁begin｜>"
CALL_END: Final = "<｜tool▁call▁end｜>"
SEPARATOR: Final = "<｜tool▁sep｜>"


class DeepSeek(ToolFormat):
    """V3's and V3.1's are read; `is_fenced`: V3's is written."""

    opens = (BEGIN, CALL)
    marks = (BEGIN, END, CALL, CALL_END, SEPARATOR)

    def __init__(self, *, is_fenced: bool) -> None:
        self._is_fenced = is_fenced

    def block(self, source: Source, functions: Functions) -> Block:
        yield from source.literal(BEGIN)
        while True:
            yield from source.space()
            if not (yield from source.literal(CALL)):
                break
            head = yield from source.until(SEPARATOR)
            if head is None:
                return False
            yield from source.literal(SEPARATOR)
            name, is_fenced = head.strip(), not (yield from source.stands("{"))
            if is_fenced:
                name = ((yield from source.until("```json")) or "").strip()
                yield from source.literal("```json")
                yield from source.space()
            if name not in functions or not (yield from source.stands("{")):
                return False
            yield Call(name, "")
            if not (yield from source.arguments()):
                return False
            if is_fenced:
                yield from source.space()
                yield from source.literal("```")
            yield from source.space()
            if not (yield from source.literal(CALL_END)) and source.pos < len(source.text):
                return False
        yield from source.literal(END)
        return True

    def grammar(self, lark: Lark, functions: Functions, *, several: bool) -> str:
        def head(name: str) -> str:
            fenced = f"{CALL}function{SEPARATOR}{name}\n```json\n"
            return fenced if self._is_fenced else f"{CALL}{name}{SEPARATOR}"

        end = "\n```" + CALL_END if self._is_fenced else CALL_END
        calls = lark.each_call(functions, head, end)
        lark.add("call", " | ".join(calls))
        between = lark.literal("\n") + " " if self._is_fenced else ""
        more = f"({between}call)*" if several else ""
        lark.add("calls", f"call {more} {lark.literal(END)}")
        return BEGIN
