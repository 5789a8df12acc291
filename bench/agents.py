"""Agents on one document by a service with a real model, over Ray and HTTP: two of them, then 1 to 64.

    python -m bench.agents [--model smollm2] [--dtype auto] [--rounds 5] [--most 64] [--url URL] [--quick]
                           [--out FILE]

`mallee serve`, one worker, unless `--url` names a service that runs. Scenes, each from a cold document:

    pair   two agents with a question each. `apart`: one after the other, each computes the document;
           `shared`: both fork its capsule. `second_first_ms`: from the moment at which the document is
           there, or that of asking, to the second agent's first token. Sides by turns; medians of the rounds
    sweep  1, 2, 4 .. agents at once, each with turns that go on from its own last capsule: milliseconds of
           a turn, `jitter_ms` (how far an agent's turns differ), tokens a second, Jain's index over the
           agents' rates, and the knee: the fewest agents of which twice as many bring little more

The table goes to stderr, the last line of stdout is one JSON object.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.measure import conclude, machine, medians, rounded
from bench.mocker.scenes import knee
from bench.serve.sides import serve_model
from mallee.cli.demo.text import DOCUMENT, QUESTIONS
from mallee.client import AsyncCapsule, AsyncMallee

TIMEOUT_S: Final = 600.0


class Scale(NamedTuple):
    rounds: int = 5
    most: int = 64
    document_chars: int = len(DOCUMENT)
    answer_tokens: int = 32
    turns: int = 4
    turn_tokens: int = 24


QUICK: Final = Scale(1, 2, 200, 3, 2, 3)


class Pair(NamedTuple):
    """Two agents' work. `prefilled`: prompt tokens that were computed for both."""

    total_ms: float
    second_first_ms: float
    prefilled: int


class Agent(NamedTuple):
    """One agent's turns, in milliseconds, and its tokens a second."""

    turns_ms: list[float]
    tokens_per_s: float


def _since(begin: float) -> float:
    return 1e3 * (time.perf_counter() - begin)


async def apart(client: AsyncMallee, document: str, salt: str, scale: Scale) -> Pair:
    """Each agent asks with the whole text, and finds nothing that the other left."""
    begin, prefilled, first_ms = time.perf_counter(), 0, 0.0
    for i in range(2):
        (branch,) = await client.stream(
            f"{document}\n\n{QUESTIONS[i]}",
            max_tokens=scale.answer_tokens,
            ignore_eos=True,
            cache_salt=f"{salt}-{i}",
        ).wait()
        prefilled += branch.prefill_tokens or 0
        first_ms = branch.ttft_ms or 0.0
    return Pair(_since(begin), first_ms, prefilled)


async def shared(client: AsyncMallee, document: str, salt: str, scale: Scale) -> Pair:
    """Both agents fork the document's capsule."""
    begin = time.perf_counter()
    async with client.prefill(document, cache_salt=salt) as capsule:
        suffixes = [f"\n\n{question}" for question in QUESTIONS[:2]]
        branches = await capsule.fork(
            suffixes, max_tokens=scale.answer_tokens, ignore_eos=True
        ).wait()
        total_ms = _since(begin)
        prefilled = capsule.tokens + sum(branch.prefill_tokens or 0 for branch in branches)
    return Pair(total_ms, branches[1].ttft_ms or 0.0, prefilled)


async def pair(client: AsyncMallee, scale: Scale, run: str) -> dict[str, Any]:
    """side -> medians; `speedup` and `activation` are medians of the rounds' ratios."""
    document = DOCUMENT[: scale.document_chars]
    sides = {"apart": apart, "shared": shared}
    runs: dict[str, list[Pair]] = {name: [] for name in sides}
    for number in range(scale.rounds):
        for name in (*sides,) if number % 2 else (*reversed(sides),):
            found = await sides[name](client, document, f"{run}-{number}-{name}", scale)
            runs[name].append(found)
            print(f"  round {number + 1}, {name}: {found}", file=sys.stderr)
    both = list(zip(runs["apart"], runs["shared"], strict=True))
    return {
        **{name: medians([each._asdict() for each in found]) for name, found in runs.items()},
        "speedup": statistics.median(a.total_ms / s.total_ms for a, s in both),
        "activation": statistics.median(a.second_first_ms / s.second_first_ms for a, s in both),
    }


