"""Replays in the mocker, for comparisons of traces."""

from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.replay.run import replay as run
from mallee.mocker.sweeps.pool import keep
from mallee.synth.compare.replays import Figures, Fleet
from mallee.traces.workload import Workload


def replay(workload: Workload, fleet: Fleet, policy: str) -> Figures:
    """`workload` on `fleet`, engines timed as one H200 with Llama 3.1 8B. Raises ConfigError, CodecError."""
    config = ReplayConfig(
        engines=fleet.engines,
        policy=policy,
        kv_tokens=fleet.kv_tokens,
        block_size=fleet.block_size,
        keeps_order=fleet.keeps_order,
        max_requests=fleet.requests,
    )
    kept = keep(run(workload, config))
    summary = kept.summary
    return Figures(
        ttft_p50_ms=kept.ttft_at(0.5),
        ttft_p99_ms=kept.ttft_at(0.99),
        hit_rate=summary["hit_rate"],
        busy=summary["utilisation"]["mean"] or 0.0,
        failed=sum(summary["errors"].values()) + summary["lost"],
    )
