"""Routing policies on one trace: equal load and fleet for each, replayed in virtual time.

    python -m bench.router.policies [--trace FILE.jsonl[.gz]] [--engines 8] [--requests 4000] [--speedup 2]
                                    [--gateways 8 [--no-sync]] [--policies cost dynamo ...]

Without a trace, sessions that grow turn by turn are made up. A request goes to any of the gateways, events
reach them 3 ms late and bookings 1 ms, without sync never. `bench.router.ranking` repeats such runs over
seeds on two traces.

The last line is one JSON object: per policy `ttft_ms` and `whole_s` (to the last token) {p50, p99},
`hit_rate` (prompt tokens found / prompt tokens), `computed_mtokens`, `bookings_max_mean` over engines.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from bench.doubles.workloads import sessions
from bench.router.fanout import BOOKING_LAG_S, EVENT_LAG_S, NEVER_S
from mallee.mocker.replay.config import POLICIES, ReplayConfig
from mallee.mocker.replay.result import Result
from mallee.mocker.replay.run import replay
from mallee.traces.read import read_workload
from mallee.traces.workload import Request, Workload

BLOCK_TOKENS: Final = 512
KV_TOKENS: Final = 448_000  # of an 8B model in bf16 (128 KiB a token) on one 80 GB card, about


def made_up(requests: int, seed: int) -> Workload:
    """Sessions of eight turns on one of two system prompts; each request goes to any gateway."""
    source = sessions(
        -(-requests // 8),
        8,
        system_tokens=8 * BLOCK_TOKENS,
        turn_tokens=1500,
        output_tokens=250,
        think_s=12.0,
        gap_s=0.4,
        id_tokens=BLOCK_TOKENS,
        groups=2,
        seed=seed,
    )

    def read() -> Iterator[Request]:
        for request in source:
            yield msgspec.structs.replace(request, session="")

    return replace(source, read=read)


def replayed(workload: Workload, config: ReplayConfig) -> Result:
    """One replay, in which no request may fail."""
    result = replay(workload, config)
    summary = result.summary
    failed = sum(summary["errors"].values()) + summary["lost"]
    assert not failed, f"{failed} requests failed: {summary['reasons']}"
    return result


def play(workload: Workload, config: ReplayConfig) -> dict[str, Any]:
    """One replay's figures."""
    result = replayed(workload, config)
    summary, columns = result.summary, result.columns
    rows = np.bincount(columns.worker, minlength=config.engines)
    return {
        "ttft_ms": {name: round(summary["ttft_ms"][name], 1) for name in ("p50", "p99")},
        "hit_rate": round(summary["hit_rate"], 4),
        "computed_mtokens": round(int(columns.computed_tokens.sum()) / 1e6, 2),
        "bookings_max_mean": round(float(rows.max() / rows.mean()), 3),
        "whole_s": {name: round(summary["e2e_ms"][name] / 1e3, 2) for name in ("p50", "p99")},
    }


def config_for(engines: int, policy: str, *, gateways: int = 1, sync: bool = True) -> ReplayConfig:
    return ReplayConfig(
        engines=engines,
        policy=policy,
        kv_tokens=KV_TOKENS,
        block_size=BLOCK_TOKENS,
        gateways=gateways,
        event_lag_s=EVENT_LAG_S,
        booking_lag_s=BOOKING_LAG_S if sync else NEVER_S,
    )


def table(figures: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Markdown."""
    yield "| policy | TTFT p50 / p99 ms | whole p50 / p99 s | hit rate | computed M | max/mean |"
    yield "|---|---|---|---|---|---|"
    for name, each in figures.items():
        ttft, whole = each["ttft_ms"], each["whole_s"]
        yield (
            f"| {name} | {ttft['p50']} / {ttft['p99']} | {whole['p50']} / {whole['p99']}"
            f" | {each['hit_rate']}"
            f" | {each['computed_mtokens']} | {each['bookings_max_mean']} |"
        )


def main(args: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, help="without it sessions are made up")
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--speedup", type=float, default=1.0, help="of the trace's clock")
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--no-sync", action="store_true")
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(args)
    if given.trace is None:
        workload = made_up(given.requests, given.seed)
    else:
        workload = read_workload(given.trace, limit=given.requests, seed=given.seed)
    figures = {}
    for policy in given.policies:
        config = config_for(given.engines, policy, gateways=given.gateways, sync=not given.no_sync)
        config = replace(config, speedup=given.speedup, seed=given.seed)
        figures[policy] = play(workload, config)
    print("\n".join(table(figures)))
    conditions = {
        "trace": given.trace.name if given.trace is not None else "made up",
        "requests": given.requests,
        "engines": given.engines,
        "speedup": given.speedup,
        "gateways": given.gateways,
        "sync": not given.no_sync,
        "seed": given.seed,
    }
    print(json.dumps(conditions | figures))


if __name__ == "__main__":
    main(sys.argv[1:])
