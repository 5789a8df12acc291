"""Trees of requests that fork each other: searches, samples, swarms.

A recorded search has forks, but no times. Times are therefore those of a fleet without queues: a
request begins when all it waits for have ended, and takes `TOKEN_S` for each token of its answer.
"""

from dataclasses import dataclass, replace

import numpy as np

from mallee.synth.analysis.sessions import NO_FAMILY, Family
from mallee.synth.analysis.statistics import dense, others_alive, spearman
from mallee.synth.core.jit import kernel
from mallee.synth.core.pace import TOKEN_S
from mallee.traces.numbers import Floats, Int32s, Ints
from mallee.traces.trace import Trace
from mallee.traces.workload import NO_PARENT


@dataclass(frozen=True, slots=True)
class Forks:
    """Of a trace with forks; a request with children is *expanded*."""

    trees: int
    family: Family  # a *spawn* is all forks of one request, branches counted
    depths: (
        Floats  # of expanded requests, in the order of the family's children; 1 is a tree's root
    )
    leaf_depths: Floats
    backtracks: Floats  # levels climbed between one visit and the next, where any; depth-first only
    expanded_share: float  # of forks
    width_by_parent_width: float  # Spearman, over expanded forks
    width_by_siblings_kept: float  # Spearman with the share of siblings that is expanded


def forks_of(trace: Trace) -> Forks:
    """Of a trace some of whose requests have parents."""
    is_fork = trace.parent != NO_PARENT
    forks = np.flatnonzero(is_fork)
    parent = trace.parent[forks]
    num = len(trace)
    children = np.bincount(parent, trace.branches[forks], num).astype(np.float64)
    expanded = np.flatnonzero(children > 0)
    depths = depths_of(trace.parent)
    begin_s, end_s = times_of(trace)
    is_member = is_fork | (children > 0)  # not what stands apart from all trees
    inner = expanded[is_fork[expanded]]
    above = trace.parent[inner]
    siblings_kept = np.bincount(above, minlength=num)[above] / np.bincount(parent)[above]
    each = np.repeat(forks, trace.branches[forks])
    family = replace(
        NO_FAMILY,
        children_per_spawn=children[expanded],
        live_siblings=others_alive(dense(trace.parent[each]), begin_s[each], end_s[each]),
        join_wait_s=_join_waits(trace, begin_s, end_s),
    )
    return Forks(
        trees=int((is_member & ~is_fork).sum()),
        family=family,
        depths=depths[expanded].astype(np.float64),
        leaf_depths=depths[is_member & (children == 0)].astype(np.float64),
        backtracks=_backtracks(trace, forks, depths),
        expanded_share=len(inner) / len(forks),
        width_by_parent_width=spearman(children[inner], children[above]),
        width_by_siblings_kept=spearman(children[inner], siblings_kept),
    )


def times_of(trace: Trace) -> tuple[Floats, Floats]:
    """Begin and end of each request in seconds, on a fleet without queues."""
    service_s: Floats = trace.output_tokens.astype(np.float64) * TOKEN_S
    waits = trace.wait_starts, trace.waits, trace.tool_wait_s
    return _scheduled(trace.arrival_s, service_s, trace.parent, *waits)


def _join_waits(trace: Trace, begin_s: Floats, end_s: Floats) -> Floats:
    """Of requests that wait for two others at least; once for those that wait for the same."""
    counts = np.diff(trace.wait_starts)
    joins = np.flatnonzero(counts >= 2)
    if not len(joins):
        return np.empty(0)
    same: dict[bytes, int] = {}
    for i in joins.tolist():
        awaited = trace.waits[trace.wait_starts[i] : trace.wait_starts[i + 1]]
        same.setdefault(awaited.tobytes(), i)
    joins = np.array(list(same.values()))
    some = np.flatnonzero(counts)
    first_s = np.zeros(len(trace))
    first_s[some] = np.minimum.reduceat(end_s[trace.waits], trace.wait_starts[some])
    waited_s: Floats = begin_s[joins] - first_s[joins]
    return waited_s


def _backtracks(trace: Trace, forks: Ints, depths: Int32s) -> Floats:
    """Levels from a visit up to the parent of the next, where each waits for the one before it alone."""
    waiter = trace.waiters
    is_other = trace.waits != trace.parent[waiter]  # forks wait for their parents, told or not
    others = np.bincount(waiter[is_other], minlength=len(trace))
    awaited = np.full(len(trace), -1, np.int64)
    awaited[waiter[is_other]] = trace.waits[is_other]
    awaited = awaited[forks]
    is_next = (others[forks] == 1) & (awaited == forks - 1) & (trace.parent[awaited] != NO_PARENT)
    climbed = depths[awaited[is_next]] - depths[trace.parent[forks[is_next]]]
    found: Floats = climbed[climbed > 0].astype(np.float64)
    return found


# Passes over requests that wait for others and fork them, in an order that has those before them.


@kernel
def depths_of(parent: Int32s) -> Int32s:
    """Of each request in its tree; 1 without a parent."""
    depths = np.ones(len(parent), np.int32)
    for i in range(len(parent)):
        if parent[i] >= 0:
            depths[i] = depths[parent[i]] + 1
    return depths


@kernel
def _scheduled(
    arrival_s: Floats,
    service_s: Floats,
    parent: Int32s,
    wait_starts: Ints,
    waits: Int32s,
    tool_wait_s: Floats,
) -> tuple[Floats, Floats]:
    """Begin and end of each: after all that it waits for, or at its arrival if it waits for none."""
    begin_s, end_s = np.zeros(len(parent)), np.zeros(len(parent))
    for i in range(len(parent)):
        ready = -np.inf
        if parent[i] >= 0:
            ready = end_s[parent[i]]
        for at in range(wait_starts[i], wait_starts[i + 1]):
            ready = max(ready, end_s[waits[at]])
        begin_s[i] = arrival_s[i] if ready == -np.inf else ready + tool_wait_s[i]
        end_s[i] = begin_s[i] + service_s[i]
    return begin_s, end_s
