"""Routing policies from an idle fleet to a saturated one, over working sets below and above its memory.

    python -m bench.router.spread [--engines 2 4 8] [--shared 1 16 64] [--ratios .3 .8 1.5 4]
                                [--gaps 20 1 .1 .02] [--turns 6]
    python -m bench.router.spread --trace FILE --kv-tokens N [--requests N] [--speedup X] [--engines 4]

Six sessions an engine over one beginning take turns in random order, `gap` seconds apart on average,
replayed in virtual time. `shared` are the beginning's ids of 64 tokens (a turn has 8), `ratio` is all text to
the fleet's memory. For each scene the default rule stands beside the best of the simple ones, figure by
figure, so that it is held against four rules at once. With a trace, that trace alone.

The last line is one JSON object: per scene the figures of every policy, `lead` in hit rate, ratios of TTFT;
`worst` and `mean` over scenes, and `losses`: scenes where a figure is more than 2 % behind.
"""

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any, Final

from bench.doubles.workloads import turns_in_any_order
from bench.router.policies import replayed
from mallee.mocker.replay.config import ReplayConfig
from mallee.traces.read import read_workload
from mallee.traces.workload import Workload

OTHERS: Final = ("dynamo", "least_loaded", "round_robin", "prefix_only")
TIMES: Final = ("p50", "p90")
ID_TOKENS: Final = 64
TURN_IDS: Final = 8
SESSIONS: Final = 6  # an engine
BEHIND: Final = 0.02


def figures(workload: Workload, policy: str, **config: Any) -> dict[str, float]:
    """One replay's hit rate, and its times to the first token in ms."""
    summary = replayed(workload, ReplayConfig(policy=policy, **config)).summary
    times = {name: round(summary["ttft_ms"][name], 2) for name in (*TIMES, "mean")}
    return {"hit_rate": round(summary["hit_rate"], 4), **times}


def compared(workload: Workload, **config: Any) -> dict[str, Any]:
    """A scene: figures of every policy, and the default rule's beside the best of the others."""
    by_policy = {each: figures(workload, each, **config) for each in ("cost", *OTHERS)}
    ours, others = by_policy["cost"], [by_policy[each] for each in OTHERS]
    lead = ours["hit_rate"] - max(each["hit_rate"] for each in others)
    ratios = {
        name: round(ours[name] / min(each[name] for each in others), 3) for name in (*TIMES, "mean")
    }
    return {"lead": round(lead, 4), **ratios, "policies": by_policy}


def summed_up(scenes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The worst scene and the mean of each comparison, and what is behind."""
    worst, mean, losses = {}, {}, {}
    for name in ("lead", *TIMES, "mean"):
        values = {scene: each[name] for scene, each in scenes.items()}
        pick = min if name == "lead" else max
        scene = pick(values, key=lambda scene: values[scene])
        worst[name] = {scene: values[scene]}
        mean[name] = round(statistics.fmean(values.values()), 3)
        losses[name] = [
            scene
            for scene, value in values.items()
            if (value < -BEHIND if name == "lead" else value > 1.0 + BEHIND)
        ]
    return {"worst": worst, "mean": mean, "losses": losses}


def main(args: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--shared", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.3, 0.8, 1.5, 4.0])
    parser.add_argument("--gaps", type=float, nargs="+", default=[20.0, 1.0, 0.1, 0.02])
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--speedup", type=float, default=1.0, help="of the trace's clock")
    parser.add_argument(
        "--kv-tokens", type=int, default=262_144, help="of each engine, for a trace"
    )
    given = parser.parse_args(args)
    scenes: dict[str, dict[str, Any]] = {}
    if given.trace is not None:
        workload = read_workload(given.trace, limit=given.requests)
        for engines in given.engines:
            config = {"engines": engines, "kv_tokens": given.kv_tokens, "speedup": given.speedup}
            scenes[f"{given.trace.name} engines {engines}"] = compared(workload, **config)
    else:
        every = (given.engines, given.shared, given.ratios, given.gaps)
        for engines, shared, ratio, gap in itertools.product(*every):
            num = SESSIONS * engines
            workload = turns_in_any_order(
                num, given.turns, shared_ids=shared, turn_ids=TURN_IDS, gap_s=gap
            )
            ids = shared + num * given.turns * TURN_IDS
            kv_ids = max(int(ids / ratio / engines), shared + given.turns * TURN_IDS + 4)
            name = f"engines {engines} shared {shared} ratio {ratio:g} gap {gap:g}"
            scenes[name] = compared(workload, engines=engines, kv_tokens=kv_ids * ID_TOKENS)
    print("| scene | lead in hits | TTFT p50 | p90 | mean |\n|---|---|---|---|---|")
    for name, each in scenes.items():
        print(f"| {name} | {each['lead']:+.3f} | {each['p50']} | {each['p90']} | {each['mean']} |")
    print(json.dumps({**summed_up(scenes), "scenes": scenes}))


if __name__ == "__main__":
    main(sys.argv[1:])
