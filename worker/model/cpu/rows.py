"""The small operations between a layer's products, one pass over each row: a norm, a gate, the turning
of queries and keys with the writing of KV. Rows are float32 or bfloat16; the arithmetic is float32.
"""

from typing import Any, NamedTuple

import numpy as np

from mallee.worker.model.cpu.jit import (
    Kernel,
    claim,
    exp2,
    floats,
    from_bits,
    from_half,
    halves,
    inner,
    to_half,
    words,
)

_LOG2E = np.float32(1.4426950408889634)
_GELU = np.float32(2.0 * 0.7978845608028654)
_GELU_CUBIC = np.float32(0.044715)
_ROWS = 8
"""Rows that a thread takes at a time: one by one, two threads took as long as one for a norm (measured)."""


@inner
def _read(address: int, n: int, is_half: bool, target: Any) -> None:
    """target[:n] = the numbers at `address`."""
    if is_half:
        narrow = halves(address)
        for i in range(n):
            target[i] = from_half(narrow[i])
    else:
        wide = floats(address)
        for i in range(n):
            target[i] = wide[i]


@inner
def _write(address: int, n: int, is_half: bool, source: Any) -> None:
    """The numbers at `address` = source[:n]."""
    if is_half:
        narrow = halves(address)
        for i in range(n):
            narrow[i] = to_half(source[i])
    else:
        wide = floats(address)
        for i in range(n):
            wide[i] = source[i]


@inner
def _normed(row: Any, weight: Any, n: int, eps: float) -> None:
    """row[:n] = row / sqrt(mean square + eps) * weight."""
    total = np.float32(0)
    for i in range(n):
        total += row[i] * row[i]
    scale = np.float32(1.0) / np.sqrt(total / np.float32(n) + eps)
    for i in range(n):
        row[i] *= scale * weight[i]


class _NormWords(NamedTuple):
    """The offsets in the control block of `norm`."""

    counter: int
    num_rows: int
    x: int
    stride: int
    out: int
    width: int
    is_half: int
    weight: int
    is_weight_half: int
    eps: int


NORM = _NormWords(*range(10))


def _norm(control: int) -> None:
    a = words(control)
    width, is_half = a[NORM.width], a[NORM.is_half] != 0
    size = 2 if is_half else 4
    eps = from_bits(np.int32(a[NORM.eps]))
    row, weight = np.empty(width, np.float32), np.empty(width, np.float32)
    _read(a[NORM.weight], width, a[NORM.is_weight_half] != 0, weight)
    n, first = a[NORM.num_rows], claim(control) * _ROWS
    while first < n:
        for i in range(first, min(first + _ROWS, n)):
            _read(a[NORM.x] + i * a[NORM.stride] * size, width, is_half, row)
            _normed(row, weight, width, eps)
            _write(a[NORM.out] + i * width * size, width, is_half, row)
        first = claim(control) * _ROWS


class _GateWords(NamedTuple):
    """The offsets in the control block of `gate`."""

    counter: int
    num_rows: int
    x: int
    out: int
    width: int
    is_half: int
    is_gelu: int


GATE = _GateWords(*range(7))


def _gate(control: int) -> None:
    a = words(control)
    width, is_half = a[GATE.width], a[GATE.is_half] != 0
    size = 2 if is_half else 4
    gate, up = np.empty(width, np.float32), np.empty(width, np.float32)
    n, first = a[GATE.num_rows], claim(control) * _ROWS
    while first < n:
        for row in range(first, min(first + _ROWS, n)):
            source = a[GATE.x] + row * 2 * width * size
            _read(source, width, is_half, gate)
            _read(source + width * size, width, is_half, up)
            if a[GATE.is_gelu]:
                for i in range(width):
                    x = gate[i]
                    bend = _GELU * x * (np.float32(1.0) + _GELU_CUBIC * x * x)
                    gate[i] = x * up[i] / (np.float32(1.0) + exp2(-bend * _LOG2E))
            else:
                for i in range(width):
                    x = gate[i]
                    gate[i] = x * up[i] / (np.float32(1.0) + exp2(-x * _LOG2E))
            _write(a[GATE.out] + row * width * size, width, is_half, gate)
        first = claim(control) * _ROWS


class _PlaceWords(NamedTuple):
    """The offsets in the control block of `place`."""

    counter: int
    num_rows: int
    x: int
    heads: int
    kv_heads: int
    dim: int
    is_half: int
    cos: int
    sin: int
    slots: int
    memory: int
    weight: int
    eps: int


PLACE = _PlaceWords(*range(13))


def _place(control: int) -> None:
    a = words(control)
    dim = a[PLACE.dim]
    row, turned = np.empty(dim, np.float32), np.empty(dim, np.float32)
    cos, sin = np.empty(dim, np.float32), np.empty(dim, np.float32)
    n, first = a[PLACE.num_rows], claim(control) * _ROWS
    while first < n:
        for i in range(first, min(first + _ROWS, n)):
            _place_row(a, i, row, turned, cos, sin)
        first = claim(control) * _ROWS


@inner
def _place_row(a: Any, index: int, row: Any, turned: Any, cos: Any, sin: Any) -> None:
    heads, kv_heads, dim = a[PLACE.heads], a[PLACE.kv_heads], a[PLACE.dim]
    is_half = a[PLACE.is_half] != 0
    half, line = dim // 2, dim * (2 if is_half else 4)
    eps = from_bits(np.int32(a[PLACE.eps]))
    _read(a[PLACE.cos] + index * line, dim, is_half, cos)
    _read(a[PLACE.sin] + index * line, dim, is_half, sin)
    source = a[PLACE.x] + index * (heads + 2 * kv_heads) * line
    target = a[PLACE.memory] + words(a[PLACE.slots])[index] * 2 * kv_heads * line
    for head in range(heads + kv_heads):
        _read(source, dim, is_half, row)
        if a[PLACE.weight]:
            _normed(row, floats(a[PLACE.weight] + head * dim * 4), dim, eps)
        for i in range(half):
            turned[i] = row[i] * cos[i] + row[half + i] * sin[i]
        for i in range(half):
            turned[half + i] = row[half + i] * cos[half + i] + row[i] * sin[half + i]
        _write(source, dim, is_half, turned)
        if head >= heads:
            _write(target, dim, is_half, turned)
            target += line
        source += line
    for _ in range(kv_heads):
        _read(source, dim, is_half, row)
        _write(target, dim, is_half, row)
        source += line
        target += line


norm = Kernel(_norm)
gate = Kernel(_gate)
place = Kernel(_place)
