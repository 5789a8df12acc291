"""Text that comes in parts, read by a parser that looks as if all of it were there.

A parser is a generator over a `Source`: it yields None where it needs more text, and each call that it found.
The steps decide by the text alone and not by how it was split, so the results don't depend on that either.

Arguments are the model's own text and come as it is written: a call is one as soon as its name stands there
and its arguments begin. If it breaks afterwards, it is a call with the text so far, and what follows is text.
Calls whose arguments stand before the name, or are no object, come whole and are written again.
"""

import json
import re
from collections.abc import Generator, Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from mallee.api.text.conversation import MAX_LEVELS, Function, is_deeper
from mallee.api.text.tokenizer import overlap

T = TypeVar("T")


class Call(NamedTuple):
    """A function's name and arguments, the text of a JSON object; without a name, more of that text.

    `own_id` is the id that the model itself gave, in forms that have one.
    """

    name: str
    arguments: str
    own_id: str = ""


class Prose(NamedTuple):
    """A part of a message that a form writes as a block too: reasoning, or text."""

    text: str
    is_thought: bool


Wait: TypeAlias = Generator[None, None, T]
"""A step that waits for text, and its result."""
Block: TypeAlias = Generator[Call | Prose | None, None, bool]
"""The calls of a block in parts, or its prose; whether it came to its end. If not, what follows is text."""
Functions: TypeAlias = Mapping[str, Function]

_STRUCTURE: Final = re.compile(r"""["'\\(){}\[\]]""")
_ARGUMENT_KEYS: Final = ('"arguments"', '"parameters"')
_CALL_KEYS: Final = ('"name"', '"type"', '"id"', *_ARGUMENT_KEYS)
_IN_STRING: Final = re.compile(r'["\\\x00-\x1f]')
_BETWEEN: Final = re.compile(r'["{}\[\]]')
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

    def prose(self, *ends: str, is_thought: bool) -> "Block":
        """The text up to the first of `ends` as it comes, at least one part; the end is left standing."""
        pattern = re.compile("|".join(map(re.escape, ends)))
        yield Prose("", is_thought)
        while True:
            found = pattern.search(self.text, self.pos)
            end = found.start() if found else len(self.text)
            if not found and not self.is_over:
                end -= max(overlap(self.text[self.pos :], mark) for mark in ends)
            text, self.pos = self.text[self.pos : end], end
            if text:
                yield Prose(text, is_thought)
            if found or self.is_over:
                return True
            yield None

    def bracketed(self, quotes: str = '"', opened: str = "") -> Wait[str | None]:
        """The text from the bracket here to the one that closes it, strings passed over; else None.

        `opened`: the brackets that stand before it and are closed too.
        """
        begin, at, quote = self.pos, self.pos, ""
        closing = [_CLOSES[bracket] for bracket in opened]
        while True:
            if not opened and at == begin < len(self.text) and self.text[at] not in _CLOSES:
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

    def may_be_call(self) -> Wait[bool]:
        """Whether the object here may be a call by its first key. Other JSON may be the whole answer."""
        begin = self.pos
        yield from self.literal("{")
        yield from self.space()
        key = yield from self.literal(*_CALL_KEYS)
        self.pos = begin
        return bool(key)

    def call_head(self, functions: Functions) -> Wait[str]:
        """The name of the call that the object here is, passed up to its arguments' bracket.

        "" and nothing passed, if the arguments are no object or don't follow a name of `functions`.
        """
        begin, name = self.pos, ""
        yield from self.literal("{")
        while True:
            yield from self.space()
            key = yield from self.literal(*_CALL_KEYS)
            yield from self.space()
            if not key or not (yield from self.literal(":")):
                break
            yield from self.space()
            if key in _ARGUMENT_KEYS:
                if name in functions and (yield from self.stands("{")):
                    return name
                break
            text = (yield from self.until('"')) if (yield from self.literal('"')) else None
            if text is None or "\\" in text:
                break
            name = text if key == '"name"' else name
            yield from self.literal('"')
            yield from self.space()
            if not (yield from self.literal(",")):
                break
        self.pos = begin
        return ""

    def arguments(self) -> "Block":
        """The JSON object here as it comes, by its brackets; False if it has too many or breaks off.

        Line breaks and such in its strings are escaped, which models forget.
        """
        closing, is_quoted = list[str](), False
        while True:
            parts: list[str] = []
            is_open = True
            while is_open and self.pos < len(self.text):
                found = (_IN_STRING if is_quoted else _BETWEEN).search(self.text, self.pos)
                at = len(self.text) if found is None else found.start()
                parts.append(self.text[self.pos : at])
                self.pos = at
                if found is None:
                    break
                mark = found[0]
                if mark == "\\":
                    mark = self.text[at : at + 2]
                    if len(mark) < 2:
                        break  # with the character that it escapes
                elif mark == '"':
                    is_quoted = not is_quoted
                elif is_quoted:
                    parts.append(json.dumps(mark)[1:-1])
                    self.pos += 1
                    continue
                elif mark in _CLOSES:
                    if len(closing) == MAX_LEVELS:
                        is_open = False
                        break
                    closing.append(_CLOSES[mark])
                elif closing[-1] == mark:
                    closing.pop()
                else:
                    is_open = False
                    break
                parts.append(mark)
                self.pos += len(mark)
                is_open = bool(closing)
            if text := "".join(parts):
                yield Call("", text)
            if not is_open:
                return not closing
            if self.is_over:
                return False
            yield None

    def call_end(self) -> Wait[bool]:
        """Pass what stands behind the arguments in a call's object, up to its end."""
        yield from self.space()
        begin = self.pos
        if not (yield from self.stands("}", ",")):
            return False
        rest = yield from self.bracketed(opened="{")
        if rest is None or read_json('{"arguments": 0' + rest) is None:
            self.pos = begin
            return False
        return True

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
    text = written_json(arguments) if isinstance(arguments, dict) else None
    return Call(name, text) if text is not None else None


def written_json(value: object) -> str | None:
    """The value as JSON, in UTF-8; None if it can't be, or is too deep for a history."""
    if is_deeper(value, MAX_LEVELS):
        return None
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return None
    return text


def call_of_object(value: object, functions: Functions) -> Call | None:
    """A call as {"name": ..., "arguments": ... or "parameters": ...}."""
    if not isinstance(value, dict) or not ("arguments" in value or "parameters" in value):
        return None
    return call_of(value.get("name"), value.get("arguments", value.get("parameters")), functions)


def object_call(source: Source, functions: Functions) -> Block:
    """The call that the JSON object here is."""
    if name := (yield from source.call_head(functions)):
        yield Call(name, "")
        return (yield from source.arguments()) and (yield from source.call_end())
    call = call_of_object((yield from source.json()), functions)
    if call is None:
        return False
    yield call
    return True


def json_calls(source: Source, functions: Functions) -> Block:
    """The call that the JSON object here is, or those of a list of them."""
    if not (yield from source.literal("[")):
        return (yield from object_call(source, functions))
    while True:
        yield from source.space()
        if not (yield from object_call(source, functions)):
            return False
        yield from source.space()
        if (yield from source.literal("]")):
            return True
        if not (yield from source.literal(",")):
            return False


def joined_calls(parts: Iterable[Call]) -> tuple[Call, ...]:
    """The calls, with each part that has no name added to the one before; the first may have none."""
    found: list[Call] = []
    for part in parts:
        if found and not part.name:
            found[-1] = found[-1]._replace(arguments=found[-1].arguments + part.arguments)
        else:
            found.append(part)
    return tuple(found)
