"""A random mixture of work for a forward pass, the same for each seed."""

from typing import Any

import numpy as np
import torch


def run_schedule(run: Any, seed: int) -> list[torch.Tensor]:
    """Logits of a random mixture of prompts, chunks, forks and decodes over one forward."""
    rng = np.random.default_rng(seed)
    found: list[torch.Tensor] = []

    def new(n: int) -> list[int]:
        return rng.integers(0, 128, n).tolist()

    found += run.step(run.row("a", new(70)), run.row("b", new(3)))
    found += run.step(run.row("a", new(45)), run.row("b", new(1)))
    names = [f"c{i}" for i in range(6)]
    copies = [copy for name in names for copy in run.fork("a", name)]
    found += run.step(
        *(run.row(name, new(1 + i % 3)) for i, name in enumerate(names)), copies=copies
    )
    for _ in range(3):
        rows = [run.row(name, new(1)) for name in names]
        found += run.step(*rows, run.row("b", new(19)))
    return [logits.float().cpu() for logits in found]
