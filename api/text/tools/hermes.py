"""Hermes' form, Qwen's too: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

import json
from typing import Final

from mallee.api.text.tools.lark import Lark
from mallee.api.text.tools.parser import ToolFormat
from mallee.api.text.tools.source import Block, Functions, Source, object_call

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"


class Hermes(ToolFormat):
    """A call each block."""

    opens = (OPEN,)
    marks = (OPEN, CLOSE)

    def block(self, source: Source, functions: Functions) -> Block:
        yield from source.literal(OPEN)
        yield from source.space()
        if not (yield from object_call(source, functions)):
            return False
        yield from source.space()
        # At the end of the text it may be missing.
        return bool((yield from source.literal(CLOSE))) or source.pos == len(source.text)

    def grammar(self, lark: Lark, functions: Functions, *, several: bool) -> str:
        def head(name: str) -> str:
            return f'\n{{"name": {json.dumps(name)}, "arguments": '

        calls = lark.each_call(functions, head, "}\n" + CLOSE)
        lark.calls(calls, lark.literal("\n" + OPEN) if several else None)
        return OPEN
