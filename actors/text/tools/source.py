"""Text that comes in parts, read by a parser that looks as if all of it were there.

A parser is a generator over a `Source`: it yields None where it needs more text, and each call that it found.
The steps decide by the text alone and not by how it was split, so the results don't depend on that either.
"""

import json
import re
from collections.abc import Generator, Mapping
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from mallee.actors.text.conversation import Function

T = TypeVar("T")


class Call(NamedTuple):
    """A function's name and its arguments, the text of a JSON object."""

    name: str
    arguments: str


Wait: TypeAlias = Generator[None, None, T]
"""A step that waits for text, and its result."""
Block: TypeAlias = Generator[Call | None, None, bool]
"""The calls of a block; whether it came to its end. What follows its last call is not read then."""
Functions: TypeAlias = Mapping[str, Function]

_STRUCTURE: Final = re.compile(r"""["'\\(){}\[\]]""")
_CALL_KEYS: Final = ('"name"', '"type"', '"id"', '"arguments"', '"parameters"')
_CLOSES: Final = {"{": "}", "[": "]", "(": ")"}


class Source:
    """Text so far, a place in it, and whether more can come."""

    __slots__ = ("is_over", "pos", "text")

    def __init__(self, text: str = "", *, is_over: bool = False) -> None:
        self.text = text
        self.pos = 0
        self.is_over = is_over

    def literal(self, *options: str) -> Wait[str]:
        """The first of `options` that stands here, which is passed; else ""."""
        for option in options:
            while not self.is_over and self._may_become(option):
                yield
            if self.text.startswith(option, self.pos):
                self.pos += len(option)
                return option
        return ""

    def _may_become(self, option: str) -> bool:
        left = len(self.text) - self.pos
        return left < len(option) and option.startswith(self.text[self.pos :])

    def space(self) -> Wait[None]:
        """Pass white space."""
        while True:
            while self.pos < len(self.text) and self.text[self.pos].isspace():
                self.pos += 1
            if self.pos < len(self.text) or self.is_over:
                return
            yield

    def until(self, mark: str) -> Wait[str | None]:
        """The text before the next `mark`, which is left standing; None if none comes."""
        begin = looked = self.pos
        while (at := self.text.find(mark, looked)) < 0:
            if self.is_over:
                return None
            looked = max(begin, len(self.text) - len(mark) + 1)
            yield
        self.pos = at
        return self.text[begin:at]

    def bracketed(self, quotes: str = '"') -> Wait[str | None]:
        """The text from the bracket here to the one that closes it, strings passed over; else None."""
        begin, at, closing, quote = self.pos, self.pos, list[str](), ""
        while True:
            if at == begin < len(self.text) and self.text[at] not in _CLOSES:
                return None
            found = _STRUCTURE.search(self.text, at)
            at = len(self.text) if found is None else found.end()
            mark = "" if found is None else found[0]
            if quote:
                if mark == "\\":
                    at += 1  # the next character, which may not be there yet
                elif mark == quote:
                    quote = ""
            elif mark and mark in quotes:
                quote = mark
            elif mark in _CLOSES:
                closing.append(_CLOSES[mark])
            elif mark and mark in ")]}":
                if closing.pop() != mark:
                    return None
                if not closing:
                    self.pos = at
                    return self.text[begin:at]
            while at >= len(self.text):
                if self.is_over:
                    return None
                yield

    def stands(self, *options: str) -> Wait[str]:
        """The first of `options` that stands here, which is not passed; else ""."""
        begin = self.pos
        found = yield from self.literal(*options)
        self.pos = begin
        return found

    def call_object(self) -> Wait[Any]:
        """The object here if it may be a call by its first key, which is passed; else None.

        Other JSON is not waited for: it may be the whole answer.
        """
        begin = self.pos
        yield from self.literal("{")
        yield from self.space()
        key = yield from self.literal(*_CALL_KEYS)
        self.pos = begin
        return (yield from self.json()) if key else None

    def json(self) -> Wait[Any]:
        """The value of the JSON here, an object or a list, which is passed; else None."""
        text = yield from self.bracketed()
        return None if text is None else read_json(text)


def read_json(text: str) -> Any:
    """The value, with raw line breaks in strings as models write them; None if it is no JSON."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def call_of(name: object, arguments: object, functions: Functions) -> Call | None:
    """A call of one of `functions`; None if it is none. Models write no arguments in several ways."""
    if not isinstance(name, str) or name not in functions:
        return None
    if isinstance(arguments, str):  # JSON in JSON
        arguments = read_json(arguments) if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        text = json.dumps(arguments, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return Call(name, text)


def call_of_object(value: object, functions: Functions) -> Call | None:
    """A call as {"name": ..., "arguments": ... or "parameters": ...}."""
    if not isinstance(value, dict) or not ("arguments" in value or "parameters" in value):
        return None
    return call_of(value.get("name"), value.get("arguments", value.get("parameters")), functions)
