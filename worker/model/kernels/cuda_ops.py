"""The small operations of a decoder on CUDA, one launch each, and their trial when a model is loaded."""

from collections.abc import Iterator
from typing import Any

import torch

from mallee.worker.model.config import Activation, ModelConfig
from mallee.worker.model.kernels.triton_launch import NoTriton, TritonKernels, power_of_two
from mallee.worker.model.linear.base import Linear
from mallee.worker.model.linear.rounded import Rounding
from mallee.worker.model.ops import Ops, movable
from mallee.worker.model.rotary import Rotation

FLOAT8 = torch.float8_e4m3fn
MOST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2, FLOAT8: 0.13}
"""By dtype of results, as a share of the largest: a sum in another order may round to the next number."""
_GATE_BLOCK = 1024
_HEAD_BLOCK = 8
_VALUE_BLOCK = 32


class KernelWrong(RuntimeError):
    """A kernel's results are not those of torch's operations."""


class CudaOps(Ops):
    """`Ops` by Triton's kernels. Tensors are contiguous."""

    __slots__ = ("_kernels",)

    def __init__(self, kernels: TritonKernels) -> None:
        self._kernels = kernels

    @property
    def kernels(self) -> TritonKernels:
        return self._kernels

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._normed(x, None, None, weight, eps)

    def added_norm(
        self,
        linear: Linear,
        x: torch.Tensor,
        residual: torch.Tensor,
        *,
        own_norm: torch.Tensor | None,
        norm: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return residual, self._normed(linear(x), residual, own_norm, norm, eps)

    def _normed(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        own_norm: torch.Tensor | None,
        norm: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        assert x.is_contiguous()
        assert residual is None or residual.is_contiguous()
        n, width = x.shape
        # A number for each thread at least: those of one that others hold too must not change under them.
        block = max(32, power_of_two(width))
        out = torch.empty_like(x)
        self._kernels.launch(
            "norm",
            (n,),
            x,
            residual,
            own_norm,
            norm,
            out,
            eps,
            width=width,
            block=block,
            num_warps=min(16, max(1, block // 512)),
        )
        return out

    def place(
        self,
        qkv: torch.Tensor,
        turn: Rotation,
        slots: torch.Tensor,
        memory: torch.Tensor,
        *,
        head_norm: torch.Tensor | None,
        eps: float,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        n, all_heads, dim = qkv.shape
        kv_heads = memory.shape[2]
        for each in (qkv, turn.cos, turn.sin, slots, memory):
            assert each.is_contiguous()
        heads = all_heads - 2 * kv_heads
        turned = torch.empty((n, heads + kv_heads, dim), dtype=qkv.dtype, device=qkv.device)
        self._kernels.launch(
            "place",
            (n, -(-all_heads // _HEAD_BLOCK)),
            qkv,
            turn.cos,
            turn.sin,
            slots,
            head_norm,
            kv_scales,
            turned,
            movable(memory),
            eps,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            head_block=_HEAD_BLOCK,
            half_block=power_of_two(dim // 2),
            is_float8=memory.dtype == FLOAT8,
            num_warps=4,
        )
        return turned

    def fold(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        decay: torch.Tensor,
        rate: torch.Tensor,
        read: torch.Tensor,
        written: torch.Tensor,
        matrices: torch.Tensor,
    ) -> torch.Tensor:
        rows, heads, value_dim = v.shape
        key_dim = q.shape[2]
        assert matrices.stride()[1:] == (value_dim * key_dim, key_dim, 1)
        out = torch.empty_like(v)
        self._kernels.launch(
            "fold",
            (rows, heads, -(-value_dim // _VALUE_BLOCK)),
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            decay.contiguous(),
            rate.contiguous(),
            read,
            written,
            matrices,
            out,
            slot_stride=matrices.stride(0),
            heads=heads,
            key_dim=key_dim,
            value_dim=value_dim,
            key_block=power_of_two(key_dim),
            value_block=_VALUE_BLOCK,
            num_warps=4,
        )
        return out

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        assert gate_up.is_contiguous()
        n, both = gate_up.shape
        width = both // 2
        out = torch.empty((n, width), dtype=gate_up.dtype, device=gate_up.device)
        self._kernels.launch(
            "gate",
            (n, -(-width // _GATE_BLOCK)),
            gate_up,
            out,
            width=width,
            block=_GATE_BLOCK,
            is_gelu=activation != "silu",
            num_warps=4,
        )
        return out


def choose_ops(
    config: ModelConfig, *, dtype: torch.dtype, kv_dtype: torch.dtype, device: str
) -> CudaOps:
    """The operations of this model on this CUDA device, once their kernels agree with `Ops`.

    Compiles all that the model's steps will run, for some seconds the first time on a machine. Raises
    NoTriton.
    """
    ops = CudaOps(TritonKernels.load())
    try:
        check(ops, config, dtype=dtype, kv_dtype=kv_dtype, device=device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as e:
        raise NoTriton(f"Triton's kernels of small operations don't run here: {e}") from e
    return ops


def check(
    ops: CudaOps, config: ModelConfig, *, dtype: torch.dtype, kv_dtype: torch.dtype, device: str
) -> None:
    """Run every kernel that a model's layers run, over a few rows. Raises KernelWrong, NoTriton."""
    for name, ours, plain in _trials(ops, config, dtype, kv_dtype, device):
        expected = plain.float()
        error = float((ours.float() - expected).abs().max() / expected.abs().max())
        if not error <= MOST_ERROR[ours.dtype]:
            raise KernelWrong(
                f"{name} in {ours.dtype} is wrong by {error:.2g} of the largest number"
            )


def _trials(
    ops: CudaOps, config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype, device: str
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Results of each kernel, and of torch's operations."""
    plain, family, eps, n = Ops(), config.family, config.norm_eps, 3
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, wide: bool = False) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator)
        return drawn.to(device, torch.float32 if wide else dtype)

    x, residual = random(n, config.hidden_size), random(n, config.hidden_size)
    weight = random(config.hidden_size, wide=family.norm_offset != 0)
    own = weight if family.has_sandwich_norms else None
    yield "a norm", ops.norm(x, weight, eps), plain.norm(x, weight, eps)
    total = residual + (x if own is None else plain.norm(x, own, eps))
    normed = ops._normed(x, residual, own, weight, eps)
    yield "a sum", residual, total
    yield "the norm of a sum", normed, plain.norm(total, weight, eps)

    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    qkv = random(n, heads + 2 * kv_heads, dim)
    turn = Rotation(random(n, 1, dim), random(n, 1, dim))
    slots = torch.arange(n, 0, -1, device=device)
    options: dict[str, Any] = {"eps": eps, "head_norm": None}
    if family.has_qk_norm:
        options["head_norm"] = random(heads + kv_heads, dim, wide=True)
    scales = [None] if kv_dtype == dtype else [None, random(2, wide=True).abs()]
    for each in scales:
        memories = [
            torch.zeros((n + 1, 2, kv_heads, dim), device=device).to(kv_dtype) for _ in range(2)
        ]
        turned = [
            which.place(qkv.clone(), turn, slots, memory, kv_scales=each, **options)
            for which, memory in zip((ops, plain), memories, strict=True)
        ]
        yield "turned heads", turned[0], turned[1]
        yield "written KV", memories[0], memories[1]
    gate_up = random(n, 2 * config.intermediate_size)
    bent = [which.gated(gate_up, config.activation) for which in (ops, plain)]
    yield "a gate", bent[0], bent[1]

    if (delta := config.delta) is not None:
        every, size = (n, delta.num_value_heads), (delta.value_dim, delta.key_dim)
        q, k, v = (random(*every, dim, wide=True) for dim in (*size[1:] * 2, size[0]))
        k = torch.nn.functional.normalize(k, dim=-1)
        kept, slow = random(n + 1, *every[1:], *size, wide=True), random(*every, wide=True).abs()
        states = [kept, kept.clone()]
        found = [
            which.fold(
                q,
                k,
                v,
                decay=-slow,
                rate=torch.full(every, 0.5, device=device),
                read=slots - 1,
                written=slots,
                matrices=matrices,
            )
            for which, matrices in zip((ops, plain), states, strict=True)
        ]
        yield "answers of states", found[0], found[1]
        yield "folded states", states[0], states[1]

    if config.quantization is not None:
        rounded = Rounding(ops.kernels)(x), Rounding()(x)
        yield "rounded activations", rounded[0][0], rounded[1][0]
        yield "the scales of activations", rounded[0][1], rounded[1][1]
