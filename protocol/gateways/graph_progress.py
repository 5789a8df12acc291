"""The parts of a graph that are done, as its gateway copies them to the others for the case that it dies."""

from typing import Final

import msgspec

from mallee.protocol.codec import Decoder


class NodeDone(msgspec.Struct, frozen=True, array_like=True):
    """A node that is done: its output, and what workers did for it.

    `request` is "" for a tool or a map, `capsule` for a node that left none. A map has no output here: its
    items have.
    """

    node: str
    text: str = ""
    items: tuple[str, ...] | None = None
    request: str = ""
    worker: str = ""
    capsule: str = ""
    boundary: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    completion_tokens: int = 0
    finish: str | None = None


class GraphProgress(msgspec.Struct, frozen=True, array_like=True):
    """Nodes of one graph that are done, in the order of their ends. `digest` is that of the graph."""

    digest: bytes
    nodes: tuple[NodeDone, ...]


decode_graph_progress: Final = Decoder(GraphProgress, "what is done of a graph")
