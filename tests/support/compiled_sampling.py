"""Compiles a sampler's kernels for GPUs that aren't here, for the very arguments that it launches them with.

Run as `python -m support.compiled_sampling COMPUTE_CAPABILITY...` it prints a line for each.
"""

import sys
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget

from mallee.protocol.messages import Sampling
from mallee.worker.forward import Draw, LogprobQuery, TokenHistory, distinct
from mallee.worker.model.kernels.triton import sampling
from mallee.worker.model.sampling import device
from support.compiled_kernels import Compiled

NAMES = ("edit", "draw", "report")
SIZE = 32_000


def main(capabilities: list[int]) -> None:
    past = TokenHistory(distinct([3, 4]))
    logits = torch.zeros(SIZE, dtype=torch.bfloat16)
    for capability in capabilities:
        targets = [GPUTarget("cuda", capability, 32)]
        kernels = {name: Compiled(getattr(sampling, name), targets) for name in NAMES}
        module = SimpleNamespace(tl=sampling.tl, **kernels)
        device.kernels = lambda module=module: module
        sampler = device.DeviceSampler()
        sampler.launch([Draw(logits, Sampling(1.0, 5, 0.9), 1, 2, past)])
        sampler.logprobs([LogprobQuery(logits, 3, 5)])
        compiled = [name for name, kernel in kernels.items() if kernel.forms]
        sys.stdout.write(f"{capability} {' '.join(compiled)}\n")


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]])
