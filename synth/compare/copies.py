"""The share of a generated trace that repeats sessions of its source."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from mallee.synth.compare.gates import Value
from mallee.synth.core.threads import threads_of
from mallee.traces.numbers import Floats
from mallee.traces.trace import Trace

LEAST_TURNS: Final = 8  # shorter ones agree by chance
TOLERANCE: Final = 0.1  # of the logarithms of lengths


def copies(source: Trace, other: Trace) -> Value:
    """The share of requests, of those in long sessions, whose session is like one of the source.

    Alike are two sessions of equally many turns, at least `LEAST_TURNS`, whose prompts and answers are
    all equally long, to about a tenth. A model that replays what it saw, at other times and a bit off, has 1
    here, and passes every other gate.
    """
    if source.has_forks:
        return Value(None, "search trees of one size have lengths alike")
    known: dict[int, list[Floats]] = {}
    for lengths in _sessions(source):
        known.setdefault(len(lengths), []).append(lengths)
    stacked = {turns: np.stack(each) for turns, each in known.items()}
    total = same = 0
    for lengths in _sessions(other):
        turns = len(lengths)
        total += turns
        if turns in stacked:
            apart = np.abs(stacked[turns] - lengths).max(axis=(1, 2))
            same += turns * bool((apart <= TOLERANCE).any())
    return Value(same / total) if total else Value(None, f"no session has {LEAST_TURNS} turns")


def _sessions(trace: Trace) -> Iterator[Floats]:
    """Logarithms of prompt and answer of each turn of each long session: [turns, 2]."""
    session = threads_of(trace).session
    order = np.argsort(session, kind="stable")
    tokens = np.stack([trace.input_tokens, trace.output_tokens], axis=1)[order]
    lengths = np.log1p(tokens.astype(np.float64))
    bounds = np.searchsorted(session[order], np.arange(int(session.max(initial=-1)) + 2))
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if end - begin >= LEAST_TURNS:
            yield lengths[begin:end]
