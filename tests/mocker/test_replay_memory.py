"""X25: what memory costs. An idle fleet uses all of its memory, and keeps what is asked for again."""

import numpy as np
import pytest

from bench.doubles.workloads import turns_in_any_order
from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.replay.run import replay
from mallee.traces.workload import Workload

OTHERS = ("dynamo", "round_robin", "least_loaded", "prefix_only")


def hit_rate(workload: Workload, *, policy: str, engines: int, kv_tokens: int) -> float:
    config = ReplayConfig(engines=engines, policy=policy, kv_tokens=kv_tokens, seed=1)
    rate: float = replay(workload, config).summary["hit_rate"]
    return rate


def test_sessions_that_fit_the_fleet_are_shared_out_while_nothing_is_under_way() -> None:
    """Eight sessions over one prompt, 20 s apart, on two workers of half their text each."""
    scene = turns_in_any_order(
        8, 8, shared_ids=2, turn_ids=2, gap_s=20.0, id_tokens=512, by_turns=True
    )
    result = replay(scene, ReplayConfig(engines=2, kv_tokens=32_768))
    assert np.bincount(result.columns.worker).tolist() == [32, 32]
    assert result.summary["hit_rate"] > 0.8


@pytest.mark.parametrize("shared_ids", [1, 16, 64])
@pytest.mark.parametrize("ratio", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("gap_s", [20.0, 0.1])
def test_no_other_policy_finds_more_of_its_prompts(
    shared_ids: int, ratio: float, gap_s: float
) -> None:
    """`ratio`: of all text to the memory of all four workers."""
    engines, sessions, turns, turn_ids = 4, 16, 6, 8
    workload = turns_in_any_order(
        sessions, turns, shared_ids=shared_ids, turn_ids=turn_ids, gap_s=gap_s
    )
    num_ids = shared_ids + sessions * turns * turn_ids
    kv_ids = max(int(num_ids / ratio / engines), shared_ids + turns * turn_ids + 4)
    rates = {
        policy: hit_rate(workload, policy=policy, engines=engines, kv_tokens=64 * kv_ids)
        for policy in ("cost", *OTHERS)
    }
    assert rates["cost"] > max(rates[policy] for policy in OTHERS) - 0.02, rates
