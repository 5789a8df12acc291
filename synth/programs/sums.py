"""Sums along the branches of trees."""

from typing import Any, TypeVar

import numpy.typing as npt

from mallee.synth.core.jit import kernel
from mallee.traces.numbers import Int32s, Ints

_Values = TypeVar("_Values", bound=npt.NDArray[Any])


@kernel
def summed_down(parent: Int32s, order: Ints, values: _Values) -> _Values:
    """Each node's value with those of all nodes above; `order` has parents before children."""
    sums = values.copy()
    for node in order:
        if parent[node] >= 0:
            sums[node] += sums[parent[node]]
    return sums


@kernel
def summed_up(parent: Int32s, order: Ints, values: _Values) -> _Values:
    """Each node's value with those of all nodes below; `order` has parents before children."""
    sums = values.copy()
    for node in order[::-1]:
        if parent[node] >= 0:
            sums[parent[node]] += sums[node]
    return sums