async def _agent(capsule: AsyncCapsule, number: int, scale: Scale) -> Agent:
    """Turn after turn from the capsule that the one before left."""
    took, begin, drawn = [], time.perf_counter(), 0
    source: Any = capsule
    for turn in range(scale.turns):
        asked = time.perf_counter()
        suffix = f"\n\nAgent {number}, turn {turn}: {QUESTIONS[(number + turn) % len(QUESTIONS)]}"
        branches = source.fork(suffix, max_tokens=scale.turn_tokens, ignore_eos=True)
        (source,) = await branches.wait()
        took.append(_since(asked))
        drawn += scale.turn_tokens
    return Agent(took, 1e3 * drawn / _since(begin))


async def sweep(client: AsyncMallee, scale: Scale, run: str) -> dict[str, Any]:
    """Number of agents -> their figures; and the knee."""
    rows: dict[str, Any] = {}
    rates: dict[int, float] = {}
    document = DOCUMENT[: scale.document_chars]
    async with client.prefill(document, cache_salt=run) as capsule:
        await _agent(capsule, 0, scale)  # warms up
        num = 1
        while num <= scale.most:
            begin = time.perf_counter()
            found = await asyncio.gather(*(_agent(capsule, i, scale) for i in range(num)))
            rates[num] = 1e3 * num * scale.turns * scale.turn_tokens / _since(begin)
            rows[str(num)] = {**figures(found), "output_tokens_per_s": rates[num]}
            print(f"  {num} agents: {rows[str(num)]}", file=sys.stderr)
            num *= 2
    return {**rows, "knee": knee(rates)}


def figures(agents: Sequence[Agent]) -> dict[str, float]:
    """Of agents that worked side by side."""
    turns = sorted(each for agent in agents for each in agent.turns_ms)
    rates = [agent.tokens_per_s for agent in agents]
    return {
        **{f"p{q}_ms": percentile(turns, q) for q in (50, 95, 99)},
        "jitter_ms": statistics.fmean(statistics.pstdev(agent.turns_ms) for agent in agents),
        "fairness": sum(rates) ** 2 / (len(rates) * sum(rate * rate for rate in rates)),
    }


def percentile(ordered: Sequence[float], q: int) -> float:
    """The value at or below which `q` per cent are, the nearest one."""
    return ordered[max(0, -(-q * len(ordered) // 100) - 1)]


async def bench(url: str, scale: Scale) -> dict[str, Any]:
    """scene -> figures."""
    run = str(time.time_ns())  # salts that no earlier run had
    async with AsyncMallee(url, timeout=TIMEOUT_S) as client:
        await client.complete("Are you warm?", max_tokens=8, n=8)
        print("pair", file=sys.stderr)
        two = await pair(client, scale, run)
        print("sweep", file=sys.stderr)
        return {"pair": two, "sweep": await sweep(client, scale, run)}


def _lines(found: dict[str, Any]) -> Iterator[str]:
    two = found["pair"]
    for name in ("apart", "shared"):
        yield f"{name:8}" + "  ".join(f"{key} {value:g}" for key, value in two[name].items())
    yield f"speedup {two['speedup']:g}, the second agent's start {two['activation']:g} times as soon"
    for num, row in found["sweep"].items():
        if isinstance(row, dict):
            yield f"{num:>3} " + "  ".join(f"{key} {value:g}" for key, value in row.items())
    yield f"knee: {found['sweep']['knee']}"


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="as of `mallee serve`")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--most", type=int)
    parser.add_argument("--url", default="", help="a service that runs, in place of one of its own")
    parser.add_argument("--quick", action="store_true", help="a moment each: does it run at all")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(given)
    scale = QUICK if args.quick else Scale()
    scale = scale._replace(rounds=args.rounds or scale.rounds, most=args.most or scale.most)
    with nullcontext(args.url) if args.url else serve_model(args.model, args.dtype) as url:
        found = rounded(asyncio.run(bench(url, scale)))
    for line in _lines(found):
        print(line, file=sys.stderr)
    about = {
        **{"model": args.url or args.model, "dtype": args.dtype, "scale": scale._asdict()},
        "versions": {name: metadata.version(name) for name in ("mallee", "ray", "torch")},
        **machine(),
    }
    conclude(found | about, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
