"""The layout of the attention kernels' memory: control block, tables, and a thread's scratch.

Sizes are in bytes, offsets in words of 8 bytes.
"""

from typing import Any, NamedTuple

from mallee.worker.model.cpu.jit import inner

COLUMNS = 16
"""Columns (query heads of tokens) in a tile, and key slots in a run."""
LINE = 64
"""A line of a tile, of a cache, and 16 numbers in float32."""
TILE = 16 * LINE
KEYS = 128
"""Key slots taken at a time: what is computed of as many stays near the first cache."""
VALUES = KEYS // 32 * TILE
"""A column of 16 values' dimensions, packed: a tile for 32 of the keys."""
MAX_TILES = 32
"""Most tiles of columns in one job: they share the reading of keys and the packing of values."""


class _Control(NamedTuple):
    task: int  # the next task; threads count it up
    thread: int  # the next thread's number
    num_tasks: int  # jobs * key heads
    queries: int  # address of [n, query heads, dim] bfloat16 ...
    query_stride: int  # ... and bytes from token to token
    memory: int  # address of [slots, 2, key heads, dim] bfloat16 ...
    slot_stride: int  # ... and bytes from slot to slot
    heads: int  # key heads
    group: int  # query heads of each
    dim: int
    scale: int  # bits of the float32 that makes a score a power of 2
    scratch: int
    scratch_stride: int
    jobs: int  # [jobs, 5]: where its runs begin; first and last slot; first and last tile (last: excluded)
    runs: int  # of each run of 16 slots, the first slot in memory
    tiles: int  # [tiles, 2]: first of its places, their number; a place is a token in a job
    tokens: int  # of each place
    bounds: int  # [places, 2]: first and last slot (excluded) that it sees, counted within the job's runs
    sums: int  # [places, query heads, dim] float32: values weighted by 2**(score - top)
    tops: int  # [places, query heads, 2] float32: top, and the sum of the weights
    num_tokens: int
    firsts: int  # [num_tokens + 1]: of each token, where its places begin in ...
    places: int
    out: int  # address of [n, query heads, dim] bfloat16


CONTROL = _Control(*range(24))


class Scratch(NamedTuple):
    """Addresses in one thread's scratch memory."""

    saved: int  # the thread's tile configuration
    ours: int
    alpha: int
    zeros: int  # a slot's value, 0
    tops: int  # a line per tile
    sums: int
    queries: int  # dim / 32 tiles per tile of columns
    out: int  # [16, dim] float32 per tile of columns
    scores: int  # [KEYS, 16] float32
    weights: int  # a tile per 32 keys
    packed: int  # dim / 16 columns of values
    end: int


@inner
def scratch_at(base: int, dim: int) -> Scratch:
    alpha = base + 2 * LINE
    zeros = alpha + LINE
    tops = zeros + 2 * dim
    sums = tops + MAX_TILES * LINE
    queries = sums + MAX_TILES * LINE
    out = queries + MAX_TILES * (dim // 32) * TILE
    scores = out + MAX_TILES * (dim // 16) * TILE
    weights = scores + KEYS * LINE
    packed = weights + KEYS * 32
    end = packed + KEYS * 2 * dim
    return Scratch(
        base, base + LINE, alpha, zeros, tops, sums, queries, out, scores, weights, packed, end
    )


@inner
def run_at(memory: int, runs: Any, slot: int, stride: int) -> int:
    """The address of the 16 slots from `slot` on (a multiple of 16)."""
    address: int = memory + runs[slot >> 4] * stride
    return address
