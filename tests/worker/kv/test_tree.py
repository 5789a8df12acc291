"""The branch tree: sharing, copy on write, cache, eviction."""

from collections import Counter

import pytest

from mallee.protocol.hashing import block_hashes
from mallee.worker.kv.audit import check_tree
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.node import BlockCopy, Node
from mallee.worker.kv.pool import BlockPool
from mallee.worker.kv.tree import BranchTree
from mallee.worker.kv.usage import tree_usage

SALT = "test"


def make_tree(num_blocks: int = 64, block_size: int = 4) -> tuple[BranchTree, Journal]:
    journal = Journal()
    return BranchTree(BlockPool(num_blocks), block_size, journal), journal


def begin(tree: BranchTree, tokens: list[int]) -> Node:
    """A held node with exactly `tokens`, found in the cache as far as possible."""
    size = tree.block_size
    hashes = block_hashes(tokens[: (len(tokens) - 1) // size * size], size, salt=SALT)
    return grow(tree, tree.attach(hashes, SALT), tokens, from_start=True)


def grow(tree: BranchTree, node: Node, tokens: list[int], *, from_start: bool = False) -> Node:
    rest = tokens[node.end :] if from_start else tokens
    node, _ = tree.reserve(node, len(rest))
    tree.commit(node, rest)
    check_tree(tree)
    return node


def path_tokens(node: Node) -> list[int]:
    tokens: list[int] = []
    walk: Node | None = node
    limit = len(node.tokens)
    while walk is not None:
        tokens = walk.tokens[:limit] + tokens
        limit = walk.base - (walk.parent.base if walk.parent else 0)
        walk = walk.parent
    return tokens


def test_a_fork_moves_counters_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """D2, D5, part: forking by node allocates and copies no block, touches no hash and searches nothing."""
    tree, _ = make_tree()
    parent = begin(tree, list(range(10)))
    before = tree.pool.stats()
    calls: list[str] = []
    monkeypatch.setattr(BranchTree, "find", lambda *_: calls.append("find"))
    monkeypatch.setattr("mallee.worker.kv.text.block_hashes", lambda *_, **__: calls.append("hash"))
    tree.hold(parent, 1000)
    assert calls == []
    assert tree.pool.stats() == before
    assert tree.stats().num_nodes == 1
    tree.release(parent, 1000)
    check_tree(tree)


def test_the_first_append_of_a_child_copies_one_partial_block() -> None:
    """D3: exactly one block, only the filled slots; the parent's blocks stay as they are."""
    tree, _ = make_tree()
    parent = begin(tree, list(range(10)))  # 2 full blocks and 2 slots
    blocks = list(parent.blocks)
    tree.hold(parent)
    used = tree.pool.num_blocks - tree.pool.num_free
    child, copy = tree.reserve(parent, 1)
    assert child is not parent
    assert tree.pool.num_blocks - tree.pool.num_free == used + 1
    assert copy == BlockCopy(blocks[2], child.blocks[0], 2)
    tree.commit(child, [99])
    assert path_tokens(child) == [*range(10), 99]
    assert path_tokens(parent) == list(range(10))
    assert parent.blocks == blocks
    assert tree.table(child).tolist() == [*blocks[:2], child.blocks[0]]
    check_tree(tree)


def test_a_copy_that_was_not_made_is_told_again() -> None:
    """D3, I18: whoever lost a step after `reserve` gets the same copy from the next one."""
    tree, _ = make_tree()
    parent = begin(tree, list(range(6)))
    tree.hold(parent)
    child, copy = tree.reserve(parent, 1)
    assert copy is not None
    assert tree.reserve(child, 1) == (child, copy)
    assert tree.reserve(child, 9) == (child, copy)
    tree.commit(child, [7])
    assert tree.reserve(child, 1) == (child, None)


def test_the_source_of_a_copy_stays_until_the_copy_is_made() -> None:
    """D3: the parent's last holder and another child leave between plan and pass."""
    tree, _ = make_tree(num_blocks=6)
    parent = begin(tree, list(range(6)))
    tree.hold(parent, 2)
    first, _ = tree.reserve(parent, 1)
    tree.commit(first, [50])
    second, copy = tree.reserve(parent, 1)
    assert copy is not None
    tree.release(parent)
    tree.release(first)
    third = tree.attach(block_hashes([], 4), "")
    tree.reserve(third, 8)  # takes all that is free, and what `first` leaves
    assert not tree.pool.is_free(copy.src)
    check_tree(tree)
    tree.commit(second, [60])
    assert tree.pool.is_free(copy.src)
    check_tree(tree)


def test_without_cache_nothing_is_found_again_and_everything_is_free_at_once() -> None:
    """I20: prefix_cache off: no hash, no event, no block kept; forks share as before."""
    journal = Journal()
    tree = BranchTree(BlockPool(16), 4, journal, keeps_cache=False)
    node = begin(tree, list(range(10)))
    tree.hold(node)
    child = grow(tree, node, [50])
    assert tree.pool.num_blocks - tree.pool.num_free == 4
    assert tree.find(block_hashes(list(range(8)), 4, salt=SALT)) == 0
    tree.release(node)
    assert path_tokens(child) == [*range(10), 50]
    tree.release(child)
    check_tree(tree)
    assert tree.pool.num_free == 16
    assert not len(journal)


def test_usage_counts_what_readers_share() -> None:
    """D4, D36, part, D37, part: prefix 1024, 3 x 512, 9 x 128 tokens use 232 blocks, not 936.

    More than half of these are shared.
    """
    tree, _ = make_tree(num_blocks=400, block_size=16)
    root = begin(tree, list(range(1024)))
    leaves = []
    for i in range(3):
        tree.hold(root)
        middle = grow(tree, root, [2000 + i] * 512)
        for j in range(3):
            tree.hold(middle)
            leaves.append(grow(tree, middle, [3000 + 3 * i + j] * 128))
        tree.release(middle)
    tree.release(root)
    assert tree.pool.num_blocks - tree.pool.num_free == 64 + 3 * 32 + 9 * 8 == 232
    usage = tree_usage(tree, Counter(leaves))
    assert usage.readers == 9
    assert usage.live_blocks == 232
    assert usage.shared_blocks == 64 + 3 * 32
    assert usage.references == 9 * (64 + 32 + 8) == 936
    assert usage.live_slots == 232 * 16
    assert usage.share_ratio > 0.5
    assert usage.pool_ratio == 232 / 400
    assert tree.stats().num_children == 3 + 9
    assert tree.stats().num_copies == 0


def test_a_chain_of_a_thousand_single_forks_stays_shallow_and_frees_everything() -> None:
    """D29, part: a deep chain is freed to zero; single children are merged, so depth stays bounded."""
    tree, _ = make_tree(num_blocks=2048)
    node = begin(tree, [1, 2, 3])
    for i in range(1000):
        tree.hold(node)
        parent, node = node, tree.reserve(node, 1)[0]
        tree.commit(node, [i % 7])
        tree.release(parent)
    assert tree.stats().num_nodes == 1
    assert len(tree.table(node)) == -(-node.end // 4)
    tree.release(node)
    check_tree(tree)
    assert tree.num_available == 2048


def test_a_tree_five_hundred_levels_deep_has_a_table_and_frees_everything() -> None:
    """D29, part: 500 nested forks whose parents stay alive."""
    tree, _ = make_tree(num_blocks=2048)
    nodes = [begin(tree, [1, 2, 3])]
    for i in range(500):
        tree.hold(nodes[-1])
        node, _ = tree.reserve(nodes[-1], 2)
        tree.commit(node, [i % 7, i % 5])
        nodes.append(node)
    assert len(tree.table(nodes[-1])) == -(-nodes[-1].end // 4)
    for node in nodes:
        tree.release(node)
    check_tree(tree)
    assert tree.num_available == 2048
