"""Monte Carlo tree search over made-up values."""

import numpy as np

from mallee.synth.core.jit import kernel
from mallee.traces.numbers import Floats, Int32s, Ints


@kernel
def uct_tree(widths: Ints, steps: Floats, exploration: float, levels: int) -> Int32s:
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
