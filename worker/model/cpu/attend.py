"""Attention over paged bfloat16 keys in tiles, each column (a token's query head) with its softmax.

A *job* is a run of key slots and the tokens that meet them; a task is one key head of one job. Scores
come transposed, [keys, columns], so that a tile of keys is read straight from its page, and a column's
softmax is one lane of a vector. Results are parts: sums weighted by 2**(score - top), not yet divided,
which `merge` adds up for each token that has several. Source of the split softmax: FlashAttention-2,
section 3.1.
"""

from typing import Any

import numpy as np
import torch

from mallee.worker.model.cpu import amx, vectors
from mallee.worker.model.cpu.jit import (
    Kernel,
    claim,
    fill,
    floats,
    from_bits,
    halves,
    inner,
    pairs,
    prefetch,
    to_half,
    words,
)
from mallee.worker.model.cpu.layout import (
    CONTROL,
    KEYS,
    LINE,
    TILE,
    VALUES,
    Scratch,
    run_at,
    scratch_at,
)
from mallee.worker.model.cpu.vectors import exponents, interleave, raise_tops, transpose

_HAS_TILES = vectors.has("amx_bf16")  # not by permission: compiled kernels are kept by processor
_unit: Any = amx if _HAS_TILES else vectors
_score, _weigh = _unit.score, _unit.weigh

_HIDDEN = np.float32(-1e38)
_LOWEST = np.float32(-1e30)  # above all hidden scores, so that 2**(hidden - lowest) is 0
_ZERO = np.float32(0)
_ONE = np.float32(1)


def is_available() -> bool:
    """Whether this process may run `attend`; asks the operating system for tiles where there are some."""
    return vectors.has("avx512_f") and (not _HAS_TILES or bool(torch.cpu._init_amx()))


