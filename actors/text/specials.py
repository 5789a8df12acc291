"""Special tokens that stand in clients' texts, which must not open a turn or end one.

Tokens that a tokenizer doesn't flag as special but that a chat template writes are no less so.
Where a text has one, marks take their places before the template renders it, and the rendering is cut into
pieces there: no piece but the template's own text has a special token, and each is tokenized on its own. All
other conversations are one piece, so their tokens are those of the plain rendering.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any, Final, NamedTuple

from mallee.actors.text.answers import THINKING
from mallee.actors.text.conversation import Conversation, Message, ToolCall
from mallee.protocol.errors import ContextLengthExceeded

_PRIVATE: Final = range(0xE000, 0xF900)  # code points without a meaning
# Templates look for them in the texts of assistants, which come back as the model wrote them.
_OWN: Final = frozenset(mark for marks in THINKING.values() for mark in marks)


class Rendering(NamedTuple):
    """A conversation as text. Its tokens are those of its pieces, one or more, one after the other."""

    pieces: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def plus(self, other: "Rendering") -> "Rendering":
        """Both, one after the other; the pieces that meet are one."""
        *before, last = self.pieces
        first, *after = other.pieces
        return Rendering((*before, last + first, *after))


class SpecialTokens:
    """The special tokens of a tokenizer, as they are written."""

    def __init__(self, tokens: Collection[str]) -> None:
        """Tokens of a single character can't be cut, and stay special."""
        self._tokens = tuple(sorted((t for t in tokens if len(t) > 1), key=len, reverse=True))
        # By their first characters: a pattern with one is 20 times as fast, the character alone more so.
        self._by_first = tuple(
            (first, _one_of(token for token in self._tokens if token[0] == first))
            for first in sorted({token[0] for token in self._tokens})
        )
        self._pattern = _one_of(self._tokens)
        self._not_own = _one_of(token for token in self._tokens if token not in _OWN)
        self._numbers = {token: i for i, token in enumerate(self._tokens)}

    def are_in(self, text: str) -> bool:
        return any(
            first in text and pattern.search(text) is not None for first, pattern in self._by_first
        )

    def render(
        self,
        conversation: Conversation,
        render: Callable[[Conversation], str],
        *,
        max_tokens: int | None = None,
    ) -> Rendering:
        """The pieces of `render(conversation)`.

        Raises ContextLengthExceeded: its texts have more special tokens than `max_tokens`.
        """
        num = 0

        def count(text: str, pattern: re.Pattern[str]) -> str:
            nonlocal num
            if self.are_in(text):
                for _ in pattern.finditer(text):
                    num += 1
                    if max_tokens is not None and num > max_tokens:
                        raise ContextLengthExceeded(num, 0, max_tokens)
            return text

        self._each_text(conversation, count)
        if not num:
            return Rendering((render(conversation),))
        return self._render_marked(conversation, render)

    def _render_marked(
        self, conversation: Conversation, render: Callable[[Conversation], str]
    ) -> Rendering:
        used: set[str] = set()

        def collect(text: str, pattern: re.Pattern[str]) -> str:
            used.update(text)
            return text

        self._each_text(conversation, collect)
        mark = next(chr(point) for point in _PRIVATE if chr(point) not in used)

        def hide(text: str, pattern: re.Pattern[str]) -> str:
            return pattern.sub(lambda m: f"{mark}{self._numbers[m[0]]}{mark}", text)

        rendered = render(self._each_text(conversation, hide))
        # Templates may write JSON in ASCII.
        either = f"(?:{mark}|{re.escape(json.dumps(mark)[1:-1])})"
        pieces: list[str] = []
        for i, piece in enumerate(re.split(f"{either}([0-9]+){either}", rendered)):
            pieces += self._cut(self._tokens[int(piece)]) if i % 2 else [piece]
        return Rendering(tuple(piece for piece in pieces if piece) or ("",))

    def _each_text(
        self, conversation: Conversation, change: Callable[[str, re.Pattern[str]], str]
    ) -> Conversation:
        """The conversation with every text as `change` has it, which is told the tokens to look for."""
        return _each_text(
            conversation,
            lambda text: change(text, self._pattern),
            lambda text: change(text, self._not_own),
        )

    def _cut(self, token: str) -> list[str]:
        """The text of `token` in pieces without a special token."""
        rest = token[1:]
        return list(token) if self._pattern.search(rest) else [token[0], rest]


def _one_of(tokens: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tokens)) or r"(?!)")


def _each_text(
    conversation: Conversation, change: Callable[[str], str], change_own: Callable[[str], str]
) -> Conversation:
    """The conversation with every text that a client gave as `change` has it; assistants' as `change_own`."""

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, dict):
            return {walk(key): walk(each) for key, each in value.items()}
        return [walk(each) for each in value] if isinstance(value, list | tuple) else value

    def arguments(call: ToolCall) -> str:
        """Read first: JSON may spell any character in its own way."""
        return json.dumps(walk(json.loads(call.arguments)), ensure_ascii=False)

    def message(given: Message) -> Message:
        calls = given.tool_calls
        written = change_own if given.role == "assistant" else change
        return Message(
            change(given.role),
            written(given.text),
            written(given.reasoning),
            tuple(ToolCall(change(c.id), change(c.name), arguments(c)) for c in calls),
            change(given.tool_call_id),
            change(given.name),
        )

    return Conversation(
        [message(each) for each in conversation.messages],
        [
            replace(
                each,
                name=change(each.name),
                description=change(each.description),
                parameters=walk(each.parameters),
            )
            for each in conversation.functions
        ],
        walk(conversation.variables),
    )
