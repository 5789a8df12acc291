"""Large indexes: tables that grow and shrink a few segments at a time, interned sets, and the byte cap."""

import numpy as np
import psutil
import pytest

from mallee.router.index.index import PrefixIndex
from mallee.router.index.kernels import layout
from mallee.router.index.kernels.table import segment_of
from mallee.router.index.table import Table
from mallee.router.load.kernels import count_down, count_up
from support.index_contents import contents

AT_ONCE = 65_536
Rng = np.random.Generator


def random_keys(rng: Rng, n: int) -> np.ndarray:
    return rng.integers(1, 1 << 64, n, dtype=np.uint64)


class Truth:
    """Matrix of booleans: keys held, by tier and worker."""

    def __init__(self, num_workers: int, keys: np.ndarray, num_tiers: int = 1) -> None:
        self.index = PrefixIndex(num_workers)
        self.keys = keys
        self.held = np.zeros((num_tiers, num_workers, len(keys)), dtype=bool)

    def store(self, worker: int, which: np.ndarray, tier: int = 0) -> None:
        self.index.store(worker, self.keys[which], tier)
        self.held[tier, worker, which] = True

    def remove(self, worker: int, which: np.ndarray, tier: int = 0) -> None:
        self.index.remove(worker, self.keys[which], tier)
        self.held[tier, worker, which] = False

    def clear(self, worker: int) -> None:
        self.index.clear(worker)
        self.held[:, worker] = False

    def check_keys(self, which: np.ndarray) -> None:
        """They are matched up to the first that no tier has."""
        unions = np.logical_or.accumulate(self.held[:, :, which], axis=0)
        want = np.logical_and.accumulate(unions, axis=2).sum(axis=2)
        for tier, counts in enumerate(want):
            assert (self.index.match(self.keys[which], tier) == counts).all()

    def check_match(self, rng: Rng) -> None:
        """Runs of keys, in which holes are rare or common."""
        start = int(rng.integers(0, len(self.keys) - 200))
        for at in range(start, start + 200, 20):
            self.check_keys(np.arange(at, min(at + 40, len(self.keys))))

    def check_counts(self) -> None:
        for worker in range(self.held.shape[1]):
            assert self.index.num_held(worker) == self.held[:, worker].sum()

    def check(self) -> None:
        self.check_counts()
        self.index.check()
        for worker, tiers in enumerate(contents(self.index)):
            for tier, held in enumerate(self.held[:, worker]):
                assert tiers[tier] == set(self.keys[held].tolist())


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 63, 64, 65, 130, 1000])
def test_random_sets_of_many_workers_are_told_apart(num_workers: int) -> None:
    """K1: thousands of distinct sets, in three tiers, equal a matrix of booleans; rows are recycled."""
    rng = np.random.default_rng(num_workers)
    num_blocks = 1500
    truth = Truth(num_workers, random_keys(rng, num_blocks), 3)
    index = truth.index
    for step in range(4 * min(num_workers, 150)):
        worker = int(rng.integers(0, num_workers)) if step % 9 else num_workers - 1
        tier = int(rng.integers(0, 3)) if step > 50 else 0
        which = np.flatnonzero(rng.random(num_blocks) < rng.choice([0.02, 0.5]))
        if rng.random() < 0.3:
            truth.remove(worker, which, tier)
        elif rng.random() < 0.95:
            truth.store(worker, which, tier)
        else:
            truth.clear(worker)
        if rng.random() < 0.2:
            index.work(64)
        truth.check_keys(rng.integers(0, num_blocks, 3))
    truth.check()
    if num_workers > 100:
        assert index.stats().num_sets > 1000
    for worker in range(num_workers):
        index.clear(worker)
    while index.work():
        pass
    index.check()
    assert index.stats().num_sets == index.stats().num_entries == index.num_blocks == 0


@pytest.mark.slow
def test_answers_stay_right_while_a_table_grows_and_shrinks() -> None:
    """K1: store, remove, clear, match and sweep between the steps of a move equal a matrix."""
    rng = np.random.default_rng(1)
    truth = Truth(5, random_keys(rng, 150_000))
    index, num_left, sizes = truth.index, 0, set[int]()
    for phase in ("grow", "shrink", "grow", "empty", "grow"):
        for step in range(40):
            worker = int(rng.integers(0, 5))
            start = int(rng.integers(0, len(truth.keys)))
            n = int(rng.choice([1, 16, 500, 20_000 if phase == "grow" else 500]))
            truth.store(worker, np.arange(start, min(start + n, len(truth.keys))))
            if phase == "shrink" or step % 8 == 7:
                held = np.flatnonzero(truth.held[0, worker])
                truth.remove(worker, held[rng.random(len(held)) < (0.2 + 0.7 * (step % 2))])
            if (phase == "empty" and step % 7 == 0) or rng.random() < 0.04:
                truth.clear(worker)
            sizes.add(index.nbytes)
            num_left += bool(index.work(int(rng.choice([1, 1, 16, 300]))))
            truth.check_match(rng)
            truth.check_counts()
            if step % 20 == 19:
                truth.check()
    assert num_left > 10, "tables that move"
    assert len(sizes) > 4


