"""Searches on a mocked H200 in virtual time: by forks, by requests with a block cache, by requests without.

    python -m bench.search [--runs 10] [--shapes S1,S2,...] [--no-scenes] [--timing NAME] [--out FILE]

Programs are in `programs.py`, ways of serving them in `ways.py`: real tree, pool and scheduler, steps timed
by a profile that comes with Mallee (`mallee profile --fits`), with a jitter of 5 % a step that is assumed.
All ways must give the same answers. A figure is the median over runs, each with a seed of its own, with a
bootstrap interval of 95 %; a speed-up is that of each seed's pair of runs. `decode` alone is in host time.
Equal seeds give equal figures but there. The last line is one JSON object.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.measure import conclude, machine
from bench.search.decode import decode_cost
from bench.search.programs import SHAPES, Shape, steps
from bench.search.ways import BLOCK_SIZE, WAYS, Run, Setting, play
from mallee.mocker.timing import Timing, load_timing
from mallee.mocker.timing.profiles import DEFAULT_ENGINE, fitted

PROFILE: Final = "h200-llama-3.1-8b-bf16"
OTHERS: Final = ("h200-llama-3.1-8b-fp8", "h200-llama-3.1-8b-bf16@kernels")
JITTER: Final = 0.05
PROMPT: Final = 2048
OTHER_PROMPTS: Final = (512, 8192)
FIRST_TOKENS: Final = (2048, 4096, 8192)  # prompts
SCALED: Final = ("tree", "mcts", "mcts_4")  # shapes over all prompts
POOLS: Final = (4096, 6144, 8192, 32_768)
POOL_SEARCHES: Final = 2
POOL_RUNS: Final = 3
DECODE_ROWS: Final = (1, 8, 32)
RESAMPLES: Final = 2000


def interval(values: Sequence[float]) -> dict[str, float]:
    """The median, and the 95 % interval of medians of samples drawn again from `values`."""
    draws = np.random.default_rng(0).choice(np.array(values), (RESAMPLES, len(values)))
    low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
    return {"median": statistics.median(values), "low": float(low), "high": float(high)}


def figures(runs: Sequence[Run]) -> dict[str, Any]:
    """Of one way. TTFT is over the answers of all runs."""
    ttft = 1e3 * np.concatenate([run.ttft_s for run in runs])
    kept = ("prefilled", "peak_blocks", "held_blocks", "resent", "preemptions")
    return {
        "total_s": interval([run.total_s for run in runs]),
        "total_p99_s": float(np.percentile([run.total_s for run in runs], 99)),
        "drawn_per_s": statistics.median(run.drawn / run.total_s for run in runs),
        "ttft_ms": {f"p{q}": float(np.percentile(ttft, q)) for q in (50, 99)},
        **{name: statistics.median(getattr(run, name) for run in runs) for name in kept},
    }


def compared(shape: Shape, setting: Setting, num_runs: int) -> dict[str, Any]:
    """One shape by all ways. Raises RuntimeError if ways gave different answers."""
    runs = {
        way: [play(shape, way, setting, seed) for seed in range(1, num_runs + 1)] for way in WAYS
    }
    answers = {tuple(run.answers for run in each) for each in runs.values()}
    if len(answers) > 1:
        raise RuntimeError(f"{shape.text}: ways gave different answers: {answers}")
    return {
        **{way: figures(each) for way, each in runs.items()},
        "speedup": {
            way: {
                other: interval(
                    [
                        theirs.total_s / ours.total_s
                        for ours, theirs in zip(runs[way], runs[other], strict=True)
                    ]
                )
                for other in WAYS
                if other != way
            }
            for way in ("forks", "tree")
        },
    }


def first_tokens(timing: Timing, kv_tokens: int, num_runs: int) -> dict[str, Any]:
    """Milliseconds to the first token of a prompt, and of what continues its answer, by prompt.

    `cold` computes the prompt; `restore` continues a capsule with nothing, `fork` with 64 tokens; `cached`
    sends the text and these 64 tokens again, with a block cache.
    """
    cases = {
        "cold": ("resent", 0, 0),
        "cached": ("cached", 64, 1),
        "fork": ("forks", 64, 1),
        "restore": ("forks", 0, 1),
    }
    found: dict[str, Any] = {}
    for prompt in FIRST_TOKENS:
        times: dict[str, list[float]] = {}
        for name, (way, suffix, place) in cases.items():
            shape = Shape(name, steps, {"depth": 2, "width": 1, "tokens": 16, "suffix": suffix})
            # The first request has a suffix too: a prompt of just so many tokens in all.
            setting = Setting(timing, kv_tokens, prompt - suffix)
            runs = [play(shape, way, setting, seed) for seed in range(1, num_runs + 1)]
            times[name] = [1e3 * run.ttft_s[place] for run in runs]
        row = {name: interval(each) for name, each in times.items()}
        for name in ("cached", "fork", "restore"):
            pairs = zip(times["cold"], times[name], strict=True)
            row[f"{name}_speedup"] = interval([cold / warm for cold, warm in pairs])
        found[str(prompt)] = row
    least, most = min(map(int, found)), max(map(int, found))
    for name in cases:
        rise = found[str(most)][name]["median"] - found[str(least)][name]["median"]
        found.setdefault("slope_us_per_token", {})[name] = 1e3 * rise / (most - least)
    return found


def row(name: str, found: Mapping[str, Any]) -> str:
    """A line for people."""
    parts = [
        f"{way} {found[way]['total_s']['median']:8.4g} s {found[way]['peak_blocks']:6.0f} blocks"
        for way in WAYS
    ]
    against = ", ".join(
        f"{each['median']:.2f} x {way}" for way, each in found["speedup"]["tree"].items()
    )
    return f"  {name:<24} {'  '.join(parts)}  tree is {against}"


def conditions(args: argparse.Namespace) -> dict[str, Any]:
    """All that the figures depend on."""
    profile = fitted().profiles[args.timing.partition("@")[0]]
    engine = args.timing.partition("@")[2] or DEFAULT_ENGINE
    return {
        "timing": args.timing,
        "gpu": profile.gpu,
        "model": profile.model_name,
        "quant": profile.quant,
        "source": profile.source,
        "engine": engine,
        "engine_source": fitted().engines[engine].source if engine in fitted().engines else None,
        "jitter": JITTER,
        "runs": args.runs,
        "pool_runs": min(args.runs, POOL_RUNS),
        "prompt": PROMPT,
        "kv_tokens": profile.kv_tokens,
        "kv_bytes_per_token": profile.kv_bytes_per_token,
        "block_size": BLOCK_SIZE,
        "shapes": {name: [shape.text, shape.figures] for name, shape in SHAPES.items()},
        **machine(),
    }


def timing_of(name: str) -> Timing:
    return replace(load_timing(name), jitter=JITTER)


def scenes(args: argparse.Namespace, kv_tokens: int) -> dict[str, Any]:
    """All but the shapes over one prompt: prompts, profiles, pools, first tokens, decodes."""
    timing, found = timing_of(args.timing), {}
    by_prompt: dict[str, Any] = {}
    for name in SCALED:
        by_prompt[name] = {}
        for prompt in OTHER_PROMPTS:
            setting = Setting(timing, kv_tokens, prompt)
            by_prompt[name][str(prompt)] = each = compared(SHAPES[name], setting, args.runs)
            print(row(f"{name} over {prompt}", each), flush=True)
    found["prompts"] = by_prompt
    found["profiles"] = {}
    for other in OTHERS:
        setting = Setting(timing_of(other), kv_tokens, PROMPT)
        found["profiles"][other] = each = compared(SHAPES["mcts_4"], setting, args.runs)
        print(row(f"mcts_4, {other}", each), flush=True)
    found["pools"] = {"searches": POOL_SEARCHES}
    for pool in (*POOLS, kv_tokens):
        setting = Setting(timing, pool, PROMPT, searches=POOL_SEARCHES)
        each = compared(SHAPES["mcts"], setting, min(args.runs, POOL_RUNS))
        found["pools"][str(pool)] = each
        print(row(f"{POOL_SEARCHES} mcts in {pool}", each), flush=True)
    found["first_tokens"] = first_tokens(timing, kv_tokens, args.runs)
    found["decode"] = {}
    for rows in DECODE_ROWS:
        cost = decode_cost(timing, rows)
        found["decode"][str(rows)] = {**cost._asdict(), "slowdown": cost.slowdown}
        print(f"  decode, {rows} rows: {cost} {cost.slowdown:.4f}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=list(SHAPES))
    parser.add_argument("--no-scenes", action="store_true", help="the shapes alone")
    parser.add_argument("--timing", default=PROFILE, help="a profile of `mallee profile --fits`")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for name in args.shapes:
        if name not in SHAPES:
            parser.error(f"--shapes {name}: there are {', '.join(SHAPES)}")
    if args.runs < 1:
        parser.error(f"--runs {args.runs}: give at least 1")
    if args.timing.partition("@")[0] not in fitted().profiles:
        parser.error(f"--timing {args.timing}: there are {', '.join(fitted().profiles)}")
    report = conditions(args)
    setting = Setting(timing_of(args.timing), report["kv_tokens"], PROMPT)
    report["results"] = {}
    for name in args.shapes:
        report["results"][name] = compared(SHAPES[name], setting, args.runs)
        print(row(name, report["results"][name]), flush=True)
    if not args.no_scenes:
        report |= scenes(args, report["kv_tokens"])
    conclude(report, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
