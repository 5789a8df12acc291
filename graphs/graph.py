"""Graphs that are whole: every name is known, and nothing waits for itself.

Checked before anything runs, with errors that name the node or the edge. An edge `u -> v` is there where v
takes something of u: its capsule, its output, or both.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Final

from mallee.graphs.nodes import Branch, Drawn, Item, Join, Map, Node, Prefill, Tool, Wait
from mallee.protocol.errors import InvalidGraph, shown

MAX_NAMED: Final = 8  # nodes in a message

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
_RULE: Final = "names are 1 to 64 letters, digits, '_', '.' and '-'"


@dataclass(frozen=True, slots=True)
class CheckedGraph:
    """A graph that can run. `takers` of a node are those at its other end of edges, in the given order."""

    nodes: Mapping[str, Node]  # in the given order
    takers: Mapping[str, tuple[str, ...]]
    outputs: tuple[str, ...]  # nodes that are wanted for themselves
    order: tuple[str, ...]  # each after all that it takes from


def checked_graph(nodes: Sequence[Node], outputs: Sequence[str] = ()) -> CheckedGraph:
    """The graph of `nodes`; `outputs` are by default those that no other node takes from.

    Raises InvalidGraph.
    """
    if not nodes:
        raise InvalidGraph("a graph has at least one node")
    known: dict[str, Node] = {}
    for node in nodes:
        if not _NAME.fullmatch(node.name):
            raise InvalidGraph(f"a node's name is {shown(node.name)}: {_RULE}")
        if node.name in known:
            raise InvalidGraph(
                f"two nodes are named {shown(node.name)}: give each a name of its own"
            )
        known[node.name] = node
    found: dict[str, list[str]] = {name: [] for name in known}
    for node in nodes:
        _check_values(node)
        _check_edges(node, known)
        for name in node.takes:
            found[name].append(node.name)
    takers = {name: tuple(names) for name, names in found.items()}
    try:
        order = tuple(TopologicalSorter({node.name: node.takes for node in nodes}).static_order())
    except CycleError as error:
        raise _cycle(error.args[1][:-1]) from None
    return CheckedGraph(known, takers, _checked_outputs(known, takers, outputs, order), order)


# Values of one node


def _check_values(node: Node) -> None:
    if node.messages and node.text:
        raise _wrong(node, "text", node.text, "give either text or messages")
    if not isinstance(node, Map) and any(isinstance(p, Item) for text in node.texts for p in text):
        raise _wrong(node, "text", "item", "only a map has items")
    if isinstance(node, Drawn):
        if node.at is not None:
            _check_count(node, "at", node.at)
        _check_count(node, "max_tokens", node.max_tokens)
    match node:
        case Prefill() if not any(node.text) and not node.messages:
            raise _wrong(node, "text", "", "give a text, or messages")
        case Join(inputs=inputs):
            if not inputs:
                raise _wrong(node, "inputs", [], "name at least one node")
            if len(set(inputs)) < len(inputs):
                twice = next(name for name in inputs if inputs.count(name) > 1)
                raise _wrong(node, "inputs", twice, "it is named twice; name each node once")
            _check_wait(node, node.wait, len(inputs))
        case Tool():
            _check_count(node, "max_tokens", node.max_tokens)
            if not node.timeout_s > 0.0:  # also refuses NaN
                raise _wrong(node, "timeout_s", node.timeout_s, "give seconds, more than 0")
        case Map():
            _check_count(node, "max_items", node.max_items)
            _check_wait(node, node.wait, node.max_items)


def _check_count(node: Node, field: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise _wrong(node, field, value, "give a whole number, at least 1")


def _check_wait(node: Node, wait: Wait, n: int) -> None:
    if wait not in ("all", "first") and not (isinstance(wait, int) and 1 <= wait <= n):
        raise _wrong(node, "wait", wait, f"give all, first, or 1 to {n}")


def _wrong(node: Node, field: str, value: object, remedy: str) -> InvalidGraph:
    return InvalidGraph(f"node {node.name}: {field}={shown(value)}: {remedy}")


# Edges


def _check_edges(node: Node, known: Mapping[str, Node]) -> None:
    """Raises InvalidGraph for ends that are not there, or that have not what is taken from them."""
    for name in node.takes:
        if name == node.name:
            raise InvalidGraph(f"edge {name} -> {name}: a node can't take from itself")
        if name not in known:
            raise InvalidGraph(
                f"edge {shown(name)[1:-1]} -> {node.name}: the graph has no node of the first name;"
                f" it has {_listed(known)}"
            )
    if node.parent and not isinstance(known[node.parent], Prefill | Branch):
        kind = type(known[node.parent]).__name__.lower()
        remedy = f"a {kind} leaves no capsule to go on from; name a prefill or a branch"
        raise _wrong(node, "of", node.parent, remedy)
    for name in node.reads:
        if isinstance(known[name], Prefill):
            raise InvalidGraph(
                f"edge {name} -> {node.name}: a prefill has no output; take that of one of its branches"
            )


def _listed(names: Iterable[str]) -> str:
    found = [*names]
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return ", ".join(found[:MAX_NAMED]) + more


def _cycle(ring: list[str]) -> InvalidGraph:
    """Each node of `ring` is taken from by the next, and the last by the first."""
    told = ring if len(ring) <= MAX_NAMED else [*ring[: MAX_NAMED - 1], "...", ring[-1]]
    around = " -> ".join((*told, ring[0]))
    return InvalidGraph(
        f"edge {ring[-1]} -> {ring[0]} closes a cycle of {len(ring)} nodes ({around}); take one of"
        " its edges out"
    )


def _checked_outputs(
    known: Mapping[str, Node],
    takers: Mapping[str, Sequence[str]],
    outputs: Sequence[str],
    order: Sequence[str],
) -> tuple[str, ...]:
    """`outputs`, or by default the ends. Raises InvalidGraph, also for nodes that lead to none."""
    if not outputs:
        return tuple(name for name in known if not takers[name])
    for name in outputs:
        if name not in known:
            raise InvalidGraph(f"outputs has {shown(name)}; the graph has {_listed(known)}")
    wanted = set(outputs)
    for name in reversed(order):
        if any(taker in wanted for taker in takers[name]):
            wanted.add(name)
    if idle := [name for name in known if name not in wanted]:
        raise InvalidGraph(
            f"no output comes of {_listed(idle)}: leave them out, or name them in outputs"
        )
    return tuple(dict.fromkeys(outputs))
