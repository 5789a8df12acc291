"""Passes over requests that wait for others and fork them; these come after whom they name."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mallee.synth.core.jit import kernel

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Small: TypeAlias = npt.NDArray[np.int32]


@kernel
def depths_of(parent: Small) -> Small:
    """Of each request in its tree; 1 without a parent."""
    depths = np.ones(len(parent), np.int32)
    for i in range(len(parent)):
        if parent[i] >= 0:
            depths[i] = depths[parent[i]] + 1
    return depths


@kernel
def schedule(
    arrival_s: Floats,
    service_s: Floats,
    parent: Small,
    wait_starts: Ints,
    waits: Small,
    tool_wait_s: Floats,
    begin_s: Floats,
    end_s: Floats,
) -> None:
    """Begin and end of each: after whom it waits for, or when it arrives if it waits for nobody."""
    for i in range(len(arrival_s)):
        ready = -np.inf
        if parent[i] >= 0:
            ready = end_s[parent[i]]
        for at in range(wait_starts[i], wait_starts[i + 1]):
            ready = max(ready, end_s[waits[at]])
        begin_s[i] = arrival_s[i] if ready == -np.inf else ready + tool_wait_s[i]
        end_s[i] = begin_s[i] + service_s[i]
