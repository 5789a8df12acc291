"""Routing policies on a trace: the real router over stub workers in virtual time, the same for each policy.

    python -m bench.router.policies [--trace FILE.jsonl[.gz]] [--engines 8] [--requests 4000] [--speedup 2]
                             [--gateways 8 [--no-sync]] [--policies cost dynamo ...]

The trace has Mooncake's fields (timestamp ms, input_length, output_length, hash_ids of 512-token blocks);
its 3 s ticks are spread evenly. Without a trace, sessions that grow turn by turn are made up. No policy
is told how long answers will be. Of several gateways each takes some.

The last line is one JSON object: per policy `ttft_ms` {p50, p99}, `hit_rate` (prompt tokens found /
prompt tokens), `computed_mtokens`, `bookings_max_mean` over workers, `whole_s` {p50, p99} to the last token.
"""

import argparse
import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.router.stub_fleet import Simulation
from bench.router.stub_gateways import Answer, Gateways, router_config
from mallee.protocol.hashing import Hashes
from mallee.protocol.workload import WorkloadRow, decode_row
from mallee.router.config import Policy
from mallee.router.placement.pricing import POLICIES

BLOCK_TOKENS = 512
TICK_MS = 3000.0
MAX_TOKENS = 1024  # what clients allow: nobody knows how long an answer gets
KV_TOKENS = 448_000  # of an 8B model in bf16 (128 KiB a token) on one 80 GB card, about


class Scene(NamedTuple):
    """What every policy is played with."""

    rows: Sequence[WorkloadRow]
    engines: int
    gateways: int = 1
    sync: bool = True
    seed: int = 0


def read_trace(path: Path, requests: int, speedup: float) -> list[WorkloadRow]:
    """The trace's first rows; those of one tick follow each other evenly."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        rows = [decode_row(line) for line, _ in zip(lines, range(requests), strict=False)]
    ticks = Counter(row.timestamp for row in rows)
    passed = Counter[float]()
    spread = []
    for row in rows:
        at = row.timestamp + TICK_MS * passed[row.timestamp] / ticks[row.timestamp]
        passed[row.timestamp] += 1
        spread.append(_at(row, at / speedup))
    return spread


def make_trace(requests: int, speedup: float, seed: int) -> list[WorkloadRow]:
    """Sessions that begin with one of eight prompts and grow by a turn at a time."""
    rng = np.random.default_rng(seed)
    rows: list[WorkloadRow] = []
    next_id = 1000
    begin_ms = 0.0
    while len(rows) < 2 * requests:
        begin_ms += rng.exponential(1200.0)
        prompt = int(rng.integers(8))
        ids = list(range(prompt * 16, prompt * 16 + 4 + prompt))
        at = begin_ms
        for _ in range(1 + rng.geometric(0.2)):
            more = 1 + rng.geometric(0.25)
            ids += range(next_id, next_id + more)
            next_id += more
            length = len(ids) * BLOCK_TOKENS - int(rng.integers(BLOCK_TOKENS))
            output = 16 + int(rng.exponential(250.0))
            rows.append(
                WorkloadRow(
                    timestamp=at / speedup,
                    input_length=length,
                    output_length=output,
                    hash_ids=tuple(ids),
                )
            )
            at += 4000.0 + rng.exponential(20_000.0)
    return sorted(rows, key=lambda row: row.timestamp)[:requests]


def _at(row: WorkloadRow, timestamp: float) -> WorkloadRow:
    return WorkloadRow(
        timestamp=timestamp,
        input_length=row.input_length,
        output_length=row.output_length,
        hash_ids=row.hash_ids,
    )


def hashes_of(row: WorkloadRow) -> Hashes:
    """Its full blocks, by hashes that follow from their ids."""
    ids = np.array(row.hash_ids[: row.input_length // BLOCK_TOKENS], dtype=np.uint64)
    mixed = (ids + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return mixed ^ (mixed >> np.uint64(29))


def play(scene: Scene, policy: Policy) -> dict[str, Any]:
    """One policy's figures."""
    simulation = Simulation()
    gateways = Gateways(
        simulation,
        scene.engines,
        config=router_config(scene.engines, block_size=BLOCK_TOKENS, policy=policy),
        num_gateways=scene.gateways,
        sync=scene.sync,
        num_blocks=KV_TOKENS // BLOCK_TOKENS,
        seed=scene.seed,
    )
    answers: list[Answer] = []

    def ask(number: int, row: WorkloadRow) -> None:
        answers.append(
            gateways.generate(
                f"r{number}",
                hashes_of(row),
                more_tokens=row.input_length % BLOCK_TOKENS,
                output_tokens=max(1, row.output_length),
                max_tokens=MAX_TOKENS,
            )
        )

    for number, row in enumerate(scene.rows):
        simulation.at(row.timestamp / 1000, partial(ask, number, row))
    simulation.run()
    return _figures(scene, answers)


def _figures(scene: Scene, answers: list[Answer]) -> dict[str, Any]:
    ttft = [1000 * (answer.first_s[0] - answer.begun_s) for answer in answers]
    whole = [answer.slowest_s for answer in answers]
    prompt = sum(answer.prompt_tokens for answer in answers)
    cached = sum(answer.cached_tokens for answer in answers)
    workers = Counter(answer.placements[0][0] for answer in answers)
    return {
        "ttft_ms": {f"p{p}": round(float(np.percentile(ttft, p)), 1) for p in (50, 99)},
        "hit_rate": round(cached / prompt, 4),
        "computed_mtokens": round((prompt - cached) / 1e6, 2),
        "bookings_max_mean": round(max(workers.values()) * scene.engines / len(answers), 3),
        "whole_s": {f"p{p}": round(float(np.percentile(whole, p)), 2) for p in (50, 99)},
    }


def _table(figures: dict[str, dict[str, Any]]) -> Iterator[str]:
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
    if given.trace is not None:
        rows = read_trace(given.trace, given.requests, given.speedup)
    else:
        rows = make_trace(given.requests, given.speedup, given.seed)
    scene = Scene(rows, given.engines, given.gateways, not given.no_sync, given.seed)
    figures = {policy: play(scene, policy) for policy in given.policies}
    print("\n".join(_table(figures)))
    conditions = {
        "trace": given.trace.name if given.trace is not None else "made up",
        "requests": len(rows),
        "engines": given.engines,
        "speedup": given.speedup,
        "gateways": given.gateways,
        "sync": not given.no_sync,
        "seed": given.seed,
    }
    print(json.dumps(conditions | figures))


if __name__ == "__main__":
    main(sys.argv[1:])
