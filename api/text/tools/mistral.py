"""Mistral's form: [TOOL_CALLS] and a JSON list, or in newer models a name, [ARGS] and an object."""

import json
from typing import Final

from mallee.api.text.tools.lark import Lark
from mallee.api.text.tools.parser import ToolFormat
from mallee.api.text.tools.source import Block, Call, Functions, Source, json_calls

OPEN: Final = "[TOOL_CALLS]"
ARGUMENTS: Final = "[ARGS]"
CALL_ID: Final = "[CALL_ID]"


class Mistral(ToolFormat):
    """Both are read; `names_first`: the newer one is written."""

    opens = (OPEN,)
    marks = (OPEN, ARGUMENTS, CALL_ID)
    has_short_ids = True

    def __init__(self, *, names_first: bool) -> None:
        self._names_first = names_first

    def block(self, source: Source, functions: Functions) -> Block:
        yield from source.literal(OPEN)
        yield from source.space()
        if (yield from source.stands("[", "{")):
            return (yield from json_calls(source, functions))
        text = yield from source.until("{")
        head = (text or "").partition(ARGUMENTS)[0]
        name = head.partition(CALL_ID)[0].strip()
        if text is None or name not in functions:
            return False
        yield Call(name, "")
        return (yield from source.arguments())

    def grammar(self, lark: Lark, functions: Functions, *, several: bool) -> str:
        def head(name: str) -> str:
            newer = f"{name}{ARGUMENTS}"
            return newer if self._names_first else f'{{"name": {json.dumps(name)}, "arguments": '

        calls = lark.each_call(functions, head, "" if self._names_first else "}")
        if self._names_first:
            lark.calls(calls, lark.literal(OPEN) if several else None)
        else:
            lark.add("call", " | ".join(calls))
            lark.add("calls", '"[" call (", " call)* "]"' if several else '"[" call "]"')
        return OPEN
