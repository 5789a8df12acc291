"""Compiles our Triton kernels for GPUs that are not here, as `CudaOps` launches them for real models' shapes.

Run as a program: Triton must not interpret. Arguments are compute capabilities, 90 for 9.0. Prints the number
of kernels that were compiled.
"""

import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mallee.worker.model.cuda_ops import CudaOps
from mallee.worker.model.kernels import fused
from mallee.worker.model.ops import Turn

SHAPES = (
    (4096, 32, 8, 128, 14336, False),  # Llama 3.1 8B
    (1024, 16, 8, 128, 3072, True),  # Qwen 3 0.6B
    (640, 4, 1, 256, 2048, True),  # Gemma 3 270M
    (576, 9, 3, 64, 1536, False),  # SmolLM2 135M
)
"""Width, query heads, key heads, head_dim, width of the gate, whether heads are normed."""
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int64: "*i64",
}
UNALIGNED = "slots"


class Compiled:
    """A kernel whose launch compiles it for `targets` instead."""

    def __init__(self, kernel: Any, targets: list[GPUTarget]) -> None:
        self._kernel = kernel
        self._targets = targets
        self.num = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, num_warps: int, enable_fp_fusion: bool, **fixed: Any) -> None:
            names = self._kernel.arg_names
            given = {**dict(zip(names, args, strict=False)), **fixed}
            signature = {name: _type(given[name], name in fixed) for name in names}
            constants = {
                (i,): given[name] for i, name in enumerate(names) if signature[name] == "constexpr"
            }
            aligned = {
                (i,): [["tt.divisibility", 16]]
                for i, name in enumerate(names)
                if signature[name].startswith("*") and name != UNALIGNED
            }
            options = {"num_warps": num_warps, "enable_fp_fusion": enable_fp_fusion}
            for target in self._targets:
                source = ASTSource(
                    fn=self._kernel, signature=signature, constexprs=constants, attrs=aligned
                )
                assert triton.compile(source, target=target, options=options).asm["cubin"]
                self.num += 1

        return launch


def _type(value: Any, is_fixed: bool) -> str:
    if value is None or is_fixed:
        return "constexpr"
    return TYPES[value.dtype] if torch.is_tensor(value) else "fp32"


class _Same:
    """A product that changes nothing."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


def launch_all(ops: CudaOps, shape: tuple[Any, ...], dtype: torch.dtype) -> None:
    width, heads, kv_heads, dim, inner, has_norms = shape
    x, weight = torch.zeros(1, width, dtype=dtype), torch.zeros(width)
    ops.norm(x, weight.to(dtype), 1e-6)
    linear: Any = _Same()
    for own in (None, weight):
        norm = weight if own is not None else weight.to(dtype)
        ops.added_norm(linear, x, x.clone(), own_norm=own, norm=norm, eps=1e-6)
    qkv = torch.zeros(1, heads + 2 * kv_heads, dim, dtype=dtype)
    turn = Turn(*torch.zeros(2, 1, 1, dim, dtype=dtype))
    head_norm = torch.zeros(heads + kv_heads, dim) if has_norms else None
    for kept, scales in (
        (dtype, None),
        (torch.float8_e4m3fn, None),
        (torch.float8_e4m3fn, torch.ones(2)),
    ):
        memory = torch.zeros(1, 2, kv_heads, dim).to(kept)
        slots = torch.zeros(1, dtype=torch.int64)
        ops.place(qkv, turn, slots, memory, head_norm=head_norm, eps=1e-6, kv_scales=scales)
    gate_up = torch.zeros(1, 2 * inner, dtype=dtype)
    ops.gated(gate_up, "gelu_tanh" if has_norms else "silu")


def main(capabilities: list[str]) -> None:
    targets = [GPUTarget("cuda", int(each), 32) for each in capabilities]
    names = ("norm", "gate", "place")
    kernels = {name: Compiled(getattr(fused, name), targets) for name in names}
    for shape in SHAPES:
        launch_all(CudaOps(SimpleNamespace(**kernels)), shape, torch.bfloat16)
    launch_all(CudaOps(SimpleNamespace(**kernels)), SHAPES[1], torch.float32)
    sys.stdout.write(f"{sum(kernel.num for kernel in kernels.values())}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
