"""Ranking of routing policies by time to first token, on two real workloads at equal load.

    python -m bench.router.ranking [--traces FOLDER] [--seeds 5] [--requests 4000 2000] [--processes 2]

Each policy gets the same requests, the same arrivals and the same fleet; other seeds give other arrivals
(Mooncake: other places inside the 3 s ticks; Claude Code: other starts of the sessions) and other draws.
Mooncake conversation comes by its timestamps (open loop); in the Claude-Code fleet a turn waits for the
turn before it and for its tool, as agents do. All in virtual time, real router and scheduler; engines are
H200 with Llama 3.1 8B in FP8 and 1 M tokens of KV, 4 for Mooncake, 16 for
Claude Code. The router's prices are fitted to the timing that the engines run under.

Tables have medians over the seeds, and in how many seeds cost was better. A request that failed counts as
one that waited for ever. The last line is one JSON object: per workload and policy the figures of each
seed, and `cost_wins`: whether cost beats every other policy's p50 and p99 in medians.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench import TRACES
from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.sweeps.pool import Done, Failed, Job, Run, run_jobs
from mallee.traces.read import read_workload

POLICIES: Final = ("cost", "round_robin", "least_loaded", "random", "prefix_only")
BLOCK_TOKENS: Final = 512
KV_TOKENS: Final = 1_048_576


class Scene(NamedTuple):
    """One workload and its fleet."""

    name: str
    trace: Path
    requests: int
    engines: int


class Figures(NamedTuple):
    """One replay."""

    p50_ms: float
    p99_ms: float
    hit_rate: float
    prefix_copies: float
    utilisation: float
    failed: int
    digest: str


def jobs_of(scene: Scene, seeds: int) -> list[tuple[str, Job]]:
    """All policies, seed by seed."""
    return [
        (
            policy,
            Job(
                partial(read_workload, scene.trace, limit=scene.requests, seed=seed),
                ReplayConfig(
                    engines=scene.engines,
                    policy=policy,
                    kv_tokens=KV_TOKENS,
                    block_size=BLOCK_TOKENS,
                    seed=seed,
                ),
            ),
        )
        for seed in range(1, seeds + 1)
        for policy in POLICIES
    ]


def figures_of(run: Run) -> Figures:
    summary = run.summary
    return Figures(
        p50_ms=run.ttft_at(0.5),
        p99_ms=run.ttft_at(0.99),
        hit_rate=summary["hit_rate"],
        prefix_copies=summary["prefix_copies"],
        utilisation=summary["utilisation"]["mean"],
        failed=sum(summary["errors"].values()) + summary["lost"],
        digest=summary["digest"],
    )


def cost_wins(found: dict[str, list[Figures]]) -> bool:
    """Whether the medians of cost are below all others."""
    return all(
        median(found["cost"], name) < median(found[policy], name)
        for policy in found
        if policy != "cost"
        for name in ("p50_ms", "p99_ms")
    )


def median(runs: list[Figures], name: str) -> float:
    return float(statistics.median(getattr(run, name) for run in runs))


def table(scene: Scene, found: dict[str, list[Figures]]) -> Iterator[str]:
    """Markdown."""
    num = len(found["cost"])
    yield (
        f"| {scene.name}, {scene.requests} requests, {scene.engines} engines, {num} seeds |"
        + "|" * 6
    )
    yield "|---|---|---|---|---|---|---|"
    yield "| policy | TTFT p50 ms | p99 ms | cost better: p50, p99 | hit rate | copies | failed |"
    for policy, runs in found.items():
        better = "-"
        if policy != "cost":
            pairs = list(zip(found["cost"], runs, strict=True))
            p50 = sum(cost.p50_ms < run.p50_ms for cost, run in pairs)
            p99 = sum(cost.p99_ms < run.p99_ms for cost, run in pairs)
            better = f"{p50}, {p99} of {num}"
        yield (
            f"| {policy} | {spread(runs, 'p50_ms')} | {spread(runs, 'p99_ms')} | {better}"
            f" | {median(runs, 'hit_rate'):.3f} | {median(runs, 'prefix_copies'):.2f}"
            f" | {sum(run.failed for run in runs)} |"
        )


def spread(runs: list[Figures], name: str) -> str:
    """Median, and the least and the most in brackets."""
    values = [getattr(run, name) for run in runs]
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def main(args: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--requests", type=int, nargs=2, default=(4000, 2000))
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args(args)
    scenes = (
        Scene("mooncake", given.traces / "mooncake_conversation.jsonl.gz", given.requests[0], 4),
        Scene("claude_code", given.traces / "claude_code_sessions.jsonl.gz", given.requests[1], 16),
    )
    jobs = [(scene.name, *pair) for scene in scenes for pair in jobs_of(scene, given.seeds)]
    done = 0

    def count(index: int, outcome: Done) -> None:
        nonlocal done
        done += 1
        name, policy, job = jobs[index]
        sys.stderr.write(f"{done}/{len(jobs)} {name} {policy} seed {job.config.seed}\n")

    begun = time.perf_counter()
    outcomes = run_jobs([job for *_, job in jobs], processes=given.processes, on_done=count)
    found: dict[str, dict[str, list[Figures]]] = {
        scene.name: {policy: [] for policy in POLICIES} for scene in scenes
    }
    for (name, policy, _), outcome in zip(jobs, outcomes, strict=True):
        if isinstance(outcome, Failed):
            raise SystemExit(f"{name} {policy}: {outcome.error}")
        found[name][policy].append(figures_of(outcome))
    for scene in scenes:
        print("\n".join(table(scene, found[scene.name])), end="\n\n")
    print(json.dumps(as_json(scenes, found) | {"wall_s": round(time.perf_counter() - begun, 1)}))


def as_json(
    scenes: tuple[Scene, ...], found: dict[str, dict[str, list[Figures]]]
) -> dict[str, Any]:
    return {
        scene.name: {
            "requests": scene.requests,
            "engines": scene.engines,
            "kv_tokens": KV_TOKENS,
            "block_size": BLOCK_TOKENS,
            "cost_wins": cost_wins(found[scene.name]),
            "policies": {
                policy: [run._asdict() for run in runs]
                for policy, runs in found[scene.name].items()
            },
        }
        for scene in scenes
    }


if __name__ == "__main__":
    main(sys.argv[1:])
