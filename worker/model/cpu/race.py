"""Finds tokens that can win a Gumbel race, by a bound on each token's noise without a logarithm.

For v in [2**-k, 2**(1 - k)) the noise -log(-log(1 - v)) is below k ln 2, and by no more than `GAP`: 2 ln 2
+ log(ln 2) for k > 1, and down to -2.82 for the largest v. So one pass over a vocabulary leaves a handful
of tokens, near the highest bound, for which the exact noise matters.
"""

from typing import NamedTuple

import numpy as np
import torch

from mallee.worker.model.cpu.jit import Kernel, floats, pairs, to_bits, words

GAP = 3.52
_LN2 = np.float32(0.6931472)
_M0 = np.uint32(0x7FEB352D)
_M1 = np.uint32(0x846CA68B)


class RaceWords(NamedTuple):
    """The offsets in the control block of `race`."""

    scores: int  # address of float32 [n]
    ids: int  # address of int32 [n]
    n: int
    key_low: int
    key_high: int
    bounds: int  # address of float32 [n]: scores + the bounds of their noise


RACE = RaceWords(*range(6))


def _race(control: int) -> None:
    table = words(control)
    scores, ids = floats(table[RACE.scores]), pairs(table[RACE.ids])
    bounds = floats(table[RACE.bounds])
    low, high = np.uint32(table[RACE.key_low]), np.uint32(table[RACE.key_high])
    for i in range(table[RACE.n]):
        x = np.uint32(ids[i] ^ low)  # the hash of `sampler.noise`
        x = np.uint32(x ^ np.uint32(x >> np.uint32(16)))
        x = np.uint32(x * _M0)
        x = np.uint32(x ^ np.uint32(x >> np.uint32(15)))
        x = np.uint32(x ^ high)
        x = np.uint32(x * _M1)
        x = np.uint32(x ^ np.uint32(x >> np.uint32(16)))
        odd = np.int32(np.uint32(x & np.uint32(0x7FFFFFFF)) | np.uint32(1))
        k = np.int32(158) - np.int32(to_bits(np.float32(odd)) >> np.int32(23))
        if np.uint32(x << np.uint32(1)) == np.uint32(0):
            k += np.int32(1)
        bounds[i] = scores[i] + np.float32(k) * _LN2


race = Kernel(_race)


def contenders(scores: torch.Tensor, ids: torch.Tensor, key: int) -> torch.Tensor:
    """Places of the few tokens that can win the race of `key`, rising: the winner is among them.

    Needs the kernel `race`. Noise for a whole vocabulary takes five times as long.
    """
    n = len(scores)
    scores, ids = scores.contiguous(), ids.contiguous()
    assert scores.dtype == torch.float32
    assert ids.dtype == torch.int32
    bounds = np.empty(n, dtype=np.float32)
    control = np.zeros(len(RACE), dtype=np.int64)
    control[RACE.scores], control[RACE.ids] = scores.data_ptr(), ids.data_ptr()
    control[RACE.n], control[RACE.bounds] = n, bounds.ctypes.data
    control[RACE.key_low], control[RACE.key_high] = key & 0xFFFFFFFF, key >> 32
    race.run(control.ctypes.data, 1)
    lowest = bounds.max() - np.float32(GAP + 1e-3)
    found = np.flatnonzero(bounds >= lowest)  # torch takes 5 times as long
    return torch.from_numpy(found) if len(found) else torch.arange(n)  # none: not numbers
