"""Text that sessions share from their begin on: tools, system prompts, projects, as a forest of segments.

The forest is learned from the *trunks* of threads: their prompts up to the first that dropped something. A
block that two of them hold is shared, and a segment is a run of shared blocks with nothing else between.
What sessions draw is a segment and with it all above; most have it in their first request, but who does a
task again begins with calls that somebody made before.

A fleet keeps getting new tools and prompts, so that hit rates stay the same however long it is
watched: over each further length of the source some segments are replaced by new ones. Which, two things
tell. With a Pitman-Yor law a value drawn c times gives up the share d / c of its draws to new values, d being
the discount. That law knows no time and takes a prompt of one afternoon for one that comes back; so what has
been silent for many times its usual gap is replaced too.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from mallee.synth.core.extras import scipy
from mallee.synth.core.prefix_tree import chains
from mallee.synth.core.threads import Threads
from mallee.traces.numbers import Floats, Int32s, Ints
from mallee.traces.trace import Trace

NO_SEGMENT: Final = -1
_DISCOUNTS: Final = np.linspace(0.0, 0.98, 50)
_STRENGTHS: Final = np.geomspace(0.01, 1000.0, 26)
_PATIENCE: Final = 5.0  # usual gaps of silence that mean nothing


@dataclass(frozen=True, slots=True)
class Forest:
    """Segments, each after the one above it."""

    above: Int32s  # segment that this one goes on from, or NO_SEGMENT
    blocks: Int32s  # how long it is
    renewal: Floats  # chance that it is another text a source's length later
    chosen: Int32s  # of each thread of the source: its deepest segment, or NO_SEGMENT
    depth: Int32s  # of each thread of the source: blocks it has from the forest
    first: Int32s  # of each thread of the source: how many of these its first request has

    def __len__(self) -> int:
        return len(self.above)


def fit_forest(trace: Trace, threads: Threads) -> Forest:
    """Learns the forest of the threads that bring a root of their own."""
    heads = threads.heads
    own = np.flatnonzero(~threads.is_fork[heads])
    ends = trunk_ends(trace, threads)[own]
    blocks = np.concatenate([trace.path(r) for r in ends.tolist()] or [trace.blocks[:0]])
    owner = np.repeat(np.arange(len(own)), trace.depth[ends])
    found = chains(threads.tree.parents, np.bincount(blocks, minlength=trace.num_blocks))
    segments = found.of_block[blocks]
    chosen = np.full(len(heads), NO_SEGMENT, np.int32)
    np.maximum.at(chosen, own[owner], segments)  # a segment's number is above its parent's
    depth = np.bincount(own[owner], segments != NO_SEGMENT, len(heads)).astype(np.int32)
    return Forest(
        above=found.above,
        blocks=found.blocks,
        renewal=np.maximum(
            _given_up(found.above, found.uses, len(own)), _silent(segments, owner, len(found.above))
        ),
        chosen=chosen,
        depth=depth,
        first=np.minimum(depth, trace.depth[heads]).astype(np.int32),
    )


def trunk_ends(trace: Trace, threads: Threads) -> Ints:
    """Of each thread the last request that has all whole blocks of all before it."""
    full = (trace.input_tokens // trace.block_size).tolist()
    sources, before, shared = (
        each.tolist() for each in (threads.source, threads.previous, threads.shared)
    )
    ends = threads.heads.copy()
    for request, thread in enumerate(threads.thread.tolist()):
        last = before[request]
        if last >= 0 and ends[thread] == last == sources[request] and shared[request] >= full[last]:
            ends[thread] = request
    return ends


def _given_up(above: Int32s, uses: Ints, num_threads: int) -> Floats:
    """Share of each segment's draws that goes to new segments within a source's length.

    Children of one segment (or roots) are one sequence of draws; threads that went on alone from there are
    part of it, as values drawn once.
    """
    share = np.zeros(len(above))
    for parent in np.unique(above).tolist():
        children = np.flatnonzero(above == parent)
        counts = uses[children]
        draws = num_threads if parent == NO_SEGMENT else int(uses[parent])
        alone = max(0, draws - int(counts.sum()))
        share[children] = _discount(np.append(counts, np.ones(alone, np.int64))) / counts
    return share


def _silent(segments: Int32s, threads: Ints, num: int) -> Floats:
    """Chance that each of `num` segments is not used any more. `segments` and `threads`: uses, by block."""
    if not num:
        return np.empty(0)
    is_use = segments >= 0
    which, when = np.unique(np.stack([segments[is_use], threads[is_use]]), axis=1)
    counts = np.bincount(which, minlength=num)
    end = int(threads.max()) + 1
    first, last = np.full(num, end), np.zeros(num, np.int64)
    np.minimum.at(first, which, when)
    np.maximum.at(last, which, when)
    usual = np.maximum(last - first, 1) / np.maximum(counts - 1, 1)
    longest = np.ones(num, np.int64)  # what was silent as long before came back
    goes_on = which[1:] == which[:-1]
    np.maximum.at(longest, which[1:][goes_on], np.diff(when)[goes_on])
    beyond = end - 1 - last - np.maximum(_PATIENCE * usual, longest)
    chance: Floats = 1.0 - np.exp(-np.maximum(0.0, beyond) / np.maximum(usual, longest))
    return chance


def _discount(counts: Ints) -> float:
    """The discount of the Pitman-Yor law that makes a partition with these counts likeliest, on a grid.

    Source: Pitman 2006, the exchangeable partition probability of the two-parameter process.
    """
    gammaln = scipy("special").gammaln
    num, draws = len(counts), int(counts.sum())
    if draws < 2:
        return 0.0
    sizes, times = np.unique(counts, return_counts=True)
    d, s = _DISCOUNTS[:, None], _STRENGTHS[None, :]
    positive = np.maximum(d, 1e-9)
    new = np.where(
        d > 0,
        num * np.log(positive) + gammaln(s / positive + num) - gammaln(s / positive),
        num * np.log(s),
    )
    stay = (times * (gammaln(sizes - d) - gammaln(1 - d))).sum(1)[:, None]
    likelihood = new + stay - (gammaln(s + draws) - gammaln(s))
    return float(_DISCOUNTS[np.argmax(likelihood.max(axis=1))])
