"""Order of eviction, against models that keep plain lists."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.events import Removed, unpack_hashes
from mallee.protocol.hashing import block_hashes
from mallee.worker.kv.audit import check_tree
from mallee.worker.kv.eviction import EvictionName
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.node import Node
from mallee.worker.kv.pool import BlockPool
from mallee.worker.kv.tree import BranchTree

SIZE = 2


class Cache:
    """A tree of prompts that come and go."""

    def __init__(self, num_blocks: int, eviction: EvictionName) -> None:
        self.journal = Journal()
        self.tree = BranchTree(BlockPool(num_blocks), SIZE, self.journal, eviction=eviction)

    def open(self, tokens: list[int]) -> Node:
        node = self.tree.attach(block_hashes(tokens, SIZE, salt=""), "")
        if rest := tokens[node.end :]:
            node, _ = self.tree.reserve(node, len(rest))
            self.tree.commit(node, rest)
        return node

    def evicted(self) -> list[int]:
        """Blocks evicted since the last call, in order."""
        gone: list[int] = []
        for event in self.journal.drain():
            if isinstance(event, Removed):
                gone += unpack_hashes(event.hashes).tolist()
        return gone


def session(cache: Cache, name: int, *sides: int) -> Node:
    """A trunk of two blocks and one block for each side branch, all held no more but the trunk."""
    trunk = [name] * (2 * SIZE)
    top = cache.open(trunk)
    for side in sides:
        cache.tree.release(cache.open([*trunk, *[side] * SIZE]))
    return top


def blocks_left(cache: Cache, text: list[int]) -> int:
    return cache.tree.find(block_hashes(text, SIZE, salt=""))


SESSIONS: tuple[tuple[EvictionName, int, int], ...] = (("lru", 1, 2), ("lineage", 0, 3))


def test_lineage_gives_up_the_oldest_session_whole_before_a_side_branch_of_a_later_one() -> None:
    """K15, part, D37, part: under lru the side branches of both would go first."""
    for eviction, old_left, later_left in SESSIONS:
        cache = Cache(6, eviction)
        later = session(cache, 1, 7)  # its side branch is the oldest of all
        old = session(cache, 2, 8)
        cache.tree.release(old)
        cache.tree.release(later)
        cache.open([3] * (3 * SIZE))  # three blocks have to go for it
        assert blocks_left(cache, [2, 2, 2, 2, 8, 8]) == old_left
        assert blocks_left(cache, [1, 1, 1, 1, 7, 7]) == later_left
        check_tree(cache.tree)


def tops(tree: BranchTree) -> dict[Node, list[Node]]:
    """Dead lineages by their top, found the slow way."""
    found: dict[Node, list[Node]] = {}
    for node in tree.nodes():
        if node.live:
            continue
        top = node
        while top.parent is not None and not top.parent.live:
            top = top.parent
        found.setdefault(top, []).append(node)
    return found


def lru_victim(tree: BranchTree) -> Node:
    return min((n for n in tree.nodes() if not n.live and not n.children), key=_stamp)


def lineage_victim(tree: BranchTree) -> Node:
    lineages = tops(tree)
    node = min(lineages, key=_stamp)
    while node.children:
        node = min(node.children, key=_stamp)
    return node


def _stamp(node: Node) -> int:
    return node.stamp


VICTIMS: dict[EvictionName, Callable[[BranchTree], Node]] = {
    "lru": lru_victim,
    "lineage": lineage_victim,
}


@pytest.mark.parametrize("eviction", ["lru", "lineage"])
@given(seed=st.integers(0, 1 << 32))
def test_the_next_victim_is_the_one_a_full_search_finds(eviction: Any, seed: int) -> None:
    """K15, part: random lives on a small pool; a parent never goes before its child."""
    rng = random.Random(seed)
    cache = Cache(14, eviction)
    tree = cache.tree
    held: list[Node] = []
    for _ in range(40):
        if held and rng.random() < 0.5:
            tree.release(held.pop(rng.randrange(len(held))))
        elif held and rng.random() < 0.3:
            node = rng.choice(held)
            tree.hold(node)
            held.append(node)
        elif tree.num_available >= 6:
            text = [rng.randrange(2) for _ in range(rng.randint(1, 5)) for _ in range(SIZE)]
            node = cache.open(text)
            if rng.random() < 0.5:
                node, _ = tree.reserve(node, 1)
                tree.commit(node, [5])  # ends inside a block
            held.append(node)
        check_tree(tree)
        found = tree.next_evicted()
        if found is None:
            assert not tops(tree)
        else:
            assert found is VICTIMS[eviction](tree)


def test_the_order_stays_small_while_the_same_text_comes_and_goes() -> None:
    """Stale entries are dropped: memory is bounded by what is cached, not by how often it was used."""
    cache = Cache(64, "lru")
    for i in range(3000):
        cache.tree.release(cache.open([i % 4] * (2 * SIZE)))
    assert len(cache.tree._store._order._leaves._entries) <= 200
