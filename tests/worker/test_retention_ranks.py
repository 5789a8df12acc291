"""Blocks that requests want retained: they go last, while their time and their room last."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.events import Removed, unpack_hashes
from mallee.protocol.hashing import block_hashes
from mallee.protocol.messages import RetainSpan
from mallee.worker.kv.audit import check_tree
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.node import Node
from mallee.worker.kv.pool import BlockPool
from mallee.worker.kv.tree import BranchTree
from mallee.worker.retention import Retention
from support.examples import examples

SIZE = 2
Text = tuple[int, ...]


def whole(priority: int = 50, duration_s: float = 10.0) -> list[RetainSpan]:
    return [RetainSpan(1 << 62, priority, duration_s)]


class Cache:
    """A tree of prompts that come and go; block i of a text is `text[i]`, twice."""

    def __init__(self, num_blocks: int, max_retained: int) -> None:
        self.now = 0.0
        self.journal = Journal()
        self.retention = Retention(max_retained, lambda: self.now)
        self.tree = BranchTree(BlockPool(num_blocks), SIZE, self.journal, ranks=self.retention)
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


def test_what_is_retained_goes_after_what_is_not_and_the_less_before_the_more() -> None:
    cache = Cache(12, 12)
    cache.use((1, 1, 1), *whole(80))
    cache.use((2, 2, 2), *whole(20))
    cache.use((3, 3, 3))
    cache.use((4, 4, 4))
    cache.use((5,) * 9)
    assert [text[0] for text in cache.evicted()] == [3, 3, 3, 4, 4, 4, 2, 2, 2]
    assert cache.held((1, 1, 1)) == 3
    cache.use((6,) * 12)
    assert cache.held((1, 1, 1)) == 0, "retention is soft"


def test_it_ends_with_its_time_and_begins_anew_with_each_use() -> None:
    cache = Cache(6, 6)
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


def test_of_one_text_the_span_with_the_lower_priority_goes_first() -> None:
    cache = Cache(8, 8)
    cache.use((1,) * 6, RetainSpan(8, 90, 10.0), RetainSpan(10, 30, 10.0))
    cache.use((2, 2), *whole(60))
    cache.use((3,) * 3)
    assert cache.held((1,) * 6) == 4, "without the last span, and what nobody wanted retained"
    assert cache.held((2, 2)) == 1


def test_a_budget_clips_and_refuses_and_a_tenant_has_half_of_it() -> None:
    cache = Cache(20, 8)
    assert cache.use((1,) * 3, *whole(), tenant="ann") == (3, 3)
    assert cache.use((2,) * 3, *whole(), tenant="ann") == (3, 1)
    assert cache.use((3,) * 2, *whole(), tenant="ann") == (2, 0)
    assert cache.use((1,) * 3, *whole(), tenant="ann") == (3, 3), "it is retained already"
    assert cache.use((4,) * 5, *whole(), tenant="") == (5, 4)
    assert Cache(20, 0).use((1,) * 3, *whole()) == (3, 0)
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
    cache = Cache(8, max_retained)
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
