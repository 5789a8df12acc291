"""Memory of an index: interned sets, and the byte cap."""

import numpy as np
import pytest

from mallee.router.index.index import PrefixIndex
from support.index_contents import contents, match_tiers

Rng = np.random.Generator


def random_keys(rng: Rng, n: int) -> np.ndarray:
    return rng.integers(1, 1 << 64, n, dtype=np.uint64)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 63, 64, 65, 130, 1000])
def test_random_sets_of_many_workers_are_told_apart(num_workers: int) -> None:
    """K1: thousands of distinct sets, in three tiers, equal a matrix of booleans; rows are recycled."""
    rng = np.random.default_rng(num_workers)
    num_blocks = 1500
    index = PrefixIndex(num_workers)
    keys = random_keys(rng, num_blocks)
    held = np.zeros((3, num_workers, num_blocks), dtype=bool)
    for step in range(4 * min(num_workers, 150)):
        worker = int(rng.integers(0, num_workers)) if step % 9 else num_workers - 1
        tier = int(rng.integers(0, 3)) if step > 50 else 0
        which = np.flatnonzero(rng.random(num_blocks) < rng.choice([0.02, 0.5]))
        if rng.random() < 0.3:
            index.remove(worker, keys[which], tier)
            held[tier, worker, which] = False
        elif rng.random() < 0.95:
            index.store(worker, keys[which], tier)
            held[tier, worker, which] = True
        else:
            index.clear(worker)
            held[:, worker] = False
        if rng.random() < 0.2:
            index.work(64)
        which = rng.integers(0, num_blocks, 3)
        unions = np.logical_or.accumulate(held[:, :, which], axis=0)
        want = np.logical_and.accumulate(unions, axis=2).sum(axis=2)
        assert (match_tiers(index, keys[which]) == want).all()
    index.check()
    for worker, tiers in enumerate(contents(index)):
        for tier, blocks in enumerate(tiers):
            assert blocks == set(keys[held[tier, worker]].tolist())
    if num_workers > 100:
        assert index.stats().num_sets > 1000
    for worker in range(num_workers):
        index.clear(worker)
    while index.work():
        pass
    index.check()
    assert index.stats().num_sets == index.stats().num_entries == index.num_blocks == 0


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
