"""The service as users start it, over Ray and HTTP, beside others: latency, requests/s, tokens/s.

    python -m bench.serve [--quick] [--sides serve,one_process,itl] [--smg PATH] [--dynamo PYTHON]
    python -m bench.serve --stages     the gateway's CPU for a request, by stage (`stages.py`)

Sides (`sides.py`): `mallee serve` with one gateway, with two, and behind Ray's Python proxy;
`mallee mock`, which is the same without Ray; smg over stubs; Dynamo's frontend over its mockers. 100
mocked engines that take no time. All sides are alive and take turns in every round, never two at a
time; medians of the rounds. The load generator (`bench.gateway.load`) is a process of its own.

Requests: 200 words, of which three quarters are one of 50 shared beginnings, 8 tokens, SSE; 1, 16 and
64 clients in a closed loop. Then 128 streams at once, of 1,000 tokens each: tokens/s to clients, from
the first request to the last token; an event holds what waited for its client. At last `itl`, a real
model's stream (`itl.py`). The table goes to stderr, the last line of stdout is one JSON object.
"""

import argparse
import json
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from bench import measure
from bench.gateway.__main__ import load
from bench.serve import itl, stages
from bench.serve.sides import MODEL, Programs, sides

PROMPT_CHARS = 960  # 200 words
FIGURES = ("p50_ms", "p99_ms", "first_p50_ms", "first_p99_ms", "rps")


class Scale(NamedTuple):
    engines: int = 100
    rounds: int = 3
    seconds: float = 4.0
    warm_up_s: float = 1.0
    clients: tuple[int, ...] = (1, 16, 64)
    streams: int = 128
    stream_tokens: int = 1000
    itl_rounds: int = 15
    itl_tokens: int = 128


QUICK = Scale(
    engines=10,
    rounds=1,
    seconds=0.3,
    warm_up_s=0.1,
    clients=(1, 4),
    streams=8,
    stream_tokens=50,
    itl_rounds=1,
    itl_tokens=8,
)


def measured(url: str, scale: Scale, seed: int) -> dict[str, dict[str, float]]:
    """case -> figures of one side's turn."""
    common = {"stream": True, "prompt_chars": PROMPT_CHARS, "model": MODEL, "seed": seed}
    found = {}
    for clients in scale.clients:
        timing = {"seconds": scale.seconds, "warm_up_s": scale.warm_up_s}
        run = load(url, concurrency=clients, prompts=4000, **timing, **common)
        found[f"c{clients}"] = {figure: run[figure] for figure in FIGURES}
    run = load(
        url,
        concurrency=scale.streams,
        requests=scale.streams,
        prompts=scale.streams,
        max_tokens=scale.stream_tokens,
        usage=True,
        **common,
    )
    found[f"streams{scale.streams}"] = {
        figure: run[figure]
        for figure in ("tokens_per_s", "tokens_per_event", "first_p50_ms", "first_p99_ms")
    }
    return found


def bench(scale: Scale, wanted: list[str], programs: Programs) -> dict[str, Any]:
    """side -> case -> figures: medians of the rounds."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        known = sides(folder, scale.engines, programs)
        names = [name for name in known if not wanted or name in wanted]
        urls = {name: stack.enter_context(known[name]()) for name in names}
        rounds: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in names}
        for number in range(scale.rounds):
            for name, url in urls.items():
                rounds[name].append(measured(url, scale, number))
                print(f"round {number}: {name} {_short(rounds[name][-1])}", file=sys.stderr)
    return {
        name: {case: measure.medians([each[case] for each in runs]) for case in runs[0]}
        for name, runs in rounds.items()
    }


def _short(run: dict[str, dict[str, float]]) -> str:
    parts = [
        f"{case} {figures['p50_ms']:.1f} ms {figures['rps']:.0f}/s"
        if "rps" in figures
        else f"{case} {figures['tokens_per_s']:.0f} tok/s"
        for case, figures in run.items()
    ]
    return ", ".join(parts)


def _print_table(found: dict[str, Any]) -> None:
    print(f"{'':>26}" + "".join(f"{side:>14}" for side in found), file=sys.stderr)
    for case, figures in next(iter(found.values())).items():
        for figure in figures:
            cells = (f"{measure.rounded(float(each[case][figure])):,}" for each in found.values())
            print(
                f"{f'{case}.{figure}':>26}" + "".join(f"{cell:>14}" for cell in cells),
                file=sys.stderr,
            )


def _arguments() -> argparse.Namespace:
    beside = Path(sys.executable).with_name("smg")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a moment each: does it run at all")
    parser.add_argument("--sides", default="", help="some of them, with commas; all by default")
    parser.add_argument("--stages", action="store_true", help="CPU of a request by stage, alone")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--engines", type=int)
    found = str(beside) if beside.exists() else shutil.which("smg") or ""
    parser.add_argument("--smg", default=found, help="its program; '' to leave it out")
    parser.add_argument("--dynamo", default="", help="a Python that has ai-dynamo")
    return parser.parse_args()


def main() -> int:
    args = _arguments()
    scale = QUICK if args.quick else Scale()
    given = {name: getattr(args, name) for name in ("rounds", "engines")}
    scale = scale._replace(**{name: value for name, value in given.items() if value is not None})
    programs = Programs(args.smg, args.dynamo)
    if args.stages:
        found = stages.bench(scale.engines, PROMPT_CHARS)
        print(json.dumps(measure.rounded(found) | measure.machine()))
        return 0
    wanted = [name for name in args.sides.split(",") if name]
    found = bench(scale, wanted, programs)
    if found:
        _print_table(found)
    if not wanted or "itl" in wanted:
        found["itl"] = itl.bench(scale.itl_rounds, scale.itl_tokens)
    about = {"scale": scale._asdict(), "versions": programs.versions(), **measure.machine()}
    print(json.dumps(measure.rounded(found) | about))
    return 0


if __name__ == "__main__":
    sys.exit(main())
