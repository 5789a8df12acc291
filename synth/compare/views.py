"""Traces cut down to what another one can show, so that both are measured alike.

A source without session ids is compared by threads that are found in its prompts; then the ids of what was
made from it say nothing. Text that a fork shares is in the block tree in any case; only where both
traces have forks is their logical tree compared.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mallee.synth.core.streams import stream
from mallee.traces.numbers import Bools, Int32s, Numbers
from mallee.traces.trace import NO_SESSION, Trace, picked_lists
from mallee.traces.workload import NO_PARENT


class Shows(NamedTuple):
    """The parts of a trace besides requests and their text."""

    sessions: bool
    waits: bool
    forks: bool


def shows(trace: Trace) -> Shows:
    return Shows(bool((trace.session != NO_SESSION).any()), len(trace.waits) > 0, trace.has_forks)


def shared_views(a: Trace, b: Trace) -> tuple[Shows, Shows]:
    """The parts of source `a` and of `b` that are compared.

    `b` loses what the source doesn't have. The source loses its forks where `b` has none, but not its
    sessions and waits: a trace that dropped those has failed to show them.
    """
    of_a, of_b = shows(a), shows(b)
    forks = of_a.forks and of_b.forks
    return (
        of_a._replace(forks=forks),
        Shows(of_a.sessions and of_b.sessions, of_a.waits and of_b.waits, forks),
    )


def view(trace: Trace, keep: Shows) -> Trace:
    """`trace` without what `keep` leaves out."""
    num = len(trace)
    if not keep.sessions:
        trace = replace(trace, session=np.full(num, NO_SESSION, np.int32), sessions=())
    if not keep.waits:
        trace = replace(
            trace,
            wait_starts=np.zeros(num + 1, np.int64),
            waits=np.empty(0, np.int32),
            tool_wait_s=np.zeros(num),
        )
    if not keep.forks:
        trace = replace(trace, parent=np.full(num, NO_PARENT, np.int32))
    return trace


def picked(trace: Trace, chosen: Bools) -> Trace:
    """The chosen requests, with the waits and forks among them; blocks and times from 0 again."""
    (at,) = np.nonzero(chosen)
    place = np.full(len(trace), -1, np.int64)
    place[at] = np.arange(len(at))
    starts, flat = picked_lists(trace.starts, trace.blocks, at)
    wait_starts, waits = picked_lists(trace.wait_starts, trace.waits, at)
    owner = np.repeat(np.arange(len(at)), np.diff(wait_starts))
    inside = place[waits] >= 0
    counts = np.bincount(owner[inside], minlength=len(at))
    parent = trace.parent[at]
    arrival_s = trace.arrival_s[at]
    return replace(
        trace,
        arrival_s=arrival_s - arrival_s.min(initial=np.inf),
        input_tokens=trace.input_tokens[at],
        output_tokens=trace.output_tokens[at],
        starts=starts,
        blocks=Numbers().of(flat.astype(np.int64)),
        session=trace.session[at],
        cls=trace.cls[at],
        wait_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        waits=place[waits[inside]].astype(np.int32),
        tool_wait_s=trace.tool_wait_s[at],
        branches=trace.branches[at],
        parent=np.where(parent == NO_PARENT, NO_PARENT, place[parent]).astype(np.int32),
    )


def halves(trace: Trace, group: Int32s, seed: int) -> tuple[Trace, Trace]:
    """Two traces of half the groups each, dealt by chance. `group`: number of each request's, from 0."""
    num = int(group.max(initial=-1)) + 1
    order = stream(seed, "halves").permutation(num)
    is_first = np.zeros(num, bool)
    is_first[order[: num // 2]] = True
    return picked(trace, is_first[group]), picked(trace, ~is_first[group])
