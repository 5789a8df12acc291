"""Use of KV memory by workers, as Prometheus text."""

from mallee.actors.telemetry.metrics import GatewayMetrics
from mallee.actors.telemetry.workers import MAX_SHOWN
from mallee.protocol.events import EngineUse, LendingUse, LoanUse, TierUse
from mallee.protocol.ids import WorkerId


def test_the_last_report_of_each_living_worker_is_shown() -> None:
    """D36, part, D22, part: gauges and counters by worker; a worker that is gone leaves nothing behind."""
    metrics = GatewayMetrics()
    assert "mallee_worker" not in metrics.render().decode()
    a, b = WorkerId("a"), WorkerId("b")
    metrics.workers.reported(a, EngineUse(100, 40, 30, 20, 9, 2, 7, 5, 3, 0))
    metrics.workers.reported(a, EngineUse(100, 41, 31, 21, 9, 2, 8, 5, 3, 1))
    metrics.workers.reported(b, EngineUse(50, 0, 0, 0, 0, 0, 0, 0, 0, 0))
    text = metrics.render().decode()
    for line in (
        'mallee_worker_live_blocks{worker="a"} 41.0',
        'mallee_worker_shared_blocks{worker="a"} 31.0',
        'mallee_worker_copied_blocks_total{worker="a"} 8.0',
        'mallee_worker_kv_faults_total{worker="a"} 1.0',
        'mallee_worker_total_blocks{worker="b"} 50.0',
    ):
        assert line in text
    metrics.workers.keep({b})
    text = metrics.render().decode()
    assert 'worker="a"' not in text
    assert 'mallee_worker_total_blocks{worker="b"} 50.0' in text


def test_a_large_fleet_has_few_time_series() -> None:
    """K21, part: beyond a bound of workers their sum is shown, and routes to them under one name."""
    metrics = GatewayMetrics()
    names = [WorkerId(f"w{i}") for i in range(2 * MAX_SHOWN)]
    for name in names:
        metrics.workers.reported(name, EngineUse(100, 1, 0, 0, 0, 0, 2, 0, 0, 0))
        metrics.routed(name, 1, 2)
    lines = metrics.render().decode().splitlines()
    for family in ("mallee_worker_live_blocks", "mallee_route_decisions_total"):
        assert sum(line.startswith(family + "{") for line in lines) == MAX_SHOWN + 1
    assert f'mallee_worker_live_blocks{{worker="others"}} {MAX_SHOWN}.0' in lines
    assert f'mallee_worker_copied_blocks_total{{worker="others"}} {2 * MAX_SHOWN}.0' in lines
    assert f'mallee_route_decisions_total{{worker="others"}} {MAX_SHOWN}.0' in lines


def test_blocks_below_the_device_are_shown_by_tier_and_by_move() -> None:
    """D36, part: nothing of a worker without tiers; the rest of a large fleet is summed."""
    metrics = GatewayMetrics()
    metrics.workers.reported(WorkerId("plain"), EngineUse(100, 1, 0, 0, 0, 0, 2, 0, 0, 0))
    assert "mallee_worker_tier" not in metrics.render().decode()
    assert metrics.workers.tiers_of(WorkerId("plain")) is None
    use = TierUse(1024, 7, 3, 20, 11, 1, 4, 21, 5, 6, 2, 1)
    for i in range(MAX_SHOWN + 2):
        named = EngineUse(100, 1, 0, 0, 0, 0, 2, 0, 0, 0, 0, use)
        metrics.workers.reported(WorkerId(f"w{i}"), named)
    lines = metrics.render().decode().splitlines()
    for line in (
        'mallee_worker_tier_blocks{tier="host",worker="w0"} 7.0',
        'mallee_worker_tier_bytes{tier="disk",worker="w0"} 20480.0',
        'mallee_worker_host_held_blocks{worker="w0"} 3.0',
        'mallee_worker_moved_blocks_total{move="offload",worker="w0"} 11.0',
        'mallee_worker_moved_blocks_total{move="park",worker="w0"} 4.0',
        'mallee_worker_moved_bytes_total{move="fetch_disk",worker="others"} 12288.0',
        'mallee_worker_dropped_blocks_total{worker="w0"} 1.0',
        'mallee_worker_declined_blocks_total{worker="others"} 4.0',
        'mallee_worker_failed_moves_total{worker="w0"} 1.0',
    ):
        assert line in lines, line


def test_loans_between_workers_are_shown_by_direction() -> None:
    """D36, part, X6, part: those of a worker that is gone are forgotten, those of many are summed."""
    metrics = GatewayMetrics()
    use = LendingUse(LoanUse(1, 7, 2, 3, 4096, 0.5), LoanUse(2, 8, 0, 1, 8192, 0.25))
    for i in range(MAX_SHOWN + 2):
        metrics.workers.lends(WorkerId(f"w{i}"), use)
    lines = metrics.render().decode().splitlines()
    for line in (
        'mallee_worker_open_loans{direction="lent",worker="w0"} 2.0',
        'mallee_worker_loans_total{direction="borrowed",worker="w0"} 7.0',
        'mallee_worker_refused_loans_total{direction="borrowed",worker="w0"} 2.0',
        'mallee_worker_failed_loans_total{direction="borrowed",worker="w0"} 3.0',
        'mallee_worker_loan_bytes_total{direction="lent",worker="others"} 16384.0',
        'mallee_worker_loan_seconds_total{direction="borrowed",worker="others"} 1.0',
    ):
        assert line in lines, line
    metrics.workers.keep({WorkerId("w1")})
    assert 'worker="w0"' not in metrics.render().decode()
