"""Small operations in float64, rounding in kernels; rotary tables against transformers'."""

from typing import Any

import numpy as np
import pytest
import torch

from mallee.worker.model.config import Activation
from mallee.worker.model.cpu import attend, vectors
from mallee.worker.model.cpu.jit import (
    Kernel,
    floats,
    from_half,
    halves,
    to_half,
    words,
)
from mallee.worker.model.cpu.ops import MIN_PARALLEL_NUMEL, FusedOps
from mallee.worker.model.cpu.pages import PAGE_NBYTES, take_large_pages
from mallee.worker.model.loading.config_json import parse_config
from mallee.worker.model.ops import Ops, Rotation
from mallee.worker.model.rotary import Rotary, inverse_frequencies
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
    turn = Rotation(angles.cos().to(dtype), (angles.sin() * sign).to(dtype))
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


# Rotary tables: at long contexts the last bit of a frequency shows


HEAD_DIM = 128
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_cosines_and_sines_are_transformers_to_the_last_bit(kind: str) -> None:
    """I1, part: every rope type, at positions up to the context's end."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    raw = {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 2 * HEAD_DIM,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 100_000,
    }
    (rope,) = parse_config({**raw, "rope_parameters": SETTINGS[kind]}).ropes
    theirs = LlamaRotaryEmbedding(LlamaConfig(**raw, rope_parameters=dict(SETTINGS[kind])))
    assert torch.equal(inverse_frequencies(rope, HEAD_DIM), theirs.inv_freq)
    positions = torch.tensor([0, 1, 7, 8191, 8192, 99_999])
    ours = Rotary(rope, head_dim=HEAD_DIM, max_positions=100_000, dtype=torch.float32, device="cpu")
    cos, sin = ours.at(positions)
    expected_cos, expected_sin = theirs(torch.zeros(1), positions[None])
    half = HEAD_DIM // 2
    assert torch.equal(cos[:, 0], expected_cos[0])
    assert torch.equal(sin[:, 0, half:], expected_sin[0, :, half:])
    assert torch.equal(sin[:, 0, :half], -expected_sin[0, :, :half])  # rotate_half's sign


# Rounding in compiled kernels, and large pages


def _convert(control: int) -> None:
    a = words(control)
    wide, narrow, back = floats(a[2]), halves(a[3]), floats(a[4])
    for i in range(a[1]):
        narrow[i] = to_half(wide[i])
        back[i] = from_half(narrow[i])


def test_rounding_to_bfloat16_is_torchs() -> None:
    """I7, part: ties to even, infinities and NaN included."""
    bits = torch.arange(0, 1 << 32, 65521, dtype=torch.int64).to(torch.int32)
    wide = torch.cat((bits.view(torch.float32), torch.randn(10_000), torch.tensor([0.0, -0.0])))
    narrow, back = torch.empty_like(wide, dtype=torch.bfloat16), torch.empty_like(wide)
    addresses = [x.data_ptr() for x in (wide, narrow, back)]
    control = np.array([0, len(wide), *addresses])
    convert = Kernel(_convert)
    convert.compile()
    convert.run(control.ctypes.data, 1)
    torch.testing.assert_close(narrow, wide.bfloat16(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(back, wide.bfloat16().float(), rtol=0, atol=0, equal_nan=True)


def test_tiles_are_not_used_by_kernels_for_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors.numba_config, "CPU_NAME", "generic")
    assert not attend.is_available()


# Large pages for weights


def test_what_is_written_moves_to_large_pages_unchanged() -> None:
    room = torch.arange(5 * PAGE_NBYTES // 8)
    expected = room.clone()
    first = -(-room.data_ptr() // PAGE_NBYTES) * PAGE_NBYTES
    if not take_large_pages(first, 3 * PAGE_NBYTES):
        pytest.skip("this system makes no large pages of memory that is written")
    assert torch.equal(room, expected)


def test_small_tensors_and_unmapped_memory_are_let_be() -> None:
    small = torch.ones(100)
    assert not take_large_pages(small.data_ptr(), small.nbytes)
    assert not take_large_pages(PAGE_NBYTES, PAGE_NBYTES)  # nothing lies so low
