"""Reads the path from a node to its root: page table, chain hashes, tokens. Changes no node,
but for the table cached on it.
"""

from collections.abc import Iterable

import numpy as np

from mallee.protocol.hashing import Hashes
from mallee.worker.kv.node import BlockTable, Node
from mallee.worker.kv.text import Text


def flatten(node: Node, block_size: int) -> BlockTable:
    """Block ids of the whole sequence, reserved ones included; read-only, cached on every node passed.

    O(blocks) when it has changed, whatever the depth: a parent's table is cached too.
    """
    table = node.flat
    if table is not None:
        return table
    path = []
    walk: Node | None = node
    while walk is not None and walk.flat is None:
        path.append(walk)
        walk = walk.parent
    table = None if walk is None else walk.flat
    for step in reversed(path):
        own = np.array(step.blocks, dtype=np.int32)
        if step.base:
            assert table is not None, "a root begins at 0"
            own = np.concatenate((table[: step.base // block_size], own))
        own.flags.writeable = False
        table = step.flat = own
    assert table is not None, "a path has at least one node"
    return table


def side_tables(node: Node, block_size: int) -> tuple[BlockTable, ...]:
    """The tables of the side groups (`Row.sides`); none of a model of one group."""
    return tuple(part.table(node, i, block_size) for i, part in enumerate(node.sides))


def with_ancestors(nodes: Iterable[Node]) -> set[Node]:
    """`nodes` and all nodes above them."""
    found: set[Node] = set()
    for node in nodes:
        walk: Node | None = node
        while walk is not None and walk not in found:
            found.add(walk)
            walk = walk.parent
    return found


def path_hashes(node: Node, block_size: int) -> Hashes:
    """Chain hashes of all full blocks of the sequence, from the root on."""
    parts: list[list[int]] = []
    walk: Node | None = node
    limit = len(node.hashes)
    while walk is not None:
        parts.append(walk.hashes[:limit])
        limit = (walk.base - (walk.parent.base if walk.parent else 0)) // block_size
        walk = walk.parent
    return np.array([h for part in reversed(parts) for h in part], dtype=np.uint64)


def last_hash(node: Node, block_size: int) -> int | None:
    """Chain hash of the last full block before the node's first unhashed one."""
    if node.hashes:
        return node.hashes[-1]
    walk = node.parent
    while walk is not None and walk.base == node.base:
        walk = walk.parent
    if walk is None:
        return None
    return walk.hashes[(node.base - walk.base) // block_size - 1]


def path_texts(node: Node, begin: int, end: int) -> list[Text]:
    """Tokens `begin` to `end` of the sequence that ends at the end of `node`, in pieces.

    O(their number, and the nodes passed).
    """
    parts: list[Text] = []
    end = min(end, node.end)
    walk: Node | None = node
    while walk is not None and end > begin:
        parts.append(walk.tokens[max(0, begin - walk.base) : max(0, end - walk.base)])
        end = min(end, walk.base)
        walk = walk.parent
    parts.reverse()
    return parts


def path_tokens(node: Node) -> list[int]:
    """The whole sequence, token by token. O(tokens)."""
    return [token for part in path_texts(node, 0, node.end) for token in part]
