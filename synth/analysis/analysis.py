"""Everything that is measured of a trace, in one record."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mallee.synth.analysis.arrivals import Counts, counts_of, tick_of
from mallee.synth.analysis.forks import Forks, forks_of
from mallee.synth.analysis.reuse import NO_TOUCHER, reuse_of
from mallee.synth.analysis.sessions import Family, Sessions, family_of, sessions_of
from mallee.synth.analysis.stack import MissCurve, miss_curve
from mallee.synth.analysis.statistics import spearman
from mallee.synth.core.threads import Threads, threads_of
from mallee.traces.numbers import Floats
from mallee.traces.trace import Trace
from mallee.traces.workload import NO_PARENT


@dataclass(frozen=True, slots=True)
class Analysis:
    """Samples are float64 arrays, empty where the trace has nothing of the kind.

    Per request, in order of arrival: `isl` and `osl` tokens; `hit_depth` leading blocks seen in an
    earlier prompt, `new_blocks` the others, `new_tokens` the tokens not in the former.
    A trace with forks has the tree of its requests in `roots`, `branch_*` and `family` (module `forks`);
    another one the tree of its blocks, and its sessions' spawned threads (module `sessions`).
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
    counts: dict[float, Counts]  # of arrivals, by width of the bins in seconds
    tick_s: float | None  # that all arrivals are on
    # reuse
    new_tokens: Floats
    new_blocks: Floats
    hit_depth: Floats
    curve: MissCurve  # of plain LRU
    engine_curve: MissCurve  # of LRU that gives up the ends of prompts first
    reuse_gap_requests: Floats  # of those that hit: since the last toucher of the deepest block hit
    reuse_gap_s: Floats
    # tree
    roots: int
    branch_widths: Floats  # children of what has at least two
    branch_depths: Floats  # of the same; 1 is a root
    sessions: Sessions
    family: Family
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
    reuse = reuse_of(trace)
    sessions = sessions_of(trace, threads)
    # Forks come when what they wait for ends, whatever the file says: only trees arrive.
    arrival_s = trace.arrival_s[trace.parent == NO_PARENT]
    if trace.has_forks:
        forks = forks_of(trace)
        family = forks.family
        roots, widths, depths = forks.trees, family.children_per_spawn, forks.depths
    else:
        tree, forks, family = threads.tree, None, family_of(trace, threads)
        widths, depths = tree.children.astype(np.float64), tree.depths.astype(np.float64)
        roots = len(tree.roots)
    branches = widths >= 2
    hits = np.flatnonzero(reuse.touchers != NO_TOUCHER)
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
        counts=counts_of(arrival_s),
        tick_s=tick_of(arrival_s),
        new_tokens=new_tokens,
        new_blocks=(trace.depth - reuse.hit_blocks).astype(np.float64),
        hit_depth=reuse.hit_blocks.astype(np.float64),
        curve=miss_curve(trace),
        engine_curve=miss_curve(trace, keeps_front=True),
        reuse_gap_requests=(hits - touchers).astype(np.float64),
        reuse_gap_s=trace.arrival_s[hits] - trace.arrival_s[touchers],
        roots=roots,
        branch_widths=widths[branches],
        branch_depths=depths[branches],
        sessions=sessions,
        family=family,
        forks=forks,
        second_order=_second_order(trace, threads, new_tokens, sessions, forks),
    )


def _second_order(
    trace: Trace, threads: Threads, new_tokens: Floats, sessions: Sessions, forks: Forks | None
) -> dict[str, float]:
    later = np.flatnonzero(threads.previous >= 0)
    before = threads.previous[later]
    third = np.flatnonzero(threads.previous[before] >= 0)  # of `later`: those with two before them
    gaps = np.zeros(len(trace))
    gaps[later] = sessions.turn_gaps_s
    found = {
        "isl_osl": spearman(trace.input_tokens, trace.output_tokens),
        "new_tokens_osl": spearman(new_tokens, trace.output_tokens),
        "new_tokens_next_new_tokens": spearman(new_tokens[before], new_tokens[later]),
        "osl_next_osl": spearman(trace.output_tokens[before], trace.output_tokens[later]),
        "osl_next_gap": spearman(trace.output_tokens[before], gaps[later]),
        "gap_next_gap": spearman(gaps[before[third]], gaps[later[third]]),
        "gap_new_tokens": spearman(gaps[later], new_tokens[later]),
    }
    if forks is not None:
        found["width_parent_width"] = forks.width_by_parent_width
        found["width_siblings_kept"] = forks.width_by_siblings_kept
    else:
        heads = threads.heads[threads.parent[threads.heads] >= 0]
        _, place, counts = np.unique(threads.parent[heads], return_inverse=True, return_counts=True)
        turns = sessions.turns_per_thread[threads.thread[heads]]
        found["child_turns_siblings"] = spearman(turns, counts[place.reshape(-1)])
    return {name: value for name, value in found.items() if value == value}
