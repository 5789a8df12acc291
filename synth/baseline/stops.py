"""The ends of walks in the tree of shared blocks, and the own text that follows there.

A walk goes from the empty prompt down; in each node it takes an edge to a child, or one of two
sentinels, by the distribution (CDF) of the visits that came through. These chances multiply to the share of
requests that stopped at the last node: visits cancel from edge to edge. So a whole walk is one number: the
place of a request among all of them, sorted by where they stopped.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from mallee.synth.baseline.core import EMPTY
from mallee.synth.core.streams import scaled
from mallee.traces.numbers import Bools, Int32s, Ints
from mallee.traces.trace import Trace

PROMPT: Final = 0  # nothing is shared: the whole prompt is its own
TAIL: Final = 1  # cache end: text of its own follows
REST: Final = 2  # end, with less than a block that has no number (rule "floor")
FIXED: Final = 3  # end in a shared block, perhaps a partial one (rule "ceil")


@dataclass(frozen=True, slots=True)
class Stops:
    """Sentinels that requests took, in order."""

    nodes: Int32s
    kinds: npt.NDArray[np.int8]
    last_tokens: Int32s  # FIXED: in the last block; else 0


@dataclass(frozen=True, slots=True)
class OwnText:
    """Tokens of requests' own text: samples by kind of stop, those of a kind next to each other."""

    tokens: Ints
    has_ids: Bools  # its blocks have numbers
    starts: Ints  # of PROMPT, TAIL, REST, and the end

    def draw(self, kinds: npt.NDArray[np.int8], rng: np.random.Generator) -> tuple[Ints, Bools]:
        """Tokens and whether they have ids, for stops of these kinds; nothing for FIXED."""
        sizes = np.diff(self.starts, append=self.starts[-1])[kinds]
        at = self.starts[kinds] + (rng.random(len(kinds)) * sizes).astype(np.int64)
        return np.append(self.tokens, 0)[at], np.append(self.has_ids, False)[at]


def fit_stops(trace: Trace, nodes: Int32s, depths: Ints) -> tuple[Stops, OwnText]:
    """`nodes` and `depths` [requests]: where each left the core, and after how many blocks."""
    size = trace.block_size
    own = trace.input_tokens - size * depths
    is_whole = trace.depth == depths  # no block is its own
    kinds = np.full(len(trace), TAIL, np.int8)
    if trace.rule == "ceil":
        kinds[is_whole & (own > -size) & (own <= 0)] = FIXED
    else:
        kinds[is_whole & (own < size)] = REST
    kinds[nodes == EMPTY] = PROMPT
    last = np.where(kinds == FIXED, own + size, 0).astype(np.int32)
    order = np.lexsort((last, kinds, nodes))
    by_kind = np.argsort(kinds, kind="stable")
    starts = np.searchsorted(kinds[by_kind], [PROMPT, TAIL, REST, FIXED])
    pooled = by_kind[: starts[-1]]
    has_ids = (trace.depth > depths) | (own < size) & (trace.num_blocks > 0)
    return (
        Stops(nodes[order], kinds[order], last[order]),
        OwnText(own[pooled], has_ids[pooled], starts),
    )


def stretched(own: Ints, factor: float, rng: np.random.Generator) -> Ints:
    """Own text `factor` times as long; none stays none, and some stays some."""
    if factor == 1.0:
        return own
    return np.where(own > 0, np.maximum(1, scaled(own, factor, rng)), own)
