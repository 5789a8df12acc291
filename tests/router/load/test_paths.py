"""Counted paths against a recount over the paths in use, and predicted contents against a list of prompts."""

import hashlib
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.router.index.index import PrefixIndex
from mallee.router.load.kernels import match_prompt
from mallee.router.load.layout import NUM_LOADS
from mallee.router.load.paths import STRIDE, CountedPaths, room_for_waypoints
from mallee.router.load.predictions import Predictions
from mallee.router.load.prompts import EarlierPrompts
from support.index_contents import waypoints_of

NUM_WORKERS = 3


@cache
def chain_hash(path: str) -> int:
    return int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest(), "little")


def hashes_of(path: str) -> np.ndarray:
    """Chain hashes of a path, one letter a block."""
    return np.array([chain_hash(path[: i + 1]) for i in range(len(path))], dtype=np.uint64)


def prefixes(paths: list[str]) -> set[str]:
    return {path[: i + 1] for path in paths for i in range(len(path))}


# Runs of letters: paths that part and end anywhere inside a stride.
path_texts = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from([1, 2, 3, 7, 8, 9, 16])), max_size=4
).map(lambda runs: "".join(letter * n for letter, n in runs))
operations = st.lists(
    st.tuples(st.sampled_from(["use", "use", "leave", "work"]), st.integers(0, 2), path_texts),
    max_size=30,
)


@given(st.sampled_from([1, 2, 3, STRIDE]), operations, path_texts)
def test_unique_blocks_equal_a_recount_within_a_stride(
    stride: int, stream: list[tuple[str, int, str]], query: str
) -> None:
    """K4: exact at stride 1; else over-counted by less than a stride for each user, never under."""
    paths = CountedPaths(NUM_WORKERS, stride=stride)
    live: list[list[str]] = [[] for _ in range(NUM_WORKERS)]
    counted = [0] * NUM_WORKERS
    for verb, worker, path in stream:
        mine = live[worker]
        if verb == "leave" and mine:
            path = mine.pop(len(path) % len(mine))
            gone = paths.leave(worker, waypoints_of(hashes_of(path), stride), len(path))
            assert gone >= 0
            counted[worker] -= gone
        elif verb == "use":
            fresh = paths.use(worker, waypoints_of(hashes_of(path), stride), len(path))
            assert 0 <= fresh <= len(path)
            counted[worker] += fresh
            mine.append(path)
        elif verb == "work":
            paths.work()
        paths.check()
        for each, users in enumerate(live):
            unique = len(prefixes(users))
            assert unique <= counted[each] <= unique + (stride - 1) * len(users)
            waypoints = {m for p in users for m in waypoints_of(hashes_of(p), stride).tolist()}
            assert paths.num_used(each) == len(waypoints)
        for asked in (query, path):
            counts = np.empty(NUM_WORKERS, dtype=np.int32)
            paths.match_into(waypoints_of(hashes_of(asked), stride), len(asked), counts)
            for each, users in enumerate(live):
                used = prefixes(users)
                true = next(
                    (i for i in range(len(asked)) if asked[: i + 1] not in used), len(asked)
                )
                assert true // stride * stride <= counts[each] <= true
                if asked in users:
                    assert counts[each] == len(asked)
    for worker, users in enumerate(live):
        for path in users:
            counted[worker] -= paths.leave(worker, waypoints_of(hashes_of(path), stride), len(path))
    paths.check()
    assert counted == [0] * NUM_WORKERS


@pytest.mark.parametrize("n", [0, 1, STRIDE - 1, STRIDE, STRIDE + 1, 3 * STRIDE + 1, 2048])
def test_waypoints_are_one_hash_a_stride_and_the_last(n: int) -> None:
    """K4"""
    hashes = np.arange(1, n + 1, dtype=np.uint64)
    waypoints = room_for_waypoints(n)
    counts = np.empty((2, 1), dtype=np.int32)
    index, prompts, loads = PrefixIndex(1), EarlierPrompts(16), np.zeros((NUM_LOADS, 1))
    table = prompts.address
    match_prompt(index.address, 0, table, hashes, waypoints, counts[:1], counts[1], loads, 1)
    assert waypoints.tolist() == sorted({*range(STRIDE, n + 1, STRIDE), *([n] if n else [])})
    assert waypoints.tolist() == waypoints_of(hashes).tolist()


def test_a_stride_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="stride=0"):
        CountedPaths(1, stride=0)


TTL_S = 10.0
CAPACITY = 12


def chained(root: int, length: int) -> np.ndarray:
    """Hashes of a prompt: those with the same root share it up to the shorter's length."""
    return np.array([1000 * root + i for i in range(1, length + 1)], dtype=np.uint64)


prompts_added = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "clear", "expire", "work"]),
        st.integers(0, 2),
        st.integers(1, 3),
        st.sampled_from([0, 1, 3, 8, 9, 12, 13]),
        st.sampled_from([0.0, 1.0, 6.0]),
    ),
    max_size=40,
)


@given(st.sampled_from([1, 8]), prompts_added)
def test_beliefs_equal_a_list_of_prompts(
    stride: int, stream: list[tuple[str, int, int, int, float]]
) -> None:
    """K29: held for ttl_s, the oldest crowded out beyond the worker's capacity."""
    predictions = Predictions(3, ttl_s=TTL_S, stride=stride)
    truth: list[list[tuple[float, int, int]]] = [[], [], []]  # expires at, root, length

    def size(prompts: list[tuple[float, int, int]]) -> int:
        sizes: dict[int, int] = {}
        for _, root, n in prompts:
            for i, waypoint in enumerate(waypoints_of(chained(root, n), stride).tolist()):
                sizes[waypoint] = min(stride, n - i * stride)
        return sum(sizes.values())

    now = 0.0
    for verb, worker, root, length, passed in stream:
        now += passed
        mine = truth[worker]
        if verb == "add":
            waypoints = waypoints_of(chained(root, length), stride)
            predictions.add(worker, waypoints, length, capacity=CAPACITY, now=now)
            if 0 < length <= CAPACITY:
                mine.append((now + TTL_S, root, length))
            while size(mine) > CAPACITY:
                mine.pop(0)
        elif verb == "clear":
            predictions.clear(worker)
            mine.clear()
        elif verb == "expire":
            predictions.expire(now)
            truth = [[each for each in prompts if each[0] > now] for prompts in truth]
        else:
            predictions.work()
        predictions.check()
        assert bool(predictions.busy) == any(truth)
        assert predictions.num_prompts == sum(map(len, truth))
        counts = np.empty(3, dtype=np.int32)
        predictions.match_into(waypoints_of(chained(root, 16), stride), 16, counts)
        for each, prompts in enumerate(truth):
            longest = max((n for _, r, n in prompts if r == root), default=0)
            assert counts[each] == longest // stride * stride
