"""The interface of all models of a trace, and the choice of one."""

from typing import Final, Literal, Protocol, TypeAlias, cast, get_args

from mallee.protocol.errors import ConfigError
from mallee.synth.core.knobs import Knobs
from mallee.traces.trace import Trace
from mallee.traces.workload import Workload

Kind: TypeAlias = Literal["tree", "session"]

_DEFAULT: Final = Knobs()


class Model(Protocol):
    """Learned from one trace; makes others like it. Immutable, so that it may be used many times."""

    @property
    def kind(self) -> str:
        """The model's name: tree or session."""
        ...

    def generate(self, *, requests: int, seed: int, knobs: Knobs = _DEFAULT) -> Workload:
        """A workload of `requests` requests, drawn anew, and the same, each time it is iterated.

        Its ids stand for the model's block size. The same seed and knobs give the same requests in any
        process. Raises ConfigError for a knob that is out of range or that this model doesn't have.
        """
        ...


def fit(trace: Trace, kind: str) -> Model:
    """Learns `trace`. Raises ConfigError for an unknown kind, CodecError if its blocks are no prefix tree.

    Search trees, whose requests fork others, have a session model of their own.
    """
    from mallee.synth.core.prefix_tree import PrefixTree

    PrefixTree.of(trace)
    match cast(Kind, kind):
        case "tree":
            from mallee.synth.baseline.fit import fit_tree

            return fit_tree(trace)
        case "session" if trace.has_forks:
            from mallee.synth.programs.fit import fit_search

            return fit_search(trace)
        case "session":
            from mallee.synth.session.fit import fit_session

            return fit_session(trace)
    raise ConfigError(f"model {kind!r}: give one of {', '.join(get_args(Kind))}")
