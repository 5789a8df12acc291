"""Grammars over token ids instead of text: `Structures` for engines whose model is mocked.

"choice": a JSON list of lists of token ids, of which the answer is one. "json_object": anything, may
end at any time. "regex": a count n in digits: anything, and the matcher breaks after n tokens.
"""

import json
from collections.abc import Callable, Sequence

import numpy as np

from mallee.protocol.errors import InvalidParameter
from mallee.protocol.messages import Grammar
from mallee.worker.forward import Words

Path = tuple[int, ...]


class MockMatcher:
    """A matcher over token paths: what is left of each text that is still possible, or of any text."""

    def __init__(self, paths: Sequence[Path] | None, num_left: int | None = None) -> None:
        self.paths = paths
        self.num_left = num_left
        self.error = ""

    @property
    def is_accepting(self) -> bool:
        return not self.error and (self.paths is None or () in self.paths)

    @property
    def is_stopped(self) -> bool:
        return bool(self.error) or (self.paths is not None and not any(self.paths))

    def advance(self, token: int) -> None:
        if self.num_left is not None:
            self.num_left -= 1
            self.error = "" if self.num_left else "the matcher broke"
        if self.paths is not None:
            self.paths = [path[1:] for path in self.paths if path[:1] == (token,)]
            self.error = "" if self.paths else f"token {token} can't follow"

    def fork(self) -> "MockMatcher":
        return MockMatcher(self.paths, self.num_left)


class MockStructures:
    """Compiles in no time. `on_fill` is called first thing in `fill`, with the number of matchers."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        on_fill: Callable[[int], None] = lambda n: None,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos = tuple(eos_token_ids)
        self.on_fill = on_fill

    def knows(self, grammar: Grammar) -> bool:
        return True

    def compile(self, grammar: Grammar) -> MockMatcher:
        if grammar.kind == "choice":
            return MockMatcher([tuple(path) for path in json.loads(grammar.source)])
        if grammar.kind == "json_object":
            return MockMatcher(None)
        if grammar.kind == "regex":
            return MockMatcher(None, int(grammar.source))
        raise InvalidParameter("grammar", grammar.kind, "the mock knows no such kind")

    def fill(self, matchers: Sequence[MockMatcher], sets: Words) -> None:
        self.on_fill(len(matchers))
        for matcher, row in zip(matchers, sets, strict=False):
            bits = np.zeros(len(row) * 32, dtype=bool)
            if matcher.paths is None:
                bits[: self._vocab_size] = True
            else:
                bits[[path[0] for path in matcher.paths if path]] = True
            bits[list(self._eos)] = matcher.is_accepting
            row[:] = np.packbits(bits, bitorder="little").view("<i4")

    def close(self) -> None:
        pass
