"""The prefix index against brute force."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mallee.router.index import PrefixIndex


def run(*blocks: int) -> np.ndarray:
    return np.array(blocks, dtype=np.uint64)


blocks = st.lists(st.integers(0, 12).map(lambda i: (1 << 64) - 1 - i), max_size=8)
operations = st.lists(
    st.tuples(st.sampled_from(["store", "remove", "clear", "match"]), st.integers(0, 9), blocks),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(operations)
def test_index_equals_brute_force_on_random_streams(
    stream: list[tuple[str, int, list[int]]],
) -> None:
    """K1: overlap per worker equals a scan over plain sets, after any stream of operations."""
    index = PrefixIndex(10)
    truth: list[set[int]] = [set() for _ in range(10)]
    for verb, worker, hashes in stream:
        if verb == "store":
            index.store(worker, run(*hashes))
            truth[worker] |= set(hashes)
        elif verb == "remove":
            index.remove(worker, run(*hashes))
            truth[worker] -= set(hashes)
        elif verb == "clear":
            index.clear(worker)
            truth[worker].clear()
        counts = index.match(run(*hashes))
        for each, held in enumerate(truth):
            leading = next((i for i, h in enumerate(hashes) if h not in held), len(hashes))
            assert counts[each] == leading
            assert index.held(each) == held
        assert index.num_blocks == len(set().union(*truth))
        index.check()


def test_a_hole_ends_the_match_of_that_worker_only() -> None:
    index = PrefixIndex(3)
    index.store(0, run(1, 2, 3))
    index.store(1, run(1, 3))
    assert index.match(run(1, 2, 3, 4)).tolist() == [3, 1, 0]
    assert index.match(run(3)).tolist() == [1, 1, 0]


def test_storing_twice_changes_nothing_and_is_counted() -> None:
    index = PrefixIndex(1)
    index.store(0, run(1, 2))
    index.store(0, run(1, 2))
    index.remove(0, run(1, 9))
    assert index.match(run(2)).tolist() == [1]
    assert index.stats().duplicate_stores == 2
    assert index.stats().absent_removes == 1


def test_a_block_nobody_holds_leaves_no_row_behind() -> None:
    index = PrefixIndex(70)
    index.store(0, run(5))
    index.store(69, run(5))
    assert index.holders(5) == (0, 69)
    index.remove(0, run(5))
    index.clear(69)
    assert index.num_blocks == 0
    assert index.holders(5) == ()


def test_match_of_nothing_is_zero_for_all() -> None:
    index = PrefixIndex(2)
    index.store(0, run(1))
    assert index.match(run()).tolist() == [0, 0]
    assert index.match(run(2)).dtype == np.int32


@pytest.mark.parametrize("worker", [-1, 2])
def test_a_worker_out_of_range_is_refused_with_the_range(worker: int) -> None:
    index = PrefixIndex(2)
    with pytest.raises(ValueError, match=f"worker={worker}: the index has workers 0 to 1"):
        index.store(worker, run(1))
