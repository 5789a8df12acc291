"""The prefix index against brute force, on small trees of paths."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.router.index.index import NUM_TIERS, PrefixIndex
from support.examples import examples
from support.index_contents import contents, match_tiers

DEPTH = 6
LEAVES = 1 << (DEPTH - 1)
TOP = (1 << 64) - 1


def run(*blocks: int) -> np.ndarray:
    return np.array(blocks, dtype=np.uint64)


def random_keys(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, TOP, n, dtype=np.uint64).tolist()


KEYS = {
    "poor": list(range(1, 2 * LEAVES)),
    "high": [TOP - i for i in range(2 * LEAVES - 1)],
    "aligned": [(i + 1) << 52 for i in range(2 * LEAVES - 1)],
    "random": random_keys(7, 2 * LEAVES - 1),
}
"""Block hashes of a binary tree's nodes 1, 2, 3, ... (the children of i are 2i and 2i + 1)."""


def ancestors(node: int) -> list[int]:
    """The path to `node`, from the root, with it."""
    return [node >> up for up in range(node.bit_length() - 1, -1, -1)]


def below(node: int) -> list[int]:
    """The nodes of the subtree of `node`, children before parents."""
    return sorted((n for n in range(1, 2 * LEAVES) if node in ancestors(n)), reverse=True)


