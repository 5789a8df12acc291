"""The ends of walks in the tree of shared blocks, and the own text that follows there.

The walk goes from the empty prompt down; in each node it takes an edge to a child, or one of two
sentinels, by the distribution (CDF) of the visits that came through. These chances multiply to the share of
requests that stopped at the last node: visits cancel from edge to edge. So a whole walk is one
number, looked up in the sentinels' counts laid end to end.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from mallee.synth.baseline.core import EMPTY
from mallee.synth.core.streams import places, scaled
from mallee.traces.numbers import Bools, Int32s, Ints
from mallee.traces.trace import Trace

PROMPT: Final = 0  # nothing is shared: the whole prompt is its own
TAIL: Final = 1  # cache end: text of its own follows
REST: Final = 2  # end, with less than a block that has no number (rule "floor")
FIXED: Final = 3  # end in a shared block, perhaps a partial one (rule "ceil")


@dataclass(frozen=True, slots=True)
class Stops:
    """Sentinels, alike ones counted."""

    nodes: Int32s
    kinds: npt.NDArray[np.int8]
    last_tokens: Int32s  # FIXED: in the last block; else 0
    totals: Ints  # requests that stopped here or at one before

    def walk(self, rng: np.random.Generator, count: int) -> Ints:
        """`count` places of sentinels."""
        drawn = places(rng, count, int(self.totals[-1]))
        return np.searchsorted(self.totals, drawn, side="right")


@dataclass(frozen=True, slots=True)
class OwnText:
    """Tokens of requests' own text: samples by kind of stop, those of a kind next to each other."""

    tokens: Ints
    has_ids: Bools  # its blocks have numbers
    starts: tuple[int, int, int, int]  # of PROMPT, TAIL, REST, and the end

    def draw(self, kinds: npt.NDArray[np.int8], rng: np.random.Generator) -> tuple[Ints, Bools]:
        """Tokens and whether they have ids, for stops of these kinds; nothing for FIXED."""
        first = np.array(self.starts)  # of FIXED, too: where the others end
        sizes = np.diff(first, append=first[-1])[kinds]
        at = first[kinds] + (rng.random(len(kinds)) * sizes).astype(np.int64)
        return np.append(self.tokens, 0)[at], np.append(self.has_ids, False)[at]


def fit_stops(trace: Trace, nodes: Int32s, depths: Ints) -> tuple[Stops, OwnText]:
    """`nodes` and `depths` [requests]: where each left the core, and after how many blocks."""
    own = trace.input_tokens - trace.block_size * depths
    kinds = _kinds(trace, nodes, depths, own)
    last = np.where(kinds == FIXED, own + trace.block_size, 0)
    rows = np.stack([nodes.astype(np.int64), kinds.astype(np.int64), last])
    alike, counts = np.unique(rows, axis=1, return_counts=True)
    stops = Stops(
        nodes=alike[0].astype(np.int32),
        kinds=alike[1].astype(np.int8),
        last_tokens=alike[2].astype(np.int32),
        totals=np.cumsum(counts),
    )
    order = np.argsort(kinds, kind="stable")[: int((kinds != FIXED).sum())]
    has_ids = (trace.depth > depths) | (own < trace.block_size) & (trace.num_blocks > 0)
    starts = np.searchsorted(kinds[order], [PROMPT, TAIL, REST, FIXED])
    pools = (int(starts[0]), int(starts[1]), int(starts[2]), int(starts[3]))
    return stops, OwnText(own[order], has_ids[order], pools)


def _kinds(trace: Trace, nodes: Int32s, depths: Ints, own: Ints) -> npt.NDArray[np.int8]:
    """The kind of each request's stop."""
    size = trace.block_size
    is_whole = trace.depth == depths  # no block is its own
    kinds = np.full(len(trace), TAIL, np.int8)
    if trace.rule == "ceil":
        kinds[is_whole & (own > -size) & (own <= 0)] = FIXED
    else:
        kinds[is_whole & (own < size)] = REST
    kinds[nodes == EMPTY] = PROMPT
    return kinds


def stretched(own: Ints, factor: float, rng: np.random.Generator) -> Ints:
    """Own text `factor` times as long; none stays none, and some stays some."""
    if factor == 1.0:
        return own
    return np.where(own > 0, np.maximum(1, scaled(own, factor, rng)), own)
