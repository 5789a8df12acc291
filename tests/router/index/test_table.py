"""Large tables: growing and shrinking a few segments at a time, with operations in between."""

import numpy as np
import psutil
import pytest

from mallee.router.index.index import PrefixIndex
from mallee.router.index.kernels import layout
from mallee.router.index.kernels.table import home_of, segment_of
from mallee.router.index.table import Table
from mallee.router.load.kernels import count_down, count_up
from support.index_contents import contents

AT_ONCE = 65_536
Rng = np.random.Generator


def random_keys(rng: Rng, n: int) -> np.ndarray:
    return rng.integers(1, 1 << 64, n, dtype=np.uint64)


class Truth:
    """Matrix of booleans: keys held, by worker."""

    def __init__(self, num_workers: int, keys: np.ndarray) -> None:
        self.index = PrefixIndex(num_workers)
        self.keys = keys
        self.held = np.zeros((num_workers, len(keys)), dtype=bool)

    def store(self, worker: int, which: np.ndarray) -> None:
        self.index.store(worker, self.keys[which])
        self.held[worker, which] = True

    def remove(self, worker: int, which: np.ndarray) -> None:
        self.index.remove(worker, self.keys[which])
        self.held[worker, which] = False

    def clear(self, worker: int) -> None:
        self.index.clear(worker)
        self.held[worker] = False

    def check_match(self, rng: Rng) -> None:
        """Runs of keys, in which holes are rare or common."""
        start = int(rng.integers(0, len(self.keys) - 200))
        for at in range(start, start + 200, 20):
            part = self.held[:, at : at + 40]
            want = np.where(part.all(axis=1), 40, np.argmin(part, axis=1))
            assert (self.index.match(self.keys[at : at + 40]) == want).all()

    def check_counts(self) -> None:
        for worker, held in enumerate(self.held):
            assert self.index.num_held(worker) == held.sum()

    def check(self) -> None:
        self.check_counts()
        self.index.check()
        found = contents(self.index)
        for worker, held in enumerate(self.held):
            assert found[worker][0] == set(self.keys[held].tolist())


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
                held = np.flatnonzero(truth.held[worker])
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


@pytest.mark.slow
@pytest.mark.parametrize("num_left", [0, 3_000])
def test_a_burst_of_stores_while_a_table_shrinks_finds_room(num_left: int) -> None:
    """K1: blocks that arrive after a shrink began, more than its target holds, are all there."""
    rng = np.random.default_rng(5)
    truth = Truth(2, random_keys(rng, 400_000))
    truth.store(0, np.arange(250_000))
    while truth.index.work(1024):
        pass
    truth.remove(0, np.arange(num_left, 250_000))
    assert truth.index.work(1), "it shrinks"
    for start in range(250_000, 400_000, 15_000):
        truth.store(1, np.arange(start, start + 15_000))
        truth.check_match(rng)
    truth.check()


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
    assert truth.index.num_blocks == truth.held.any(axis=0).sum()


def test_no_clear_pays_for_a_sweep_of_the_whole_table() -> None:
    """K1, part: where clears outrun idle turns each sweeps a share, and a spare column is always left."""
    index = PrefixIndex(300)
    rng = np.random.default_rng(14)
    for worker in range(300):
        index.store(worker, random_keys(rng, 500))
    num_spare = index._tier_columns - 300
    for i in range(700):
        before = int(index._control[layout.AT_SWEEP_CURSOR])
        index.clear(i % 300)
        swept = int(index._control[layout.AT_SWEEP_CURSOR]) - before
        assert swept <= 2 * layout.NUM_SEGMENTS // num_spare + 1
        index.store(i % 300, random_keys(rng, 500))
    index.check()


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


def test_homes_are_within_a_segment() -> None:
    """K1: whatever the key, and for capacities beyond what memory allows."""
    rng = np.random.default_rng(11)
    edges = [1, 2, -1, -(1 << 63), (1 << 63) - 1, 1 << 62, 1 << 32, -(1 << 32)]
    for key in [*edges, *random_keys(rng, 200).view(np.int64).tolist()]:
        assert 0 <= segment_of(key) < layout.NUM_SEGMENTS
        for cap in (8, 9, 1000, 1 << 20, (1 << 31) - 1):
            assert 0 <= home_of(key, cap) < cap


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
