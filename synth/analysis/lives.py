"""How many of a group are alive at a time."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]


def others_alive(group: Ints, begin_s: Floats, end_s: Floats) -> Floats:
    """Per member: how many others of its `group` (numbers from 0) are alive at its begin.

    Who begins at the same moment is alive, who ends then is too.
    """
    if not len(group):
        return np.empty(0)
    moments = dense(np.concatenate([begin_s, end_s]))
    # All groups on one axis, one after another: each as long as there are moments.
    shift = group * (int(moments.max()) + 1)
    begin, end = shift + moments[: len(group)], shift + moments[len(group) :]
    begun = np.searchsorted(np.sort(begin), begin, side="right")
    ended = np.searchsorted(np.sort(end), begin, side="left")
    alive: Floats = (begun - ended - 1).astype(np.float64)
    return alive


def dense(values: npt.NDArray[np.int32] | Ints | Floats) -> Ints:
    """Numbers from 0 in the order of the values, equal ones for equal values."""
    return np.unique(values, return_inverse=True)[1].reshape(-1).astype(np.int64)
