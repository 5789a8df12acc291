"""Which request goes on from which: a trace taken apart into lines of calls.

A *line* is one context that grows call by call: a session's main thread, or one sub-agent of it. Where
a trace names sessions these are believed, and inside a session class and `wait_for` tell lines
apart. Where it names none, a request goes on from the one that touched the deepest block they
share last, unless that block is *public*: a root that many different texts go on from (a system
prompt) says nothing about who is talking. Where sessions are named and waits are not, a request that has less
than half of the other's blocks begins a line of its own, unless the other line is over: then
that line has dropped its context.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from mallee.synth.core.prefix_tree import PrefixTree
from mallee.synth.kernels.lines import take_apart, with_ancestors
from mallee.traces.trace import Trace

PUBLIC_CHILDREN: Final = 5
"""A block that so many different blocks follow is public, where sessions have no names."""

Int32s = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Lines:
    """For each of the trace's requests; -1: none.

    A line is spawned by a request of its session's other line and brings a root of its own, or, if
    `is_fork`, starts with what that request had.
    """

    line: Int32s  # its line; lines are numbered by first request
    previous: Int32s  # the request before it in its line
    source: Int32s  # earlier request of the line (of a forked line: of its parent's) it shares most with
    shared: Int32s  # leading blocks it has in common with `source`; 0 without one
    session: Int32s  # number of its session, numbered by first request
    spawner: Int32s  # of the first request of a line: the request that spawned or forked the line
    is_fork: Bools  # of the first request of a line
    has_edges: bool  # whether the trace says who waits for whom

    @property
    def num_lines(self) -> int:
        return int(self.line.max(initial=-1)) + 1

    @property
    def heads(self) -> npt.NDArray[np.int64]:
        """First request of each line."""
        return np.flatnonzero(self.previous < 0)


def lines_of(trace: Trace) -> Lines:
    """Takes `trace` apart. O(block references). Raises CodecError if its blocks are no prefix tree."""
    has_edges = len(trace.waits) > 0
    line, previous, source, shared, session, spawner, is_fork = take_apart(
        trace.starts,
        trace.blocks,
        trace.session,
        trace.cls,
        trace.wait_starts,
        trace.waits,
        public_blocks(trace),
        np.bincount(trace.waits, minlength=len(trace)),
        has_edges,
    )
    return Lines(line, previous, source, shared, session, spawner, is_fork, has_edges)


def public_blocks(trace: Trace) -> Bools:
    """Blocks that many others follow, and all before them."""
    tree = PrefixTree.of(trace)
    return with_ancestors(tree.children >= PUBLIC_CHILDREN, tree.parents)
