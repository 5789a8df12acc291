"""New threads from old steps: threads that are in like states exchange what comes next.

Resampling steps one by one forgets what makes a session long or slow; resampling whole threads makes nothing
new. So threads are walked side by side, and at each position threads of one kind and like context
exchange their rests, with a chance a step (a block bootstrap of template runs matched on state, of
which a run is as long as nothing was exchanged). Since positions match, no thread comes upon itself; since
rests are exchanged and not drawn, each step is used once: numbers of calls, new tokens, answers and gaps
keep their distributions to the last digit, and what jitter and exchange leave to chance is who does it when.
Source: the idea of balanced resampling is Davison, Hinkley and Schechtman 1986.
"""

from typing import Final

import numpy as np

from mallee.synth.session.steps import TIME_BINS, Steps
from mallee.synth.session.walk import Plan, plan_of
from mallee.traces.numbers import Bools, Floats, Int32s, Ints

EXCHANGE: Final = 0.8
"""Chance of a pair of threads to exchange their rests at a position: runs of few steps."""
_ALIKE_LEFT: Final = 0.2  # of what threads of a session with several still have to do
_LIKE: Final = 0.12  # of log context: farther apart they don't exchange
_AT_ALL_LIKE: Final = (
    0.5  # farther apart, and a thread that was cut off ends rather than goes on as that one
)
_MOST_PACES: Final = 8
_BIN_THREADS: Final = 64
_MANY_THREADS: Final = (
    64  # where there are fewer, one long prompt at another place moves all figures
)
_PACE_THREADS: Final = 16  # threads of a pace, at least
_BLUR: Final = 0.02  # of log context, so that other pairs are neighbours each time
_TEMPLATES: Final = 32  # threads of less and of more context that one that was cut off may go on as
END: Final = -1


def recombine(
    steps: Steps,
    rng: np.random.Generator,
    *,
    cut_off: Floats | None = None,
    left_s: Floats | None = None,
) -> Plan:
    """One thread for each of the source's, in its order.

    `cut_off`: for the last step of each thread the chance that the source's end cut the thread off there;
    it then goes on as a thread in a like state does, after the end that was `left_s` away (by step; at
    once if not given).
    """
    following = steps.following
    is_cut = np.zeros(len(steps), np.bool_)
    if cut_off is not None:
        is_cut = (following == END) & (rng.random(len(steps)) < cut_off)
    left_s = np.full(len(steps), -1.0) if left_s is None else left_s
    state = np.log1p(steps.context)
    current = steps.heads.copy()
    thread = np.arange(len(current))
    elapsed_s = np.zeros(len(current))
    ahead = np.zeros(len(current))  # tokens that a thread has more than its step had in the source
    before = np.full(len(steps), END, np.int32)
    before[following[following != END]] = np.flatnonzero(following != END)
    left = _left(steps)
    exchange = EXCHANGE * min(1.0, len(current) / _MANY_THREADS)
    levels: list[tuple[Ints, Int32s]] = []
    while len(current):
        levels.append((thread, current))
        paced = _paced(_by_time(steps, current), elapsed_s)
        held = np.log1p(np.maximum(0.0, steps.context[current] + ahead))
        successor = _exchanged(
            following[current], current, state, held, paced, steps.is_held, left, exchange, rng
        )
        successor = _continued(successor, is_cut[current], current, state, held, left_s, steps, rng)
        goes_on = successor != END
        ahead = (ahead + steps.context[current])[goes_on]
        thread, current = thread[goes_on], successor[goes_on]
        ahead -= steps.context[before[current]]
        ahead[steps.dropped[current] > steps.kept[current]] = 0.0
        elapsed_s = elapsed_s[goes_on] + steps.gap_s[current]
    return _by_thread(levels, steps)


def _left(steps: Steps) -> Int32s:
    """Steps that the thread still has after each, where its session has other threads; -1 where it is alone.

    Threads that take turns in a session are long together.
    """
    spawned = steps.heads[steps.parent_step[steps.heads] >= 0]
    has_others = np.zeros(len(steps.heads), np.bool_)
    has_others[steps.thread[spawned]] = True
    has_others[steps.thread[steps.parent_step[spawned]]] = True
    counts = np.bincount(steps.thread)
    left = counts[steps.thread] - steps.position - 1
    return np.where(has_others[steps.thread], left, -1).astype(np.int32)