@inner
def _load_queries(a: Any, head: int, place: int, n: int, target: int, spare: int) -> None:
    """The columns of places place .. place + n as tiles: line i of one holds dimensions 2 i, 2 i + 1."""
    group, dim = a[CONTROL.group], a[CONTROL.dim]
    tokens, rows, half = words(a[CONTROL.tokens]), pairs(spare), dim // 2
    for column in range(16):
        if column < n * group:
            token = tokens[place + column // group]
            first = a[CONTROL.queries] + token * a[CONTROL.query_stride]
            source = pairs(first + (head * group + column % group) * dim * 2)
            for i in range(half):
                rows[column * half + i] = source[i]
        else:
            for i in range(half):
                rows[column * half + i] = np.uint32(0)
    for i in range(dim // 32):
        transpose(spare + i * LINE, dim * 2, target + i * TILE)


@inner
def _fetch(memory: int, runs: Any, slot: int, stride: int, nbytes: int) -> None:
    """`nbytes` of each of the 16 slots from `slot` on are on their way to the cache."""
    line = run_at(memory, runs, slot, stride)
    for _ in range(16):
        for j in range(0, nbytes, LINE):
            prefetch(line + j)
        line += stride


@inner
def _pack_values(
    values: int, runs: Any, first: int, last: int, stride: int, dim: int, own: Scratch
) -> None:
    """Values of slots first .. last as tiles, 32 slots in each; slots from `last` on count as 0.

    They may never have been written, and 0 times what is there need not be 0.
    """
    width, target = dim // 16, own.packed
    for slot in range(first, last, 16):
        line = run_at(values, runs, slot, stride)
        is_second = (slot - first) & 16 != 0
        for i in range(8):
            low = line if slot + 2 * i < last else own.zeros
            high = line + stride if slot + 2 * i + 1 < last else own.zeros
            place = target + (i + 8 if is_second else i) * LINE
            for j in range(width):
                interleave(low + j * 32, high + j * 32, place + j * VALUES)
            line += 2 * stride
        if is_second:
            target += TILE
    if (last - 1 - first) & 16 == 0:
        for j in range(width):
            fill(target + j * VALUES + TILE // 2, TILE // 8, _ZERO)


@inner
def _hide(scores: int, first: int, count: int, bounds: Any, n: int, group: int) -> None:
    """Scores of slots that a column doesn't see become very low."""
    rows = floats(scores)
    for i in range(n):
        low, high = bounds[2 * i] - first, bounds[2 * i + 1] - first
        if low > 0 or high < count:
            for column in range(i * group, i * group + group):
                for slot in range(min(low, count)):
                    rows[slot * 16 + column] = _HIDDEN
                for slot in range(max(high, 0), count):
                    rows[slot * 16 + column] = _HIDDEN


@inner
def _meet(
    a: Any, keys: int, runs: Any, first: int, last: int, i: int, bounds: Any, n: int, own: Scratch
) -> None:
    """Columns of tile `i` (n places, with these bounds) meet slots first .. last."""
    dim, scale = a[CONTROL.dim], from_bits(np.int32(a[CONTROL.scale]))
    last = min(last, bounds[2 * n - 1])  # bounds rise from place to place
    if last <= first:
        return
    lines, groups = (last - first + 15) // 16 * 16, (last - first + 31) // 32
    queries = own.queries + i * (dim // 32) * TILE
    _score(keys, runs, first, lines, a[CONTROL.slot_stride], queries, dim // 32, own.scores)
    fill(own.scores + lines * LINE, (groups * 32 - lines) * 16, _HIDDEN)
    _hide(own.scores, first, groups * 32, bounds, n, a[CONTROL.group])
    tops, sums = own.tops + i * LINE, own.sums + i * LINE
    raise_tops(own.scores, groups * 32, scale, tops, own.alpha)
    exponents(own.scores, groups * 16, scale, tops, own.alpha, own.scores, sums)
    out, factors = own.out + i * (dim // 16) * TILE, floats(own.alpha)
    for line in range(16):
        factor, scaled = factors[line], floats(out + line * dim * 4)
        if factor != _ONE:  # mostly it is: the highest score comes early
            for d in range(dim):
                scaled[d] *= factor
    _weigh(own, out, groups, dim)


@inner
def _deliver(a: Any, head: int, i: int, place: int, n: int, own: Scratch) -> None:
    """The results of tile `i` go to its places; those of tokens without other parts are the output."""
    group, dim = a[CONTROL.group], a[CONTROL.dim]
    found = floats(own.out + i * (dim // 16) * TILE)
    tops, sums = floats(own.tops + i * LINE), floats(own.sums + i * LINE)
    tokens, firsts = words(a[CONTROL.tokens]), words(a[CONTROL.firsts])
    for column in range(n * group):
        own_place, own_head = place + column // group, head * group + column % group
        token, line = tokens[own_place], column * dim
        if firsts[token + 1] - firsts[token] == 1:
            out = halves(a[CONTROL.out] + (token * a[CONTROL.heads] * group + own_head) * dim * 2)
            share = _ONE / sums[column]
            for d in range(dim):
                out[d] = to_half(found[line + d] * share)
        else:
            row = own_place * a[CONTROL.heads] * group + own_head
            target = floats(a[CONTROL.sums] + row * dim * 4)
            peak = floats(a[CONTROL.tops] + row * 8)
            for d in range(dim):
                target[d] = found[line + d]
            peak[0], peak[1] = tops[column], sums[column]


@inner
def _attend(a: Any, job: int, head: int, own: Scratch) -> None:
    """One key head of a job."""
    dim, stride = a[CONTROL.dim], a[CONTROL.slot_stride]
    row = words(a[CONTROL.jobs] + job * 40)
    runs, tiles = words(a[CONTROL.runs] + row[0] * 8), words(a[CONTROL.tiles] + row[3] * 16)
    first, end, num_tiles = row[1], row[2], row[4] - row[3]
    keys = a[CONTROL.memory] + head * dim * 2
    values = keys + a[CONTROL.heads] * dim * 2
    for i in range(num_tiles):
        queries = own.queries + i * (dim // 32) * TILE
        _load_queries(a, head, tiles[2 * i], tiles[2 * i + 1], queries, own.packed)
    fill(own.zeros, dim // 2, _ZERO)
    fill(own.out, num_tiles * 16 * dim, _ZERO)
    fill(own.tops, num_tiles * 16, _LOWEST)
    fill(own.sums, num_tiles * 16, _ZERO)
    while first < end:
        last = min(first + KEYS, end)
        for slot in range(first, last, 16):
            _fetch(values, runs, slot, stride, dim * 2)
            _fetch(keys, runs, slot, stride, dim * 2)
        _pack_values(values, runs, first, last, stride, dim, own)
        for i in range(num_tiles):
            bounds = words(a[CONTROL.bounds] + tiles[2 * i] * 16)
            _meet(a, keys, runs, first, last, i, bounds, tiles[2 * i + 1], own)
        first += KEYS
    for i in range(num_tiles):
        _deliver(a, head, i, tiles[2 * i], tiles[2 * i + 1], own)


def _attend_tasks(control: int) -> None:
    a = words(control)
    base = a[CONTROL.scratch] + claim(control + 8) * a[CONTROL.scratch_stride]
    own = scratch_at(base, a[CONTROL.dim])
    if _HAS_TILES:
        amx.enter(own)
    task = a[CONTROL.num_tasks] - 1 - claim(control)
    while task >= 0:  # from the last on, which meets most keys of a prompt: small ones fill the end
        _attend(a, task // a[CONTROL.heads], task % a[CONTROL.heads], own)
        task = a[CONTROL.num_tasks] - 1 - claim(control)
    if _HAS_TILES:
        amx.leave(own)


attend = Kernel(_attend_tasks)
