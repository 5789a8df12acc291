"""The effects of a run's decisions, in order: a shell carries them out."""

from typing import NamedTuple, TypeAlias

from mallee.graphs.nodes import Filled


class Start(NamedTuple):
    """Nodes to start, with what they begin with: a prefill, a call, or branches that are one fork."""

    nodes: tuple[str, ...]
    texts: tuple[Filled, ...]


class Cancel(NamedTuple):
    """A node that was started is to be ended. Nothing of it may be left, and nothing has to be told of it."""

    node: str


class Release(NamedTuple):
    """The capsule of a node is needed no more. Once for each capsule that does not outlive the graph."""

    node: str


class Expanded(NamedTuple):
    """A map has become as many nodes as there are items."""

    node: str
    items: tuple[str, ...]


class Ended(NamedTuple):
    """A node is over. Once for each node."""

    node: str


class Over(NamedTuple):
    """Every node is over. The last effect but for releases of what ends late."""


Effect: TypeAlias = Start | Cancel | Release | Expanded | Ended | Over
