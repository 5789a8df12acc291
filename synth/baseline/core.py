"""From a trace's blocks to the tree that walks go through.

Blocks that only one request has are stripped: what is left is shared. Blocks of which each request that
has the first has the last, too, make one *node*. A request walks from the empty prompt down, and
leaves its last node by one of two sentinels: *end* (the whole prompt is shared) or *cache end* (text of
its own follows).
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from mallee.synth.core.prefix_tree import ROOT, SHARED_USES, PrefixTree, chains
from mallee.traces.numbers import Int32s, Ints
from mallee.traces.trace import Trace

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


def shared_depths(trace: Trace, tree: PrefixTree) -> Ints:
    """Of each request its leading blocks that others have, too."""
    before = np.append(0, np.cumsum((tree.visits >= SHARED_USES)[trace.blocks]))
    depths: Ints = np.diff(before[trace.starts])
    return depths


def core_of(trace: Trace, tree: PrefixTree, depths: Ints) -> tuple[Core, Int32s]:
    """The core, and the node in which each request leaves it. `depths` are `shared_depths`."""
    found = chains(tree.parents, tree.visits)
    core = Core(
        parents=np.append(-1, found.above + 1).astype(np.int32),
        lengths=np.append(0, found.blocks).astype(np.int32),
        visits=np.append(len(trace), found.uses),
    )
    last = np.full(len(trace), ROOT, np.int64)  # deepest shared block of each request
    goes_in = depths > 0
    last[goes_in] = trace.blocks[(trace.starts[:-1] + depths - 1)[goes_in]]
    return core, found.of_block[last] + 1


def owners(core: Core, stops: Int32s, session: Int32s) -> Int32s:
    """The session that alone came through each node, or -1: several did.

    `session` and `stops` are per request.
    """
    low = np.full(len(core), np.iinfo(np.int32).max, np.int32)
    high = np.full(len(core), -1, np.int32)
    np.minimum.at(low, stops, session)
    np.maximum.at(high, stops, session)
    for node, parent in reversed(list(enumerate(core.parents.tolist()))[1:]):
        low[parent] = min(low[parent], low[node])
        high[parent] = max(high[parent], high[node])
    return np.where(low == high, high, np.int32(-1))
