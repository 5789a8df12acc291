"""The context budget of a graph: prefix + largest branch + headroom <= the model's window.

Counted before anything is computed, with the most that each node can put out. A text that is made of
answers may have other tokens than they had when they were drawn: it is counted again when its node starts.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeAlias

from mallee.graphs.graph import CheckedGraph
from mallee.graphs.nodes import Drawn, Filled, Handle, Item, Join, Map, Node, Prefill, Tool
from mallee.graphs.nodes import num_awaited as awaited
from mallee.protocol.errors import GraphContextExceeded, InvalidGraph

HEADROOM: Final = 128  # tokens

Count: TypeAlias = Callable[[Node, Filled], int]
"""The tokens of a text, or of messages, that stand in a node; without what is taken from other nodes."""


class Need(NamedTuple):
    """The most tokens that what goes on from one prefill can have. `branch`: beyond the prefix, at `node`."""

    prefill: str
    prefix: int
    node: str
    branch: int


def pieces(node: Node) -> list[Filled]:
    """The parts of a node's beginning that are known before it runs, and counted: strings, or messages."""
    if node.messages:  # rendered without the outputs that are in them
        return [node.filled(lambda text: "".join(each for each in text if isinstance(each, str)))]
    return [part for part in node.text if isinstance(part, str)]


def context_needs(graph: CheckedGraph, count: Count) -> list[Need]:
    """One for each prefill, in order. Raises InvalidGraph: a branch at a place that its parent can't have."""
    outputs: dict[str, int] = {}  # tokens, at most
    roots: dict[str, str] = {}  # the prefill before each node that leaves a capsule
    lengths: dict[str, int] = {}  # tokens of its capsule, at most
    largest: dict[str, Need] = {}
    for name in graph.order:
        node = graph.nodes[name]
        outputs[name] = _output(node, outputs, count)
        if isinstance(node, Prefill):
            lengths[name] = _begin(node, outputs, 0, count)
            roots[name] = name
            largest[name] = Need(name, lengths[name], "", 0)
        elif isinstance(node, Drawn):
            item = outputs[node.over] if isinstance(node, Map) else 0
            new = _begin(node, outputs, item, count) + node.max_tokens
            roots[name] = root = roots[node.of]
            lengths[name] = _begun_at(node, lengths[node.of]) + new
            need = Need(root, lengths[root], name, lengths[name] - lengths[root])
            largest[root] = max(largest[root], need, key=lambda each: each.branch)
    return [largest[name] for name in graph.nodes if name in largest]


def check_context(graph: CheckedGraph, count: Count, n_ctx: int) -> None:
    """Raises GraphContextExceeded for the first prefill that needs more than `n_ctx` tokens.

    Raises also as `context_needs`.
    """
    for need in context_needs(graph, count):
        if need.prefix + need.branch + HEADROOM > n_ctx:
            raise GraphContextExceeded(*need, HEADROOM, n_ctx)


def _begun_at(node: Drawn, most: int) -> int:
    """Tokens of its parent, of at most `most`, that it goes on from. Raises InvalidGraph."""
    if node.at is None:
        return most
    if node.at > most:
        remedy = f"{node.of} has at most {most} tokens; give 1 to {most}"
        raise InvalidGraph(f"node {node.name}: at={node.at}: {remedy}")
    return node.at


def _begin(node: Node, outputs: Mapping[str, int], item: int, count: Count) -> int:
    """Tokens that it begins with, at most; each item of a map has at most `item`."""
    parts = [part for text in node.texts for part in text]
    taken = sum(outputs[part.name] for part in parts if isinstance(part, Handle))
    items = item * sum(isinstance(part, Item) for part in parts)
    return taken + items + sum(count(node, piece) for piece in pieces(node))


def _output(node: Node, outputs: Mapping[str, int], count: Count) -> int:
    match node:
        case Join():
            n = awaited(node.wait, len(node.inputs))
            most = sorted((outputs[name] for name in node.inputs), reverse=True)[:n]
            return sum(most) + (n - 1) * count(node, node.separator)
        case Map():
            n = awaited(node.wait, node.max_items)
            return n * node.max_tokens + (n - 1) * count(node, node.separator)
        case Drawn() | Tool():
            return node.max_tokens
        case _:
            return 0
