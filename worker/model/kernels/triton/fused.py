"""The small operations between a layer's products on CUDA, one launch each, in Triton.

Imported where there is Triton, by `TritonKernels` alone. Numbers are rounded where torch's operations round
them, so results differ by the order of sums alone. A row of a batch is a program, or several: kernels
don't depend on the number of rows, and none is compiled after the first call for a model.
"""

import triton
import triton.language as tl
from triton.errors import TritonError

__all__ = ["TritonError", "fold", "gate", "norm", "place", "round_rows"]


@triton.jit
def _normed(row: tl.tensor, weight: tl.tensor, eps: tl.tensor, width: tl.constexpr) -> tl.tensor:
    return row * tl.rsqrt(tl.sum(row * row, 0) / width + eps) * weight


@triton.jit
def norm(
    x: tl.tensor,
    residual: tl.tensor,
    own_weight: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """out = x normed. With `residual`, x is added to it in its place first, and the sum is normed.

    With `own_weight`, x is normed by that before it is added. x, residual, out [rows, width].
    """
    at = tl.arange(0, block)
    inside = at < width
    place = tl.program_id(0).to(tl.int64) * width + at
    row = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        if own_weight is not None:
            own = tl.load(own_weight + at, mask=inside, other=0.0).to(tl.float32)
            row = _normed(row, own, eps, width).to(out.dtype.element_ty).to(tl.float32)
        row += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        total = row.to(out.dtype.element_ty)
        tl.store(residual + place, total, mask=inside)
        row = total.to(tl.float32)
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, _normed(row, scale, eps, width).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate(
    gate_up: tl.tensor,
    out: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
    is_gelu: tl.constexpr,
) -> None:
    """out [rows, width] = activation(gate) * up, of gate_up [rows, 2 * width]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    source = gate_up + row * 2 * width + at
    x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    bend = x
    if is_gelu:  # 0.5 (1 + tanh(y)) is the logistic function of 2 y
        bend = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    bent = (x / (1.0 + tl.exp(-bend))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + at, (bent * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _float8(x: tl.tensor) -> tl.tensor:
    """The bits of x in float8 e4m3, rounded to nearest even; beyond 448 it saturates.

    In integers, since not every device casts to it. Below 2^-6 float8 counts in steps of 2^-9, as float32
    does from 2^14 on: a sum with that rounds.
    """
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    rounded = (size + 0x7FFFF + ((size >> 20) & 1) - (120 << 23)) >> 20
    steps = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    found = tl.where(size < 0x3C800000, steps, rounded)
    found = tl.where(size > 0x43E00000, 0x7E, found)
    found = tl.where(size > 0x7F800000, 0x7F, found)  # no number
    return (sign | found).to(tl.uint8)


@triton.jit(do_not_specialize=["slots"])  # a part of a step's numbers, aligned by chance
def place(
    qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    slots: tl.tensor,
    head_norm: tl.tensor,
    kv_scales: tl.tensor,
    turned: tl.tensor,
    memory: tl.tensor,
    eps: tl.tensor,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    head_block: tl.constexpr,
    half_block: tl.constexpr,
    is_float8: tl.constexpr,
) -> None:
    """As `Ops.place`, for `head_block` heads of a token. float8 memory comes as bytes."""
    half: tl.constexpr = dim // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * head_block + tl.arange(0, head_block)[:, None]
    at = tl.arange(0, half_block)[None, :]
    is_value = head >= heads + kv_heads
    inside = (head < heads + 2 * kv_heads) & (at < half)
    turns = inside & (head < heads + kv_heads)
    source = qkv + (token * (heads + 2 * kv_heads) + head) * dim + at
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    x, y = low, high
    if head_norm is not None:
        squares = (tl.sum(x * x, 1) + tl.sum(y * y, 1))[:, None]
        scale = tl.rsqrt(squares / dim + eps)
        weight = head_norm + head * dim + at
        x = x * scale * tl.load(weight, mask=turns, other=0.0)
        y = y * scale * tl.load(weight + half, mask=turns, other=0.0)
        x = x.to(qkv.dtype.element_ty).to(tl.float32)
        y = y.to(qkv.dtype.element_ty).to(tl.float32)
    table = token * dim + at
    shown = at < half
    cos_low = tl.load(cos + table, mask=shown, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + table + half, mask=shown, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + table, mask=shown, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + table + half, mask=shown, other=0.0).to(tl.float32)
    turned_low = (x * cos_low).to(qkv.dtype.element_ty).to(tl.float32) + y * sin_low
    turned_high = (y * cos_high).to(qkv.dtype.element_ty).to(tl.float32) + x * sin_high
    turned_low = turned_low.to(qkv.dtype.element_ty)
    turned_high = turned_high.to(qkv.dtype.element_ty)
    target = turned + (token * (heads + kv_heads) + head) * dim + at
    tl.store(target, turned_low, mask=turns)
    tl.store(target + half, turned_high, mask=turns)
    low = tl.where(is_value, low, turned_low.to(tl.float32))
    high = tl.where(is_value, high, turned_high.to(tl.float32))
    if kv_scales is not None:
        share = tl.broadcast_to(tl.load(kv_scales + is_value.to(tl.int32)), low.shape)
        low, high = tl.div_rn(low, share), tl.div_rn(high, share)
    keeps = inside & (head >= heads)
    line = memory + (tl.load(slots + token) * 2 * kv_heads + head - heads) * dim + at
    if is_float8:
        tl.store(line, _float8(low), mask=keeps)
        tl.store(line + half, _float8(high), mask=keeps)
    else:
        tl.store(line, low.to(memory.dtype.element_ty), mask=keeps)
        tl.store(line + half, high.to(memory.dtype.element_ty), mask=keeps)


@triton.jit(do_not_specialize=["read", "written"])
def fold(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    decay: tl.tensor,
    rate: tl.tensor,
    read: tl.tensor,
    written: tl.tensor,
    matrices: tl.tensor,
    out: tl.tensor,
    slot_stride: tl.constexpr,
    heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    key_block: tl.constexpr,
    value_block: tl.constexpr,
) -> None:
    """As `Ops.fold`, for `value_block` values of a row's head."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    key_at = tl.arange(0, key_block)
    value_at = tl.program_id(2) * value_block + tl.arange(0, value_block)
    has_key, has_value = key_at < key_dim, value_at < value_dim
    inside = has_value[:, None] & has_key[None, :]
    place = (head * value_dim + value_at[:, None]) * key_dim + key_at[None, :]
    own = row * heads + head
    query = tl.load(q + own * key_dim + key_at, mask=has_key, other=0.0)
    key = tl.load(k + own * key_dim + key_at, mask=has_key, other=0.0)
    value = tl.load(v + own * value_dim + value_at, mask=has_value, other=0.0)
    state = tl.load(matrices + tl.load(read + row) * slot_stride + place, mask=inside, other=0.0)
    state *= tl.exp(tl.load(decay + own))
    missing = (value - tl.sum(state * key[None, :], 1)) * tl.load(rate + own)
    state += missing[:, None] * key[None, :]
    tl.store(matrices + tl.load(written + row) * slot_stride + place, state, mask=inside)
    tl.store(out + own * value_dim + value_at, tl.sum(state * query[None, :], 1), mask=has_value)


@triton.jit
def round_rows(
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """As `rounded_rows` to float8, whose values come as bytes."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < width
    wide = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(wide), 0), 448.0), 1e-12)
    tl.store(scales + row, scale)
    share = tl.div_rn(wide, tl.broadcast_to(scale, wide.shape))
    tl.store(values + row * width + at, _float8(share), mask=inside)
