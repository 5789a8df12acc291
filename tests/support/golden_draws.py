"""Draws with literal tokens: a change of these changes every sampled text ever replayed."""

from typing import Final

import numpy as np
import torch

from mallee.protocol.messages import Sampling
from mallee.worker.forward import Draw

HOT: Final = Sampling(temperature=1.0)
_FIRST: Final = [219, 259, 270, 403, 219, 933]
GOLDEN: Final = [514, *_FIRST, 47, 79, 219, *_FIRST, 219, 219, 514, *_FIRST, 47, 79]


def golden_draws() -> list[Draw]:
    """The draws of `GOLDEN`."""
    logits = vocabulary(0, 1000)
    return [
        Draw(logits, sampling, seed, position)
        for sampling in (HOT, Sampling(temperature=0.7, top_k=20), Sampling(1.3, 0, 0.8))
        for seed in (0, 1, 2**64 - 1)
        for position in (0, 1, 500)
    ]


def vocabulary(seed: int, size: int = 97, scale: float = 3.0) -> torch.Tensor:
    """Random logits, float32."""
    return torch.from_numpy(np.random.default_rng(seed).normal(0, scale, size).astype(np.float32))
