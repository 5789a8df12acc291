"""A forward of a toy hybrid: beside its KV it folds every token into a state, as recurrent layers do."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash

from bench.doubles.forward import MockForward, digest_of, linear_tokens
from mallee.mocker.passes import mock_spec
from mallee.protocol.hashing import as_tokens
from mallee.protocol.messages import Sampling
from mallee.protocol.model import GroupSpec, ModelSpec
from mallee.worker.forward import ForwardBatch, Logits
from mallee.worker.forward import Row as BatchRow
from mallee.worker.kv.sides.group import row_spans
from mallee.worker.kv.sides.states import NO_STATE
from mallee.worker.kv.watch import Row, Rows

STATE_WORDS = 5
"""8 bytes each: of blocks of 32 bytes a state takes two rows, the second one filled up."""


def fold_spec(vocab_size: int = 8) -> ModelSpec:
    """A model of a layer with full attention and one with a state."""
    plain = mock_spec(vocab_size=vocab_size)
    state = GroupSpec(kind="state", layers=(1,), nbytes=8 * STATE_WORDS)
    return msgspec.structs.replace(plain, groups=(*plain.groups, state))


class FoldForward(MockForward):
    """A `Forward` whose logits depend on all slots of a row and its state, which must be its text's."""

    def __init__(self, *, num_blocks: int, block_size: int = 4, vocab_size: int = 8) -> None:
        spec = fold_spec(vocab_size)
        super().__init__(spec, num_blocks=num_blocks, block_size=block_size)
        (self._span,) = row_spans(spec.groups, num_blocks, block_size)
        num_slots = spec.groups[1].num_blocks(num_blocks, block_size)
        self.states = np.zeros((num_slots, STATE_WORDS), np.uint64)
        self.last_rows: list[BatchRow] = []
        self.num_refolds = 0

    def forward(self, batch: ForwardBatch) -> Sequence[Logits]:
        self.last_rows = []  # of a pass that fails, none is kept
        digests = iter(super().forward(batch))
        logits: list[Logits] = []
        for row in batch.rows:
            read, written = row.sides[0].tolist()
            before = self._text(row.table, row.start)
            state = fold([]) if read == NO_STATE else self.states[read]
            assert (state == fold(before)).all(), "the state of another text"
            after = [*before, *row.tokens.tolist()]
            self.states[written] = fold(after)
            ends = range(len(after) - row.num_logits + 1, len(after) + 1)
            logits += [_mixed(next(digests), after[:end]) for end in ends]
        self.last_rows = [*batch.rows]
        return logits

    def refold(self, rows: Sequence[BatchRow], counts: Sequence[int]) -> None:
        assert rows, "nothing to fold again"
        for row, count in zip(rows, counts, strict=True):
            assert any(row is each for each in self.last_rows), "a row of another pass"
            assert 1 <= count < len(row.tokens) <= row.num_logits, "a state that is there"
            read, written = row.sides[0].tolist()
            text = self._text(row.table, row.start)
            assert (self.states[read] == fold(text)).all(), "the state before was written over"
            self.states[written] = fold([*text, *row.tokens[:count].tolist()])
            self.num_refolds += 1

    def _text(self, table: Any, num_tokens: int) -> list[int]:
        """The tokens whose KV is in the first slots of `table`."""
        slots = self.kv[table].reshape(-1)[:num_tokens]
        return [int(slot) & 0xFFFFFFFF for slot in slots]

    def read(self, blocks: Sequence[int], rows: Rows, after: object = None) -> None:
        for block, row in zip(blocks, rows, strict=True):
            words = self._words(block)
            row.view(np.uint64)[: len(words)] = words
            row.view(np.uint64)[len(words) :] = 0

    def write(self, blocks: Sequence[int], rows: Rows, after: object = None) -> None:
        for block, row in zip(blocks, rows, strict=True):
            words = self._words(block)
            words[:] = row.view(np.uint64)[: len(words)]

    def clear(self, row: Row, num_slots: int, group: int = 0, part: int = 0) -> None:
        assert group == 0, "a state is never filled in part"
        super().clear(row, num_slots)

    def _words(self, block: int) -> Any:
        if block < self.num_blocks:
            return self.kv[block]
        slot, part = divmod(block - self._span.first, self._span.per_block)
        return self.states[slot][part * self.block_size : (part + 1) * self.block_size]


def fold(tokens: Sequence[int]) -> Any:
    """The state after `tokens`."""
    digest = xxhash.xxh3_64_intdigest(as_tokens(tokens).tobytes())
    return np.full(STATE_WORDS, digest, np.uint64) + np.arange(STATE_WORDS, dtype=np.uint64)


def fold_tokens(
    prompt: Sequence[int], n: int, *, sampling: Sampling, seed: int, vocab_size: int = 8
) -> list[int]:
    """The n tokens that one sequence draws after `prompt`, computed from the tokens alone."""
    spec = fold_spec(vocab_size)
    return linear_tokens(
        spec,
        prompt,
        n,
        sampling=sampling,
        seed=seed,
        logits_after=lambda tokens: _mixed(digest_of(tokens), tokens),
    )


def _mixed(digest: int, tokens: Sequence[int]) -> int:
    return digest ^ int(fold(tokens)[-1])
