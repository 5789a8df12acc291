"""The KV memory of a torch model as bytes, for checks and tiers. Doesn't know what a slot holds.

Checks are slow: every one waits for the device and copies what it looks at. Blocks of a device beside the
host are copied a batch at a time, gathered there, on a stream for copies alone (`memory.copies`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import xxhash

from mallee.worker.kv.pool import runs
from mallee.worker.kv.sides.group import RowSpan
from mallee.worker.kv.watch import Row, Rows
from mallee.worker.memory.copies import CopyStream
from mallee.worker.memory.errors import memory_errors
from mallee.worker.memory.transfer import sent
from mallee.worker.model.cpu.copies import past_caches, prepare

_NO_NUMBERS: dict[torch.dtype, tuple[Any, Any]] = {
    torch.float32: (np.uint32(0x7F800000), np.uint32((127 + 60) << 23)),
    torch.bfloat16: (np.uint16(0x7F80), np.uint16((127 + 60) << 7)),
    torch.float8_e4m3fn: (np.uint8(0x7F), np.uint8(0x7F)),
}
"""By type the bits of a value's size, and from where on they are refused: NaN, infinity, and 2**60, whose
products may overflow."""

_WORD: Final = torch.int64

PATTERN = 0xA5
"""As bfloat16, float32 or float8 a small negative number: unfilled slots are read, with weight 0."""


class TorchKV:
    """Bytes of `memory` [num_layers, num_blocks * block_size, ...] by block."""

    __slots__ = ("_block_size", "_copies", "_dtype", "_memory", "_raw", "block_nbytes")

    def __init__(
        self, memory: torch.Tensor, block_size: int, copies: CopyStream | None = None
    ) -> None:
        """`copies` is the stream of a memory that is not the host's."""
        self._memory = memory
        self._block_size = block_size
        self._copies = copies
        layers, slots = memory.shape[:2]
        # [layers, blocks, bytes of a layer's part of a block]
        self._raw = memory.view(torch.uint8).view(layers, slots // block_size, -1)
        self.block_nbytes = layers * self._raw.shape[2]
        self._dtype = memory.dtype
        if copies is None:
            prepare(memory.nbytes)

    def new_rows(self, num: int) -> Rows:
        if self._copies is not None:
            return self._copies.new_rows(num, self.block_nbytes)
        return np.zeros((num, self.block_nbytes), np.uint8)  # a page costs nothing until it is used

    def mark(self) -> object:
        return None if self._copies is None else self._copies.mark()

    def read(self, blocks: Sequence[int], rows: Rows, after: object = None) -> None:
        copy = self._read if self._copies is None else self._gather
        self._run(partial(copy, blocks, rows), after)

    def write(self, blocks: Sequence[int], rows: Rows, after: object = None) -> None:
        copy = self._write if self._copies is None else self._scatter
        self._run(partial(copy, blocks, rows), after)

    def _run(self, copy: Callable[[], None], after: object) -> None:
        if self._copies is None:
            copy()
            return
        with memory_errors(self._memory.device):  # batches have room there (`Work.staged_blocks`)
            self._copies.run(copy, after)

    def _read(self, blocks: Sequence[int], rows: Rows) -> None:
        if past_caches(self._raw, blocks, rows, is_read=True):
            return
        for part in runs(blocks):
            own, there = self._in_a_row(blocks[part]), rows[part]
            _copy(torch.from_numpy(there).view(own.shape), own)

    def _write(self, blocks: Sequence[int], rows: Rows) -> None:
        if past_caches(self._raw, blocks, rows, is_read=False):
            return
        for part in runs(blocks):
            own, there = self._in_a_row(blocks[part]), rows[part]
            _copy(own, torch.from_numpy(there).view(own.shape))

    def _in_a_row(self, blocks: Sequence[int]) -> torch.Tensor:
        """[blocks, layers, bytes of a layer's part of a block] of blocks in a row, a view."""
        return self._raw[:, blocks[0] : blocks[-1] + 1].transpose(0, 1)

    def _gather(self, blocks: Sequence[int], rows: Rows) -> None:
        """Enqueue a copy of `blocks` to `rows`: one kernel, then one copy across."""
        raw, index = self._by_block(blocks)
        own = raw.index_select(0, index)
        there = torch.from_numpy(rows).view(raw.dtype).view(own.shape)
        there.copy_(own, non_blocking=True)

    def _scatter(self, blocks: Sequence[int], rows: Rows) -> None:
        raw, index = self._by_block(blocks)
        there = torch.from_numpy(rows).view(raw.dtype).view(len(rows), *raw.shape[1:])
        raw.index_copy_(0, index, there.to(raw.device, non_blocking=True))

    def _by_block(self, blocks: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The memory by block [blocks, layers, words], a view in the widest words, and `blocks` beside it."""
        is_wide = self._raw.shape[2] % _WORD.itemsize == 0
        raw = (self._raw.view(_WORD) if is_wide else self._raw).transpose(0, 1)
        return raw, sent(np.asarray(blocks, np.int64), raw.device)

    def are_numbers(self, blocks: Sequence[int], rows: Rows) -> bool:
        mask, first = _NO_NUMBERS[self._dtype]
        return not any(bool(((row.view(mask.dtype) & mask) >= first).any()) for row in rows)

    def clear(self, row: Row, num_slots: int, group: int = 0, part: int = 0) -> None:
        row.reshape(len(self._raw), self._block_size, -1)[:, num_slots:] = 0

    def fill(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._bytes(block, self._block_size).fill_(PATTERN)

    def is_filled(self, block: int) -> bool:
        return bool((self._bytes(block, self._block_size) == PATTERN).all())

    def digest(self, block: int, num_slots: int) -> int:
        raw = self._bytes(block, num_slots).contiguous().cpu().numpy().tobytes()
        return xxhash.xxh3_64_intdigest(raw)

    def _bytes(self, block: int, num_slots: int) -> torch.Tensor:
        """[num_layers, num_slots, ...] uint8, a view."""
        begin = block * self._block_size
        return self._memory[:, begin : begin + num_slots].view(torch.uint8)


class GroupedKV(TorchKV):
    """The same with side groups, each of whose blocks is several rows to read and write (`kv.sides`).

    Checks know blocks of the first of `memories`, the full group's, alone. A memory of states is
    [slots, bytes]. A state is always written as a whole, so that bad numbers in it harm its own text alone.
    """

    __slots__ = ("_groups",)

    def __init__(
        self,
        memories: Sequence[torch.Tensor],
        block_size: int,
        spans: Sequence[RowSpan],
        copies: CopyStream | None = None,
    ) -> None:
        super().__init__(memories[0], block_size, copies)
        # [layers, blocks, bytes of a layer's part of a block], by first row; the last group first
        self._groups = [(RowSpan(0, 0, 1), self._raw)]
        for memory, span in zip(memories[1:], spans, strict=True):
            raw = memory
            if not _has_states(memory):
                raw = memory.view(torch.uint8).view(len(memory), memory.shape[1] // block_size, -1)
            self._groups.insert(0, (span, raw))

    def _read(self, blocks: Sequence[int], rows: Rows) -> None:
        for block, row in zip(blocks, rows, strict=True):
            part = self._part(block)
            _copy(torch.from_numpy(row[: part.numel()]).view(part.shape), part)
            row[part.numel() :] = 0

    def _write(self, blocks: Sequence[int], rows: Rows) -> None:
        for block, row in zip(blocks, rows, strict=True):
            part = self._part(block)
            _copy(part, torch.from_numpy(row[: part.numel()]).view(part.shape))

    _gather, _scatter = _read, _write

    def are_numbers(self, blocks: Sequence[int], rows: Rows) -> bool:
        states = {span for span, raw in self._groups if _has_states(raw)}
        own = [i for i, block in enumerate(blocks) if self._group(block)[0] not in states]
        return super().are_numbers([blocks[i] for i in own], rows[own])

    def clear(self, row: Row, num_slots: int, group: int = 0, part: int = 0) -> None:
        raw = next(raw for span, raw in self._groups if span.group == group)
        layers = len(self._raw)
        num_layers = len(raw[part * layers : (part + 1) * layers])
        used = row[: num_layers * raw.shape[2]]
        used.reshape(num_layers, self._block_size, -1)[:, num_slots:] = 0

    def _group(self, row: int) -> tuple[RowSpan, torch.Tensor]:
        return next(each for each in self._groups if row >= each[0].first)

    def _part(self, row: int) -> torch.Tensor:
        """A view: [at most the full group's layers, bytes of a layer's part of a block], or of a state."""
        span, raw = self._group(row)
        block, part = divmod(row - span.first, span.per_block)
        if _has_states(raw):
            return raw[block, part * self.block_nbytes : (part + 1) * self.block_nbytes]
        layers = len(self._raw)
        return raw[part * layers : (part + 1) * layers, block]


def _has_states(memory: torch.Tensor) -> bool:
    return memory.dim() == 2


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """In host memory by numpy's one thread: torch copies there with all its threads, which wait for one
    another where others compute (measured beside a busy core: 0.05 GB/s, numpy 14).
    """
    if target.device == source.device:
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source, non_blocking=True)
