"""Attention over paged bfloat16 KV on a CPU with AMX or AVX-512: every part of a split in one kernel.

Shared prefixes and segments alike become *jobs* (a run of key slots and the tokens that meet them), a job's
tokens become tiles of columns, and each token's parts are merged at the end. Keys are read where they
are: nothing is gathered.
"""

import math
from typing import NamedTuple

import numpy as np
import torch

from mallee.worker.model.attention.base import MIN_SHARED_SAVING, AttentionSplit, Ints
from mallee.worker.model.cpu.attend import attend, is_available
from mallee.worker.model.cpu.layout import COLUMNS, CONTROL, LINE, MAX_TILES, scratch_at
from mallee.worker.model.cpu.merge import merge

MIN_KEYS = 512
"""A job is divided between threads by its keys into runs of at least this many."""
MIN_MERGED_TOKENS = 16
"""With fewer tokens one thread merges them sooner than two would begin."""


class Parts(NamedTuple):
    """A split as this backend runs it: the kernels' control block, and what it points to."""

    control: Ints
    address: int  # of the control block
    tables: tuple[Ints, ...]
    has_merges: bool  # whether a token has several parts


class TiledAttention:
    """As `TorchAttention`, for what `is_supported`. Its only state is scratch memory."""

    __slots__ = ("_control", "_group", "_per_job", "_scratch", "_sums", "_threads", "_tops")
    min_saving = MIN_SHARED_SAVING

    @staticmethod
    def is_supported(
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        block_size: int,
        head_dim: int,
        group_size: int,
    ) -> bool:
        return (
            dtype == kv_dtype == torch.bfloat16
            and block_size % 16 == 0
            and head_dim % 32 == 0
            and group_size <= COLUMNS
            and is_available()
        )

    def __init__(self, *, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        assert is_available(), "its products would be illegal instructions"
        attend.compile()
        merge.compile()
        self._group = num_heads // num_kv_heads
        self._per_job = COLUMNS // self._group * MAX_TILES  # tokens
        self._threads = torch.get_num_threads()
        self._sums = torch.empty(0)
        self._tops = torch.empty(0)
        stride = -(-scratch_at(0, head_dim).end // 4096) * 4096
        self._scratch = np.zeros(stride * self._threads + LINE, dtype=np.uint8)
        control = self._control = np.zeros(len(CONTROL), dtype=np.int64)
        control[CONTROL.slot_stride] = 2 * num_kv_heads * head_dim * 2
        control[CONTROL.heads] = num_kv_heads
        control[CONTROL.group] = self._group
        control[CONTROL.dim] = head_dim
        control[CONTROL.scratch] = -(-self._scratch.ctypes.data // LINE) * LINE
        control[CONTROL.scratch_stride] = stride

    def prepare(self, split: AttentionSplit) -> Parts:
        """`split` as the kernels' tables."""
        blocks = [prefix.blocks for prefix in split.shared]
        blocks += [segment.blocks for segment in split.segments]
        starts = np.concatenate(blocks).astype(np.int64) * split.block_size
        runs = (starts[:, None] + np.arange(0, split.block_size, COLUMNS)).reshape(-1)
        spans = self._divide(_spans(split))
        jobs, tiles, tokens, bounds = _tables(split, spans, COLUMNS // self._group)
        firsts = np.zeros(split.num_tokens + 1, dtype=np.int64)
        np.cumsum(np.bincount(tokens, minlength=split.num_tokens), out=firsts[1:])
        tables = {
            CONTROL.jobs: jobs,
            CONTROL.runs: runs,
            CONTROL.tiles: tiles,
            CONTROL.tokens: tokens,
            CONTROL.bounds: bounds,
            CONTROL.firsts: firsts,
            CONTROL.places: tokens.argsort(kind="stable"),
        }
        control = self._control.copy()
        for word, table in tables.items():
            control[word] = table.ctypes.data
        control[CONTROL.num_tasks] = len(jobs) * control[CONTROL.heads]
        control[CONTROL.num_tokens] = split.num_tokens
        self._reserve(len(tokens))
        has_merges = len(tokens) > split.num_tokens
        return Parts(control, control.ctypes.data, tuple(tables.values()), has_merges)

    def _divide(self, spans: Ints) -> Ints:
        """`spans`, with those that would keep one thread busy while others wait cut by their keys.

        Long prompts are not: they are many tasks, of all their keys, and need not be merged then.
        """
        num_keys = spans[:, _LAST] - spans[:, _FIRST]
        if self._threads == 1 or num_keys.max() < 2 * MIN_KEYS:
            return spans
        costs = num_keys * spans[:, _SIZE]
        wanted = np.rint(costs * self._threads / costs.sum()).astype(np.int64)
        tasks = -(-spans[:, _SIZE] // self._per_job) * int(self._control[CONTROL.heads])
        wanted = np.minimum(wanted, -(-2 * wanted // tasks))
        counts = np.maximum(np.minimum(wanted, num_keys // MIN_KEYS), 1)
        steps = -(-num_keys // counts // COLUMNS) * COLUMNS
        divided = spans.repeat(counts, axis=0)
        turns = np.arange(len(divided)) - (counts.cumsum() - counts).repeat(counts)
        divided[:, _FIRST] += turns * steps.repeat(counts)
        ends = divided[:, _FIRST] + steps.repeat(counts)
        divided[:, _LAST] = np.minimum(divided[:, _LAST], ends)
        return divided

    def _reserve(self, num_parts: int) -> None:
        """Room for the results of so many (job, token) pairs."""
        heads, group, dim = self._control[CONTROL.heads : CONTROL.dim + 1].tolist()
        numel = num_parts * heads * group
        if len(self._tops) < 2 * numel:
            self._tops = torch.empty(2 * (numel + numel // 4))
            self._sums = torch.empty((numel + numel // 4) * dim)

    def attend(
        self, reads: Parts, q: torch.Tensor, memory: torch.Tensor, *, scale: float
    ) -> torch.Tensor:
        n, num_heads, dim = q.shape
        assert q.stride()[1:] == (dim, 1)
        assert memory.is_contiguous()
        assert q.dtype == memory.dtype == torch.bfloat16
        control = reads.control
        out = torch.empty((n, num_heads, dim), dtype=q.dtype)
        factor = np.float32(scale * math.log2(math.e))
        control[CONTROL.task] = control[CONTROL.thread] = 0
        control[CONTROL.queries] = q.data_ptr()
        control[CONTROL.query_stride] = q.stride(0) * q.itemsize
        control[CONTROL.memory] = memory.data_ptr()
        control[CONTROL.scale] = factor.view(np.int32)
        control[CONTROL.sums] = self._sums.data_ptr()
        control[CONTROL.tops] = self._tops.data_ptr()
        control[CONTROL.out] = out.data_ptr()
        threads = min(self._threads, torch.get_num_threads())
        attend.run(reads.address, threads)
        if reads.has_merges:
            control[CONTROL.task] = 0
            merge.run(reads.address, threads if n >= MIN_MERGED_TOKENS else 1)
        return out


_PART, _OFFSET, _SIZE, _BEGIN, _LOW, _HIGH, _SLOPE, _FIRST, _LAST = range(9)
"""Columns of spans, each a part of a cut or some of its keys: the part's number; its first run; its
tokens and the first of them, which sees slots low .. high (excluded), each next one `slope` further;
the slots to meet."""


def _spans(split: AttentionSplit) -> Ints:
    """A span for each prefix and segment: [parts, 9]."""
    rows: list[tuple[int, ...]] = []
    offset = 0
    runs_per_block = split.block_size // COLUMNS
    for prefix in split.shared:
        n = len(prefix.blocks) * split.block_size
        rows.append((len(rows), offset, len(prefix.tokens), 0, 0, n, 0, 0, n))
        offset += len(prefix.blocks) * runs_per_block
    for segment in split.segments:
        first = max(segment.first, 0) // COLUMNS * COLUMNS
        end = segment.last + 1
        seen = (segment.size, segment.begin, segment.first, end, 1)
        rows.append((len(rows), offset, *seen, first, end + segment.size - 1))
        offset += len(segment.blocks) * runs_per_block
    return np.array(rows, dtype=np.int64)


def _tables(split: AttentionSplit, spans: Ints, per_tile: int) -> tuple[Ints, Ints, Ints, Ints]:
    """The kernels' jobs [n, 5], tiles [n, 2], tokens [places] and bounds [places, 2]."""
    sizes = spans[:, _SIZE]
    owner, at, places = _enumerate(sizes)
    tokens = spans[owner, _BEGIN] + at
    for i, part in enumerate(spans[:, _PART].tolist()):
        if part >= len(split.shared):
            break  # shared come first
        tokens[places[i] : places[i + 1]] = split.shared[part].tokens
    slid = spans[owner, _SLOPE] * at
    bounds = np.stack((np.maximum(spans[owner, _LOW] + slid, 0), spans[owner, _HIGH] + slid), 1)
    owner, at, tile_starts = _enumerate(-(-sizes // per_tile))
    tiles = np.empty((len(owner), 2), dtype=np.int64)
    tiles[:, 0] = places[owner] + at * per_tile
    tiles[:, 1] = np.minimum(sizes[owner] - at * per_tile, per_tile)
    owner, at, _ = _enumerate(-(-sizes // (per_tile * MAX_TILES)))
    jobs = np.empty((len(owner), 5), dtype=np.int64)
    jobs[:, 0] = spans[owner, _OFFSET]
    jobs[:, 3] = tile_starts[owner] + at * MAX_TILES
    jobs[:, 4] = np.minimum(jobs[:, 3] + MAX_TILES, tile_starts[owner + 1])
    lowest = bounds[tiles[jobs[:, 3], 0], 0]  # bounds rise from place to place
    highest = bounds[tiles[jobs[:, 4] - 1].sum(1) - 1, 1]
    jobs[:, 1] = np.maximum(spans[owner, _FIRST], lowest // COLUMNS * COLUMNS)
    jobs[:, 2] = np.maximum(np.minimum(spans[owner, _LAST], highest), jobs[:, 1])
    return jobs, tiles, tokens, bounds


def _enumerate(counts: Ints) -> tuple[Ints, Ints, Ints]:
    """For `counts` of things in a row: each thing's owner, its number there, and where owners begin."""
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    owner = np.arange(len(counts)).repeat(counts)
    return owner, np.arange(starts[-1]) - starts[owner], starts
