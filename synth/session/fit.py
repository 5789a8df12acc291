"""Learns the session model from a trace."""

from typing import Final

import numpy as np

from mallee.protocol.errors import ConfigError
from mallee.synth.core.arrivals import fit_starts, fit_turnstile
from mallee.synth.core.threads import Threads, threads_of
from mallee.synth.session.forest import fit_forest
from mallee.synth.session.model import SessionModel
from mallee.synth.session.steps import Steps, steps_of
from mallee.traces.numbers import Floats, Ints
from mallee.traces.trace import Trace

_TAIL: Final = 0.1  # of a trace's time: where it begins no more sessions, it ran out


def fit_session(trace: Trace) -> SessionModel:
    """The session model of `trace`. Raises ConfigError if it has no requests, or forks (`synth.programs`)."""
    if not len(trace):
        raise ConfigError(f"{trace.name}: no requests to learn from")
    if trace.has_forks:
        raise ConfigError(f"{trace.name}: its requests fork others; learn it as a search")
    threads = threads_of(trace)
    forest = fit_forest(trace, threads)
    depth = np.zeros(len(trace), np.int32)
    depth[threads.heads] = forest.first
    roots = threads.heads[threads.parent[threads.heads] < 0]
    begins = trace.arrival_s[roots]
    end_s = float(trace.arrival_s[-1])
    runs_out = not np.any(begins > end_s - _TAIL * (end_s - begins[0]))
    is_course = runs_out and begins[-1] > begins[0]  # the last begin ends it; else the last request
    last_s = float(begins[-1]) if is_course else end_s
    steps = steps_of(trace, threads, depth)
    return SessionModel(
        name=trace.name,
        block_size=trace.block_size,
        rule=trace.rule,
        classes=trace.classes,
        steps=steps,
        forest=forest,
        starts=fit_starts(begins, last_s),
        turnstile=fit_turnstile(begins, _ends(trace, threads, roots)),
        cut_off=None if runs_out else cut_off(trace.arrival_s, threads, steps),
        has_ids=bool(len(trace.blocks)),
        has_edges=threads.has_edges,
        has_sessions=bool((trace.session >= 0).any()),
    )


def _ends(trace: Trace, threads: Threads, roots: Ints) -> Floats:
    """Begin of the last request of each session, in the order of `roots`."""
    ends = np.zeros(int(threads.session.max()) + 1)
    np.maximum.at(ends, threads.session, trace.arrival_s)
    found: Floats = ends[threads.session[roots]]
    return found


def cut_off(arrival_s: Floats, threads: Threads, steps: Steps) -> Floats:
    """For the last step of each thread the chance that the trace's end cut the thread off; 0 for others.

    By Bayes: the thread goes on with the share of threads that did so at that position, and its next gap
    is longer than what was left of the trace with the share of gaps that are.
    """
    gaps = np.sort(steps.gap_s[threads.previous >= 0])
    last = steps.following < 0
    chance = np.zeros(len(steps))
    if not len(gaps):
        return chance
    left = arrival_s[-1] - arrival_s
    goes_on = _share_going_on(steps)[steps.position]
    too_late = 1.0 - np.searchsorted(gaps, left, side="right") / len(gaps)
    both = goes_on * too_late
    chance[last] = (both / (1.0 - goes_on + both + 1e-12))[last]
    return chance


def _share_going_on(steps: Steps) -> Floats:
    """By position, the share of threads that have another step; positions that few reach share theirs."""
    reached = np.bincount(steps.position)
    going = np.append(reached[1:], 0)
    width = np.maximum(1, np.arange(len(reached)) // 4)
    sums_reached = np.concatenate([[0], np.cumsum(reached)])
    sums_going = np.concatenate([[0], np.cumsum(going)])
    at = np.arange(len(reached))
    low, high = np.maximum(0, at - width), np.minimum(len(reached), at + width + 1)
    share: Floats = (sums_going[high] - sums_going[low]) / (sums_reached[high] - sums_reached[low])
    return share
