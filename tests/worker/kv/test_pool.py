"""The block pool."""

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.errors import PoolExhausted
from mallee.worker.kv.pool import BlockPool, runs


def test_alloc_more_than_free_takes_nothing_and_names_the_numbers() -> None:
    pool = BlockPool(4)
    pool.alloc(3)
    with pytest.raises(PoolExhausted, match="2 KV blocks needed, 1 of 4 free"):
        pool.alloc(2)
    assert pool.num_free == 1


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks=0"):
        BlockPool(0)


@given(st.lists(st.integers(-5, 5), max_size=60))
def test_blocks_are_handed_out_once_until_they_come_back(moves: list[int]) -> None:
    pool = BlockPool(16)
    held: list[int] = []
    for move in moves:
        if move >= 0 and move <= pool.num_free:
            taken = pool.alloc(move)
            assert not set(taken) & set(held)
            held += taken
        elif move < 0:
            back, held = held[:-move], held[-move:]
            pool.free(back)
        pool.check()
        assert pool.num_free == 16 - len(held)


def test_many_random_operations_leak_nothing() -> None:
    """D14, I9: batches of every size, in any order; at the end every block is free."""
    rng = random.Random(7)
    pool = BlockPool(4096)
    held: list[list[int]] = []
    for _ in range(100_000):
        if rng.random() < 0.5 and pool.num_free > 8:
            held.append(pool.alloc(1 + int(8 * rng.random())))
        elif held:
            i = int(len(held) * rng.random())
            held[i], held[-1] = held[-1], held[i]
            pool.free(held.pop())
    pool.check()
    for batch in held:
        pool.free(batch)
    pool.check()
    assert pool.used_blocks() == set()
    stats = pool.stats()
    assert stats.free == 4096
    assert stats.num_allocs == stats.num_frees > 100_000


def test_an_operation_takes_as_long_in_a_large_pool_as_in_a_small_one() -> None:
    """D14: constant time; the fastest of many runs, in processor time, a thousand times as many blocks."""

    def fastest(num_blocks: int) -> float:
        pool = BlockPool(num_blocks)
        held = pool.alloc(num_blocks // 2)
        times = []
        for _ in range(30):
            begin = time.process_time()
            for _ in range(300):
                pool.free(pool.alloc(4))
            times.append(time.process_time() - begin)
        pool.free(held)
        return min(times)

    assert fastest(256 << 10) < 3 * fastest(256)


def test_runs_are_the_longest_that_count_up_and_no_longer_than_asked() -> None:
    ids = [4, 5, 6, 7, 9, 8, 7, 8]
    assert [ids[part] for part in runs(ids)] == [[4, 5, 6, 7], [9], [8], [7, 8]]
    assert [ids[part] for part in runs(ids, 3)] == [[4, 5, 6], [7], [9], [8], [7, 8]]
    assert list(runs([])) == []
