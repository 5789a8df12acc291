"""Load, memory and latencies of workers, as Prometheus text."""

from typing import Any

from prometheus_client import CollectorRegistry

from mallee.protocol.events import (
    EngineUse,
    KeptUse,
    Lease,
    LendingUse,
    Load,
    LoanUse,
    MemoryUse,
    TierUse,
)
from mallee.protocol.ids import WorkerId
from mallee.protocol.messages import ALL_BRANCHES, Update
from mallee.runtime.telemetry.catalog import MOST_WORKERS
from mallee.runtime.telemetry.engines import EngineMeter, EngineMeters
from mallee.runtime.telemetry.metrics import GatewayMetrics

COUNTED: Any = {
    "num_drafted_tokens": 50,
    "num_accepted_tokens": 40,
    "num_ahead_rows": 30,
    "num_ahead_void_rows": 2,
    "host_gap_s": 1.5,
}


def lease(worker: str, use: EngineUse | None = None, **more: Any) -> Lease:
    load = None if use is None else Load(3, 2, 0, 0, use)
    return Lease(WorkerId(worker), 1, "a", "m", "f", 16, 100, 8, 4096, 0, load=load, **more)


def test_the_last_report_of_each_living_worker_is_shown() -> None:
    """D36, part, D22, part, I23, part: gauges and counters by worker; one that is gone leaves nothing."""
    metrics = GatewayMetrics()
    assert "mallee_worker_" not in metrics.render().decode()
    metrics.workers.heard(lease("a", EngineUse(100, 40, 30, 20, 9, 2, 7, 5, 3, 0)))
    metrics.workers.heard(lease("a", EngineUse(100, 41, 31, 21, 9, 2, 8, 5, 3, 1, **COUNTED)))
    metrics.workers.heard(lease("b", EngineUse(50, 0, 0, 0, 0, 0, 0, 0, 0, 0)))
    text = metrics.render().decode()
    for line in (
        'mallee_worker_running_branches{worker="a"} 3.0',
        'mallee_worker_waiting_branches{worker="a"} 2.0',
        'mallee_worker_live_blocks{worker="a"} 41.0',
        'mallee_worker_shared_blocks{worker="a"} 31.0',
        'mallee_worker_copied_blocks_total{worker="a"} 8.0',
        'mallee_worker_kv_faults_total{worker="a"} 1.0',
        'mallee_worker_drafted_tokens_total{worker="a"} 50.0',
        'mallee_worker_accepted_tokens_total{worker="a"} 40.0',
        'mallee_worker_ahead_rows_total{worker="a"} 30.0',
        'mallee_worker_ahead_void_rows_total{worker="a"} 2.0',
        'mallee_worker_host_gap_seconds_total{worker="a"} 1.5',
        'mallee_worker_total_blocks{worker="b"} 50.0',
    ):
        assert line in text
    # Memory by branch and by part, of a worker without branches and of one with ten over 40 blocks.
    kept = (KeptUse(2, 30), KeptUse(1, 8), KeptUse())
    use = EngineUse(
        *(100, 40, 30, 20, 10, 3, 7, 5, 3, 0),
        references=90,
        constraint_states=4,
        block_nbytes=2048,
        kept_by_tier=kept,
        max_kept_blocks=90,
    )
    metrics.workers.heard(lease("a", use, memory=MemoryUse(7000, 2000, 1000, 500)))
    lines = metrics.render().decode().splitlines()
    for line in (
        'mallee_worker_block_references{worker="a"} 90.0',
        'mallee_worker_branch_blocks{worker="a"} 9.0',
        'mallee_worker_branch_bytes{worker="a"} 8192.0',
        'mallee_worker_branch_bytes{worker="b"} 0.0',
        'mallee_worker_constraint_states{worker="a"} 4.0',
        'mallee_worker_capsules{tier="0",worker="a"} 2.0',
        'mallee_worker_capsule_bytes{tier="1",worker="a"} 16384.0',
        'mallee_worker_capsule_limit_bytes{worker="a"} 184320.0',
        'mallee_worker_memory_bytes{part="weights",worker="a"} 7000.0',
        'mallee_worker_memory_bytes{part="kv",worker="a"} 2000.0',
        'mallee_worker_memory_bytes{part="other",worker="a"} 1000.0',
        'mallee_worker_memory_bytes{part="graphs",worker="a"} 500.0',
    ):
        assert line in lines, line
    assert not any("memory" in line and '"b"' in line for line in lines), "a mocked engine has none"
    metrics.workers.keep({WorkerId("b")})
    text = metrics.render().decode()
    assert 'worker="a"' not in text
    assert 'mallee_worker_total_blocks{worker="b"} 50.0' in text


