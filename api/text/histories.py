"""Prompts of conversations that clients send again whole, with a few messages more each time.

A conversation is found by its last messages and compared from its first on. What is known of its beginning is
not rendered, searched for special tokens or tokenized again: the template goes on from a mark
(`resumable`), and the text is cut before a token that the template wrote there, so that the tokens are
those of the whole (`Tokenizer.delimiters`). Where a template cannot go on, or nothing is known, the answer is
the same, and takes longer.

Histories belong to their scope (a tenant's): the time of an answer must not reveal others' texts.
"""

import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import xxhash

from mallee.api.text.chat import ChatTemplate, shown_functions
from mallee.api.text.conversation import Conversation, Message, digest_of
from mallee.api.text.resumable import Mark, Rendered, Trace
from mallee.api.text.scoped_memory import ScopedMemory, nbytes_of
from mallee.api.text.tokenizer import Tokenizer
from mallee.protocol.hashing import Tokens

MAX_NBYTES: Final = 128 << 20
LEAST_CHARS: Final = 8192  # of a conversation: shorter ones are rendered in no time
END_CHARS: Final = 64
KEPT_CHARS: Final = END_CHARS + 32
MESSAGE_NBYTES: Final = 1500  # beside its texts: its objects here, about
MAX_REST: Final = 16_384  # characters between a cut and its mark
NEAR_CHARS: Final = 4096  # from the end of a text, in which every mark is kept
FAR_CHARS: Final = 16_384  # between those before
MAX_COMPARED: Final = 4  # conversations, for one that is looked for
NEAR: Final = 24  # messages from the end, each of which is looked for; then ever fewer


class Prompt(NamedTuple):
    """The tokens of a conversation, the end of its text before the answer, and digests of its messages."""

    tokens: Tokens
    end: str
    digests: tuple[int, ...]


class _Cut(NamedTuple):
    """A mark, and the cut before it: behind so many tokens. `before`: the end of the text up to there."""

    mark: Mark
    num_tokens: int
    before: str
    rest: str  # from the cut to the mark


class _History(NamedTuple):
    """One conversation. Of another that begins alike, its objects are used again."""

    kind: bytes  # all that it was rendered with beside its messages
    messages: list[Message]
    shown: list[dict[str, Any]]
    functions: list[dict[str, Any]] | None
    functions_nbytes: int
    digests: tuple[int, ...]
    sizes: list[int]  # bytes of all messages up to each
    trace: Trace | None
    cuts: list[_Cut]
    tokens: Tokens  # of the whole prompt
    nbytes: int


class _Key(NamedTuple):
    """A message at its place."""

    scope: str
    kind: int
    place: int
    digest: int


class _Growing:
    """A conversation as it grows: its youngest history, and the keys by which it is found."""

    __slots__ = ("history", "keys")

    def __init__(self, history: _History) -> None:
        self.history = history
        self.keys: list[_Key] = []


class _Found(NamedTuple):
    """An earlier conversation, and how many of its first messages a new one has."""

    growing: _Growing
    history: _History
    num_same: int


