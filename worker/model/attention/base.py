"""Splits a batch's attention into shared prefixes and segments, for layers of one window.

Attention over a row's keys may be cut anywhere: the parts are computed apart and merged by their
log-sum-exp. So blocks that several rows share (forks of one capsule) become one *prefix*: all those
rows' queries meet its keys together, and its bytes are read once. What no prefix holds of a row is one
*segment*, or several under a window. Doesn't know layers, dtypes or how the parts are computed.
"""

import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from mallee.worker.forward import Row
from mallee.worker.kv.node import BlockTable

Reads: TypeAlias = Any
"""The KV reads of the layers of one window: an attention backend's own form of an `AttentionSplit`."""

MIN_SHARED_SAVING = 32
"""On a CPU a prefix must spare this many block reads; below it, the merge costs more than the reading."""
NEVER_SHARED: Final = sys.maxsize
"""More block reads than any prefix spares: each row reads all its keys itself."""
MAX_WINDOWED_TOKENS = 128
"""Under a window a longer row is taken in segments of this many tokens, so that each reads little else."""
UNBOUNDED = -(1 << 40)
"""A first slot that no token has outgrown."""

Ints = npt.NDArray[np.int64]


class SharedPrefix(NamedTuple):
    """Full blocks of which every one of `tokens` sees every key."""

    blocks: BlockTable
    tokens: Ints  # indices into the flat batch, rising


class Segment(NamedTuple):
    """New tokens begin .. begin + size of the flat batch, of one row, over blocks of that row.

    Token begin + i sees slots max(first + i, 0) .. last + i of `blocks`, both included; slot last + i
    is its own.
    """

    begin: int
    size: int
    blocks: BlockTable
    first: int  # UNBOUNDED without a window
    last: int

    @property
    def sees_all(self) -> bool:
        """Whether no token of the segment is denied a slot before its own."""
        return self.first + self.size <= 1

    @property
    def window_left(self) -> int:
        """Slots before its own that each token sees; -1: all."""
        return -1 if self.first == UNBOUNDED else self.last - self.first


class AttentionSplit(NamedTuple):
    """The reads of the layers of one window: every token meets every key it sees in exactly one part.

    A token is in exactly one segment, and in any number of shared prefixes.
    """

    block_size: int
    num_tokens: int
    shared: tuple[SharedPrefix, ...]
    segments: tuple[Segment, ...]


class _Tail(NamedTuple):
    """The rest of a row beside its shared prefixes: its blocks before `hole` and from `end` on."""

    row: int
    hole: int
    end: int


def split_batch(
    rows: Sequence[Row],
    *,
    block_size: int,
    window: int | None = None,
    min_saving: int = MIN_SHARED_SAVING,
) -> AttentionSplit:
    """The split of `rows` for layers of `window`. A shared prefix spares `min_saving` block reads."""
    splitter = _Splitter(rows, block_size, window, min_saving)
    order = list(range(len(rows)))
    tails = splitter.share(order) if min_saving != NEVER_SHARED else [_Tail(i, 0, 0) for i in order]
    tails.sort()
    segments = [segment for tail in tails for segment in splitter.segments(tail)]
    return AttentionSplit(block_size, splitter.begins[-1], tuple(splitter.shared), tuple(segments))


