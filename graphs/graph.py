"""Graphs that are whole: every name is known, and nothing waits for itself.

Checked before anything runs, with errors that name the node or the edge. An edge `u -> v` is there where v
takes something of u: its capsule, its output, or both.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mallee.graphs.nodes import (
    ROLES,
    Branch,
    Join,
    Map,
    Node,
    Prefill,
    Ref,
    Text,
    Tool,
    Wait,
    Worded,
    parts,
    refs,
    texts_of,
)
from mallee.protocol.errors import InvalidGraph, shown

MAX_NODES: Final = 2048  # items of maps among them
MAX_EDGES: Final = 16_384
MAX_PARTS: Final = 1024  # of one text
MAX_TOOL_S: Final = 3600.0
MAX_NAMED: Final = 8  # nodes in a message

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
_RULE: Final = "names are 1 to 64 letters, digits, '_', '.' and '-'"
_CAPSULED: Final = Prefill | Branch  # what leaves a capsule


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph that can run. `takers` of a node are those at its other end of edges, in the given order."""

    nodes: Mapping[str, Node]  # in the given order
    takers: Mapping[str, tuple[str, ...]]
    outputs: tuple[str, ...]  # nodes that are wanted for themselves
    order: tuple[str, ...]  # each after all that it takes from


def checked_graph(nodes: Sequence[Node], outputs: Sequence[str] = ()) -> Graph:
    """The graph of `nodes`; `outputs` are by default those that no other node takes from.

    Raises InvalidGraph.
    """
    if not nodes:
        raise InvalidGraph("a graph has at least one node")
    if (num := sum(map(_num_runs, nodes))) > MAX_NODES:
        raise InvalidGraph(
            f"{shown(num)} nodes > {MAX_NODES}, the items of maps (max_items) among them; split the graph,"
            " or lower max_items"
        )
    known: dict[str, Node] = {}
    for i, node in enumerate(nodes):
        if not _NAME.fullmatch(node.name):
            raise InvalidGraph(f"nodes[{i}].name={shown(node.name)}: {_RULE}")
        if node.name in known:
            raise InvalidGraph(
                f"two nodes are named {shown(node.name)}: give each a name of its own"
            )
        known[node.name] = node
    if (num := sum(len(node.takes) for node in nodes)) > MAX_EDGES:
        raise InvalidGraph(f"{num} edges > {MAX_EDGES}; put joins between, or split the graph")
    for node in nodes:
        _check_values(node)
        _check_edges(node, known)
    found: dict[str, list[str]] = {name: [] for name in known}
    for node in nodes:
        for name in node.takes:
            found[name].append(node.name)
    takers = {name: tuple(names) for name, names in found.items()}
    order = _ordered(takers)
    return Graph(known, takers, _checked_outputs(known, takers, outputs, order), order)


def _num_runs(node: Node) -> int:
    return 1 + max(node.max_items, 0) if isinstance(node, Map) else 1


# Values of one node


def _check_values(node: Node) -> None:
    if isinstance(node, Worded) and node.messages:
        if node.text:
            raise _wrong(node, "text", node.text, "give either text or messages")
        if len(node.messages) > MAX_PARTS:
            remedy = f"give at most {MAX_PARTS} messages"
            raise _wrong(node, "messages", len(node.messages), remedy)
        for i, turn in enumerate(node.messages):
            if turn.role not in ROLES:
                remedy = f"give one of {', '.join(ROLES)}"
                raise _wrong(node, f"messages[{i}].role", turn.role, remedy)
    for field, text in texts_of(node).items():
        _check_text(node, field, text)
    match node:
        case Prefill():
            if not node.text and not node.messages:
                raise _wrong(node, "text", node.text, "give a text, or messages")
        case Branch():
            if node.at is not None:
                _check_count(node, "at", node.at)
            _check_count(node, "max_tokens", node.max_tokens)
        case Join():
            if not node.inputs:
                raise _wrong(node, "inputs", [], "name at least one node")
            if len(set(node.inputs)) < len(node.inputs):
                twice = next(name for name in node.inputs if node.inputs.count(name) > 1)
                raise _wrong(node, "inputs", twice, "it is named twice; name each node once")
            _check_wait(node, node.wait, len(node.inputs))
        case Tool():
            _check_count(node, "max_tokens", node.max_tokens)
            if not node.call or len(node.call) > 64:
                raise _wrong(node, "call", node.call, "give 1 to 64 characters")
            if not 0.0 < node.timeout_s <= MAX_TOOL_S:  # also refuses NaN
                remedy = f"give up to {MAX_TOOL_S:.0f} seconds, more than 0"
                raise _wrong(node, "timeout_s", node.timeout_s, remedy)
        case Map():
            _check_count(node, "max_tokens", node.max_tokens)
            _check_count(node, "max_items", node.max_items)
            _check_wait(node, node.wait, node.max_items)


