"""What workers say of their KV memory, as Prometheus text."""

from mallee.actors.metrics import GatewayMetrics
from mallee.protocol.events import EngineUse
from mallee.protocol.ids import WorkerId


def test_the_last_report_of_each_living_worker_is_shown() -> None:
    """D36, D22: gauges and counters by worker; a worker that is gone leaves nothing behind."""
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
