"""Which tokens a branch's text holds, for penalties: kept up to date token by token, never rescanned."""

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.int64]

_ROOM = 32


def distinct(tokens: Iterable[int]) -> Ids:
    """Each token once, rising."""
    return np.unique(np.fromiter(tokens, dtype=np.int64))


class TokenHistory:
    """A prompt's distinct tokens (shared by all branches of a job) and a branch's own, with counts."""

    __slots__ = ("_counts", "_ids", "_places", "_size", "prompt")

    def __init__(self, prompt: Ids) -> None:
        self.prompt = prompt
        self._places: dict[int, int] = {}
        self._ids = np.empty(_ROOM, dtype=np.int64)
        self._counts = np.zeros(_ROOM, dtype=np.float32)
        self._size = 0

    def add(self, token: int) -> None:
        """The branch drew `token`."""
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = self._size
            self._size += 1
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place] = token
        self._counts[place] += 1

    @property
    def drawn(self) -> Ids:
        """The branch's own distinct tokens, in order of their first draw."""
        return self._ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often each of `drawn` was drawn."""
        return self._counts[: self._size]

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        assert list(self._places) == self.drawn.tolist(), "places and ids disagree"
        assert (self.counts >= 1).all(), "a token in the history that was never drawn"
        assert (np.diff(self.prompt) > 0).all(), "the prompt's tokens are not distinct and rising"
