"""gpt-oss' form (harmony): messages of a header each, which are reasoning, text or calls.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
<|constrain|>json<|message|>{...}<|call|>, and text in the channels `final` and `commentary`. The prompt has
the first <|start|>assistant; a recipient may also stand before its channel.
"""

import re
from typing import Final

from mallee.api.text.tools.lark import Lark
from mallee.api.text.tools.parser import ToolFormat
from mallee.api.text.tools.source import Block, Call, Functions, Source

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
ANALYSIS: Final = CHANNEL + "analysis" + MESSAGE
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
_KIND: Final = "functions."
_RECIPIENT: Final = re.compile(r"\bto=([^\s<]+)")


class Harmony(ToolFormat):
    """A message each block. What a model puts before a header's last <|start|> is dropped."""

    opens = (START, CHANNEL)
    starts = ("to=" + _KIND,)
    marks = (START, CHANNEL, MESSAGE, "<|constrain|>", *_ENDS)
    head = CHANNEL + "final" + MESSAGE

    def block(self, source: Source, functions: Functions) -> Block:
        header = yield from source.until(MESSAGE)
        if header is None:
            return False
        yield from source.literal(MESSAGE)
        header = header.rpartition(START)[2]
        found = _RECIPIENT.search(header)
        name = found[1].removeprefix(_KIND) if found else ""
        is_thought = header.rpartition(CHANNEL)[2].startswith("analysis")
        if name in functions:
            yield from source.space()
            if not (yield from source.stands("{", *_ENDS)):
                return False
            yield Call(name, "")
            if (yield from source.stands(*_ENDS)):
                yield Call("", "{}")
            elif not (yield from source.arguments()):
                return False
            yield from source.space()
        elif found and not is_thought:
            return False
        else:
            yield from source.prose(*_ENDS, *self.opens, is_thought=is_thought)
        yield from source.literal(*_ENDS)
        return True

    def grammar(self, lark: Lark, functions: Functions, *, several: bool) -> str:
        def head(name: str) -> str:
            return f" to={_KIND}{name} <|constrain|>json{MESSAGE}"

        lark.calls(lark.each_call(functions, head, ""), None)  # <|call|> ends the answer
        return CHANNEL + "commentary"
