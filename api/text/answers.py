"""Answers apart, as their text comes: the model's reasoning, its text, and its calls of functions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from mallee.api.text.conversation import Function
from mallee.api.text.tokenizer import overlap
from mallee.api.text.tools.harmony import ANALYSIS, START, Harmony
from mallee.api.text.tools.parser import CallParser, Piece, ToolFormat
from mallee.api.text.tools.source import Call, Prose, joined_calls


class Thinking(NamedTuple):
    """The marks around a model's reasoning; `form`: it is read as a block of that, as calls are."""

    open: str
    close: str
    form: ToolFormat | None = None

    def is_open_in(self, prompt_end: str) -> bool:
        """Whether a prompt ends inside of the reasoning."""
        return prompt_end.rstrip().endswith(self.open)

    def is_closed_in(self, prompt_end: str) -> bool:
        """Whether a prompt ends behind it, so that none is written."""
        close = self.close if self.form is None else self.form.head
        return prompt_end.rstrip().endswith(close)


THINKING: Final = MappingProxyType(
    {
        "think": Thinking("<think>", "</think>"),
        "mistral": Thinking("[THINK]", "[/THINK]"),
        "harmony": Thinking(ANALYSIS, f"<|end|>{START}assistant", Harmony()),
    }
)


def thinking_of(template: str) -> str | None:
    """The name of the marks that a chat template knows; None if it knows none."""
    marks = ((name, each.open if each.form else each.close) for name, each in THINKING.items())
    return next((name for name, mark in marks if mark in template), None)


class Parsed(NamedTuple):
    """Parts of an answer. The first call may have no name: it goes on with the arguments of the last."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()

    def plus(self, other: "Parsed") -> "Parsed":
        calls = joined_calls((*self.calls, *other.calls))
        return Parsed(self.text + other.text, self.reasoning + other.reasoning, calls)


@dataclass(frozen=True, slots=True)
class Reading:
    """The way in which the answers to one request are read."""

    thinking: Thinking | None = None
    is_open: bool = False  # the prompt ends inside of the reasoning
    form: ToolFormat | None = None
    functions: Mapping[str, Function] = field(default_factory=dict)
    is_forced: bool = False  # the client named the one function that is called
    begun: str = ""  # the head of a message of `form` that the prompt ends with

    @property
    def marks(self) -> tuple[str, ...]:
        """Special tokens that the text must show."""
        of_calls = self.form.marks if self.form is not None else ()
        return (*of_calls, *(self.thinking[:2] if self.thinking else ()))

    @property
    def thinks_first(self) -> bool:
        """Whether an answer can't begin with its text."""
        is_block = self.thinking is not None and self.thinking.form is not None
        return self.is_open or (is_block and not self.begun)

    def parser(self) -> "AnswerParser":
        """A fresh one, for one answer."""
        return AnswerParser(self)


class AnswerParser:
    """The parts of one answer. They don't depend on how its text was split."""

    __slots__ = ("_calls", "_held", "_is_begun", "_state", "_thinking")

    def __init__(self, reading: Reading) -> None:
        self._thinking = reading.thinking
        self._state: Literal["before", "inside", "after", "text"] = "text"
        if reading.thinking is not None and reading.thinking.form is None:
            self._state = "inside" if reading.is_open else "before"
        self._held = ""
        self._is_begun = False  # reasoning was given out
        form = reading.form
        self._calls = CallParser(form, reading.functions) if form is not None else None
        if self._calls is not None:
            self._calls.feed(reading.begun)

    @property
    def is_in_call(self) -> bool:
        """Whether the text ends inside of what may be a call, which is held back."""
        return self._calls is not None and self._calls.is_reading

    def feed(self, text: str) -> Parsed:
        """Parts that no later text can change."""
        return self._read(text, is_last=False)

    def end(self) -> Parsed:
        """The rest, at the end of the text."""
        found = self._read("", is_last=True)
        return found.plus(_sorted(self._calls.end())) if self._calls is not None else found

    def _read(self, text: str, *, is_last: bool) -> Parsed:
        text, reasoning = self._split(text, is_last=is_last)
        if not text or self._calls is None:
            return Parsed(text, reasoning)
        return Parsed(reasoning=reasoning).plus(_sorted(self._calls.feed(text)))

    def _split(self, text: str, *, is_last: bool) -> tuple[str, str]:
        """(text of the answer itself, reasoning)."""
        if self._thinking is None or self._state == "text":
            return text, ""
        self._held += text
        reasoning = ""
        if self._state == "before":
            begun = self._held.lstrip()
            if not begun.startswith(self._thinking.open):
                if self._thinking.open.startswith(begun) and not is_last:
                    return "", ""
                self._state = "text"
                return self._release(), ""
            self._state, self._held = "inside", begun.removeprefix(self._thinking.open)
        if self._state == "inside":
            reasoning = self._think(self._thinking.close, is_last=is_last)
        if self._state == "after":
            self._held = self._held.lstrip("\n")
            if self._held:
                self._state = "text"
                return self._release(), reasoning
        return "", reasoning

    def _think(self, close: str, *, is_last: bool) -> str:
        """Reasoning without the line breaks around it."""
        if not self._is_begun:
            self._held = self._held.lstrip("\n")
        found, _, rest = self._held.partition(close)
        if len(found) < len(self._held):
            self._state, self._held = "after", rest
            return found.rstrip("\n")
        keep = 0 if is_last else overlap(found, close)
        cut = len(found[: len(found) - keep].rstrip("\n"))
        self._held = found[cut:]
        self._is_begun = self._is_begun or cut > 0
        return found[:cut]

    def _release(self) -> str:
        held, self._held = self._held, ""
        return held


def _sorted(pieces: list[Piece]) -> Parsed:
    texts = [piece for piece in pieces if isinstance(piece, str)]
    calls = joined_calls(piece for piece in pieces if isinstance(piece, Call))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Prose))
    return Parsed("".join(texts), reasoning, calls)