def _check_text(node: Node, field: str, text: Text) -> None:
    if len(parts(text)) > MAX_PARTS:
        raise _wrong(node, field, len(text), f"give at most {MAX_PARTS} parts")
    for i, part in enumerate(parts(text)):
        if not isinstance(part, Ref):
            continue
        if bool(part.node) == part.item:
            given = {"node": part.node, "item": part.item}
            raise _wrong(node, f"{field}[{i}]", given, 'give {"node": name} or {"item": true}')
        if part.item and not isinstance(node, Map):
            raise _wrong(node, f"{field}[{i}]", {"item": True}, "only a map has items")


def _check_count(node: Node, field: str, value: int) -> None:
    if value < 1:
        raise _wrong(node, field, value, "give at least 1")


def _check_wait(node: Node, wait: Wait, n: int) -> None:
    if isinstance(wait, int) and not 1 <= wait <= n:
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
    if node.parent and not isinstance(known[node.parent], _CAPSULED):
        raise _wrong(
            node,
            "of",
            node.parent,
            f"a {_kind(known[node.parent])} leaves no capsule to go on from; name a prefill or a branch",
        )
    for name in _texts_of(node):
        if isinstance(known[name], Prefill):
            raise InvalidGraph(
                f"edge {name} -> {node.name}: a prefill has no output; take that of one of its branches"
            )


def _texts_of(node: Node) -> list[str]:
    """The nodes whose output, not only their capsule, it takes."""
    match node:
        case Join():
            return node.inputs
        case Map():
            return [node.over, *refs(node)]
        case _:
            return [*refs(node)]


def _kind(node: Node) -> str:
    return type(node).__name__.lower()


def _listed(names: Iterable[str]) -> str:
    found = [*names]
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return ", ".join(found[:MAX_NAMED]) + more


_WHITE, _GREY, _BLACK = range(3)  # not seen; on the path that is walked; done, with all after it


def _ordered(takers: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The nodes, each after those that it takes from: reversed, as a walk in depth leaves them.

    Raises InvalidGraph naming the edge that leads back to the path.
    """
    colours = dict.fromkeys(takers, _WHITE)
    left: list[str] = []
    for root in takers:
        if colours[root] != _WHITE:
            continue
        colours[root] = _GREY
        path: list[tuple[str, Iterator[str]]] = [(root, iter(takers[root]))]
        while path:
            node, rest = path[-1]
            taker = next(rest, None)
            if taker is None:
                colours[node] = _BLACK
                left.append(node)
                path.pop()
            elif colours[taker] == _GREY:
                raise _cycle(taker, [name for name, _ in path])
            elif colours[taker] == _WHITE:
                colours[taker] = _GREY
                path.append((taker, iter(takers[taker])))
    return tuple(reversed(left))


def _cycle(begin: str, path: list[str]) -> InvalidGraph:
    ring = path[path.index(begin) :]
    told = ring if len(ring) <= MAX_NAMED else [*ring[: MAX_NAMED - 1], "...", ring[-1]]
    around = " -> ".join((*told, begin))
    return InvalidGraph(
        f"edge {path[-1]} -> {begin} closes a cycle of {len(ring)} nodes ({around}); take one of"
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
