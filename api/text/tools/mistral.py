"""Mistral's form: [TOOL_CALLS] and a JSON list, or in newer models a name, [ARGS] and an object."""

import json
from typing import Final

from mallee.api.text.tools.lark import Lark
from mallee.api.text.tools.source import Block, Call, Functions, Source, json_calls

OPEN: Final = "[TOOL_CALLS]"
ARGUMENTS: Final = "[ARGS]"
CALL_ID: Final = "[CALL_ID]"


class Mistral:
    """Both are read; `names_first`: the newer one is written."""

    opens = (OPEN,)
    marks = (OPEN, ARGUMENTS, CALL_ID)
    starts: tuple[str, ...] = ()
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
        calls = []
        for i, function in enumerate(functions.values()):
            if self._names_first:
                head, end = f"{function.name}{ARGUMENTS}", ""
            else:
                head, end = f'{{"name": {json.dumps(function.name)}, "arguments": ', ' "}"'
            arguments = lark.arguments(f"arguments_{i}", function.parameters)
            calls.append(lark.add(f"call_{i}", f"{lark.literal(head)} {arguments}{end}"))
        if self._names_first:
            lark.calls(calls, lark.literal(OPEN) if several else None)
        else:
            lark.add("call", " | ".join(calls))
            lark.add("calls", '"[" call (", " call)* "]"' if several else '"[" call "]"')
        return OPEN
