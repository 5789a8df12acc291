"""Special tokens that stand in clients' texts, which must not open a turn or end one.

Tokens that a tokenizer doesn't flag as special but that a chat template writes are no less so.
Where a text has one, its number between two marks takes its place before the template renders it, and the
rendering is cut into pieces there: no piece but the template's own text has a special token, and each is
tokenized on its own. All other conversations are one piece, so their tokens are those of the plain rendering.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any, Final, NamedTuple

from mallee.api.text.answers import THINKING
from mallee.api.text.conversation import Conversation, Message, ToolCall
from mallee.protocol.errors import ContextLengthExceeded, InvalidParameter

_PRIVATE: Final = range(0xE000, 0xF900)  # code points without a meaning
_ESCAPE: Final = re.compile(
    r"\\u([0-9a-f]{4})"
)  # of a character, in JSON as templates may write it
# Templates look for them in the texts of assistants, which come back as the model wrote them.
_OWN: Final = frozenset(mark for marks in THINKING.values() for mark in marks[:2])


class Marks(NamedTuple):
    """Around the number of a token. They differ, so that no text between two tokens is taken for a number."""

    begin: str
    end: str

    @classmethod
    def unused(cls, used: Collection[str]) -> "Marks | None":
        free = (chr(point) for point in _PRIVATE if chr(point) not in used)
        begin, end = next(free, ""), next(free, "")
        return cls(begin, end) if end else None

    def are_in(self, text: str) -> bool:
        return any(each in text or _in_ascii(each) in text for each in self)


_MARKS: Final = Marks(chr(_PRIVATE[0]), chr(_PRIVATE[1]))


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

    def hidden(self, conversation: Conversation) -> Conversation | None:
        """The conversation with marks instead of special tokens; None: its texts have such marks."""
        is_used = False

        def hide(text: str, pattern: re.Pattern[str]) -> str:
            nonlocal is_used
            is_used = is_used or _MARKS.are_in(text)
            return self._marked(text, pattern, _MARKS) if self.are_in(text) else text

        found = self._each_text(conversation, hide)
        return None if is_used else found

    def pieces(self, text: str, marks: Marks = _MARKS) -> tuple[str, ...]:
        """Text that was rendered from hidden texts, cut at the marks; it may begin in the midst of one."""
        if not marks.are_in(text):
            return (text,)
        begin, end = (f"(?:{each}|{re.escape(_in_ascii(each))})" for each in marks)
        pieces: list[str] = []
        for i, piece in enumerate(re.split(f"{begin}([0-9]+){end}", text)):
            pieces += self._cut(self._tokens[int(piece)]) if i % 2 else [piece]
        return tuple(piece for piece in pieces if piece) or ("",)

    def render(
        self,
        conversation: Conversation,
        render: Callable[[Conversation], str],
        *,
        max_tokens: int | None = None,
    ) -> Rendering:
        """The pieces of `render(conversation)`.

        Raises ContextLengthExceeded: its texts have more special tokens than `max_tokens`;
        InvalidParameter: they have all characters that could be marks.
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
            used.update(chr(int(code, 16)) for code in _ESCAPE.findall(text))
            return text

        self._each_text(conversation, collect)
        marks = Marks.unused(used)
        if marks is None:
            remedy = "leave out some of the characters from U+E000 to U+F8FF, which have no meaning"
            raise InvalidParameter("messages", len(conversation.messages), remedy)

        def hide(text: str, pattern: re.Pattern[str]) -> str:
            return self._marked(text, pattern, marks)

        return Rendering(self.pieces(render(self._each_text(conversation, hide)), marks))

    def _marked(self, text: str, pattern: re.Pattern[str], marks: Marks) -> str:
        return pattern.sub(lambda m: f"{marks.begin}{self._numbers[m[0]]}{marks.end}", text)

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


def _in_ascii(mark: str) -> str:
    """As templates may write it in JSON."""
    return json.dumps(mark)[1:-1]


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
