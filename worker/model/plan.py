"""How one step's attention is split: computed once per step, used by every layer.

Attention over a row's cached tokens may be cut anywhere: the parts are computed apart and merged by
their log-sum-exp. So blocks that several rows share (forks of one capsule) become one *trunk*: all
those rows' queries meet its keys in a single matrix product, and its bytes are read once. What is
left of each row is its *tail*: long tails (prefill chunks) run one by one, short ones (decode) are
padded to a common shape and run together. Doesn't know layers, weights or dtypes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mallee.worker.forward import Row

MIN_TRUNK_SAVING = 32
"""A trunk must spare this many block reads; below it, the merge costs more than the reading."""
MAX_PADDED_TOKENS = 16
"""Rows with at most this many new tokens are padded together; longer ones run alone."""
MAX_PADDED_BLOCKS = 256
"""One padded group reads at most this many blocks (if it has more than one row), to stay in cache."""

Ints = npt.NDArray[np.int64]


class Trunk(NamedTuple):
    """Keys that all of `tokens` attend to in full."""

    blocks: torch.Tensor  # [num_blocks] block ids
    num_keys: int  # filled slots: the last block may be partial
    tokens: torch.Tensor | None  # [n] indices into the flat batch; None: all of it


class Chunk(NamedTuple):
    """Tokens begin .. end of the flat batch attend causally to themselves."""

    begin: int
    end: int


class Padded(NamedTuple):
    """Short tails side by side: `width` query places and `blocks.shape[1]` blocks for each row."""

    blocks: torch.Tensor  # [num_rows, num_blocks] block ids, padded with the row's first
    queries: torch.Tensor | None  # [num_rows * width] flat tokens; None: all of them, in order
    places: torch.Tensor | None  # [n] which of those are real; None: all
    real: torch.Tensor  # [n] flat tokens at those places
    mask: torch.Tensor  # [num_rows, 1, width, num_blocks * block_size] 0 or -inf
    width: int


class Plan(NamedTuple):
    """One step. `key_reads` counts key slots fetched per layer; `flat_key_reads` without trunks."""

    tokens: torch.Tensor  # [n] ids
    positions: torch.Tensor  # [n]
    slots: torch.Tensor  # [n] block * block_size + offset, where each token's KV goes
    trunks: tuple[Trunk, ...]
    chunks: tuple[Chunk, ...]
    padded: tuple[Padded, ...]
    outputs: torch.Tensor  # [k] flat tokens whose logits are wanted
    key_reads: int
    flat_key_reads: int


class _Tail(NamedTuple):
    row: int
    first_block: int  # blocks before it are in trunks


def make_plan(rows: Sequence[Row], *, block_size: int, device: str, is_shared: bool = True) -> Plan:
    """The plan for `rows`; with is_shared False nothing is shared (every row reads all its keys)."""
    counts = np.array([len(row.tokens) for row in rows], dtype=np.int64)
    ends = np.cumsum(counts)
    begins = ends - counts
    slots = np.empty(int(ends[-1]), dtype=np.int64)
    positions = np.empty_like(slots)
    for row, begin, end in zip(rows, begins, ends, strict=True):
        at = np.arange(row.start, row.start + end - begin)
        positions[begin:end] = at
        slots[begin:end] = row.table[at // block_size].astype(np.int64) * block_size
        slots[begin:end] += at % block_size
    builder = _Builder(rows, begins, ends, block_size=block_size, device=device)
    builder.build(is_shared)
    wanted = [int(e) - 1 for row, e in zip(rows, ends, strict=True) if row.wants_logits]
    return Plan(
        tokens=builder.tensor(np.concatenate([row.tokens for row in rows])),
        positions=builder.tensor(positions),
        slots=builder.tensor(slots),
        trunks=tuple(builder.trunks),
        chunks=tuple(builder.chunks),
        padded=tuple(builder.padded),
        outputs=builder.tensor(np.array(wanted, dtype=np.int64)),
        key_reads=builder.key_reads,
        flat_key_reads=sum(row.start + len(row.tokens) for row in rows),
    )


class _Builder:
    """Collects the parts of a plan while the rows are sorted into trunks and tails."""

    def __init__(
        self, rows: Sequence[Row], begins: Ints, ends: Ints, *, block_size: int, device: str
    ) -> None:
        self.rows = rows
        self.begins = begins
        self.ends = ends
        self.block_size = block_size
        self.device = device
        self.trunks: list[Trunk] = []
        self.chunks: list[Chunk] = []
        self.padded: list[Padded] = []
        self.key_reads = 0

    def tensor(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self.device)

    def build(self, is_shared: bool) -> None:
        order = list(range(len(self.rows)))
        tails = self._share(order) if is_shared else [_Tail(i, 0) for i in order]
        short = []
        for tail in tails:
            row = self.rows[tail.row]
            if len(row.tokens) <= MAX_PADDED_TOKENS and row.start > 0:
                short.append(tail)
            else:
                self._run_alone(tail)
        for group in self._groups(short):
            self._pad(group)

    def _share(self, rows: list[int]) -> list[_Tail]:
        """Make trunks of what rows have in common; what is left of each row."""
        tails: list[_Tail] = []
        # (rows, begin, depth): they are equal up to block `depth`, and in trunks up to `begin`.
        todo = [(rows, 0, 0)]
        while todo:
            group, begin, depth = todo.pop()
            branches: dict[int, list[int]] = {}
            for i in group:
                if self._num_cached(i) > depth:
                    branches.setdefault(int(self.rows[i].table[depth]), []).append(i)
                else:
                    tails.append(_Tail(i, begin))
            for members in branches.values():
                if len(members) == 1:
                    tails.append(_Tail(members[0], begin))
                    continue
                end = depth + self._common(members, depth)
                if (len(members) - 1) * (end - begin) >= MIN_TRUNK_SAVING:
                    self._add_trunk(members, begin, end)
                    todo.append((members, end, end))
                else:  # part of them may share enough further down
                    todo.append((members, begin, end))
        return tails

    def _num_cached(self, i: int) -> int:
        """Full blocks wholly before the row's own tokens."""
        return self.rows[i].start // self.block_size

    def _common(self, members: list[int], depth: int) -> int:
        limit = min(self._num_cached(i) for i in members)
        first = self.rows[members[0]].table[depth:limit]
        length = limit - depth
        for i in members[1:]:
            differs = np.flatnonzero(self.rows[i].table[depth : depth + length] != first[:length])
            if len(differs):
                length = int(differs[0])
        return length

    def _add_trunk(self, members: list[int], begin: int, end: int) -> None:
        blocks = self.rows[members[0]].table[begin:end]
        self._trunk(blocks, len(blocks) * self.block_size, members)

    def _trunk(self, blocks: npt.NDArray[np.int32], num_keys: int, members: list[int]) -> None:
        spans = [np.arange(self.begins[i], self.ends[i]) for i in members]
        tokens = np.concatenate(spans)
        is_whole = len(tokens) == self.ends[-1] and bool((np.diff(tokens) == 1).all())
        self.trunks.append(
            Trunk(self.tensor(blocks), num_keys, None if is_whole else self.tensor(tokens))
        )
        self.key_reads += num_keys

    def _run_alone(self, tail: _Tail) -> None:
        row = self.rows[tail.row]
        first = tail.first_block * self.block_size
        if row.start > first:
            last = -(-row.start // self.block_size)
            self._trunk(row.table[tail.first_block : last], row.start - first, [tail.row])
        self.chunks.append(Chunk(int(self.begins[tail.row]), int(self.ends[tail.row])))
        self.key_reads += len(row.tokens)

    def _tail_blocks(self, tail: _Tail) -> int:
        row = self.rows[tail.row]
        return -(-(row.start + len(row.tokens)) // self.block_size) - tail.first_block

    def _groups(self, tails: list[_Tail]) -> list[list[_Tail]]:
        """Tails of like size together: padding at most doubles what a row reads."""
        groups: list[list[_Tail]] = []
        by_width: dict[int, list[_Tail]] = {}
        for tail in tails:
            width = len(self.rows[tail.row].tokens)
            by_width.setdefault((width - 1).bit_length(), []).append(tail)
        for same in by_width.values():
            same.sort(key=self._tail_blocks)
            group: list[_Tail] = []
            for tail in same:
                size = self._tail_blocks(tail)
                is_long = group and size > 2 * self._tail_blocks(group[0]) + 2
                if is_long or (group and size * (len(group) + 1) > MAX_PADDED_BLOCKS):
                    groups.append(group)
                    group = []
                group.append(tail)
            groups.append(group)
        return groups

    def _pad(self, group: list[_Tail]) -> None:
        group.sort()
        size = self.block_size
        width = max(len(self.rows[t.row].tokens) for t in group)
        num_blocks = max(self._tail_blocks(t) for t in group)
        blocks = np.empty((len(group), num_blocks), dtype=np.int64)
        queries = np.empty((len(group), width), dtype=np.int64)
        last_key = np.zeros((len(group), width), dtype=np.int64)
        is_real = np.zeros((len(group), width), dtype=np.bool_)
        for g, tail in enumerate(group):
            row = self.rows[tail.row]
            own = row.table[tail.first_block : tail.first_block + self._tail_blocks(tail)]
            blocks[g, : len(own)] = own
            blocks[g, len(own) :] = own[0]
            n = len(row.tokens)
            queries[g] = self.begins[tail.row]
            queries[g, :n] += np.arange(n)
            last_key[g, :n] = row.start - tail.first_block * size + np.arange(n)
            is_real[g, :n] = True
        hidden = np.arange(num_blocks * size) > last_key[:, :, None]
        mask = np.where(hidden, np.float32(-np.inf), np.float32(0.0))
        flat = queries.reshape(-1)
        is_whole = len(flat) == self.ends[-1] and bool((flat == np.arange(len(flat))).all())
        self.padded.append(
            Padded(
                blocks=self.tensor(blocks),
                queries=None if is_whole else self.tensor(flat),
                places=None if is_real.all() else self.tensor(np.flatnonzero(is_real)),
                real=self.tensor(queries[is_real]),
                mask=torch.from_numpy(mask[:, None]).to(self.device),
                width=width,
            )
        )
        self.key_reads += blocks.size * size
