"""Llama 3's form: the answer is {"name": ..., "parameters": {...}}, after <|python_tag|> or not.

One call an answer: Llama's own templates refuse histories with more. What the model writes with semicolons
between is read all the same.
"""

import json
from typing import Final

from mallee.api.text.tools.lark import Lark
from mallee.api.text.tools.source import Block, Functions, Source, object_call

TAG: Final = "<|python_tag|>"


class Llama:
    """A call each block."""

    opens: tuple[str, ...] = ()
    marks = (TAG,)
    starts = (TAG, "{", ";")
    has_short_ids = False

    def block(self, source: Source, functions: Functions) -> Block:
        yield from source.literal(TAG, ";")
        yield from source.space()
        is_call = yield from source.may_be_call()
        return is_call and (yield from object_call(source, functions))

    def grammar(self, lark: Lark, functions: Functions, *, several: bool) -> str:
        calls = []
        for i, function in enumerate(functions.values()):
            head = lark.literal(f'{{"name": {json.dumps(function.name)}, "parameters": ')
            arguments = lark.arguments(f"arguments_{i}", function.parameters)
            calls.append(lark.add(f"call_{i}", f'{head} {arguments} "}}"'))
        lark.calls(calls, None)
        return ""
