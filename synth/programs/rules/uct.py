"""Monte Carlo tree search over made-up values, and the exploration that makes trees like given ones."""

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from mallee.synth.core.jit import kernel
from mallee.traces.trace import Floats, Ints

_LOWEST: Final = 1e-3
_HIGHEST: Final = 1e3
_HALVINGS: Final = 20


@kernel
def uct_tree(widths: Ints, steps: Floats, exploration: float, levels: int) -> npt.NDArray[np.int32]:
    """Parents of at most `len(widths)` nodes in the order in which they are added; the root's is -1.

    A node takes `widths` children before one of them is followed; its value is its parent's and its
    step. Ends early when all `levels` are full.
    """
    most = len(widths)
    parent = np.full(most, -1, np.int32)
    first = np.full(most, -1, np.int32)  # children as lists
    following = np.full(most, -1, np.int32)
    children = np.zeros(most, np.int64)
    depth = np.zeros(most, np.int64)
    full = np.zeros(most, np.bool_)  # nothing below can be added
    value = np.zeros(most)
    total = np.zeros(most)
    visits = np.ones(most)
    for node in range(1, most):
        at = np.int32(0)
        while children[at] >= widths[at]:
            chosen, highest = np.int32(-1), -np.inf
            child = first[at]
            while child >= 0:
                if not full[child]:
                    bound = total[child] / visits[child]
                    bound += exploration * np.sqrt(np.log(visits[at]) / visits[child])
                    if bound > highest:
                        chosen, highest = child, bound
                child = following[child]
            at = chosen
        parent[node], depth[node] = at, depth[at] + 1
        following[node], first[at] = first[at], node
        children[at] += 1
        value[node] = total[node] = value[at] + steps[node]
        full[node] = depth[node] >= levels
        up = at
        while up >= 0:
            total[up] += value[node]
            visits[up] += 1
            if children[up] >= widths[up] and not full[up]:
                is_full = True
                child = first[up]
                while child >= 0:
                    is_full &= full[child]
                    child = following[child]
                full[up] = is_full
            up = parent[up]
        if full[0]:
            return parent[: node + 1]
    return parent


def exploration_for(mean_depth: float, mean_depth_at: Callable[[float], float]) -> float:
    """The exploration at which trees are `mean_depth` deep on average; the more, the flatter they are."""
    low, high = np.log(_LOWEST), np.log(_HIGHEST)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if mean_depth_at(float(np.exp(middle))) > mean_depth:
            low = middle
        else:
            high = middle
    return float(np.exp((low + high) / 2))
