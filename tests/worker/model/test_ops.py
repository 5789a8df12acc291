"""The small operations and the products of every backend against plain float64 arithmetic."""

import pytest
import torch

from mallee.worker.model.config import Activation
from mallee.worker.model.linear.plain import plain_linear
from mallee.worker.model.ops import MIN_PARALLEL_NUMEL, FusedOps, Ops, Turn
from support.torch_threads import torch_threads

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2}
"""Largest difference, relative to the largest number."""

both_ops = pytest.mark.parametrize("ops", [Ops(), FusedOps()], ids=["torch", "fused"])
both_dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["fp32", "bf16"])
counts = pytest.mark.parametrize("n", [1, 7, 40])


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def agrees(ours: torch.Tensor, exact: torch.Tensor) -> bool:
    difference = float((ours.double() - exact).abs().max())
    return difference <= TOLERANCE[ours.dtype] * max(1.0, float(exact.abs().max()))


@both_ops
@both_dtypes
@counts
@pytest.mark.parametrize("is_wide", [False, True], ids=["own", "float32"])
def test_a_norm_divides_by_the_root_mean_square(
    ops: Ops, dtype: torch.dtype, n: int, is_wide: bool
) -> None:
    """I7, part: RMS norm with weights of the model's dtype, or in float32 as families with an offset have."""
    x, weight = random(n, 576, dtype=dtype) * 3, random(576, seed=1)
    weight = weight if is_wide else weight.to(dtype)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    found = ops.norm(x, weight, 1e-5)
    assert found.dtype == dtype
    assert agrees(found, exact)


@both_ops
@both_dtypes
@counts
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gate_bends_one_half_and_multiplies_the_other(
    ops: Ops, dtype: torch.dtype, n: int, activation: Activation
) -> None:
    """I7, part: SwiGLU and GeGLU, far from 0 too."""
    gate_up = random(n, 2 * 1536, dtype=dtype) * 20
    gate, up = gate_up.double().chunk(2, -1)
    if activation == "silu":
        exact = torch.nn.functional.silu(gate) * up
    else:
        exact = torch.nn.functional.gelu(gate, approximate="tanh") * up
    assert agrees(ops.gated(gate_up, activation), exact)


@both_ops
@both_dtypes
@counts
@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "qk-norm"])
def test_keys_are_turned_and_written_with_their_values(
    ops: Ops, dtype: torch.dtype, n: int, has_norm: bool
) -> None:
    """I7, part: rotary positions, norms of heads, and one write of KV; other slots keep their bytes."""
    heads, kv_heads, dim = 6, 2, 32
    qkv = random(n, heads + 2 * kv_heads, dim, dtype=dtype)
    angles = random(n, 1, dim // 2, seed=2).repeat(1, 1, 2)
    sign = torch.tensor([-1.0, 1.0]).repeat_interleave(dim // 2)
    turn = Turn(angles.cos().to(dtype), (angles.sin() * sign).to(dtype))
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(3))[:n]
    memory = random(64, 2, kv_heads, dim, seed=4, dtype=dtype)
    before = memory.clone()
    weight = random(heads + kv_heads, dim, seed=5) if has_norm else None
    wide = qkv[:, :-kv_heads].double()
    if weight is not None:
        wide = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    exact = wide * turn.cos.double() + wide.roll(dim // 2, -1) * turn.sin.double()
    values = qkv[:, -kv_heads:].clone()
    turned = ops.place(qkv, turn, slots, memory, head_norm=weight, eps=1e-5)
    assert agrees(turned, exact)
    assert torch.equal(memory[slots, 0], turned[:, heads:])
    assert torch.equal(memory[slots, 1], values)
    untouched = torch.ones(64, dtype=torch.bool)
    untouched[slots] = False
    assert torch.equal(memory[untouched], before[untouched])


@both_dtypes
def test_a_row_is_computed_alike_alone_and_among_many_by_several_threads(
    dtype: torch.dtype,
) -> None:
    """A fused row depends on nothing but itself: bit for bit, whatever the batch and the threads."""
    ops = FusedOps()
    x, weight = random(64, 576, dtype=dtype), random(576, seed=1, dtype=dtype)
    gate_up = random(64, 512, dtype=dtype)
    assert x.numel() > MIN_PARALLEL_NUMEL
    with torch_threads(2):
        many = ops.norm(x, weight, 1e-5), ops.gated(gate_up, "silu")
    assert torch.equal(ops.norm(x[9:10], weight, 1e-5), many[0][9:10])
    assert torch.equal(ops.gated(gate_up[9:10].contiguous(), "silu"), many[1][9:10])


@both_dtypes
@pytest.mark.parametrize(("inner", "outer"), [(576, 960), (64, 40), (72, 36)])
def test_products_are_the_checkpoints_and_may_be_added_to(
    dtype: torch.dtype, inner: int, outer: int
) -> None:
    weight = random(outer, inner, dtype=dtype)
    linear = plain_linear(weight)
    for n in (1, 3, 50):
        x, residual = random(n, inner, seed=1, dtype=dtype), random(n, outer, seed=2, dtype=dtype)
        exact = x.double() @ weight.double().t()
        assert agrees(linear(x), exact)
        assert agrees(linear.add(x, residual), exact + residual.double())
