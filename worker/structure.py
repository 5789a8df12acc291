"""The seam between the engine and whatever knows grammars: which tokens may come next.

Torch-free. A `Matcher` is the state of one text under one grammar. Branches share the matcher that they
begin with: each takes a copy at its own first token (`Constraint`), so that a fork costs nothing.
"""

from collections.abc import Sequence
from typing import Protocol, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from mallee.protocol.messages import Grammar

Words: TypeAlias = npt.NDArray[np.int32]
"""A set of tokens as bits: token t is in it if bit t % 32 of word t // 32 is set."""


def num_words(vocab_size: int) -> int:
    """Words of a set over a vocabulary."""
    return -(-vocab_size // 32)


def flags(words: Words, vocab_size: int) -> npt.NDArray[np.bool_]:
    """For each token whether it is in the set; of several sets, [..., words], for each of them."""
    raw = words.astype("<i4", copy=False).view(np.uint8)
    return np.unpackbits(raw, axis=-1, count=vocab_size, bitorder="little").view(np.bool_)


class Matcher(Protocol):
    """Where one text is in its grammar. One thread at a time."""

    @property
    def is_accepting(self) -> bool:
        """Whether the text may end here."""
        ...

    @property
    def is_stopped(self) -> bool:
        """Whether it has to: no further token can follow. Also if there is an `error`."""
        ...

    @property
    def error(self) -> str:
        """Why nothing can be told any more ("": it can): a token that wasn't allowed, a limit."""
        ...

    def advance(self, token: int) -> None:
        """`token` is the next of the text. What is wrong with that is in `error`."""
        ...

    def fork(self) -> Self:
        """The same state, to go on by itself."""
        ...


M = TypeVar("M", bound=Matcher)


class Structures(Protocol[M]):
    """Compiles grammars for one vocabulary."""

    def compile(self, grammar: Grammar) -> M:
        """The state before the first token; shared by all who ask for the same grammar.

        Safe from any thread; what was compiled not long ago is there at once. Raises InvalidParameter.
        """
        ...

    def fill(self, matchers: Sequence[M], sets: Words) -> None:
        """Row i of `sets` [>= len(matchers), num_words] is what may follow matcher i.

        Ends of text are in it where the text may end. Matchers that fail say so by `error`. They must not
        be used elsewhere meanwhile; different calls may come from different threads.
        """
        ...


class Constraint:
    """The grammar state of one branch: borrowed from its origin until the branch's first token."""

    __slots__ = ("_is_own", "matcher")

    def __init__(self, matcher: Matcher) -> None:
        self.matcher = matcher
        self._is_own = False

    @property
    def left(self) -> Matcher | None:
        """What a capsule keeps of it: the state inside a text that can go on."""
        return None if self.matcher.is_stopped else self.matcher

    def advance(self, token: int) -> None:
        """The branch drew `token`."""
        if not self._is_own:
            self.matcher = self.matcher.fork()
            self._is_own = True
        self.matcher.advance(token)