class _Splitter:
    """Collects the shared prefixes of a split while the rows are sorted by what they share."""

    __slots__ = ("begins", "block_size", "min_saving", "rows", "shared", "window")

    def __init__(
        self, rows: Sequence[Row], block_size: int, window: int | None, min_saving: int
    ) -> None:
        self.rows = rows
        self.block_size = block_size
        self.window = window
        self.min_saving = min_saving
        self.begins = [0]  # of each row in the flat batch, and the batch's end
        for row in rows:
            self.begins.append(self.begins[-1] + len(row.tokens))
        self.shared: list[SharedPrefix] = []

    def share(self, rows: list[int]) -> list[_Tail]:
        """Make shared prefixes of what rows have in common; returns what is left of each row.

        Only the first prefix of a row may begin after the row's reach does, so one hole describes it.
        """
        tails: list[_Tail] = []
        # (rows, hole, begin, depth): they are equal up to block `depth`; blocks hole .. begin of each
        # are in shared prefixes.
        todo = [(rows, 0, 0, 0)]
        while todo:
            group, hole, begin, depth = todo.pop()
            branches: dict[int, list[int]] = {}
            for i in group:
                if self.rows[i].start // self.block_size > depth:
                    branches.setdefault(int(self.rows[i].table[depth]), []).append(i)
                else:
                    tails.append(_Tail(i, hole, begin))
            for members in branches.values():
                if len(members) == 1:
                    tails.append(_Tail(members[0], hole, begin))
                    continue
                end = depth + self._common(members, depth)
                first = begin if begin > hole else max(begin, *map(self._num_unseen, members))
                if (len(members) - 1) * (end - first) >= self.min_saving:
                    self._add_shared(members, first, end)
                    todo.append((members, hole if begin > hole else first, end, end))
                else:  # part of them may share enough further down
                    todo.append((members, hole, begin, end))
        return tails

    def _first_seen(self, position: int) -> int:
        """The first position that the token at `position` attends to."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def _num_unseen(self, i: int) -> int:
        """Blocks of which the row's last token doesn't see every key."""
        row = self.rows[i]
        return -(-self._first_seen(row.start + len(row.tokens) - 1) // self.block_size)

    def _common(self, members: list[int], depth: int) -> int:
        """Blocks from `depth` on that all members have in common, wholly before their own tokens."""
        limit = min(self.rows[i].start for i in members) // self.block_size
        tables = np.array([self.rows[i].table[depth:limit] for i in members])
        differs = (tables != tables[0]).any(0)
        return int(differs.argmax()) if differs.any() else limit - depth

    def _add_shared(self, members: list[int], begin: int, end: int) -> None:
        spans = [np.arange(self.begins[i], self.begins[i + 1]) for i in sorted(members)]
        blocks = self.rows[members[0]].table[begin:end]
        self.shared.append(SharedPrefix(blocks, np.concatenate(spans)))

    def segments(self, tail: _Tail) -> list[Segment]:
        row, size, begin = self.rows[tail.row], self.block_size, self.begins[tail.row]
        n = len(row.tokens)
        hole = (tail.end - tail.hole) * size
        if self.window is None:
            blocks = row.table[tail.end : -(-(row.start + n) // size)]
            return [Segment(begin, n, blocks, UNBOUNDED, row.start - tail.end * size)]
        segments = []
        for done in range(0, n, MAX_WINDOWED_TOKENS):
            count = min(MAX_WINDOWED_TOKENS, n - done)
            position = row.start + done
            reach = self._first_seen(position) // size
            total = -(-(position + count) // size)
            blocks = row.table[reach:total]
            if hole:
                blocks = np.concatenate((row.table[reach : tail.hole], row.table[tail.end : total]))
            first, last = position - self.window + 1 - reach * size, position - reach * size - hole
            segments.append(Segment(begin + done, count, blocks, first, last))
        return segments


class Attention(Protocol):
    """Attention of one layer over paged KV."""

    @property
    def min_saving(self) -> int:
        """Block reads a layer that a shared prefix must spare, for `split_batch`."""
        ...

    def prepare(self, split: AttentionSplit) -> Reads:
        """`split` in the backend's own form: made once a step, for all layers of a window."""
        ...

    def attend(
        self, reads: Reads, q: torch.Tensor, memory: torch.Tensor, *, scale: float
    ) -> torch.Tensor:
        """The attention output of every token of the batch: [n, num_heads, head_dim].

        q [n, num_heads, head_dim]; this step's keys and values are in `memory` already. Scores are
        q k^T * scale, which may differ from layer to layer. `reads` says which keys a token sees.
        """
        ...
