"""The time of a search that is not the model's: the most that a policy beside the engine could save.

    python -m bench.search.overhead [--rounds 5] [--quick] [--out FILE]

MCTS of 50 expansions of 4, one at a time, by `POST /v1/search` of `mallee serve` over Ray and HTTP, on one
mocked engine; the rest is real. `whole`: steps take what Llama 3.1 8B takes on an H200. `host`: steps take no
time, so that policy, gateway, links and the engine's own Python are all that is left. `share` is host by
whole: at the most so much would be gone if the gateway, and all beside it, took no time.
Figures are medians of the rounds, in which both take turns. The table goes to stderr, the last line of stdout
is one JSON object.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from bench.measure import conclude, machine
from bench.serve.sides import MODEL, serve

EXPANSIONS: Final = 50
WIDTH: Final = 4
STEP_TOKENS: Final = (1, 16, 50)
TIMEOUT_S: Final = 120.0
PROMPT: Final = "A mallee is a tree of many trunks from one root. " * 100


@contextmanager
def service(speedup: float) -> Iterator[httpx.Client]:
    """`mallee serve` with one mocked engine, whose steps are divided by `speedup`; 0: they take no time."""
    with (
        tempfile.TemporaryDirectory() as folder,
        serve(Path(folder), 1, speedup=speedup) as url,
        httpx.Client(base_url=url, timeout=TIMEOUT_S) as client,
    ):
        yield client


def searched_s(client: httpx.Client, expansions: int, step_tokens: int, seed: int) -> float:
    """Seconds of one search, whose tree is whole."""
    body = {
        "model": MODEL,
        "prompt": f"{PROMPT}{seed}",
        "policy": {"type": "mcts", "width": WIDTH, "depth": 256, "step_tokens": step_tokens},
        "budget": {"expansions": expansions},
        "seed": seed,
    }
    begun = time.perf_counter()
    found = client.post("/v1/search", json=body).raise_for_status().json()
    seconds = time.perf_counter() - begun
    assert found["spent"]["completion_tokens"] == expansions * WIDTH * step_tokens
    return seconds


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    rounds, expansions = (1, 5) if args.quick else (args.rounds, EXPANSIONS)
    figures: dict[str, Any] = {}
    with service(1.0) as timed, service(0.0) as untimed:
        sides = {"whole": timed, "host": untimed}
        for client in sides.values():
            searched_s(client, expansions, 1, 0)
        for tokens in STEP_TOKENS:
            seconds: dict[str, list[float]] = {name: [] for name in sides}
            for seed in range(1, rounds + 1):
                for name, client in sides.items():
                    seconds[name].append(searched_s(client, expansions, tokens, seed))
            whole, host = (statistics.median(seconds[name]) for name in sides)
            figures[str(tokens)] = {
                **{"whole_s": whole, "host_s": host, "share": host / whole},
                "host_ms_per_expansion": host * 1e3 / expansions,
            }
            print(f"{tokens:3} tokens a step: {figures[str(tokens)]}", file=sys.stderr)
    scale = {"rounds": rounds, "expansions": expansions, "width": WIDTH}
    conclude({"steps": figures, "scale": scale, **machine()}, args.out)


if __name__ == "__main__":
    main()
