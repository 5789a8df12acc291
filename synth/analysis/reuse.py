"""Blocks of prompts that earlier requests had, without eviction, and the last request that had them."""

from typing import NamedTuple

import numpy as np

from mallee.synth.core.jit import kernel
from mallee.traces.numbers import Int32s, Ints
from mallee.traces.trace import Trace

NO_TOUCHER = -1


class Reuse(NamedTuple):
    """Per request. `hit_blocks` leading blocks were in an earlier prompt; `touchers` is the last
    request before it whose prompt has the deepest of them, or NO_TOUCHER."""

    hit_blocks: Ints
    touchers: Int32s


def reuse_of(trace: Trace) -> Reuse:
    """Of a trace whose blocks form a prefix tree."""
    return Reuse(*_reuse(trace.starts, trace.blocks, trace.num_blocks))


@kernel
def _reuse(starts: Ints, blocks: Int32s, num_blocks: int) -> tuple[Ints, Int32s]:
    last = np.full(num_blocks, NO_TOUCHER, np.int32)
    hits = np.zeros(len(starts) - 1, np.int64)
    touchers = np.full(len(starts) - 1, NO_TOUCHER, np.int32)
    for i in range(len(hits)):
        for at in range(starts[i], starts[i + 1]):
            block = blocks[at]
            if last[block] >= 0:
                hits[i] += 1
                touchers[i] = last[block]
            last[block] = i
    return hits, touchers
