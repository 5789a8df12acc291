"""The interface of all models of a trace."""

from typing import Final, Literal, Protocol, TypeAlias

from mallee.synth.core.knobs import Knobs
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
