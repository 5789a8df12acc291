"""Sessions, their threads, the relation of a call to the one before it, and threads that calls spawn.

Sessions, threads and their parents are those of `synth.core.threads`. A trace does not tell when an
answer has ended: a thread *lives* from the arrival of its first request to the arrival of its last.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from mallee.synth.analysis.statistics import dense, others_alive
from mallee.synth.core.threads import Threads
from mallee.traces.numbers import Floats, Int32s, Ints
from mallee.traces.trace import Trace

RELATIONS: Final = ("extends", "rolls_back", "diverges", "resets", "returns")


@dataclass(frozen=True, slots=True)
class Sessions:
    """Sessions, their threads, and the relation of each request to the one before it in its thread.

    *returns* shares more with an older request of its thread than with the one before; of the others,
    *extends* has all whole blocks of the one before; *rolls_back* has at least half of them; of the
    rest, *resets* (or compacts) is less than half as long as the one before, *diverges* is longer.
    """

    turns_per_session: Floats
    turns_per_thread: Floats
    threads_per_session: Floats
    duration_s: Floats  # from a session's first arrival to its last
    turn_gaps_s: Floats  # from arrival to arrival in a thread
    relations: dict[str, int]  # requests by `RELATIONS`
    rollback_tokens: Floats  # whole blocks of the one before that those lack that roll back

    def relation_share(self, name: str) -> float:
        return self.relations[name] / max(1, sum(self.relations.values()))


def sessions_of(trace: Trace, threads: Threads) -> Sessions:
    num = int(threads.session.max(initial=-1)) + 1
    first, last = np.full(num, np.inf), np.full(num, -np.inf)
    np.minimum.at(first, threads.session, trace.arrival_s)
    np.maximum.at(last, threads.session, trace.arrival_s)
    later = np.flatnonzero(threads.previous >= 0)
    before = threads.previous[later]
    whole = trace.input_tokens[before] // trace.block_size
    shared = threads.shared[later]
    is_short = 2 * trace.input_tokens[later] < trace.input_tokens[before]
    conditions = [threads.source[later] != before, shared >= whole, 2 * shared >= whole, is_short]
    names = ["returns", "extends", "rolls_back", "resets"]
    relation = np.select(conditions, names, "diverges")
    lost = (whole - shared)[relation == "rolls_back"] * trace.block_size
    return Sessions(
        turns_per_session=_counts(threads.session),
        turns_per_thread=_counts(threads.thread),
        threads_per_session=_counts(threads.session[threads.heads]),
        duration_s=last - first,
        turn_gaps_s=trace.arrival_s[later] - trace.arrival_s[before],
        relations={name: int((relation == name).sum()) for name in RELATIONS},
        rollback_tokens=lost.astype(np.float64),
    )


def _counts(numbers: Int32s) -> Floats:
    return np.bincount(numbers).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Family:
    """Spawned and forked threads. A *spawn* is all threads that one request started."""

    children_per_spawn: Floats
    start_stagger_s: Floats  # from the first child's begin to each other's
    live_siblings: Floats  # at each child's begin: others of the same parent thread
    join_wait_s: Floats  # from the first child's end to the begin of the parent's call that joins
    spawn_wait_s: Floats  # from the spawning call's begin to that of the call that joins
    shared_with_parent: Floats  # share of a child's first prompt that its parent step's prompt has


NO_FAMILY = Family(*(np.empty(0) for _ in range(6)))


def family_of(trace: Trace, threads: Threads) -> Family:
    """A call joins a spawn if it is the first of the parent's thread to wait for a child's last call.

    In a trace without dependencies: if it is the first after the last child's end.
    """
    heads = threads.heads
    heads = heads[threads.parent[heads] >= 0]
    if not len(heads):
        return NO_FAMILY
    parent_step = threads.parent[heads].astype(np.int64)
    tails = np.zeros(threads.num_threads, np.int64)
    tails[threads.thread] = np.arange(len(trace))  # the last that is written stays
    begin_s = trace.arrival_s[heads]
    end_s = trace.arrival_s[tails[threads.thread[heads]]]
    spawns, place, counts = np.unique(parent_step, return_inverse=True, return_counts=True)
    place = place.reshape(-1)
    first_begin, first_end = (np.full(len(spawns), np.inf) for _ in range(2))
    np.minimum.at(first_begin, place, begin_s)
    np.minimum.at(first_end, place, end_s)
    joins = (_joins if threads.has_edges else _next_calls)(trace, threads, spawns, heads, tails)
    joined = joins < len(trace)
    join_s = trace.arrival_s[joins[joined]]
    is_first = np.zeros(len(heads), np.bool_)
    is_first[np.unique(place, return_index=True)[1]] = True  # heads are in order of arrival
    return Family(
        children_per_spawn=counts.astype(np.float64),
        start_stagger_s=(begin_s - first_begin[place])[~is_first],
        live_siblings=others_alive(dense(threads.thread[parent_step]), begin_s, end_s),
        join_wait_s=np.maximum(0.0, join_s - first_end[joined]),
        spawn_wait_s=join_s - trace.arrival_s[spawns[joined]],
        shared_with_parent=_shared(trace, heads, parent_step),
    )


def _joins(trace: Trace, threads: Threads, spawns: Ints, heads: Ints, tails: Ints) -> Ints:
    """Per spawn the first call of its thread that waits for a child's last call, or len(trace)."""
    waiter, awaited = trace.waiters, trace.waits.astype(np.int64)
    head_of = np.full(threads.num_threads, -1, np.int64)
    head_of[threads.thread[heads]] = heads
    head = head_of[threads.thread[awaited]]
    mine = (head >= 0) & (tails[threads.thread[awaited]] == awaited)
    waiter, head = waiter[mine], head[mine]
    is_parent = threads.thread[threads.parent[head]] == threads.thread[waiter]
    waiter, head = waiter[is_parent], head[is_parent]
    joins = np.full(len(spawns), len(trace), np.int64)
    np.minimum.at(joins, np.searchsorted(spawns, threads.parent[head]), waiter)
    return joins


def _next_calls(trace: Trace, threads: Threads, spawns: Ints, heads: Ints, tails: Ints) -> Ints:
    """Per spawn the first call of its thread after the last call of its children, or len(trace)."""
    last = np.zeros(len(spawns), np.int64)
    np.maximum.at(
        last, np.searchsorted(spawns, threads.parent[heads]), tails[threads.thread[heads]]
    )
    order = np.lexsort((np.arange(len(trace)), threads.thread))
    keys = threads.thread[order].astype(np.int64) * len(trace) + order  # ascending
    at = np.searchsorted(keys, threads.thread[spawns].astype(np.int64) * len(trace) + last)
    joins = np.append(order, 0)[at]
    is_same = (at < len(order)) & (threads.thread[joins] == threads.thread[spawns])
    return np.where(is_same, joins, len(trace))


def _shared(trace: Trace, heads: Ints, parent_step: Ints) -> Floats:
    """Per child the share of its first prompt's blocks that begin its parent step's prompt too."""
    shares = []
    for child, parent in zip(heads.tolist(), parent_step.tolist(), strict=True):
        mine, other = trace.path(child), trace.path(parent)
        num = min(len(mine), len(other))
        same = int(np.append(mine[:num] == other[:num], False).argmin())
        shares.append(same / len(mine) if len(mine) else 0.0)
    return np.array(shares)
