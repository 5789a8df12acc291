"""Search trees (tree of thoughts): every node is a fork of its parent's answer.

The files have structure and lengths only. Assumed: all trees of a file begin with the same instructions
of `ROOT_TOKENS`, then `TASK_TOKENS` of their own; trees begin by a Poisson process. In a breadth-first tree
a level begins when the whole level before has ended (the values of all its nodes choose the beam), in a
depth-first one (nodes have `step`) each visit begins when the visit before has ended. Nodes may be listed
in any order that has parents before children.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Final

import msgspec
import numpy as np

from mallee.traces.files.lines import MAX_TOKENS, TraceFile
from mallee.traces.workload import NO_PARENT, Request, Runs

ID_TOKENS: Final = 512
ROOT_TOKENS: Final = 2048
TASK_TOKENS: Final = 64
VISIT_TOKENS: Final = 12  # of a node without a length in the file


class Node(msgspec.Struct):
    """One node; `tok` tokens were added to its parent's text, `step` is its place in the visits."""

    id: int
    parent: int
    depth: Annotated[int, msgspec.Meta(ge=0)]
    tok: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)] = VISIT_TOKENS
    step: int | None = None


class Tree(msgspec.Struct):
    """One search; `nodes` name earlier ones as parents, the first is the root."""

    task: int
    nodes: list[Node]
    mode: str = ""


decoder: Final = msgspec.json.Decoder(Tree)


def read_trees(
    file: TraceFile, *, seed: int, trees_per_hour: float, limit: int | None
) -> Iterator[Request]:
    """Tree after tree, each node after those it waits for. Raises CodecError with line and field."""
    rng = np.random.default_rng(seed)
    number = 0
    begin_s = 0.0
    names: Counter[str] = Counter()
    for _, tree in file.read(lambda n, line: _read(file, n, line)):
        if limit is not None:
            tree.nodes = tree.nodes[: limit - number]
        name = f"tree {tree.task}{' ' + tree.mode if tree.mode else ''}"
        names[name] += 1
        again = f" ({names[name]})" if names[name] > 1 else ""  # searched once more
        yield from _requests(tree, name + again, number, begin_s)
        number += len(tree.nodes)
        if limit is not None and number >= limit:
            return
        begin_s += float(rng.exponential(3600.0 / trees_per_hour))


def _read(file: TraceFile, number: int, line: bytes) -> Tree:
    tree = file.decode(number, line, decoder)
    tree.nodes = _in_order(file, number, tree)
    depths: dict[int, int] = {}
    for node in tree.nodes:
        if not depths:
            is_right = node.parent < 0 <= node.id and node.depth == 0
        else:
            is_right = node.depth == depths.get(node.parent, -2) + 1 and node.id not in depths
        if not is_right:
            what = f"node {node.id} (parent {node.parent}, depth {node.depth}) has no place"
            what = f"{what} in the tree; list parents before children"
            raise file.bad(number, what, "nodes")
        depths[node.id] = node.depth
    return tree


def _in_order(file: TraceFile, number: int, tree: Tree) -> list[Node]:
    """As a depth-first search visited them, or level by level. Raises CodecError if it is neither."""
    root, nodes = tree.nodes[:1], tree.nodes[1:]
    steps = [node.step for node in nodes if node.step is not None]
    if not steps:
        return [*root, *sorted(nodes, key=lambda node: node.depth)]
    if len(steps) < len(nodes):
        what = "some nodes have a step, others none; give all but the root one, or none"
        raise file.bad(number, what, "nodes")
    return [*root, *(nodes[i] for i in sorted(range(len(nodes)), key=steps.__getitem__))]


def _requests(tree: Tree, name: str, number: int, begin_s: float) -> Iterator[Request]:
    place = {node.id: number + i for i, node in enumerate(tree.nodes)}
    children = Counter(node.parent for node in tree.nodes)
    levels: dict[int, list[int]] = {}
    for node in tree.nodes:
        levels.setdefault(node.depth, []).append(place[node.id])
    for i, node in enumerate(tree.nodes):
        is_root = i == 0
        yield Request(
            number=number + i,
            arrival_s=begin_s,
            ids=Runs([(0, ROOT_TOKENS // ID_TOKENS)]) if is_root else (),
            input_tokens=ROOT_TOKENS + TASK_TOKENS if is_root else 0,
            output_tokens=0 if is_root and children[node.id] else max(1, node.tok),
            session=name,
            cls="root" if is_root else "node",
            wait_for=_waits(tree.nodes, i, number, levels),
            parent=NO_PARENT if is_root else place[node.parent],
            num_children=children[node.id],
        )


def _waits(
    nodes: Sequence[Node], i: int, number: int, levels: dict[int, list[int]]
) -> tuple[int, ...]:
    """Nodes that node i waits for besides its parent."""
    if nodes[i].step is not None:
        return (number + i - 1,) if i > 1 else ()
    return tuple(levels[nodes[i].depth - 1]) if nodes[i].depth > 1 else ()
