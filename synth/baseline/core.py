"""From a trace's blocks to the tree that walks go through: stage by stage.

Blocks that only one request has are stripped: what is left is shared. Blocks of which each request that
has the first has the last, too, make one *node*. A request walks from the empty prompt down, and
leaves its last node by one of two sentinels: *end* (the whole prompt is shared) or *cache end* (text of
its own follows).
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from mallee.synth.core.prefix_tree import ROOT, PrefixTree
from mallee.traces.numbers import Int32s, Ints
from mallee.traces.trace import Trace

SHARED_VISITS: Final = 2
"""A block that fewer requests have is nobody else's."""

EMPTY: Final = 0
"""The node of the empty prompt, which has no blocks and which all requests visit."""


@dataclass(frozen=True, slots=True)
class Core:
    """Shared blocks with unary chains merged. Parents have lower numbers than children."""

    parents: Int32s  # -1 of the empty prompt's node
    lengths: Int32s  # blocks
    visits: Ints  # requests that came through

    def __len__(self) -> int:
        return len(self.parents)

    def check(self, stops: Int32s) -> None:
        """Every visit goes on to a child or stops; `stops` are the nodes in which requests leave."""
        inner = self.parents[1:]
        onward = np.bincount(inner, self.visits[1:], len(self)).astype(np.int64)
        assert (self.visits == onward + np.bincount(stops, minlength=len(self))).all()
        assert (inner < np.arange(1, len(self))).all(), "a parent comes after its child"
        assert self.lengths[EMPTY] == 0, "the empty prompt has no blocks"


def shared_depths(trace: Trace, tree: PrefixTree) -> Ints:
    """Of each request its leading blocks that others have, too."""
    depths = np.zeros(len(trace), np.int64)
    is_shared = (tree.visits >= SHARED_VISITS)[trace.blocks].view(np.int8)
    has_blocks = trace.depth > 0
    if has_blocks.any():
        begins = trace.starts[:-1][has_blocks]
        depths[has_blocks] = np.add.reduceat(is_shared, begins, dtype=np.int64)
    return depths


def merge_chains(trace: Trace, tree: PrefixTree, depths: Ints) -> tuple[Core, Int32s]:
    """The core, and the node in which each request leaves it. `depths` are `shared_depths`.

    A block's number is one above its parent's if the two were first seen together, and in a chain
    they were: so nodes are runs of numbers.
    """
    is_shared = tree.visits >= SHARED_VISITS
    last = np.full(len(trace), ROOT, np.int64)  # deepest shared block of each request
    goes_in = depths > 0
    last[goes_in] = trace.blocks[trace.starts[:-1][goes_in] + depths[goes_in] - 1]
    shared = np.flatnonzero(is_shared)
    above = tree.parents[shared]
    children = np.bincount(above[above != ROOT], minlength=len(tree))
    stops = np.bincount(last[goes_in], minlength=len(tree))
    is_last = (stops > 0) | (children != 1)  # of its node
    is_first = (above == ROOT) | is_last[above]
    node_of = np.zeros(len(tree) + 1, np.int32)  # the last place is for ROOT: the empty prompt
    node_of[shared] = np.cumsum(is_first)
    firsts = shared[is_first]
    core = Core(
        parents=np.concatenate([[-1], node_of[tree.parents[firsts]]]).astype(np.int32),
        lengths=np.bincount(node_of[shared], minlength=len(firsts) + 1).astype(np.int32),
        visits=np.concatenate([[len(trace)], tree.visits[firsts]]).astype(np.int64),
    )
    nodes = node_of[last]
    core.check(nodes)
    return core, nodes


def owners(core: Core, stops: Int32s, session: Int32s) -> Int32s:
    """The session that alone came through each node, or -1: several did.

    `session` and `stops` are per request.
    """
    low = np.full(len(core), np.iinfo(np.int32).max, np.int32)
    high = np.full(len(core), -1, np.int32)
    np.minimum.at(low, stops, session)
    np.maximum.at(high, stops, session)
    lows, highs = low.tolist(), high.tolist()
    for node, parent in reversed(list(enumerate(core.parents.tolist()))[1:]):
        lows[parent] = min(lows[parent], lows[node])
        highs[parent] = max(highs[parent], highs[node])
    return np.where(np.array(lows) == np.array(highs), highs, -1).astype(np.int32)
