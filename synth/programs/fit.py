"""Learns the search model from a trace."""

import numpy as np

from mallee.protocol.errors import ConfigError
from mallee.synth.core.arrivals import fit_starts
from mallee.synth.programs.forest import forest_of
from mallee.synth.programs.model import SearchModel
from mallee.traces.trace import Trace


def fit_search(trace: Trace) -> SearchModel:
    """The model of `trace`, whose requests fork others. Raises ConfigError if it has no requests."""
    if not len(trace):
        raise ConfigError(f"{trace.name}: no requests to learn from")
    forest = forest_of(trace)
    begins = np.sort(forest.begin_s)
    return SearchModel(forest, fit_starts(begins, float(begins[-1])))
