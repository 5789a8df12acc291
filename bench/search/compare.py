"""Searches by a service with a real model, over Ray and HTTP: forks beside texts that are sent again.

    python -m bench.search.compare [--model smollm2] [--dtype auto] [--rounds 3] [--url URL]
                                   [--scenes game,mcts,beam] [--quick] [--out FILE]

`mallee serve`, one worker, unless `--url` names a service that runs. Ways in `clients.py`; all take turns in
every round, with the same seeds, and none finds what another has left in the cache. Scenes:

    game  the game of 24 (`examples/game_of_24.py`): a tree of thoughts, breadth first, nothing pruned, over
          four puzzles; arithmetic values at the client, so that no way is one call
    mcts  50 expansions of 4 continuations, 4 at a time, over a document, valued by log-probabilities
    beam  a beam of texts by `POST /v1/search` beside n samples of the same length, one fork; the prompt is
          computed before. `rows`: as many branches a level as samples. `wide`: as many texts go on as
          samples, twice the branches

Figures are medians of the rounds. `computed_per_unique`: prompt tokens computed and tokens drawn, by the
tokens of prompt and tree. `same_tree`: the share of trees that are those of `client`. The table goes to
stderr, the last line of stdout is one JSON object.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import httpx

from bench.measure import conclude, machine, medians, rounded
from bench.search.clients import TIMEOUT_S, WAYS, Played, Task
from bench.serve.sides import serve_model
from examples.game_of_24 import PROMPT, value
from mallee.cli.demo.text import DOCUMENT

PUZZLES: Final = ((4, 5, 6, 10), (1, 3, 4, 6), (2, 4, 6, 8), (1, 2, 4, 6))
GAME_WAYS: Final = ("client", "prefix", "cold")
SOLVED: Final = 1.0


class Scale(NamedTuple):
    rounds: int = 3
    puzzles: int = len(PUZZLES)
    thoughts: int = 5  # that go on, of a level
    branch: int = 8
    thought_tokens: int = 40
    expansions: int = 50
    step_tokens: int = 16
    prompt_chars: int = len(DOCUMENT)
    samples: int = 8
    beam_depth: int = 8


QUICK: Final = Scale(
    rounds=1,
    puzzles=1,
    thoughts=2,
    branch=2,
    thought_tokens=4,
    expansions=3,
    step_tokens=2,
    prompt_chars=80,
    samples=4,
    beam_depth=2,
)


def game(scale: Scale) -> list[Task]:
    policy = {
        **{"type": "tot_bfs", "width": scale.thoughts, "branch": scale.branch, "depth": 3},
        **{"step_tokens": scale.thought_tokens, "stop_at": SOLVED},
    }
    return [
        Task(
            PROMPT.format(numbers=" ".join(map(str, numbers))),
            policy,
            {"temperature": 0.8, "stop": "\n"},
            ("(left: 24)",),
            partial(value, numbers=list(numbers)),
        )
        for numbers in PUZZLES[: scale.puzzles]
    ]


def mcts(scale: Scale) -> list[Task]:
    policy = {
        **{"type": "mcts", "expansions": scale.expansions, "width": 4, "in_flight": 4},
        **{"depth": 8, "step_tokens": scale.step_tokens},
    }
    return [Task(DOCUMENT[: scale.prompt_chars], policy, {"temperature": 1.0})]


def compared(url: str, tasks: Sequence[Task], ways: Sequence[str], rounds: int) -> dict[str, Any]:
    """way -> its figures over all tasks. Each round begins with another way."""
    runs: dict[str, list[list[Played]]] = {way: [] for way in ways}
    begun = time.time_ns()  # salts that no earlier run had
    for number in range(rounds):
        first = number % len(ways)
        for way in (*ways[first:], *ways[:first]):
            played = [
                WAYS[way](url, task, number + 1, f"{way}-{begun}-{number}-{i}")
                for i, task in enumerate(tasks)
            ]
            runs[way].append(played)
            print(f"  round {number + 1}, {way}: {_summed(played)}", file=sys.stderr)
    return {way: {**figures(each), **_same(each, runs["client"])} for way, each in runs.items()}


def figures(runs: Sequence[Sequence[Played]]) -> dict[str, float]:
    """Medians over rounds of what all tasks of a round cost together."""
    rows = [_summed(played) for played in runs]
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def _summed(played: Sequence[Played]) -> dict[str, float]:
    costs = ("seconds", "prefilled", "drawn", "unique", "requests")
    found = {name: sum(getattr(each, name) for each in played) for name in costs}
    scores = [each.score for each in played if each.score is not None]
    return {
        **found,
        "computed_per_unique": (found["prefilled"] + found["drawn"]) / found["unique"],
        "best": max(scores, default=0.0),
        "solved": sum(score >= SOLVED for score in scores),
    }


def _same(runs: Sequence[Sequence[Played]], others: Sequence[Sequence[Played]]) -> dict[str, float]:
    pairs = [
        mine.tree == theirs.tree
        for one, other in zip(runs, others, strict=True)
        for mine, theirs in zip(one, other, strict=True)
    ]
    return {"same_tree": sum(pairs) / len(pairs)}


class Timed(NamedTuple):
    """One turn of a side of the beams. `best`: the geometric mean of its best text's probabilities.

    `drawn` and `best` are None where a server doesn't tell.
    """

    seconds: float
    drawn: int | None
    best: float | None


def asked(client: httpx.Client, path: str, body: Mapping[str, Any]) -> tuple[Any, float]:
    """An answer, and its seconds."""
    begin = time.perf_counter()
    answer = client.post(path, json=body)
    took_s = time.perf_counter() - begin
    return answer.raise_for_status().json(), took_s


def sampled(
    client: httpx.Client, path: str, begin: Mapping[str, Any], seed: int, scale: Scale
) -> Timed:
    """Samples by one request. `begin`: fields that say of what."""
    body = {
        **{"n": scale.samples, "max_tokens": scale.beam_depth * scale.step_tokens},
        **{"temperature": 1.0, "seed": seed, "logprobs": 0, **begin},
    }
    answer, took_s = asked(client, path, body)
    chances = [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]]
    best = max(math.exp(statistics.fmean(each)) for each in chances)
    return Timed(took_s, sum(map(len, chances)), best)


def beamed(
    client: httpx.Client, begin: Mapping[str, Any], seed: int, scale: Scale, width: int
) -> Timed:
    """A beam by one search. `begin`: a prompt or a capsule."""
    policy = {"type": "beam", "width": width, "branch": 2, "depth": scale.beam_depth}
    body = {
        **{"policy": {**policy, "step_tokens": scale.step_tokens}, **begin},
        **{"temperature": 1.0, "seed": seed},
    }
    found, took_s = asked(client, "/v1/search", body)
    return Timed(took_s, found["spent"]["completion_tokens"], found["score"])


def beams(url: str, scale: Scale) -> dict[str, Any]:
    """side -> medians of its figures; `ratio`: its time by that of the samples of the same round."""
    runs: dict[str, list[Timed]] = {"samples": [], "rows": [], "wide": []}
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
        made = client.post("/v1/capsules", json={"prompt": DOCUMENT[: scale.prompt_chars]})
        begin = {"capsule": made.raise_for_status().json()["id"]}
        path = f"/v1/capsules/{quote(begin['capsule'], safe='')}"
        sides = {
            "samples": partial(sampled, client, f"{path}/fork", {}, scale=scale),
            "rows": partial(beamed, client, begin, scale=scale, width=scale.samples // 2),
            "wide": partial(beamed, client, begin, scale=scale, width=scale.samples),
        }
        for number in range(scale.rounds + 1):
            for name, side in sides.items():
                timed = side(seed=number)
                if number:  # the first round warms up
                    runs[name].append(timed)
                    print(f"  round {number}, {name}: {timed}", file=sys.stderr)
        client.delete(path).raise_for_status()
    return {name: _beside(timed, runs["samples"]) for name, timed in runs.items()}


def _beside(timed: Sequence[Timed], samples: Sequence[Timed]) -> dict[str, float]:
    ratios = [mine.seconds / theirs.seconds for mine, theirs in zip(timed, samples, strict=True)]
    return {
        **medians([each._asdict() for each in timed]),
        "ratio": statistics.median(ratios),
        "least_ratio": min(ratios),
        "most_ratio": max(ratios),
    }


SCENES: Final[dict[str, Callable[[str, Scale], dict[str, Any]]]] = {
    "game": lambda url, scale: compared(url, game(scale), GAME_WAYS, scale.rounds),
    "mcts": lambda url, scale: compared(url, mcts(scale), list(WAYS), scale.rounds),
    "beam": beams,
}


def bench(url: str, scale: Scale, scenes: Sequence[str]) -> dict[str, Any]:
    """scene -> way or side -> figures."""
    warm_up = {"prompt": "Are you warm?", "max_tokens": 8, "n": 8}
    httpx.post(f"{url}/v1/completions", json=warm_up, timeout=TIMEOUT_S).raise_for_status()
    found = {}
    for name in scenes:
        print(name, file=sys.stderr)
        found[name] = SCENES[name](url, scale)
    return found


def _print_table(found: dict[str, Any]) -> None:
    for scene, sides in found.items():
        for name, row in rounded(sides).items():
            cells = "  ".join(f"{key} {value:g}" for key, value in row.items())
            print(f"{scene:5} {name:8} {cells}", file=sys.stderr)


def _scene_names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in SCENES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]}: there are {', '.join(SCENES)}")
    return names


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="as of `mallee serve`")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32")
    parser.add_argument("--rounds", type=int, help="of each scene")
    parser.add_argument("--scenes", type=_scene_names, default=list(SCENES))
    parser.add_argument("--url", default="", help="a service that runs, in place of one of its own")
    parser.add_argument("--quick", action="store_true", help="a moment each: does it run at all")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    args = _arguments(given)
    scale = QUICK if args.quick else Scale()
    scale = scale._replace(rounds=args.rounds or scale.rounds)
    with nullcontext(args.url) if args.url else serve_model(args.model, args.dtype) as url:
        found = bench(url, scale, args.scenes)
    _print_table(found)
    about = {
        **{"model": args.url or args.model, "dtype": args.dtype, "scale": scale._asdict()},
        "versions": {name: metadata.version(name) for name in ("mallee", "ray", "torch")},
        **machine(),
    }
    conclude(found | about, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