class Histories:
    """Histories of at most `max_nbytes`; beyond it the scope with most of them loses its oldest.

    Safe to use from several threads.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat: ChatTemplate,
        *,
        max_nbytes: int = MAX_NBYTES,
        least_chars: int = LEAST_CHARS,
    ) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._least_chars = least_chars
        self._delimiters = tokenizer.delimiters(chat.written(tokenizer.added_tokens))
        self._lock = threading.Lock()
        self.memory: ScopedMemory[_Growing] = ScopedMemory(max_nbytes)
        self._by_key: dict[_Key, _Growing] = {}
        self.num_resumed = 0  # prompts whose beginning was neither rendered nor tokenized

    def prompt(
        self,
        conversation: Conversation,
        scope: str,
        *,
        add_generation_prompt: bool,
        begun: str = "",
        max_tokens: int,
    ) -> Prompt | None:
        """The prompt as it is without histories; `begun`: the beginning of the answer.

        None: render it whole. So it is of short conversations, of those that can't be taken apart, of what
        is refused, and of what has no token or more than `max_tokens`. Raises InvalidParameter: there is no
        template.
        """
        messages = conversation.messages
        if not self._delimiters or not self._is_long(messages):
            return None
        source = self._chat.source_for(conversation)
        kind = _kind(conversation, source is self._chat.main, add_generation_prompt)
        if source.resumable is None or kind is None:
            return None
        found = self._find(scope, kind, messages)
        known = None if found is None else found.history
        num_same = 0 if found is None else found.num_same
        hidden = self._chat.hidden(
            Conversation(
                messages[num_same:],
                conversation.functions if known is None else (),
                conversation.variables,
            )
        )
        # The whole has the pieces of such a beginning in another way.
        is_plain = not begun or self._chat.plain(begun).pieces == (begun,)
        if hidden is None or not is_plain or self._chat.pieces(begun) != (begun,):
            return None
        shown = [] if known is None else known.shown[:num_same]
        shown += map(source.message, hidden.messages)
        functions = shown_functions(source, hidden) if known is None else known.functions
        cuts = [] if known is None else known.cuts
        rendered = self._chat.render_on(
            source,
            shown,
            {**hidden.variables, "tools": functions},
            add_generation_prompt=add_generation_prompt,
            known=None if known is None else known.trace,
            marks=[cut.mark for cut in cuts],
            num_same=num_same,
        )
        if rendered is None:
            return None
        tokenized = self._tokenized(rendered, known, scope, begun, max_tokens)
        if tokenized is None:
            return None
        new_cuts, tokens, end = tokenized
        digests = () if known is None else known.digests[:num_same]
        digests += tuple(map(digest_of, messages[num_same:]))
        if known is None or num_same < len(messages):
            sizes = [] if known is None else known.sizes[:num_same]
            for message, as_shown in zip(messages[num_same:], shown[num_same:], strict=True):
                sizes.append(_nbytes(message, as_shown) + (sizes[-1] if sizes else 0))
            same = [] if known is None else known.messages[:num_same]
            its_nbytes = nbytes_of(functions) if known is None else known.functions_nbytes
            texts = [cut.rest for cut in new_cuts]
            texts += [] if rendered.trace is None else [rendered.trace.before]
            history = _History(
                kind=kind,
                messages=[*same, *messages[num_same:]],
                shown=shown,
                functions=functions,
                functions_nbytes=its_nbytes,
                digests=digests,
                sizes=sizes,
                trace=rendered.trace,
                cuts=new_cuts,
                tokens=tokens,
                nbytes=len(kind)
                + its_nbytes
                + sizes[-1]
                + tokens.nbytes
                + sum(map(sys.getsizeof, texts)),
            )
            self._keep(scope, history, found)
        elif found is not None:
            self._used(scope, found.growing)
        return Prompt(tokens, end, digests)

    def _is_long(self, messages: Sequence[Message]) -> bool:
        num = 0
        for message in messages:
            num += len(message.text)
            if num >= self._least_chars:
                return True
        return False

    def _tokenized(
        self,
        rendered: Rendered,
        known: _History | None,
        scope: str,
        begun: str,
        max_tokens: int,
    ) -> tuple[list[_Cut], Tokens, str] | None:
        """The cuts, the tokens, and the end of the text before `begun`; None: there are none, or too many."""
        cuts: list[_Cut] = []
        pieces: list[Tokens] = []
        before = rest = ""
        if known is not None and rendered.mark is not None:
            num_cuts = 1 + next(i for i, c in enumerate(known.cuts) if c.mark is rendered.mark)
            cuts = known.cuts[:num_cuts]
            _, num, before, rest = cuts[-1]
            pieces.append(known.tokens[:num])
            self.num_resumed += 1
        text = rest + rendered.text
        num = sum(map(len, pieces))
        longest = self._tokenizer.longest_token
        if longest is not None:
            num_bytes = len(text.encode(errors="replace"))
            if num + num_bytes // longest > max_tokens:
                return None
        begin = 0
        for mark, place in _sparse(rendered.marks, len(rendered.text)):
            end = len(rest) + place
            cut = max(text.rfind(each, begin, end) for each in self._delimiters)
            if cut > begin:
                pieces.append(self._tokens(text[begin:cut], scope))
                num += len(pieces[-1])
                begin = cut
            if end - begin <= MAX_REST:
                cuts.append(_Cut(mark, num, _end(before, text, begin), text[begin:end]))
        pieces.append(self._tokens(text[begin:] + begun, scope))
        tokens = np.concatenate(pieces)
        if not 0 < len(tokens) <= max_tokens:
            return None
        *_, last = self._chat.pieces(_end(before, text, len(text)))
        return cuts, tokens, last[-END_CHARS:]

    def _tokens(self, text: str, scope: str) -> Tokens:
        first, *more = self._chat.pieces(text)
        found = [self._tokenizer.tokens(first, scope=scope)]
        known: dict[str, Tokens] = {}
        for piece in more:
            if piece not in known:
                known[piece] = self._tokenizer.tokens(piece, scope=scope)
            found.append(known[piece])
        return np.concatenate(found) if more else found[0]

    def _find(self, scope: str, kind: bytes, messages: Sequence[Message]) -> _Found | None:
        hashed = xxhash.xxh3_64_intdigest(kind)
        best: _Found | None = None
        num_compared = 0
        for place in _places(len(messages)):
            growing = self._by_key.get(_Key(scope, hashed, place, digest_of(messages[place])))
            if growing is None or (best is not None and growing is best.growing):
                continue
            history = growing.history
            if history.kind != kind:  # two hashes collide
                continue
            num = _num_same(history.messages, messages)
            if num and (best is None or num > best.num_same):
                best = _Found(growing, history, num)
            num_compared += 1
            if num > place or num_compared == MAX_COMPARED:
                break
        return best

    def _keep(self, scope: str, history: _History, found: _Found | None) -> None:
        if history.nbytes > self.memory.max_nbytes // 2 or not history.cuts:
            return
        hashed = xxhash.xxh3_64_intdigest(history.kind)
        with self._lock:
            growing, first = _Growing(history), 0
            if found is not None:
                # Its first places are found by the one that it parts from.
                first = found.num_same
                is_longer = first == len(found.history.messages)
                is_youngest = found.growing.history is found.history
                if is_longer and is_youngest and self.memory.has(scope, found.growing):
                    growing = found.growing
                    growing.history = history
            for place in range(first, len(history.messages)):
                key = _Key(scope, hashed, place, history.digests[place])
                self._by_key[key] = growing
                growing.keys.append(key)
            for dropped in self.memory.put(scope, growing, history.nbytes):
                for key in dropped.keys:
                    if self._by_key.get(key) is dropped:
                        del self._by_key[key]

    def _used(self, scope: str, growing: _Growing) -> None:
        with self._lock:
            self.memory.use(scope, growing)

    def check(self) -> None:
        """Raises AssertionError if bytes or keys don't add up, or are too many."""
        self.memory.check()
        for key, growing in self._by_key.items():
            assert self.memory.has(key.scope, growing), "a key without a conversation"
            assert key in growing.keys, "a key of another conversation"


