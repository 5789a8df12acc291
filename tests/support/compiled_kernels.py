"""Compiles our Triton kernels for GPUs that are not here, as they are launched for real models' shapes.

Run as a program: Triton must not interpret. Arguments are compute capabilities, 90 for 9.0. Prints the number
of kernels that were compiled: each for one form of its arguments, as Triton tells them apart.
"""

import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from mallee.worker.model.kernels.cuda_ops import CudaOps
from mallee.worker.model.kernels.triton import fused
from mallee.worker.model.kernels.triton_launch import TritonKernels
from mallee.worker.model.linear.rounded import Rounding
from mallee.worker.model.ops import Rotation

SHAPES = (
    (4096, 32, 8, 128, 14336, False),  # Llama 3.1 8B
    (1024, 16, 8, 128, 3072, True),  # Qwen 3 0.6B
    (640, 4, 1, 256, 2048, True),  # Gemma 3 270M
    (576, 9, 3, 64, 1536, False),  # SmolLM2 135M
)
"""Width, query heads, key heads, head_dim, width of the gate, whether heads are normed."""
ROWS = (1, 3, 16, 32, 128)
NAMES = ("norm", "gate", "place", "round_rows")


class Compiled:
    """A kernel whose launch compiles it for `targets` instead, once for each form of its arguments."""

    def __init__(self, kernel: Any, targets: list[GPUTarget]) -> None:
        self._kernel = kernel
        self._targets = targets
        backend = make_backend(targets[0])
        self._bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        self.forms: set[str] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, num_warps: int, enable_fp_fusion: bool, **fixed: Any) -> None:
            forms = self._bind(*args, **fixed)[1]  # of each argument its type, and a value or "D"
            if str(forms) in self.forms:
                return
            self.forms.add(str(forms))
            options = {"num_warps": num_warps, "enable_fp_fusion": enable_fp_fusion}
            names = self._kernel.arg_names
            source = ASTSource(
                fn=self._kernel,
                signature={name: kind for name, (kind, _) in zip(names, forms, strict=True)},
                constexprs={
                    (i,): form[1] for i, form in enumerate(forms) if form[0] == "constexpr"
                },
                attrs={
                    (i,): [["tt.divisibility", 16]]
                    for i, form in enumerate(forms)
                    if form[1] == "D"
                },
            )
            for target in self._targets:
                assert triton.compile(source, target=target, options=options).asm["cubin"]

        return launch


class _Same:
    """A product that changes nothing."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


def launch_all(
    kernels: TritonKernels, shape: tuple[Any, ...], dtype: torch.dtype, num: int
) -> None:
    """All that a model of `shape` launches in a step of `num` rows, over slots that lie anywhere."""
    ops = CudaOps(kernels)
    width, heads, kv_heads, dim, inner, has_norms = shape
    x, weight = torch.zeros(num, width, dtype=dtype), torch.zeros(width)
    Rounding(kernels)(x)
    ops.norm(x, weight.to(dtype), 1e-6)
    linear: Any = _Same()
    for own in (None, weight):
        norm = weight if own is not None else weight.to(dtype)
        ops.added_norm(linear, x, x.clone(), own_norm=own, norm=norm, eps=1e-6)
    qkv = torch.zeros(num, heads + 2 * kv_heads, dim, dtype=dtype)
    turn = Rotation(*torch.zeros(2, num, 1, dim, dtype=dtype))
    head_norm = torch.zeros(heads + kv_heads, dim) if has_norms else None
    numbers = torch.zeros(2 * num + 1, dtype=torch.int64)
    for kept, scales in (
        (dtype, None),
        (torch.float8_e4m3fn, None),
        (torch.float8_e4m3fn, torch.ones(2)),
    ):
        memory = torch.zeros(1, 2, kv_heads, dim).to(kept)
        for slots in (numbers[:num], numbers[1 : num + 1]):
            ops.place(qkv, turn, slots, memory, head_norm=head_norm, eps=1e-6, kv_scales=scales)
    gate_up = torch.zeros(num, 2 * inner, dtype=dtype)
    ops.gated(gate_up, "gelu_tanh" if has_norms else "silu")


def main(capabilities: list[str]) -> None:
    targets = [GPUTarget("cuda", int(each), 32) for each in capabilities]
    kernels = {name: Compiled(getattr(fused, name), targets) for name in NAMES}
    module = SimpleNamespace(**kernels, TritonError=fused.TritonError)
    for num in ROWS:
        for shape in SHAPES:
            launch_all(TritonKernels(module), shape, torch.bfloat16, num)
        launch_all(TritonKernels(module), SHAPES[1], torch.float32, num)
    sys.stdout.write(f"{sum(len(kernel.forms) for kernel in kernels.values())}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
