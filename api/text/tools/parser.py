"""Answers apart: their plain text and the calls in it, as the text comes.

Anything that is no call of a known function stays plain text, to the character. White space beside a call is
the call's: templates write it there again.
"""

import re
from abc import ABC, abstractmethod
from typing import Final, TypeAlias

from mallee.api.text.tokenizer import overlap
from mallee.api.text.tools.lark import Lark
from mallee.api.text.tools.source import Block, Call, Functions, Prose, Source

Piece: TypeAlias = str | Call | Prose

# Blocks without a call in one answer, after which all is text: each may have been read to the answer's end.
MAX_FAILED: Final = 64


class ToolFormat(ABC):
    """The form in which a family of models writes calls.

    With one of `opens` a block begins anywhere, with one of `starts` only at the answer's beginning, or after
    another. `marks`: texts of blocks that are special tokens of some tokenizers, and have to be shown.
    `has_short_ids`: templates want ids of calls of nine letters and digits. `head` stands before the text of
    an answer without calls.
    """

    opens: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    has_short_ids = False
    head = ""

    @abstractmethod
    def block(self, source: Source, functions: Functions) -> Block:
        """The calls of a block that begins at the source's place."""

    @abstractmethod
    def grammar(self, lark: Lark, functions: Functions, *, several: bool) -> str:
        """Add the rule "calls" for what follows the text that is returned, with which calls begin."""


class CallParser:
    """The text of one answer, apart. Its pieces don't depend on how the text was split."""

    __slots__ = (
        *("_block", "_format", "_functions", "_has_text", "_has_thought", "_held", "_is_fresh"),
        *("_is_over", "_num_calls", "_num_failed", "_opened", "_opening", "_source", "_space"),
    )

    def __init__(self, form: ToolFormat, functions: Functions) -> None:
        self._format = form
        self._functions = functions
        marks = sorted(form.opens, key=len, reverse=True)
        self._opening = re.compile("|".join(map(re.escape, marks)) or r"(?!)")
        self._held = ""  # text outside of blocks that isn't given out
        self._space = ""  # white space before it, which may be beside a call
        self._is_fresh = True  # only white space since the beginning or the last block
        self._has_text = self._has_thought = False
        self._num_calls = 0
        self._num_failed = 0
        self._is_over = False
        self._block: Block | None = None
        self._opened = ""  # the mark of the block, as long as it has no call
        self._source = Source()

    @property
    def is_reading(self) -> bool:
        """Whether the text ends inside of what may be a call, which is held back."""
        return self._block is not None

    def feed(self, text: str) -> list[Piece]:
        """The pieces that no later text can change."""
        if self._block is not None:
            held, self._source.text = self._source.text, ""  # one reference: extended in place
            held += text
            self._source.text = held
        else:
            self._held += text
        pieces: list[Piece] = []
        while self._advance(pieces):
            pass
        return pieces

    def end(self) -> list[Piece]:
        """The rest, at the end of the text."""
        self._is_over = self._source.is_over = True
        pieces = self.feed("")
        if self._space and not self._num_calls:
            pieces.append(self._space)
        self._space = ""
        return pieces

    def _advance(self, pieces: list[Piece]) -> bool:
        """One step; whether there may be another."""
        if self._block is None:
            return self._look(pieces)
        source = self._source
        while True:
            try:
                call = next(self._block)
            except StopIteration as end:
                return self._leave(pieces, is_sound=bool(end.value))
            if call is None:
                assert not self._is_over, "a block waits for more than the whole text"
                return False
            if isinstance(call, Prose):
                self._add(call, pieces)
            else:
                pieces.append(call)
                self._num_calls += bool(call.name)
            self._space, self._opened = "", ""
            source.text, source.pos = source.text[source.pos :], 0

    def _add(self, prose: Prose, pieces: list[Piece]) -> None:
        """More of a message, which begins with an empty part; an empty line stands before a second one."""
        text, is_thought = prose
        if self._opened and (self._has_thought if is_thought else self._has_text):
            text = "\n\n"
        elif text and is_thought:
            self._has_thought = True
        elif text:
            self._has_text = True
        pieces.append(Prose(text, is_thought=True) if is_thought else text)

    def _leave(self, pieces: list[Piece], *, is_sound: bool) -> bool:
        """The end of a block; of one without a call the mark is text, and what follows it is looked at."""
        source, opened = self._source, self._opened
        self._block = None
        self._is_fresh = True
        if opened:
            self._num_failed += 1
            self._held = source.text[len(opened) :]
            self._give(opened, pieces)
        else:
            self._held = source.text[source.pos :] if is_sound else source.text
        return True

    def _look(self, pieces: list[Piece]) -> bool:
        """Give out what stands before a block, and begin it."""
        held = self._held
        if self._num_failed >= MAX_FAILED:
            self._held = ""
            self._give(held, pieces)
            return False
        begin = len(held) - len(held.lstrip())
        found = self._opening.search(held)
        at, opened = (found.start(), found[0]) if found is not None else (len(held), "")
        if self._is_fresh and begin < len(held):
            start = next((s for s in self._format.starts if held.startswith(s, begin)), "")
            at, opened = (begin, start) if start and begin <= at else (at, opened)
        if not opened:
            at = len(held) if self._is_over else len(held) - self._num_waiting(held, begin)
        self._give(held[:at], pieces)
        self._held = held[at:]
        if opened:
            self._opened, self._held = opened, ""
            self._source = Source(held[at:], is_over=self._is_over)
            self._block = self._format.block(self._source, self._functions)
        return bool(opened)

    def _num_waiting(self, held: str, begin: int) -> int:
        """Characters at the end that may become a mark."""
        num = max((overlap(held, mark) for mark in self._format.opens), default=0)
        rest = held[begin:]
        if self._is_fresh and rest and any(s.startswith(rest) for s in self._format.starts):
            num = max(num, len(rest))
        return num

    def _give(self, text: str, pieces: list[Piece]) -> None:
        body = text.rstrip()
        if body:
            text, space = text[len(body) :], self._space + body
            is_first = self._num_calls and not self._has_text
            pieces.append(space.lstrip() if is_first else space)
            self._space, self._has_text, self._is_fresh = "", True, False
        self._space += text
