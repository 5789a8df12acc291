"""The use and work of engines, as Prometheus text."""

from typing import Any

from mallee.actors.hosting.host import HostStats
from mallee.actors.hosting.meters import Report, WorkerMetrics
from mallee.actors.hosting.worker import Capacity
from mallee.protocol.events import (
    EngineUse,
    KeptUse,
    LendingUse,
    Load,
    LoanUse,
    MemoryUse,
    StateUse,
    TierUse,
)
from mallee.runtime.telemetry.families import OTHERS, exposition

STATS = HostStats(*(1, 0, 0, 0, 0, 0, 0), is_failed=False, compiling=0)
COUNTED: Any = {
    "num_drafted_tokens": 50,
    "num_accepted_tokens": 40,
    "num_ahead_rows": 30,
    "num_ahead_void_rows": 2,
    "host_gap_s": 1.5,
}


def report(worker: str, use: EngineUse, **more: Any) -> Report:
    given: dict[str, Any] = {"lending": None, "memory": None, **more}
    load, size = Load(3, 2, 20, 0, use), Capacity(16, 100, 8)
    return Report(model="m", worker=worker, load=load, use=use, size=size, num_open=1, **given)


def lines_of(*reports: Report) -> list[str]:
    metrics = WorkerMetrics(lambda: STATS)
    metrics.reports = reports
    return b"".join(exposition(metrics.registry, "")).decode().splitlines()


def test_what_each_worker_holds_and_did_is_shown() -> None:
    """D36, part, D22, part, I23, part: gauges and counters by worker; nothing of a worker without them."""
    assert not any(line.startswith("mallee_worker_") for line in lines_of())
    use = EngineUse(
        *(100, 40, 30, 20, 10, 3, 8, 5, 3, 1),
        references=90,
        constraint_states=4,
        block_nbytes=2048,
        kept_by_tier=(KeptUse(2, 30), KeptUse(1, 8), KeptUse()),
        max_kept_blocks=90,
        **COUNTED,
    )
    plain = EngineUse(50, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    lines = lines_of(report("a", use, memory=MemoryUse(7000, 2000, 1000, 500)), report("b", plain))
    for line in (
        'mallee_worker_running_branches{worker="a"} 3.0',
        'mallee_worker_waiting_branches{worker="a"} 2.0',
        'mallee_worker_live_blocks{worker="a"} 40.0',
        'mallee_worker_shared_blocks{worker="a"} 30.0',
        'mallee_worker_copied_blocks_total{worker="a"} 8.0',
        'mallee_worker_kv_faults_total{worker="a"} 1.0',
        'mallee_worker_drafted_tokens_total{worker="a"} 50.0',
        'mallee_worker_accepted_tokens_total{worker="a"} 40.0',
        'mallee_worker_ahead_rows_total{worker="a"} 30.0',
        'mallee_worker_ahead_void_rows_total{worker="a"} 2.0',
        'mallee_worker_host_gap_seconds_total{worker="a"} 1.5',
        'mallee_worker_total_blocks{worker="b"} 50.0',
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
        'vllm:kv_cache_usage_perc{engine="a",model_name="m"} 0.2',
    ):
        assert line in lines, line
    assert not any("memory" in line and '"b"' in line for line in lines), "a mocked engine has none"
    assert not any(line.startswith(("mallee_worker_tier", "mallee_worker_loan")) for line in lines)


def test_workers_under_one_name_are_summed() -> None:
    """K21, part, D36, part, X6, part: those beyond the bound; means stay means. Blocks below the device are
    shown by tier and by move, loans by direction.
    """
    tiers = TierUse(
        *(1024, 7, 3, 20, 11, 1, 4, 21, 5, 6, 2, 1), host_room=9, disk_limit_nbytes=65536
    )
    left = StateUse({"named": 2, "cadence": 3}, 100, 7)
    use = EngineUse(100, 1, 0, 0, 4, 0, 2, 0, 0, 0, 0, tiers, states=left)
    loans = LendingUse(LoanUse(1, 7, 2, 3, 4096, 0.5), LoanUse(2, 8, 0, 1, 8192, 0.25))
    lines = lines_of(*(report(name, use, lending=loans) for name in ("w0", OTHERS, OTHERS, OTHERS)))
    assert sum(line.startswith("mallee_worker_live_blocks{") for line in lines) == 2
    for line in (
        'mallee_worker_live_blocks{worker="others"} 3.0',
        'mallee_worker_branch_blocks{worker="others"} 0.0',
        'vllm:kv_cache_usage_perc{engine="others",model_name="m"} 0.2',
        'mallee_worker_copied_blocks_total{worker="others"} 6.0',
        'mallee_worker_tier_blocks{tier="host",worker="w0"} 7.0',
        'mallee_worker_tier_bytes{tier="disk",worker="w0"} 20480.0',
        'mallee_worker_cached_states{reason="named",worker="w0"} 2.0',
        'mallee_worker_cached_states{reason="end",worker="w0"} 0.0',
        'mallee_worker_cached_state_bytes{worker="others"} 1500.0',
        'mallee_worker_evicted_states_total{worker="w0"} 7.0',
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
