"""Order of eviction, against models that keep plain lists; blocks that requests want retained go last."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.events import Removed, unpack_hashes
from mallee.protocol.hashing import block_hashes
from mallee.protocol.messages import RetainSpan
from mallee.worker.kv.audit import check_tree
from mallee.worker.kv.eviction import EvictionName
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.node import Node
from mallee.worker.kv.pool import BlockPool
from mallee.worker.kv.tree import BranchTree
from mallee.worker.retention import Retention
from support.examples import examples

SIZE = 2
Text = tuple[int, ...]


class Cache:
    """A tree of prompts that come and go; block i of a text is `text[i]`, twice."""

    def __init__(
        self, num_blocks: int, eviction: EvictionName = "lru", max_retained: int | None = None
    ) -> None:
        self.now = 0.0
        self.journal = Journal()
        self.retention = Retention(max_retained or 0, lambda: self.now)
        ranks = None if max_retained is None else self.retention
        self.tree = BranchTree(
            BlockPool(num_blocks), SIZE, self.journal, eviction=eviction, ranks=ranks
        )
        self.names: dict[int, Text] = {}

    def open(self, text: Text) -> Node:
        tokens = [token for token in text for _ in range(SIZE)]
        hashes = block_hashes(tokens, SIZE, salt="")
        self.names.update({int(h): text[: i + 1] for i, h in enumerate(hashes)})
        node = self.tree.attach(hashes, "")
        if rest := tokens[node.end :]:
            node, _ = self.tree.reserve(node, len(rest))
            self.tree.commit(node, rest)
        return node

    def use(self, text: Text, *spans: RetainSpan, tenant: str = "") -> tuple[int, int]:
        node = self.open(text)
        path = self.tree.path_hashes(node).tolist()
        found = self.retention.keep(path, spans, tenant, block_size=SIZE)
        self.tree.release(node)
        self.check()
        return found

    def evicted(self) -> list[Text]:
        gone = [e for e in self.journal.drain() if isinstance(e, Removed)]
        return [self.names[h] for e in gone for h in unpack_hashes(e.hashes).tolist()]

    def held(self, text: Text) -> int:
        tokens = [token for token in text for _ in range(SIZE)]
        return self.tree.find(block_hashes(tokens, SIZE, salt=""))

    def check(self) -> None:
        check_tree(self.tree)
        self.retention.check()


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
            node = cache.open(tuple(rng.randrange(2) for _ in range(rng.randint(1, 5))))
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
    cache = Cache(64)
    for i in range(3000):
        cache.tree.release(cache.open((i % 4,) * 2))
    assert len(cache.tree._store._order._leaves._entries) <= 200


def whole(priority: int = 50, duration_s: float = 10.0) -> list[RetainSpan]:
    return [RetainSpan(1 << 62, priority, duration_s)]


def test_it_ends_with_its_time_and_begins_anew_with_each_use() -> None:
    cache = Cache(6, max_retained=6)
    cache.use((1, 1), *whole(duration_s=10))
    cache.now = 9.0
    cache.use((1, 1))  # a hit
    cache.now = 18.0
    cache.use((2, 2))
    cache.use((3, 3, 3))
    assert cache.held((1, 1)) == 2, "it was used 9 s ago"
    cache.now = 30.0
    cache.use((4,))
    assert [text[0] for text in cache.evicted()] == [2, 1], "its time is over, and it is the oldest"


def test_a_budget_clips_and_refuses_and_a_tenant_has_half_of_it() -> None:
    cache = Cache(20, max_retained=8)
    assert cache.use((1,) * 3, *whole(), tenant="ann") == (3, 3)
    assert cache.use((2,) * 3, *whole(), tenant="ann") == (3, 1)
    assert cache.use((3,) * 2, *whole(), tenant="ann") == (2, 0)
    assert cache.use((1,) * 3, *whole(), tenant="ann") == (3, 3), "it is retained already"
    assert cache.use((4,) * 5, *whole(), tenant="") == (5, 4)
    assert Cache(20, max_retained=0).use((1,) * 3, *whole()) == (3, 0)
    assert cache.use((5,) * 2, RetainSpan(3, 9, 1.0)) == (1, 0), "only whole blocks"
    cache.now = 60.0
    cache.use((9,) * 20)
    assert cache.use((6,) * 4, *whole(), tenant="ann") == (4, 4), "room comes back"


TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)
SPANS = st.lists(
    st.tuples(st.integers(1, 12), st.sampled_from([0, 10, 60]), st.sampled_from([2.0, 9.0])),
    max_size=2,
)
MOVES = st.one_of(
    st.tuples(st.just("use"), TEXTS, SPANS),
    st.tuples(st.just("wait"), st.integers(1, 5), st.just(None)),
)


@examples(200)
@given(st.lists(MOVES, max_size=40), st.integers(0, 10))
def test_each_block_that_goes_is_the_least_retained_of_those_that_may(
    moves: list[tuple[str, Any, Any]], max_retained: int
) -> None:
    """Against the definition: before each eviction no other leaf had a lower priority."""
    cache = Cache(8, max_retained=max_retained)
    for kind, value, wanted in moves:
        if kind == "wait":
            cache.now += value
            continue
        spans, at, priority = [], 0, 100
        for length, level, duration_s in wanted:
            at, priority = at + length, min(priority, level)
            spans.append(RetainSpan(at, priority, duration_s))
        held = {name for h, name in cache.names.items() if cache.tree.index.holders_of(h)}
        ranks = {
            cache.names[h]: kept.wish.priority
            for h, kept in cache.retention._kept.items()
            if kept.until > cache.now or value[: len(cache.names[h])] == cache.names[h]
        }
        cache.use(value, *spans)
        for gone in cache.evicted():
            leaves = [t for t in held if not any(o[: len(t)] == t and o != t for o in held)]
            free = [t for t in leaves if value[: len(t)] != t]  # what is being used stays
            assert gone in free
            assert ranks.get(gone, 0) == min(ranks.get(t, 0) for t in free)
            held.discard(gone)


def test_room_ahead_of_need_is_no_reason_for_a_retained_text_to_go() -> None:
    cache = Cache(8, max_retained=8)
    cache.use((1, 2, 3), RetainSpan(3 * SIZE, 50, 100.0))
    cache.use((4, 5))
    cache.tree.evict_ahead(6)
    assert cache.evicted() == [(4, 5), (4,)]
    cache.now += 200.0
    cache.tree.evict_ahead(6)
    assert cache.evicted() == [(1, 2, 3)]