def test_a_large_fleet_has_few_time_series() -> None:
    """K21, part, D36, part, X6, part: beyond a bound of workers their sum is shown, and routes to them under
    one name. Blocks below the device are shown by tier and by move, loans by direction; nothing of a worker
    without them.
    """
    metrics = GatewayMetrics()
    metrics.workers.heard(lease("plain", EngineUse(100, 1, 0, 0, 0, 0, 2, 0, 0, 0)))
    assert "mallee_worker_tier" not in metrics.render().decode()
    assert metrics.workers.tiers_of(WorkerId("plain")) is None
    metrics.workers.keep(set())
    tiers = TierUse(
        *(1024, 7, 3, 20, 11, 1, 4, 21, 5, 6, 2, 1), host_room=9, disk_limit_nbytes=65536
    )
    use = EngineUse(100, 1, 0, 0, 4, 0, 2, 0, 0, 0, 0, tiers)
    loans = LendingUse(LoanUse(1, 7, 2, 3, 4096, 0.5), LoanUse(2, 8, 0, 1, 8192, 0.25))
    for i in range(MOST_WORKERS + 3):
        metrics.workers.heard(lease(f"w{i}", use, lending=loans))
        metrics.routed(WorkerId(f"w{i}"), 1, 2)
    lines = metrics.render().decode().splitlines()
    for family in ("mallee_worker_live_blocks", "mallee_route_decisions_total"):
        assert sum(line.startswith(family + "{") for line in lines) == MOST_WORKERS + 1
    for line in (
        'mallee_worker_live_blocks{worker="others"} 3.0',
        'mallee_worker_branch_blocks{worker="others"} 0.0',  # a mean, not a sum
        'mallee_worker_copied_blocks_total{worker="others"} 6.0',
        'mallee_route_decisions_total{worker="others"} 3.0',
        'mallee_worker_tier_blocks{tier="host",worker="w0"} 7.0',
        'mallee_worker_tier_bytes{tier="disk",worker="w0"} 20480.0',
        'mallee_worker_host_held_blocks{worker="w0"} 3.0',
        'mallee_worker_host_room_blocks{worker="w0"} 9.0',
        'mallee_worker_disk_limit_bytes{worker="w0"} 65536.0',
        'mallee_worker_moved_blocks_total{move="offload",worker="w0"} 11.0',
        'mallee_worker_moved_blocks_total{move="park",worker="w0"} 4.0',
        'mallee_worker_moved_bytes_total{move="fetch_disk",worker="others"} 18432.0',
        'mallee_worker_dropped_blocks_total{worker="w0"} 1.0',
        'mallee_worker_declined_blocks_total{worker="others"} 6.0',
        'mallee_worker_failed_moves_total{worker="w0"} 1.0',
        'mallee_worker_open_loans{direction="lent",worker="w0"} 2.0',
        'mallee_worker_loans_total{direction="borrowed",worker="w0"} 7.0',
        'mallee_worker_refused_loans_total{direction="borrowed",worker="w0"} 2.0',
        'mallee_worker_failed_loans_total{direction="borrowed",worker="w0"} 3.0',
        'mallee_worker_loan_bytes_total{direction="lent",worker="others"} 24576.0',
        'mallee_worker_loan_seconds_total{direction="borrowed",worker="others"} 1.5',
    ):
        assert line in lines, line
    metrics.workers.keep({WorkerId("w1")})
    lines = metrics.render().decode().splitlines()
    assert not any(line.startswith("mallee_worker_") and '"w0"' in line for line in lines)


def made() -> tuple[CollectorRegistry, EngineMeter]:
    registry = CollectorRegistry()
    return registry, EngineMeters(registry).meter("m", "w0")


def read(registry: CollectorRegistry, name: str) -> float:
    value = registry.get_sample_value(f"vllm:{name}", {"model_name": "m", "engine": "w0"})
    assert value is not None
    return value


def test_first_tokens_and_gaps_are_those_of_each_branch() -> None:
    """I23, part: two branches of one request, several tokens at once by their mean; not those of others."""
    registry, meter = made()
    meter.asked("g0", "r", 10.0)
    meter.asked("g0", "r", 11.0)  # it has begun only once
    meter.took("g0", [Update("r", 0, (1,)), Update("r", 1, (1,))], 10.5)
    meter.took("g0", [Update("r", 0, (2,)), Update("r", 1), Update("unknown", 0, (1,))], 10.7)
    meter.took("g1", [Update("r", 0, (2,))], 10.8)
    meter.took("g0", [Update("r", 1, (2, 3, 4, 5), "length")], 11.3)
    assert read(registry, "time_to_first_token_seconds_count") == 2
    assert read(registry, "time_to_first_token_seconds_sum") == 1.0
    assert read(registry, "inter_token_latency_seconds_count") == 2
    assert round(read(registry, "inter_token_latency_seconds_sum"), 6) == 0.2 + 0.2


def test_requests_that_are_over_are_forgotten() -> None:
    _, meter = made()
    for gateway in ("g0", "g1"):
        for request in ("a", "b"):
            meter.asked(gateway, request, 0.0)
    meter.took("g0", [Update("a", ALL_BRANCHES, finish="error")], 1.0)
    meter.over("g0", "a")
    assert set(meter._open) == {("g0", "b"), ("g1", "a"), ("g1", "b")}
    meter.dropped("g1")
    assert set(meter._open) == {("g0", "b")}
    meter.dropped()
    assert not meter._open