def _order(state: Floats, kind: Int32s, rng: np.random.Generator) -> Ints:
    """Threads by kind and context, about."""
    return np.lexsort((state + _BLUR * rng.standard_normal(len(state)), kind))


def _by_time(steps: Steps, current: Int32s) -> Int32s:
    """Kind of each thread and part of the source's time it is in: fewer parts where fewer threads are left.

    Traffic changes over a day; and where a trace was cut off, late threads have short rests, which early ones
    must not get.
    """
    num = min(TIME_BINS, max(1, len(current) // _BIN_THREADS))
    found: Int32s = steps.kind[current] * num + steps.time_bin[current] * num // TIME_BINS
    return found


def _paced(kind: Int32s, elapsed_s: Floats) -> Int32s:
    """`kind` of each thread told apart by pace: slow sessions stay slow, or none would last long."""
    num_paces = min(_MOST_PACES, max(1, len(kind) // _PACE_THREADS))
    order = np.lexsort((elapsed_s, kind))
    counts = np.bincount(kind)
    rank = np.empty(len(kind), np.int64)
    rank[order] = np.arange(len(kind)) - np.repeat(np.cumsum(counts) - counts, counts)
    paced: Int32s = (kind * num_paces + rank * num_paces // counts[kind]).astype(np.int32)
    return paced


def _exchanged(
    successor: Int32s,
    current: Int32s,
    state: Floats,
    held: Floats,
    paced: Int32s,
    is_held: Bools,
    left: Int32s,
    exchange: float,
    rng: np.random.Generator,
) -> Int32s:
    """`successor` of each thread, exchanged between some neighbours. `left`: see `_left`.

    `held` is what context each thread has by now: the other's rest must suit it, or what threads are off by
    adds up, and contexts outgrow any limit that the source had.
    """
    order = _order(held, paced, rng)
    low = int(rng.integers(2))
    pairs = (len(order) - low) // 2
    first, second = order[low : low + 2 * pairs : 2], order[low + 1 : low + 2 * pairs : 2]
    a, b = current[first], current[second]
    apart = np.maximum(np.abs(held[first] - state[b]), np.abs(held[second] - state[a]))
    may = (paced[first] == paced[second]) & (apart < _LIKE)
    may &= ~is_held[a] & ~is_held[b]
    may &= (left[a] < 0) & (left[b] < 0) | (np.abs(left[a] - left[b]) <= _ALIKE_LEFT * left[a])
    may &= rng.random(pairs) < exchange
    found = successor.copy()
    found[first[may]], found[second[may]] = successor[second[may]], successor[first[may]]
    return found


def _continued(
    successor: Int32s,
    is_cut: Bools,
    current: Int32s,
    state: Floats,
    held: Floats,
    left_s: Floats,
    steps: Steps,
    rng: np.random.Generator,
) -> Int32s:
    """Threads that were cut off go on with the successor of a thread in a like state that has one.

    It is one that comes after the source's end, if any near does: what comes sooner would have been seen.
    """
    if not is_cut.any():
        return successor
    kind = steps.kind
    order = _order(held, kind[current], rng)
    # what is held is done once: a copy would have to spawn, or join, threads of its own
    goes_on = successor[order] != END
    whole = np.flatnonzero(~is_cut[order] & goes_on & ~steps.is_held[current[order]])
    if not len(whole):
        return successor
    cut = np.flatnonzero(is_cut[order])
    window = np.searchsorted(whole, cut)[:, None] + np.arange(-_TEMPLATES, _TEMPLATES)
    templates = order[whole[np.clip(window, 0, len(whole) - 1)]]
    mine = order[cut]
    step, other = current[mine][:, None], current[templates]
    is_other = kind[other] != kind[step]
    is_early = steps.gap_s[successor[templates]] <= left_s[step]
    apart = np.abs(state[other] - held[mine][:, None])
    best = np.lexsort((apart, is_early, apart > _LIKE, is_other), axis=1)[:, 0]
    rows = np.arange(len(mine))
    is_like = ~is_other[rows, best] & (apart[rows, best] < _AT_ALL_LIKE)
    found = successor.copy()
    found[mine[is_like]] = successor[templates[rows, best]][is_like]
    return found


def _by_thread(levels: list[tuple[Ints, Int32s]], steps: Steps) -> Plan:
    threads = np.concatenate([thread for thread, _ in levels])
    picked = np.concatenate([step for _, step in levels])
    order = np.argsort(threads, kind="stable")  # levels are in order
    return plan_of(np.bincount(threads), picked[order], steps)
