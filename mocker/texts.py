"""Prompts of a replay: the texts of blocks that a trace names, and their hashes."""

import struct
from collections.abc import Sequence

import numpy as np

from mallee.mocker.run_length import (
    RunLengthNotation,
    RunLengthTokens,
    answer_start,
    block_names,
    other_start,
    run_length_hashes,
)
from mallee.protocol.errors import InvalidParameter
from mallee.protocol.hashing import Hashes

_NAME = struct.Struct("<Q")


class Texts:
    """One per replay, shared by its engines (of `block_size`) and its routers.

    A text is named by 8 bytes, which stand for its tokens in commands; it is known until dropped.
    """

    def __init__(self, block_size: int, *, salt: str = "mock/") -> None:
        self.block_size = block_size
        self.notation = RunLengthNotation()
        self._salt = salt
        self._next = 0

    def prompt(self, ids: Sequence[int], num_tokens: int, id_tokens: int) -> bytes:
        """A text of `num_tokens` tokens, of which `ids` name the first: `id_tokens` each, the last maybe cut.

        What they don't name is like no other text. Raises InvalidParameter for an id out of range.
        """
        name = self._name()
        text = _named(ids, num_tokens, id_tokens)
        if len(text) < num_tokens:
            text.extend(
                RunLengthTokens.of_run(other_start(-1 - self._next), num_tokens - len(text))
            )
        text.know(self._hashes(text, ids, id_tokens))
        self.notation.texts[name] = text
        return name

    def suffix(self, key: int, num_tokens: int) -> bytes:
        """A text of `num_tokens` tokens that only the same key (0 or more) has."""
        if num_tokens == 0:
            return b""
        name = self._name()
        self.notation.texts[name] = RunLengthTokens.of_run(other_start(key), num_tokens)
        return name

    def answered(self, raw: bytes, seed: int, num_tokens: int, suffix: bytes = b"") -> bytes:
        """The text `raw`, then `suffix`, then the first `num_tokens` that a branch of this seed draws.

        The seed is 0 if it is greedy.
        """
        name, text = self._name(), self.notation.texts[raw][:]
        if suffix:
            text.extend(self.notation.texts[suffix])
        text.extend(RunLengthTokens.of_run(answer_start(seed) + len(text), num_tokens))
        self.notation.texts[name] = text
        return name

    def hashes(self, raw: bytes) -> Hashes:
        """Of its full blocks, as the engines hash them."""
        text = self.notation.texts[raw]
        return self.notation.hashes(text, self.block_size, salt=self._salt)

    def hashes_of(self, text: RunLengthTokens, parent: Sequence[int] = ()) -> list[int]:
        """Of the full blocks of `text`, which follows those of the hashes `parent`."""
        before = parent[-1] if parent else None
        hashes = self.notation.hashes(text, self.block_size, salt=self._salt, parent=before)
        return list(hashes.tolist())

    def drop(self, raw: bytes) -> None:
        """Forget a text that no command names any more."""
        self.notation.texts.pop(raw, None)

    def _hashes(self, text: RunLengthTokens, ids: Sequence[int], id_tokens: int) -> Hashes:
        """The same as `run_length_hashes`, sooner: most texts are whole blocks of a trace."""
        num_blocks, pieces = len(text) // self.block_size, id_tokens // self.block_size
        if id_tokens % self.block_size or num_blocks > len(ids) * pieces:
            return run_length_hashes(text, self.block_size, salt=self._salt)
        first = np.array(ids, dtype=np.uint64) * np.uint64(id_tokens)
        if pieces == 1:
            last = first[:num_blocks] + np.uint64(id_tokens - 1)
        else:
            steps = np.arange(self.block_size - 1, id_tokens, self.block_size, dtype=np.uint64)
            last = (first[:, None] + steps).ravel()[:num_blocks]
        return block_names(last, self._salt)

    def _name(self) -> bytes:
        self._next += 1
        return _NAME.pack(self._next)


def _named(ids: Sequence[int], num_tokens: int, id_tokens: int) -> RunLengthTokens:
    """The tokens that `ids` name, `num_tokens` at most."""
    starts: list[int] = []
    firsts: list[int] = []
    before = None
    for at, id_ in enumerate(ids):
        if id_ != before:
            if not 0 <= id_ < (1 << 62) // id_tokens:
                raise InvalidParameter("hash_ids", id_, "give 0 to 2**62 / tokens per id")
            starts.append(at * id_tokens)
            firsts.append(id_ * id_tokens)
        before = id_ + 1
    return RunLengthTokens.of_runs(firsts, [*starts[1:], len(ids) * id_tokens], num_tokens)
