"""The small operations between a layer's products, compiled for a CPU."""

import struct
from typing import ClassVar

import numpy as np
import torch

from mallee.worker.model.config import Activation
from mallee.worker.model.cpu import rows
from mallee.worker.model.cpu.jit import Kernel
from mallee.worker.model.ops import Ops
from mallee.worker.model.rotary import Rotation

MIN_PARALLEL_NUMEL = 1 << 14
"""Fewer numbers than this are done by one thread before a second would begin."""
_HALF = torch.bfloat16


class FusedOps(Ops):
    """`Ops` as one compiled pass each, for float32 and bfloat16 on a CPU, with KV of the same dtype.

    In torch operations they took as long as the products themselves for a few dozen rows (measured):
    eleven operations a layer with their temporaries, against four.
    """

    DTYPES: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, _HALF)
    __slots__ = ("_address", "_control")

    def __init__(self) -> None:
        self._control = np.zeros(16, dtype=np.int64)
        self._address: int = self._control.ctypes.data
        for kernel in (rows.norm, rows.place, rows.gate):
            kernel.compile()

    def _run(self, kernel: Kernel, numel: int, *words: int) -> None:
        """Run `kernel` with its counter at 0 and these words after it."""
        threads = torch.get_num_threads() if numel >= MIN_PARALLEL_NUMEL else 1
        struct.pack_into(f"{len(words) + 1}q", self._control.data, 0, 0, *words)
        kernel.run(self._address, threads)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        n, width = x.shape
        assert x.stride(1) == 1
        out = torch.empty((n, width), dtype=x.dtype)
        self._run(
            rows.norm,
            n * width,
            n,
            x.data_ptr(),
            x.stride(0),
            out.data_ptr(),
            width,
            x.dtype == _HALF,
            weight.data_ptr(),
            weight.dtype == _HALF,
            _bits(eps),
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
        assert kv_scales is None, "only KV in FP8 is scaled"
        assert qkv.is_contiguous()
        assert memory.is_contiguous()
        self._run(
            rows.place,
            qkv.numel(),
            n,
            qkv.data_ptr(),
            all_heads - 2 * kv_heads,
            kv_heads,
            dim,
            qkv.dtype == _HALF,
            turn.cos.data_ptr(),
            turn.sin.data_ptr(),
            slots.data_ptr(),
            memory.data_ptr(),
            0 if head_norm is None else head_norm.data_ptr(),
            _bits(eps),
        )
        return qkv[:, :-kv_heads]

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        n, both = gate_up.shape
        assert gate_up.is_contiguous()
        out = torch.empty((n, both // 2), dtype=gate_up.dtype)
        self._run(
            rows.gate,
            gate_up.numel(),
            n,
            gate_up.data_ptr(),
            out.data_ptr(),
            both // 2,
            gate_up.dtype == _HALF,
            activation != "silu",
        )
        return out


def _bits(value: float) -> int:
    found: int = struct.unpack("i", struct.pack("f", value))[0]
    return found