class Fleet:
    """An index and what it should say: sets of tree nodes per worker and tier.

    `closed` workers keep every ancestor of what they hold, as trees that lose leaves first do.
    """

    def __init__(self, num_workers: int, keys: str) -> None:
        self.index = PrefixIndex(num_workers)
        self.keys = KEYS[keys]
        self.workers = sorted({0, num_workers // 2, num_workers - 1})
        self.truth = {w: [set[int]() for _ in range(NUM_TIERS)] for w in self.workers}
        self.closed = {w: i % 2 == 0 for i, w in enumerate(self.workers)}
        self.owed: dict[int, list[int]] = {w: [] for w in self.workers}
        for worker, is_closed in self.closed.items():
            self.index.set_prefix_closed(worker, is_closed)

    def hashes(self, nodes: list[int]) -> np.ndarray:
        """As messages bring them: half of the runs can't be written to."""
        values = run(*(self.keys[node - 1] for node in nodes))
        return np.frombuffer(values.tobytes(), dtype=np.uint64) if len(nodes) % 2 else values

    def put(self, worker: int, nodes: list[int], tier: int) -> None:
        self.index.store(worker, self.hashes(nodes), tier)
        self.truth[worker][tier] |= set(nodes)

    def take(self, worker: int, nodes: list[int], tier: int) -> None:
        self.index.remove(worker, self.hashes(nodes), tier)
        self.truth[worker][tier] -= set(nodes)

    def settle(self, worker: int, n: int = 2 * LEAVES) -> None:
        """Removals that were on their way when a repair overtook them arrive, leaves first."""
        for node in self.owed[worker][:n]:
            for tier in range(NUM_TIERS if self.index.num_tiers > 1 else 1):
                self.take(worker, [node], tier)
        del self.owed[worker][:n]

    # One operation each; `a` and `b` choose what it is about.

    def store(self, worker: int, a: int, b: int) -> None:
        self.settle(worker)
        node = a % (2 * LEAVES - 1) + 1
        self.put(worker, ancestors(node) if self.closed[worker] else [node, b % node + 1], 0)

    def lower(self, worker: int, a: int, b: int) -> None:
        self.settle(worker)
        path = ancestors(a % (2 * LEAVES - 1) + 1)
        self.put(worker, path if self.closed[worker] else path[b % 3 :], 1 + b % 2)

    def demote(self, worker: int, a: int, b: int) -> None:
        """A block without children in its tier goes to the next one."""
        self.settle(worker)
        tier = b % 2
        held = self.truth[worker][tier]
        leaves = sorted(n for n in held if not held & {2 * n, 2 * n + 1})
        if leaves:
            node = leaves[a % len(leaves)]
            self.put(worker, [node], tier + 1)
            self.take(worker, [node], tier)

    def remove(self, worker: int, a: int, b: int) -> None:
        self.settle(worker)
        node = a % (2 * LEAVES - 1) + 1
        for tier in range(NUM_TIERS if b % 2 else 1):
            if self.closed[worker]:
                held = set().union(*self.truth[worker][: tier + 1])
                if b % 2 or not any(self.truth[worker][1:]):
                    self.take(worker, [n for n in below(node) if n in held or b % 3], tier)
            else:
                self.take(worker, [node, b % node + 1], tier)

    def repair(self, worker: int, a: int, b: int) -> None:
        self.settle(worker)
        path = ancestors(a % (2 * LEAVES - 1) + 1)[b % DEPTH :]
        believed = self.truth[worker][0] & set(path)
        assert self.index.repair(worker, self.hashes(path)) == len(believed)
        self.truth[worker][0] -= believed
        if believed and self.closed[worker]:
            # It has let go of all below, too; its events say so later.
            self.owed[worker] = below(path[0])

    def arrive(self, worker: int, a: int, b: int) -> None:
        self.settle(worker, 1 + a % 5)

    def load(self, worker: int, a: int, b: int) -> None:
        """A snapshot comes in pieces, in no order."""
        self.settle(worker)
        self.index.clear(worker)
        self.truth[worker] = [set() for _ in range(NUM_TIERS)]
        self.index.set_loading(worker, True)
        nodes = sorted({n for leaf in (a, b, a + b) for n in ancestors(leaf % LEAVES + LEAVES)})
        for node in sorted(nodes, key=lambda n: n * (2 * a + 1) % 64):
            self.put(worker, [node], 0)
            self.check_match(a)
        self.index.set_loading(worker, False)

    def clear(self, worker: int, a: int, b: int) -> None:
        self.index.clear(worker)
        self.truth[worker] = [set() for _ in range(NUM_TIERS)]
        self.owed[worker] = []

    def open_or_close(self, worker: int, a: int, b: int) -> None:
        self.settle(worker)
        unions = [set().union(*self.truth[worker][: tier + 1]) for tier in range(NUM_TIERS)]
        can_close = all(n == 1 or n >> 1 in held for held in unions for n in held)
        self.closed[worker] = can_close and bool(a % 2)
        self.index.set_prefix_closed(worker, self.closed[worker])

    def work(self, worker: int, a: int, b: int) -> None:
        while self.index.work(256):
            self.check_match(a)

    def check_match(self, a: int) -> None:
        for leaf in (a % LEAVES + LEAVES, a * 7 % LEAVES + LEAVES):
            path = ancestors(leaf)[: DEPTH - a % 2]
            hashes = self.hashes(path)
            tiers = match_tiers(self.index, hashes)
            assert (tiers[0] == self.index.match(hashes)).all()
            for worker in range(self.index.num_workers):
                held = set[int]()
                for tier in range(NUM_TIERS):
                    held |= self.truth[worker][tier] if worker in self.truth else set()
                    leading = next((i for i, n in enumerate(path) if n not in held), len(path))
                    assert tiers[tier, worker] == leading, (worker, tier, path)

    def check(self) -> None:
        self.index.check()
        everything, found = set[int](), contents(self.index)
        for worker, tiers in self.truth.items():
            assert self.index.num_held(worker) == sum(map(len, tiers))
            for tier, nodes in enumerate(tiers):
                assert found[worker][tier] == {self.keys[n - 1] for n in nodes}
                everything |= nodes
        assert self.index.num_blocks == len(everything)  # a small table is swept at once
        others = set(range(self.index.num_workers)) - set(self.workers)
        assert not any(blocks for worker in others for blocks in found[worker])


VERBS = ("store", "store", "lower", "demote", "remove", "remove", "repair", "arrive")
VERBS += ("load", "clear", "open_or_close", "work")
operations = st.lists(
    st.tuples(st.sampled_from(VERBS), st.integers(0, 2), st.integers(0, 999), st.integers(0, 999)),
    max_size=40,
)


@given(st.sampled_from([1, 2, 63, 64, 65]), st.sampled_from(sorted(KEYS)), operations)
def test_index_equals_brute_force_on_random_streams(
    num_workers: int, keys: str, stream: list[tuple[str, int, int, int]]
) -> None:
    """K1, K9, part: every answer equals a scan over plain sets, after any stream of operations.

    Workers with holes, workers without (for whom matches jump) and tiers, mixed.
    """
    fleet = Fleet(num_workers, keys)
    for verb, which, a, b in stream:
        worker = fleet.workers[which % len(fleet.workers)]
        getattr(fleet, verb)(worker, a, b)
        fleet.check_match(a)
        fleet.check()


def digests(index: PrefixIndex) -> list[int]:
    return [index.digest(worker) for worker in range(index.num_workers)]


@examples(40)
@given(st.randoms(use_true_random=False), st.integers(1, 30))
def test_digests_tell_holdings_apart_and_nothing_else(
    random: "np.random.Generator", num_blocks: int
) -> None:
    """K8: equal after other orders, duplicates, clears and detours; different after any difference."""
    facts = [(w, t, k) for w in range(3) for t in range(3) for k in random_keys(w // 2, num_blocks)]
    facts = random.sample(facts, len(facts) * 2 // 3)
    one, other = PrefixIndex(3), PrefixIndex(3)
    for worker, tier, block in facts:
        one.store(worker, run(block), tier)
    for _ in range(2):
        for worker in random.sample(range(3), 2):
            other.store(worker, run(1, 2, 3))
            other.clear(worker)
        for worker, tier, block in random.sample(facts, len(facts)):
            other.store(worker, run(block, block), tier)
    assert digests(one) == digests(other)
    other.check()
    worker, tier, block = facts[0]
    other.remove(worker, run(block), tier)
    assert one.digest(worker) != other.digest(worker)
    other.store(worker, run(block), (tier + 1) % 3)
    moved = [f for f in facts if f == (worker, (tier + 1) % 3, block)]
    assert moved or one.digest(worker) != other.digest(worker)


@examples(20)
@given(st.integers(0, 1 << 30), st.sampled_from([1, 70, 300]), st.sampled_from([0.0, 0.002, 0.2]))
def test_long_paths_with_holes_equal_brute_force(
    seed: int, num_workers: int, share_lost: float
) -> None:
    """K1: over several stretches of a walk; workers lose blocks anywhere, some of them to a lower tier."""
    rng = np.random.default_rng(seed)
    path = rng.integers(1, TOP, int(rng.integers(1, 260)), dtype=np.uint64)
    index = PrefixIndex(num_workers)
    truth = np.ones((2, num_workers, len(path)), dtype=bool)  # held in the tiers up to this one
    for worker in range(num_workers):
        index.set_prefix_closed(worker, False)
        index.store(worker, path)
        lost = rng.random(len(path)) < share_lost
        lost[int(rng.integers(1, len(path) + 1)) :] |= rng.random() < 0.3
        is_lower = rng.random(len(path)) < 0.5
        index.remove(worker, path[lost])
        index.store(worker, path[lost & is_lower], 1)
        truth[0, worker] = ~lost
        truth[1, worker] = ~lost | is_lower
    index.check()
    for tier in (0, 1):
        expected = np.cumprod(truth[tier], axis=1).sum(axis=1)
        assert index.match(path, tier).tolist() == expected.tolist()


def test_a_jump_looks_up_a_fifth_of_what_a_walk_does() -> None:
    """K3: same answers for a path of 2048 blocks, with at least five times fewer lookups."""
    keys = np.random.default_rng(3).integers(1, TOP, 2048, dtype=np.uint64)
    answers, probes = [], []
    for is_closed in (False, True):
        index = PrefixIndex(1000, is_prefix_closed=is_closed)
        for worker in range(1000):
            index.store(worker, keys if worker % 4 else keys[: 512 * (worker % 20 // 4)])
        before = index.stats().probes
        answers.append(index.match(keys).tolist())
        probes.append(index.stats().probes - before)
    assert answers[0] == answers[1]
    assert probes[1] * 5 <= probes[0]
    assert set(answers[0]) == {0, 512, 1024, 1536, 2048}


def test_the_hash_zero_is_never_held() -> None:
    """K1: key 0 means an empty entry; a block with that hash is computed again, not invented."""
    index = PrefixIndex(2)
    index.store(0, run(5, 0, 7))
    index.store(0, run(0))
    index.store(1, run(5, 0))
    assert index.num_blocks == 2
    assert index.match(run(5, 0, 7)).tolist() == [1, 1]
    assert index.match(run(0)).tolist() == [0, 0]
    assert contents(index) == [[{5, 7}, set(), set()], [{5}, set(), set()]]
    index.remove(0, run(0))
    index.check()


@pytest.mark.parametrize(
    ("worker", "tier", "says"),
    [
        (-1, 0, "worker=-1: the index has workers 0 to 1"),
        (2, 0, "worker=2: the index has workers 0 to 1"),
        (0, -1, "tier=-1"),
        (0, 3, "tier=3"),
    ],
)
def test_what_is_out_of_range_is_refused_with_the_range(worker: int, tier: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        PrefixIndex(2).store(worker, run(1), tier)