def _kind(conversation: Conversation, is_main: bool, add_generation_prompt: bool) -> bytes | None:
    """All that a text depends on beside the messages; None: it can't be compared."""
    given = (is_main, add_generation_prompt, conversation.functions, conversation.variables)
    try:
        return msgspec.json.encode(given)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None


def _sparse(marks: list[tuple[Mark, int]], num_chars: int) -> Iterator[tuple[Mark, int]]:
    """Marks for the turns to come: all near the end of a text, few before, as each cut costs time."""
    last = 0
    for mark, place in marks:
        if place - last >= FAR_CHARS or num_chars - place <= NEAR_CHARS:
            yield mark, place
            last = place


def _places(num: int) -> Iterator[int]:
    """Of `num` messages the last ones, then ever fewer of those before."""
    back = 1
    while back <= num:
        yield num - back
        back = back + 1 if back < NEAR else back * 2


def _num_same(one: Sequence[Message], other: Sequence[Message]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    differs = next((i for i, (a, b) in pairs if a is not b and a != b), None)
    return min(len(one), len(other)) if differs is None else differs


def _nbytes(message: Message, shown: dict[str, Any]) -> int:
    """Its text is one of those that are shown, or another where marks hide special tokens in it."""
    texts = [message.reasoning, *(call.arguments for call in message.tool_calls)]
    if shown["content"] is not message.text:
        texts.append(message.text)
    return MESSAGE_NBYTES + nbytes_of(shown) + sum(map(sys.getsizeof, texts))


def _end(before: str, text: str, at: int) -> str:
    """The last characters of `before + text[:at]`, and more than a mark's before them."""
    if at >= KEPT_CHARS:
        return text[at - KEPT_CHARS : at]
    return (before + text[:at])[-KEPT_CHARS:]
