"""Rules of a grammar in llguidance's Lark, to which added tokens are no text."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from mallee.api.text.conversation import Function
from mallee.protocol.messages import JSON_ESCAPES, JSON_SPACE

# JSON as templates write it: with one space, so that the next turn's prompt begins with the answer's tokens.
_LAYOUT: Final = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "json_allowed_escapes": JSON_ESCAPES,
}
# As of an answer that is JSON alone.
_LOOSE: Final = {"whitespace_pattern": JSON_SPACE, "json_allowed_escapes": JSON_ESCAPES}
ANY_TEXT: Final = r"/(.|\n)*/"
FREE: Final[Mapping[str, Any]] = MappingProxyType({"type": "object"})
"""The schema of arguments that are held to none."""
_NAME: Final = "NAME"


class Lark:
    """Rules as they are added. `added_tokens`: the tokenizer's, which stand as such in literals."""

    def __init__(self, added_tokens: Mapping[str, int]) -> None:
        self._ids = added_tokens
        tokens = sorted(added_tokens, key=len, reverse=True)
        self._special = re.compile("(" + ("|".join(map(re.escape, tokens)) or r"(?!)") + ")")
        self._rules: list[str] = []

    def add(self, name: str, body: str) -> str:
        """A rule; its name, to be used in others."""
        self._rules.append(f"{name}: {body}")
        return name

    def literal(self, text: str) -> str:
        """`text` itself; an added token in it is the token and not its letters."""
        parts = enumerate(self._special.split(text))
        return " ".join(
            f"<[{self._ids[part]}]>" if i % 2 else json.dumps(part, ensure_ascii=False)
            for i, part in parts
            if part
        )

    def json(self, name: str, schema: Mapping[str, Any], *, is_loose: bool = False) -> str:
        """A rule for values of `schema`; `is_loose`: with white space as the model likes it."""
        layout = _LOOSE if is_loose else _LAYOUT
        return self.add(name, "%json " + json.dumps({**schema, "x-guidance": layout}))

    def arguments(self, name: str, parameters: Mapping[str, Any]) -> str:
        """A rule for the arguments of a function, an object whatever its schema leaves open."""
        none = {"properties": {}, "additionalProperties": False}
        return self.json(name, {"type": "object", **(parameters or none)})

    def each_call(
        self,
        functions: Mapping[str, Function],
        head: Callable[[str], str],
        end: str,
        between: str = "",
    ) -> list[str]:
        """A rule for a call of each function: `head` of its name, the rule `between`, its arguments, `end`.

        Functions whose arguments are free share one: hundreds of rules side by side are too many.
        """
        rules, free = [], [name for name, each in functions.items() if each.parameters == FREE]
        for i, function in enumerate(functions.values()):
            if function.name in free:
                continue
            arguments = self.arguments(f"arguments_{i}", function.parameters)
            body = f"{self.literal(head(function.name))} {between} {arguments} {self.literal(end)}"
            rules.append(self.add(f"call_{i}", body))
        if free:
            before, _, after = head(_NAME).partition(_NAME)
            parts = (
                *(self.literal(before), self.name(free), self.literal(after), between),
                *(self.json("any_arguments", FREE), self.literal(end)),
            )
            rules.append(self.add("free_call", " ".join(parts)))
        return rules

    def name(self, names: Sequence[str]) -> str:
        """A rule for one of the names of functions, as one word."""
        words = "|".join(re.escape(name).replace("/", r"\/") for name in names)
        return self.add("free_name", f"/{words}/")

    def calls(self, options: Sequence[str], separator: str | None) -> None:
        """The rule "calls": one of `options`, or more with `separator` between them."""
        self.add("call", " | ".join(options))
        self.add("calls", "call" if separator is None else f"call ({separator} call)*")

    def text_until(self, name: str, mark: str) -> str:
        """A rule for any text up to the first `mark`, with it."""
        if found := self._special.search(mark):  # a token that no text has
            # Letters before the token end the text's own lexeme, which takes all that it can.
            letters = re.escape(mark[: found.start()]).replace("/", r"\/")
            any_text = f"{ANY_TEXT[:-1]}{letters}/" if letters else self._any()
            return self.add(name, f"{any_text} {self.literal(mark[found.start() :])}")
        self._rules.append(f"{name}[suffix={json.dumps(mark, ensure_ascii=False)}]: {ANY_TEXT}")
        return name

    def _any(self) -> str:
        if "any_text: " + ANY_TEXT not in self._rules:
            self.add("any_text", ANY_TEXT)
        return "any_text"

    def build(self, start: str) -> str:
        text = "\n".join((f"start: {start}", *self._rules)) + "\n"
        return text.replace("::=", r":\u003a=")  # which would make it another notation
