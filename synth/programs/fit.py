"""Learns the search model from a trace."""

import numpy as np

from mallee.protocol.errors import ConfigError
from mallee.synth.core.arrivals import fit_starts
from mallee.synth.programs.forest import forest_of
from mallee.synth.programs.model import SearchModel
from mallee.traces.trace import Trace

_TAIL = 0.1  # of a trace's time: where no program begins in it, the source ran out


def fit_search(trace: Trace) -> SearchModel:
    """The model of `trace`, whose requests fork others. Raises ConfigError if it has no requests."""
    if not len(trace):
        raise ConfigError(f"{trace.name}: no requests to learn from")
    forest = forest_of(trace)
    begins = np.sort(forest.begin_s)
    ran_out = begins[-1] > begins[0] and begins[-1] < forest.end_s - _TAIL * (
        forest.end_s - begins[0]
    )
    return SearchModel(forest, fit_starts(begins, float(begins[-1]) if ran_out else forest.end_s))
