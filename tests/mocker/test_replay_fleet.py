"""X1, X2, X7, K21: forks find their parents, cold siblings one prefix, replicas what one router finds."""

from dataclasses import replace

import pytest

from bench.doubles.workloads import forks, made, sessions, siblings
from mallee.mocker.prices import cost_model
from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.replay.result import Result, jain
from mallee.mocker.replay.run import replay
from mallee.mocker.replay.simulation import Simulation
from mallee.mocker.timing import ClosedForm, Plane, Timing, load_timing
from mallee.traces.workload import NO_PARENT, Request, Workload

TIMING = load_timing("h200-llama-3.1-8b-fp8")


def run(workload: Workload, config: ReplayConfig) -> tuple[Simulation, Result]:
    """Replayed, checked, and the result of another run of the same."""
    simulation = Simulation(workload, config)
    simulation.run()
    simulation.check()
    result = replay(workload, config)
    assert result.summary["digest"] == simulation.log.digest()
    return simulation, result


@pytest.mark.parametrize(
    ("trees", "width", "engines"),
    [(1, 2, 4), (16, 32, 4), (4, 64, 16), pytest.param(4, 32, 1000, marks=pytest.mark.slow)],
)
def test_forks_go_to_the_worker_that_holds_their_parent(
    trees: int, width: int, engines: int
) -> None:
    """X1: children of roots that run at once, each asked for on its own."""
    requests: list[Request] = []
    for tree in range(trees):
        ids = range(tree * 128, tree * 128 + 128)
        root = len(requests)
        requests.append(Request(root, 0.0, ids, 2048, 0, num_children=width))
        requests += [Request(root + 1 + i, 0.0, (), 16, 24, parent=root) for i in range(width)]
    workload = made(requests, name="trees", id_tokens=16)
    simulation, result = run(
        workload, ReplayConfig(engines=engines, kv_tokens=65536, timing=TIMING)
    )
    columns = result.columns
    where = dict(zip(columns.number.tolist(), columns.worker.tolist(), strict=True))
    children = [request for request in requests if request.parent != NO_PARENT]
    at_home = sum(where[child.number] == where[child.parent] for child in children)
    spilled = sum(result.summary["spills"].values())
    assert at_home + spilled >= len(children)
    assert at_home >= 0.99 * len(children)
    assert len({where[root] for root in range(0, len(requests), width + 1)}) == min(trees, engines)
    assert columns.cached_tokens[columns.number % (width + 1) > 0].tolist() == [2048] * len(
        children
    )
    assert simulation.sharing.copies == 1.0


@pytest.mark.parametrize(("width", "gateways"), [(2, 2), (8, 1), (64, 2)])
def test_cold_siblings_compute_their_prefix_once(width: int, gateways: int) -> None:
    """X2: they arrive in one instant; prefill tokens = prefix + suffixes, through the router."""
    scene = siblings(2, width, prefix_tokens=4096, suffix_tokens=32, output_tokens=8, gap_s=30.0)
    config = ReplayConfig(engines=8, kv_tokens=65536, timing=TIMING, gateways=gateways)
    _, result = run(scene, config)
    computed = int(result.columns.computed_tokens.sum())
    assert computed == 2 * (4096 + width * 32)
    assert result.summary["prefix_copies"] == 1.0
    spread = replay(scene, replace(config, policy="round_robin", gateways=1))
    assert spread.summary["prefix_copies"] == pytest.approx(min(8, width), rel=0.02)


@pytest.mark.slow
def test_replicas_find_what_one_router_finds() -> None:
    """X7: with 2 and 8 replicas the hit rate is within 2 % of one's, and forks stay at home."""
    scene = sessions(40, 5, system_tokens=512, turn_tokens=512, gap_s=0.05, think_s=0.4)
    config = ReplayConfig(
        engines=6, kv_tokens=32768, timing=TIMING, event_lag_s=3e-3, booking_lag_s=1e-3
    )
    alone = replay(scene, config).summary["hit_rate"]
    assert alone > 0.6
    for gateways in (2, 8):
        simulation, result = run(scene, replace(config, gateways=gateways))
        assert result.summary["hit_rate"] == pytest.approx(alone, rel=0.02)
        digests = {
            tuple(gateway.router.digest(worker) for worker in simulation.fleet.workers)
            for gateway in simulation.gateways
        }
        assert len(digests) == 1, "replicas differ about what workers hold"
    for gateways in (1, 4):
        result = replay(forks(20, 16, prefix_tokens=1024), replace(config, gateways=gateways))
        assert result.summary["rebuilt_capsules"] == 0
        assert result.summary["prefix_copies"] == 1.0


def test_prices_are_what_the_timing_takes() -> None:
    line = Timing(ClosedForm(2e-3, 3e-5, 0.0, 0.0, (Plane(4e-3, 1e-5, 2e-8),)), overhead_s=1e-3)
    cost = cost_model(line, 16)
    assert cost.prefill_token_s == pytest.approx(3e-5)
    assert cost.step_base_s == pytest.approx(5e-3)
    assert cost.step_row_s == pytest.approx(1e-5)
    assert cost.step_block_s == pytest.approx(16 * 2e-8)


def test_jain_is_one_when_all_are_equal() -> None:
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([]) is None
