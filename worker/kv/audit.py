"""The tree's invariants, checked whole: for tests after every operation, and for idle moments."""

from mallee.worker.kv.node import Node
from mallee.worker.kv.tree import BranchTree


def check_tree(tree: BranchTree) -> None:
    """Raise AssertionError naming the first broken invariant. O(blocks + tokens)."""
    tree.pool.check()
    nodes = tree._nodes
    owned = [block for node in nodes for block in node.blocks]
    assert len(owned) == len(set(owned)), "a block has two owners"
    assert all(not tree.pool.is_free(b) for b in owned), "a node owns a free block"
    assert len(owned) == tree.pool.num_blocks - tree.pool.num_free, "used blocks without an owner"
    for node in nodes:
        _check_node(tree, node)
    idle = {n for n in nodes if n.live == 0 and not n.children}
    assert set(tree._idle) == idle, "the idle list is not the set of unneeded leaves"
    cached = sum(len(n.blocks) for n in nodes if n.live == 0)
    assert tree._cached_blocks == cached, f"cached {tree._cached_blocks}, counted {cached}"
    _check_hashes(tree)


def _check_node(tree: BranchTree, node: Node) -> None:
    size = tree.block_size
    assert node.base % size == 0, f"{node} starts inside a block"
    assert len(node.blocks) * size >= len(node.tokens), f"{node} has tokens without blocks"
    assert len(node.hashes) == len(node.tokens) // size, f"{node} has unsealed full blocks"
    live = (node.holders > 0) + sum(child.live > 0 for child in node.children)
    assert node.live == live, f"{node} counts {node.live} live, has {live}"
    assert node.holders or len(node.children) != 1, f"{node} should be merged into its child"
    assert node.holders or node.children or node.hashes, f"{node} should be dropped"
    for child in node.children:
        assert child.parent is node, f"{child} has another parent"
        assert child in tree._nodes, f"{child} is not in the tree"
        assert child.base == node.end - node.end % size, f"{child} does not continue {node}"
        shared = node.end - child.base
        tail = node.tokens[len(node.tokens) - shared :] if shared else []
        assert child.tokens[:shared] == tail, f"{child} lost its parent's tokens"
    if node.parent is not None:
        assert node in node.parent.children, f"{node} is unknown to its parent"
    table = tree.table(node)
    assert len(table) == node.base // size + len(node.blocks), f"{node} has a stale table"
    assert list(table[node.base // size :]) == node.blocks, f"{node} has a stale table"


def _check_hashes(tree: BranchTree) -> None:
    holders: dict[int, list[Node]] = {}
    for node in tree._nodes:
        for value in node.hashes:
            holders.setdefault(value, []).append(node)
    listed = tree._catalog.holders()
    assert set(holders) == set(listed), "the catalog names blocks that are not there"
    for value, found in holders.items():
        assert len(listed[value]) == len(found), (
            f"block {value:x} is listed {len(listed[value])} times"
        )
        assert set(listed[value]) == set(found), f"block {value:x} is listed under other nodes"
    tree._catalog.check()
