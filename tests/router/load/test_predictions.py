"""Predicted contents of workers without events, against a list of prompts."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mallee.router.load.predictions import Predictions
from support.index_contents import waypoints_of

TTL_S = 10.0
CAPACITY = 12


def path(root: int, length: int) -> np.ndarray:
    """Hashes of a prompt: those with the same root share it up to the shorter's length."""
    return np.array([1000 * root + i for i in range(1, length + 1)], dtype=np.uint64)


operations = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "clear", "expire", "work"]),
        st.integers(0, 2),
        st.integers(1, 3),
        st.sampled_from([0, 1, 3, 8, 9, 12, 13]),
        st.sampled_from([0.0, 1.0, 6.0]),
    ),
    max_size=40,
)


@given(st.sampled_from([1, 8]), operations)
def test_beliefs_equal_a_list_of_prompts(
    stride: int, stream: list[tuple[str, int, int, int, float]]
) -> None:
    """K29: held for ttl_s, the oldest crowded out beyond the worker's capacity."""
    predictions = Predictions(3, ttl_s=TTL_S, stride=stride)
    truth: list[list[tuple[float, int, int]]] = [[], [], []]  # expires at, root, length

    def size(prompts: list[tuple[float, int, int]]) -> int:
        sizes: dict[int, int] = {}
        for _, root, n in prompts:
            for i, waypoint in enumerate(waypoints_of(path(root, n), stride).tolist()):
                sizes[waypoint] = min(stride, n - i * stride)
        return sum(sizes.values())

    now = 0.0
    for verb, worker, root, length, passed in stream:
        now += passed
        mine = truth[worker]
        if verb == "add":
            waypoints = waypoints_of(path(root, length), stride)
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
        assert bool(predictions) == any(truth)
        assert predictions.num_prompts == sum(map(len, truth))
        counts = np.empty(3, dtype=np.int32)
        predictions.match_into(waypoints_of(path(root, 16), stride), 16, counts)
        for each, prompts in enumerate(truth):
            longest = max((n for _, r, n in prompts if r == root), default=0)
            assert counts[each] == longest // stride * stride
