"""The context budget of a graph: prefix + largest branch + headroom <= the model's window.

Counted before anything is computed, with the most that each node can put out. A text that is made of
answers may have other tokens than they had when they were drawn: it is counted again when its node starts.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from mallee.graphs.graph import Graph
from mallee.graphs.nodes import (
    Branch,
    Join,
    Map,
    Node,
    Prefill,
    Text,
    Tool,
    num_awaited,
    parts,
)
from mallee.protocol.errors import GraphContextExceeded

HEADROOM: Final = 128  # tokens


class Need(NamedTuple):
    """The most tokens that what goes on from one prefill can have. `branch`: beyond the prefix, at `node`."""

    prefill: str
    prefix: int
    node: str
    branch: int


def context_needs(graph: Graph, count: Callable[[str], int]) -> list[Need]:
    """One for each prefill, in order. `count` gives the tokens of a text."""
    outputs: dict[str, int] = {}  # tokens, at most
    roots: dict[str, str] = {}  # the prefill before each node that leaves a capsule
    lengths: dict[str, int] = {}  # tokens of its capsule, at most
    largest: dict[str, Need] = {}
    for name in graph.order:
        node = graph.nodes[name]
        outputs[name] = _output(node, outputs, count)
        if isinstance(node, Prefill):
            lengths[name] = _text(node.text, outputs, 0, count)
            roots[name] = name
            largest[name] = Need(name, lengths[name], "", 0)
        elif isinstance(node, Branch | Map):
            item = outputs[node.over] if isinstance(node, Map) else 0
            new = _text(node.text, outputs, item, count) + node.max_tokens
            roots[name] = root = roots[node.of]
            lengths[name] = lengths[node.of] + new
            need = Need(root, lengths[root], name, lengths[name] - lengths[root])
            largest[root] = max(largest[root], need, key=lambda each: each.branch)
    return [largest[name] for name in graph.nodes if name in largest]


def check_context(
    graph: Graph, count: Callable[[str], int], n_ctx: int, headroom: int = HEADROOM
) -> None:
    """Raises GraphContextExceeded for the first prefill that needs more than `n_ctx` tokens."""
    for need in context_needs(graph, count):
        if need.prefix + need.branch + headroom > n_ctx:
            raise GraphContextExceeded(*need, headroom, n_ctx)


def _text(text: Text, outputs: Mapping[str, int], item: int, count: Callable[[str], int]) -> int:
    """Tokens of a text at most; each item of a map has at most `item`."""
    num = 0
    for part in parts(text):
        if isinstance(part, str):
            num += count(part)
        else:
            num += item if part.item else outputs[part.node]
    return num


def _output(node: Node, outputs: Mapping[str, int], count: Callable[[str], int]) -> int:
    match node:
        case Prefill():
            return 0
        case Branch() | Tool():
            return node.max_tokens
        case Join():
            n = num_awaited(node.wait, len(node.inputs))
            most = sorted((outputs[name] for name in node.inputs), reverse=True)[:n]
            return sum(most) + (n - 1) * count(node.separator)
        case Map():
            n = num_awaited(node.wait, node.max_items)
            return n * node.max_tokens + (n - 1) * count(node.separator)
