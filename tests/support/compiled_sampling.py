"""Compiles a sampler's kernels for GPUs that aren't here, for the very arguments that it launches them with.

Run as `python -m support.compiled_sampling COMPUTE_CAPABILITY...` it prints a line for each.
"""

import sys
from contextlib import suppress
from typing import Any

import torch
from triton import compile as compile_source
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mallee.protocol.messages import Sampling
from mallee.worker.forward import Draw, LogprobQuery, TokenHistory, distinct
from mallee.worker.model.kernels.triton import sampling
from mallee.worker.model.sampling import device

POINTERS = {
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}
SIZE = 32_000


class Compiler:
    """Stands in for the module of kernels: to launch one compiles it."""

    tl = sampling.tl

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)
        self.names: list[str] = []

    def __getattr__(self, name: str) -> "_Compiled":
        return _Compiled(self, getattr(sampling, name))

    def compile(self, function: Any, arguments: tuple[Any, ...], more: dict[str, Any]) -> None:
        options = {name: more.pop(name) for name in ("num_warps", "enable_fp_fusion")}
        given = dict(zip(function.arg_names, arguments, strict=False)) | more
        signature, aligned = {}, {}
        for place, name in enumerate(function.arg_names):
            value = given[name]
            if name in more:
                signature[name] = "constexpr"
            elif isinstance(value, torch.Tensor):
                signature[name] = POINTERS[value.dtype]
                aligned[(place,)] = [["tt.divisibility", 16]]
            else:
                signature[name] = "i32"
        constants = {(function.arg_names.index(name),): value for name, value in more.items()}
        source = ASTSource(function, signature, constants, aligned)
        found = compile_source(source, target=self._target, options=options)
        assert found.asm["cubin"]
        self.names.append(function.__name__)


class _Compiled:
    def __init__(self, compiler: Compiler, function: Any) -> None:
        self._compiler = compiler
        self._function = function

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **more: self._compiler.compile(self._function, arguments, more)


def main(capabilities: list[int]) -> None:
    past = TokenHistory(distinct([3, 4]))
    logits = torch.empty(SIZE, dtype=torch.bfloat16, device="meta")
    for capability in capabilities:
        compiler = Compiler(capability)
        device.kernels = lambda kernels=compiler: kernels
        sampler = device.DeviceSampler()
        sampler.launch([Draw(logits, Sampling(1.0, 5, 0.9), 1, 2, past)])
        with suppress(NotImplementedError):  # there is nothing to be fetched
            sampler.logprobs([LogprobQuery(logits, 3, 5)])
        sys.stdout.write(f"{capability} {' '.join(compiler.names)}\n")


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]])
