"""Adds up what attention found for a token in several parts (see `attend`), over the weights' sum."""

from typing import Any

import numpy as np

from mallee.worker.model.cpu.jit import (
    Kernel,
    claim,
    exp2,
    floats,
    halves,
    inner,
    to_half,
    words,
)
from mallee.worker.model.cpu.layout import CONTROL


@inner
def _merge(a: Any, token: int, head: int) -> None:
    """One query head of a token with several parts. The first part's sums are overwritten."""
    width, dim = a[CONTROL.heads] * a[CONTROL.group], a[CONTROL.dim]
    firsts, tops = words(a[CONTROL.firsts]), floats(a[CONTROL.tops])
    places, n = words(a[CONTROL.places] + firsts[token] * 8), firsts[token + 1] - firsts[token]
    row = places[0] * width + head
    sums, top = floats(a[CONTROL.sums] + row * dim * 4), tops[2 * row]
    for i in range(1, n):
        top = max(top, tops[2 * (places[i] * width + head)])
    factor = exp2(tops[2 * row] - top)
    total = factor * tops[2 * row + 1]
    for d in range(dim):
        sums[d] *= factor
    for i in range(1, n):
        row = places[i] * width + head
        factor = exp2(tops[2 * row] - top)
        total += factor * tops[2 * row + 1]
        more = floats(a[CONTROL.sums] + row * dim * 4)
        for d in range(dim):
            sums[d] += factor * more[d]
    out = halves(a[CONTROL.out] + (token * width + head) * dim * 2)
    share = np.float32(1) / total
    for d in range(dim):
        out[d] = to_half(sums[d] * share)


def _merge_tasks(control: int) -> None:
    a = words(control)
    token = claim(control)
    firsts = words(a[CONTROL.firsts])
    while token < a[CONTROL.num_tokens]:
        if firsts[token + 1] - firsts[token] > 1:
            for head in range(a[CONTROL.heads] * a[CONTROL.group]):
                _merge(a, token, head)
        token = claim(control)


merge = Kernel(_merge_tasks)