def test_blocks_removed_while_a_table_moves_are_holes() -> None:
    """K1, part: segments that have moved are still in the old table, as they were before."""
    truth, num_held = Truth(2, random_keys(np.random.default_rng(2), 300_000)), 0
    while num_held == 0 or not truth.index.work(1):
        for worker in range(2):
            truth.store(worker, np.arange(num_held, num_held + 1000))
        num_held += 1000
    truth.remove(0, np.arange(7, num_held, 20))
    assert truth.index.work(1), "it still moves"
    for at in range(0, num_held, 40):
        truth.check_keys(np.arange(at, at + 40))


def test_memory_is_given_back_when_blocks_are_gone() -> None:
    """K1, part: after mass removal, or clears, and `work`, a table is small again."""
    rng = np.random.default_rng(6)
    empty = PrefixIndex(3).nbytes
    for how in ("remove", "clear"):
        truth = Truth(3, random_keys(rng, 300_000))
        for worker in range(3):
            truth.store(worker, np.arange(len(truth.keys)))
        assert truth.index.nbytes > 300_000 * 16
        for worker in range(3):
            everything = np.arange(len(truth.keys))
            truth.remove(worker, everything) if how == "remove" else truth.clear(worker)
        turns = 0
        while truth.index.work():
            turns += 1
        assert turns < 5000
        truth.check()
        assert truth.index.num_blocks == 0
        assert truth.index.nbytes < empty + 16 * 2 * AT_ONCE


def test_memory_is_what_is_counted_and_a_table_that_moves_is_not_in_it_twice() -> None:
    """K1: `nbytes` is what the process has resident, to a few large pages, also while two tables exist."""
    keys = random_keys(np.random.default_rng(13), 1_500_000)
    PrefixIndex(1).store(0, keys[:50_000])
    process, index = psutil.Process(), PrefixIndex(1)
    before = process.memory_info().rss
    for start in range(0, len(keys), 10_000):
        index.store(0, keys[start : start + 10_000])
        resident = process.memory_info().rss - before
        assert abs(resident - index.nbytes) < 6_000_000, start
    assert index.nbytes == index.stats().nbytes < len(keys) * 80
    assert index.num_blocks == len(keys)


def test_clearing_more_workers_than_there_are_spare_columns_needs_no_idle_turn() -> None:
    """K1, part: 200 clears in a row, without `work`, while a table is too large to be swept at once."""
    rng = np.random.default_rng(8)
    truth = Truth(20, random_keys(rng, 80_000))
    for worker in range(20):
        truth.store(worker, np.arange(worker * 1000, worker * 1000 + 60_000))
    for i in range(200):
        worker = int(rng.integers(0, 20))
        truth.clear(worker)
        assert truth.index.num_held(worker) == 0
        truth.store(worker, np.arange(i * 100, i * 100 + 400))
        if i % 20 == 0:
            truth.check_match(rng)
    truth.check()
    while truth.index.work():
        truth.check_match(rng)
    truth.check()
    assert truth.index.num_blocks == truth.held[0].any(axis=0).sum()


def keys_of_one_segment(rng: Rng, n: int) -> np.ndarray:
    """Those whose products with SPREAD have the segment's number on top."""
    products = rng.integers(0, 1 << layout.SEGMENT_SHIFT, n, dtype=np.uint64)
    products |= np.uint64(5 << layout.SEGMENT_SHIFT)
    return products * np.uint64(pow(layout.SPREAD, -1, 1 << 64))


def test_keys_that_fall_into_one_segment_are_found_and_leave_idle_turns_idle() -> None:
    """K1: an engine with poor hashes costs memory, but neither answers nor endless rehashing."""
    rng = np.random.default_rng(10)
    truth = Truth(2, keys_of_one_segment(rng, 900))
    assert {segment_of(key) for key in truth.keys.view(np.int64).tolist()} == {5}
    for start in range(0, 900, 9):
        truth.store(start % 2, np.arange(start, start + 9))
    truth.check()
    turns = 0
    while truth.index.work():
        turns += 1
    assert turns < 2000
    truth.check()
    truth.remove(0, np.arange(900))
    truth.remove(1, np.arange(0, 900, 2))
    truth.check()


@pytest.mark.slow
def test_counts_survive_growth_and_vanish_at_zero() -> None:
    """K4: a counting table equals numpy's unique counts, through growth and back."""
    rng = np.random.default_rng(12)
    table = Table()
    pool = random_keys(rng, 120_000).view(np.int64)
    drawn = pool[rng.integers(0, len(pool), 300_000)]
    fresh = np.empty(len(drawn), dtype=np.int64)
    for start in range(0, len(drawn), 10_000):
        part = drawn[start : start + 10_000]
        done = num_fresh = 0
        while (done := count_up(table.address, part, 77, done, fresh, num_fresh)) < len(part):
            num_fresh = int(table.control[layout.AT_FRESH])
            table.make_room()
        table.follow_growth()
        num_fresh = int(table.control[layout.AT_FRESH])
        before = np.unique(drawn[:start])
        assert sorted(fresh[:num_fresh].tolist()) == sorted(np.setdiff1d(part, before).tolist())
    keys, counts = np.unique(drawn, return_counts=True)
    assert table.entries() == dict(zip((keys ^ 77).tolist(), counts.tolist(), strict=True))
    gone = np.empty(len(drawn), dtype=np.int64)
    num_gone = count_down(table.address, drawn, 77, gone)
    assert num_gone == len(keys)
    assert table.entries() == {}
    while table.work(64):
        pass
    assert table.capacity < 2 * AT_ONCE


