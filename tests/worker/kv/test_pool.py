"""The block pool."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.errors import PoolExhausted
from mallee.worker.kv.pool import BlockPool


def test_alloc_more_than_free_takes_nothing_and_names_the_numbers() -> None:
    pool = BlockPool(4)
    pool.alloc(3)
    with pytest.raises(PoolExhausted, match="2 KV blocks needed, 1 of 4 free"):
        pool.alloc(2)
    assert pool.num_free == 1


def test_freeing_a_block_twice_is_caught_and_named() -> None:
    pool = BlockPool(4)
    (block,) = pool.alloc(1)
    pool.free([block])
    with pytest.raises(AssertionError, match=f"block {block} freed twice"):
        pool.free([block])


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


def test_a_hundred_thousand_random_operations_leak_nothing() -> None:
    rng = random.Random(7)
    pool = BlockPool(256)
    held: list[int] = []
    for _ in range(100_000):
        if rng.random() < 0.5 and pool.num_free:
            held += pool.alloc(rng.randint(1, min(4, pool.num_free)))
        elif held:
            pool.free([held.pop(rng.randrange(len(held)))])
    pool.free(held)
    pool.check()
    assert pool.num_free == 256
