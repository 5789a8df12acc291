"""Everything that is measured of a trace, in one record."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from mallee.synth.analysis.arrivals import counts_of, tick_of
from mallee.synth.analysis.forks import Forks, forks_of
from mallee.synth.analysis.reuse import NOBODY, Reuse, reuse_of, share
from mallee.synth.analysis.sessions import (
    NO_FAMILY,
    Family,
    Relations,
    Sizes,
    family_of,
    relations_of,
    sizes_of,
)
from mallee.synth.analysis.stack import MissCurve, miss_curve
from mallee.synth.analysis.statistics import spearman
from mallee.synth.core.prefix_tree import PrefixTree
from mallee.synth.core.threads import Threads, threads_of
from mallee.traces.numbers import Floats
from mallee.traces.trace import Trace
from mallee.traces.workload import NO_PARENT

_WINDOWS: Final = 40


@dataclass(frozen=True, slots=True)
class Analysis:
    """Samples are float64 arrays, empty where the trace has nothing of the kind.

    Per request, in order of arrival: `isl` and `osl` tokens; `hit_depth` leading blocks seen in an
    earlier prompt, `new_blocks` the others, `new_tokens` the tokens not in the former. `dispersion` and
    `autocorrelation` are of counts of arrivals, by width of the bins in seconds (`counts_of`).
    A trace with forks has the tree of its requests in `roots`, `branch_*`, `children_per_spawn`,
    `live_siblings` and `join_wait_s` (module `forks`); another one the tree of its blocks in the first
    two, and its sessions' spawned threads in the others (module `sessions`).
    """

    name: str
    num_requests: int
    duration_s: float
    block_size: int
    rule: str
    num_blocks: int  # distinct
    # lengths
    isl: Floats
    osl: Floats
    # arrivals
    gaps_s: Floats  # between arrivals: of requests, or of trees where requests fork
    dispersion: dict[float, float]
    autocorrelation: dict[float, float]
    tick_s: float | None  # that all arrivals are on
    # reuse
    new_tokens: Floats
    new_blocks: Floats
    hit_depth: Floats
    ideal_hit: float  # share of all blocks seen before; NaN without blocks
    hit_windows: Floats  # the same of each fortieth of the requests
    curve: MissCurve  # of plain LRU
    engine_curve: MissCurve  # of LRU that gives up the ends of prompts first
    reuse_gap_requests: Floats  # of those that hit: since the last toucher of the deepest block hit
    reuse_gap_s: Floats
    # tree
    roots: int
    branch_widths: Floats  # children of what has at least two
    branch_depths: Floats  # of the same; 1 is a root
    depths: Floats  # of all blocks
    # sessions
    turns_per_session: Floats
    turns_per_line: Floats
    lines_per_session: Floats
    session_duration_s: Floats
    turn_gaps_s: Floats
    relations: Relations
    # hierarchy
    children_per_spawn: Floats
    start_stagger_s: Floats
    live_siblings: Floats
    join_wait_s: Floats
    spawn_wait_s: Floats
    shared_with_parent: Floats
    forks: Forks | None
    # Spearman correlations that a model of independent draws loses; those that can't be told are absent
    second_order: dict[str, float]

    @property
    def mrc_sizes(self) -> Floats:
        """Cache sizes in blocks: 0.5, 1, 2, 5, 10, 20, 40, 80 % of the distinct blocks."""
        return self.curve.sizes()

    @property
    def mrc_hits(self) -> Floats:
        """LRU hit rates at `mrc_sizes`."""
        return self.hits_at(self.mrc_sizes)

    def hits_at(self, sizes: npt.ArrayLike) -> Floats:
        """LRU hit rate at any cache sizes in blocks."""
        return self.curve.hits_at(sizes)


def analyze(trace: Trace) -> Analysis:
    """Raises CodecError if the trace's blocks are no prefix tree."""
    threads = threads_of(trace)
    tree = threads.tree
    reuse = reuse_of(trace)
    forks = forks_of(trace) if trace.has_forks else None
    family = NO_FAMILY if forks is not None else family_of(trace, threads)
    sizes = sizes_of(trace, threads)
    roots, widths, depths = _shape(tree, forks)
    # Forks come when what they wait for ends, whatever the file says: only trees arrive.
    arrival_s = trace.arrival_s if forks is None else trace.arrival_s[trace.parent == NO_PARENT]
    counts = counts_of(arrival_s)
    hits = np.flatnonzero(reuse.touchers != NOBODY)
    touchers = reuse.touchers[hits]
    isl = trace.input_tokens.astype(np.float64)
    new_tokens = np.maximum(0.0, isl - trace.block_size * reuse.hit_blocks)
    return Analysis(
        name=trace.name,
        num_requests=len(trace),
        duration_s=float(np.ptp(trace.arrival_s)) if len(trace) else 0.0,
        block_size=trace.block_size,
        rule=trace.rule,
        num_blocks=trace.num_blocks,
        isl=isl,
        osl=trace.output_tokens.astype(np.float64),
        gaps_s=np.diff(arrival_s),
        dispersion={width: each.dispersion for width, each in counts.items()},
        autocorrelation={width: each.autocorrelation for width, each in counts.items()},
        tick_s=tick_of(arrival_s),
        new_tokens=new_tokens,
        new_blocks=(trace.depth - reuse.hit_blocks).astype(np.float64),
        hit_depth=reuse.hit_blocks.astype(np.float64),
        ideal_hit=share(reuse.hit_blocks, trace.depth),
        hit_windows=_windows(trace, reuse),
        curve=miss_curve(trace),
        engine_curve=miss_curve(trace, keeps_front=True),
        reuse_gap_requests=(hits - touchers).astype(np.float64),
        reuse_gap_s=trace.arrival_s[hits] - trace.arrival_s[touchers],
        roots=roots,
        branch_widths=widths,
        branch_depths=depths,
        depths=tree.depths.astype(np.float64),
        turns_per_session=sizes.turns_per_session,
        turns_per_line=sizes.turns_per_line,
        lines_per_session=sizes.lines_per_session,
        session_duration_s=sizes.session_duration_s,
        turn_gaps_s=sizes.turn_gaps_s,
        relations=relations_of(trace, threads),
        children_per_spawn=family.children_per_spawn if forks is None else forks.widths,
        start_stagger_s=family.start_stagger_s,
        live_siblings=family.live_siblings if forks is None else forks.live_siblings,
        join_wait_s=family.join_wait_s if forks is None else forks.join_wait_s,
        spawn_wait_s=family.spawn_wait_s,
        shared_with_parent=family.shared_with_parent,
        forks=forks,
        second_order=_second_order(trace, threads, new_tokens, sizes, family, forks),
    )


