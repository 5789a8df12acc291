"""Llama 3's form: the answer is {"name": ..., "parameters": {...}}, after <|python_tag|> or not.

One call an answer: Llama's own templates refuse histories with more. What the model writes with semicolons
between is read all the same.
"""

import json
from typing import Final

from mallee.api.text.tools.lark import Lark
from mallee.api.text.tools.parser import ToolFormat
from mallee.api.text.tools.source import Block, Functions, Source, object_call

TAG: Final = "<|python_tag|>"


class Llama(ToolFormat):
    """A call each block."""

    marks = (TAG,)
    starts = (TAG, "{", ";")

    def block(self, source: Source, functions: Functions) -> Block:
        yield from source.literal(TAG, ";")
        yield from source.space()
        is_call = yield from source.may_be_call()
        return is_call and (yield from object_call(source, functions))

    def grammar(self, lark: Lark, functions: Functions, *, several: bool) -> str:
        def head(name: str) -> str:
            return f'{{"name": {json.dumps(name)}, "parameters": '

        lark.calls(lark.each_call(functions, head, "}"), None)
        return ""
