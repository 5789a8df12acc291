"""The choice of a model for a trace."""

from typing import cast, get_args

from mallee.protocol.errors import ConfigError
from mallee.synth.baseline.model import fit_tree
from mallee.synth.core.model import Kind, Model
from mallee.synth.core.prefix_tree import PrefixTree
from mallee.synth.programs.fit import fit_search
from mallee.synth.session.fit import fit_session
from mallee.traces.trace import Trace


def fit(trace: Trace, kind: str) -> Model:
    """Learn `trace`. Raises ConfigError for an unknown kind, CodecError if its blocks are no prefix tree.

    Search trees, whose requests fork others, have a session model of their own.
    """
    PrefixTree.of(trace)
    match cast(Kind, kind):
        case "tree":
            return fit_tree(trace)
        case "session":
            return fit_search(trace) if trace.has_forks else fit_session(trace)
    raise ConfigError(f"model {kind!r}: give one of {', '.join(get_args(Kind))}")