def test_a_further_worker_on_a_shared_block_costs_no_memory() -> None:
    """K1: 1000 workers over the same 20,000 blocks take what the first took, and one set."""
    index = PrefixIndex(1000)
    keys = random_keys(np.random.default_rng(1), 20_000)
    index.store(0, keys)
    before = index.nbytes
    for worker in range(1, 1000):
        index.store(worker, keys)
    assert index.nbytes == before
    assert index.stats().num_sets == 1
    assert index.stats().num_entries == 20_000_000
    assert (index.match(keys) == 20_000).all()
    for worker in range(999):
        index.remove(worker, keys)
    assert index.stats().num_sets == 0
    assert index.match(keys).tolist() == [0] * 999 + [20_000]
    index.check()


def paths(rng: Rng, n: int, length: int, shared: int) -> list[np.ndarray]:
    """Prefixes of `shared` blocks, each with two tails."""
    heads = [random_keys(rng, shared) for _ in range(n // 2)]
    return [np.concatenate([heads[i // 2], random_keys(rng, length - shared)]) for i in range(n)]


@pytest.mark.slow
def test_the_byte_cap_forgets_blocks_but_never_invents_them() -> None:
    """K9, part: at most the blocks that fit, evictions counted, matches exact for what is left.

    Workers without holes are walked once eviction may have made one.
    """
    rng = np.random.default_rng(2)
    index = PrefixIndex(6, is_prefix_closed=True, max_nbytes=4 << 20)
    index.set_prefix_closed(5, False)
    most = (4 << 20) // 48
    truth: list[set[int]] = [set() for _ in range(6)]
    trunks = paths(rng, 1000, 400, 200)
    for step in range(900):
        worker = int(rng.integers(0, 6))
        path = trunks[int(rng.integers(0, len(trunks)))]
        if step % 10 == 9:
            tail = path[int(rng.integers(200, 400)) :]  # of one path only: what is left has no hole
            index.remove(worker, tail[::-1].copy())
            truth[worker] -= set(tail.tolist())
        elif step % 97 == 96:
            index.clear(worker)
            truth[worker].clear()
            assert index.stats().num_walked <= 6
        else:
            index.store(worker, path)
            truth[worker] |= set(path.tolist())
        assert index.num_blocks <= most
        counts = index.match(path)
        believed = [tiers[0] for tiers in contents(index)] if step % 30 == 0 else None
        for each in range(6):
            true = next((i for i, k in enumerate(path.tolist()) if k not in truth[each]), 400)
            assert counts[each] <= true
            if believed is not None:
                left = next(
                    (i for i, k in enumerate(path.tolist()) if k not in believed[each]), 400
                )
                assert counts[each] == left
                assert believed[each] <= truth[each]
        if step % 100 == 0:
            index.check()
    index.check()
    assert index.stats().evicted > 10_000
    assert index.num_blocks > most * 0.9
    assert index.nbytes <= 1.25 * (4 << 20)


@pytest.mark.parametrize("max_nbytes", [4 << 20, 7 << 20])
def test_the_byte_cap_holds_for_unique_blocks(max_nbytes: int) -> None:
    """K1, part: also while a larger table is filled beside the old one, within a quarter."""
    rng = np.random.default_rng(3)
    index = PrefixIndex(8, max_nbytes=max_nbytes)
    num_stored = 0
    while num_stored < 2 * max_nbytes // 48:
        index.store(num_stored % 8, random_keys(rng, 2_000))
        num_stored += 2_000
        assert index.nbytes <= 1.25 * max_nbytes
    assert index.num_blocks == max_nbytes // 48 - index._sets.nbytes // 48
    assert index.stats().evicted == num_stored - index.num_blocks
    index.check()


def test_the_byte_cap_holds_for_blocks_with_sets_of_their_own() -> None:
    """K1, part: rows take memory from blocks; when more are taken the number of blocks comes down."""
    rng = np.random.default_rng(4)
    index = PrefixIndex(1000, max_nbytes=8 << 20)
    pool = random_keys(rng, 150_000)
    most = 0
    for _ in range(3_000):
        index.store(int(rng.integers(0, 1000)), pool[rng.integers(0, len(pool), 200)])
        most = max(most, index.num_blocks)
        assert index.nbytes <= 1.25 * (8 << 20)
    assert index.num_blocks < most
    assert index.stats().evicted > 0
    index.check()
