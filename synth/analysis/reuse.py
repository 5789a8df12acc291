"""Blocks of prompts that earlier requests had, without eviction, and the last request that had them."""

from typing import NamedTuple

import numpy as np

from mallee.synth.core.jit import kernel
from mallee.traces.numbers import Int32s, Ints
from mallee.traces.trace import Trace

NOBODY = -1


class Reuse(NamedTuple):
    """Per request. `hit_blocks` leading blocks were in an earlier prompt; `touchers` is the last
    request before it whose prompt has the deepest of them, or NOBODY."""

    hit_blocks: Ints
    touchers: Int32s


def reuse_of(trace: Trace) -> Reuse:
    """Of a trace whose blocks form a prefix tree."""
    hits = np.zeros(len(trace), np.int64)
    touchers = np.zeros(len(trace), np.int32)
    reuse(trace.starts, trace.blocks, np.full(trace.num_blocks, -1, np.int32), hits, touchers)
    return Reuse(hits, touchers)


@kernel
def reuse(starts: Ints, blocks: Int32s, last: Int32s, hits: Ints, touchers: Int32s) -> None:
    """Leading blocks of each request that were seen before, and the last request with the deepest of them.

    `last` [blocks] begins as -1. Requests without a hit have toucher -1.
    """
    for i in range(len(starts) - 1):
        hit = 0
        toucher = np.int32(-1)
        for at in range(starts[i], starts[i + 1]):
            block = blocks[at]
            if last[block] >= 0:
                hit += 1
                toucher = last[block]
            last[block] = i
        hits[i] = hit
        touchers[i] = toucher