def _shape(tree: PrefixTree, forks: Forks | None) -> tuple[int, Floats, Floats]:
    """Roots, widths and depths of what branches: of requests if they fork, else of blocks."""
    if forks is not None:
        branches = forks.widths >= 2
        return forks.trees, forks.widths[branches], forks.depths[branches]
    nodes = tree.branch_nodes
    return (
        len(tree.roots),
        tree.children[nodes].astype(np.float64),
        tree.depths[nodes].astype(np.float64),
    )


def _windows(trace: Trace, reuse: Reuse) -> Floats:
    """Ideal hit rate of each fortieth of the requests; NaN where they have no blocks."""
    if len(trace) < _WINDOWS:
        return np.empty(0)
    starts = np.linspace(0, len(trace), _WINDOWS + 1).astype(np.int64)[:-1]
    hits = np.add.reduceat(reuse.hit_blocks, starts)
    blocks = np.add.reduceat(trace.depth, starts)
    return np.where(blocks, hits / np.maximum(1, blocks), np.nan)


def _second_order(
    trace: Trace,
    threads: Threads,
    new_tokens: Floats,
    sizes: Sizes,
    family: Family,
    forks: Forks | None,
) -> dict[str, float]:
    later = np.flatnonzero(threads.previous >= 0)
    before = threads.previous[later]
    third = np.flatnonzero(threads.previous[before] >= 0)  # of `later`: those with two before them
    gaps = np.zeros(len(trace))
    gaps[later] = sizes.turn_gaps_s
    heads = threads.heads[threads.parent[threads.heads] >= 0]
    _, place, siblings = np.unique(threads.parent[heads], return_inverse=True, return_counts=True)
    found = {
        "isl_osl": spearman(trace.input_tokens, trace.output_tokens),
        "new_tokens_osl": spearman(new_tokens, trace.output_tokens),
        "new_tokens_next_new_tokens": spearman(new_tokens[before], new_tokens[later]),
        "osl_next_osl": spearman(trace.output_tokens[before], trace.output_tokens[later]),
        "osl_next_gap": spearman(trace.output_tokens[before], gaps[later]),
        "gap_next_gap": spearman(gaps[before[third]], gaps[later[third]]),
        "gap_new_tokens": spearman(gaps[later], new_tokens[later]),
    }
    if len(family.children_per_spawn):
        turns = sizes.turns_per_line[threads.thread[heads]]
        found["child_turns_siblings"] = spearman(turns, siblings[place.reshape(-1)])
    if forks is not None:
        found["width_parent_width"] = forks.width_by_parent_width
        found["width_siblings_kept"] = forks.width_by_siblings_kept
    return {name: value for name, value in found.items() if value == value}
