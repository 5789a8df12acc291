"""The tree's invariants, checked whole: for tests after every operation, and for idle moments."""

from collections.abc import Mapping
from typing import NamedTuple

from mallee.worker.kv.node import Node
from mallee.worker.kv.tree import BranchTree


class Leak(NamedTuple):
    """`block` is in use and will never be given back. `why` names its owners, as far as known."""

    block: int
    why: str


def find_leaks(tree: BranchTree, holds: Mapping[Node, int]) -> list[Leak]:
    """Blocks that no node owns, or that a node keeps for holders that are not in `holds`.

    `holds` counts how often each node is held by those that the caller knows of.
    """
    watch = tree.pool.watch
    owned = set()
    leaks = []
    nodes = tree.nodes()
    for node in nodes:
        owned.update(node.blocks)
        extra = node.holders - holds.get(node, 0)
        if extra > 0:
            leaks += [Leak(b, f"{extra} unknown holders of {node}") for b in node.blocks]
    for block in sorted(tree.pool.used_blocks() - owned):
        story = f": {watch.story(block)}" if watch is not None else ""
        leaks.append(Leak(block, f"no node owns it{story}"))
    for side in tree.sides:
        why = f"no node owns it in layer group {side.span.group}"
        leaks += [Leak(block, why) for block in side.lost_blocks(nodes)]
    return leaks


def check_tree(tree: BranchTree) -> None:
    """Raise AssertionError naming the first broken invariant. O(blocks + tokens)."""
    tree.pool.check()
    nodes = tree.nodes()
    owned = [block for node in nodes for block in node.blocks]
    assert len(owned) == len(set(owned)), "a block has two owners"
    assert all(not tree.pool.is_free(b) for b in owned), "a node owns a free block"
    assert len(owned) == tree.pool.num_blocks - tree.pool.num_coming, "used blocks without an owner"
    for node in nodes:
        _check_node(tree, node)
    cached = sum(len(n.blocks) for n in nodes if n.live == 0)
    counted = tree.num_available - tree.pool.num_coming
    assert counted == cached, f"cached {counted}, are {cached}"
    _check_eviction(tree)
    _check_hashes(tree)
    for side in tree.sides:
        side.check(nodes)
    if tree.pool.watch is not None:
        tree.pool.watch.check()


def _check_node(tree: BranchTree, node: Node) -> None:
    size = tree.block_size
    assert node.base % size == 0, f"{node} starts inside a block"
    assert len(node.blocks) * size >= len(node.tokens), f"{node} has tokens without blocks"
    num_hashes = len(node.tokens) // size if tree.keeps_cache else 0
    assert len(node.hashes) == num_hashes, f"{node} has unsealed full blocks"
    live = (node.holders > 0) + sum(child.live > 0 for child in node.children)
    assert node.live == live, f"{node} counts {node.live} live, has {live}"
    assert (node.stamp == 0) is (live > 0), f"{node} has stamp {node.stamp}"
    assert node.num_copying == sum(c.is_copying for c in node.children), f"{node} copies"
    assert node.holders or node.children or node.hashes, f"{node} should be dropped"
    if not node.holders:
        assert node.num_copying or len(node.tokens) % size == 0, f"{node} keeps a partial block"
        is_thin = node.num_copying or len(node.children) != 1
        assert not live or is_thin, f"{node} should be merged into its child"
    for child in node.children:
        _check_child(tree, node, child)
    if node.parent is not None:
        assert node in node.parent.children, f"{node} is unknown to its parent"
    else:
        assert node.base == 0, f"{node} has lost its parent"
    table = tree.table(node)
    assert len(table) == node.base // size + len(node.blocks), f"{node} has a stale table"
    assert list(table[node.base // size :]) == node.blocks, f"{node} has a stale table"


def _check_child(tree: BranchTree, node: Node, child: Node) -> None:
    assert child.parent is node, f"{child} has another parent"
    assert child in tree.nodes(), f"{child} is not in the tree"
    assert child.base == node.end - node.end % tree.block_size, f"{child} does not continue {node}"
    shared = node.end - child.base
    tail = node.tokens[len(node.tokens) - shared :] if shared else []
    if not child.holders:
        tail = tail[: len(child.tokens)]  # it may have given up its partial block
    if child.tokens or child.holders:  # else it gave up its partial block, which was all it had
        assert child.tokens[:shared] == tail, f"{child} lost its parent's tokens"
    assert node.live or not child.live, f"{child} lives below the dead {node}"
    assert node.live or child.stamp < node.stamp, f"{node} died before {child}"


def _check_eviction(tree: BranchTree) -> None:
    """The next to be evicted is a dead leaf."""
    leaf = tree.next_evicted()
    dead = [n for n in tree.nodes() if n.live == 0 and n.blocks]
    assert (leaf is None) is (not dead), "dead nodes that can't be evicted"
    if leaf is not None:
        assert leaf.live == 0, f"{leaf} is live and would be evicted"
        assert not leaf.children, f"{leaf} would be evicted before its children"
        assert leaf in tree.nodes(), f"{leaf} is gone and would be evicted"


def _check_hashes(tree: BranchTree) -> None:
    holders: dict[int, list[Node]] = {}
    for node in tree.nodes():
        for value in node.hashes:
            holders.setdefault(value, []).append(node)
    listed = tree.index.holders()
    assert set(holders) == set(listed), "the index names blocks that are not there"
    for value, found in holders.items():
        assert len(listed[value]) == len(found), (
            f"block {value:x} is listed {len(listed[value])} times"
        )
        assert set(listed[value]) == set(found), f"block {value:x} is listed under other nodes"
    tree.index.check()
