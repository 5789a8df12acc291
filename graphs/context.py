"""The context budget of a graph: prefix + largest branch + headroom <= the model's window.

Counted before anything is computed, with the most that each node can put out. A text that is made of
answers may have other tokens than they had when they were drawn: it is counted again when its node starts.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple, Protocol

from mallee.graphs.graph import Graph
from mallee.graphs.nodes import (
    Branch,
    Filled,
    Join,
    Map,
    Node,
    Prefill,
    Ref,
    Tool,
    filled,
    num_awaited,
    parts,
    texts_of,
)
from mallee.protocol.errors import BadRequest, GraphContextExceeded, InvalidGraph

HEADROOM: Final = 128  # tokens


class Counter(Protocol):
    """The tokens of what a node begins with. `opens`: the first of its context, as a prefill's."""

    def __call__(self, text: Filled, /, *, opens: bool = False) -> int: ...


class Need(NamedTuple):
    """The most tokens that what goes on from one prefill can have. `branch`: beyond the prefix, at `node`."""

    prefill: str
    prefix: int
    node: str
    branch: int


def context_needs(graph: Graph, count: Counter) -> list[Need]:
    """One for each prefill, in order.

    Raises InvalidGraph: a branch at a place that its parent can't have, or messages that can't be rendered.
    """
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
        elif isinstance(node, Branch | Map):
            item = outputs[node.over] if isinstance(node, Map) else 0
            new = _begin(node, outputs, item, count) + node.max_tokens
            roots[name] = root = roots[node.of]
            lengths[name] = _begun_at(node, lengths[node.of]) + new
            need = Need(root, lengths[root], name, lengths[name] - lengths[root])
            largest[root] = max(largest[root], need, key=lambda each: each.branch)
    return [largest[name] for name in graph.nodes if name in largest]


def check_context(graph: Graph, count: Counter, n_ctx: int, headroom: int = HEADROOM) -> None:
    """Raises GraphContextExceeded for the first prefill that needs more than `n_ctx` tokens.

    Raises also as `context_needs`.
    """
    for need in context_needs(graph, count):
        if need.prefix + need.branch + headroom > n_ctx:
            raise GraphContextExceeded(*need, headroom, n_ctx)


def _begun_at(node: Branch | Map, most: int) -> int:
    """Tokens of its parent, of at most `most`, that it goes on from. Raises InvalidGraph."""
    if node.at is None:
        return most
    if node.at > most:
        remedy = f"{node.of} has at most {most} tokens; give 1 to {most}"
        raise InvalidGraph(f"node {node.name}: at={node.at}: {remedy}")
    return node.at


def _begin(
    node: Prefill | Branch | Map, outputs: Mapping[str, int], item: int, count: Counter
) -> int:
    """Tokens that it begins with, at most; each item of a map has at most `item`. Raises InvalidGraph."""
    if node.messages:  # rendered without the outputs that are in them
        empty = filled(
            node, lambda text: "".join(each for each in parts(text) if isinstance(each, str))
        )
        try:
            num = count(empty, opens=isinstance(node, Prefill))
        except BadRequest as error:  # the template can't have them, or there is none
            raise InvalidGraph(f"node {node.name}: {error.message}") from error
    else:
        num = sum(count(part) for part in parts(node.text) if isinstance(part, str))
    refs = (part for text in texts_of(node).values() for part in parts(text))
    return num + sum(
        item if part.item else outputs[part.node] for part in refs if isinstance(part, Ref)
    )


def _output(node: Node, outputs: Mapping[str, int], count: Counter) -> int:
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
