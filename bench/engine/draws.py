"""Draws of whole batches against draws row by row: times by settings, rows and vocabulary.

`rows`: `sampler.sample`, which a CPU draws by; `batch`: `batched.sample_batch`, which other devices draw by.
With `--device cuda` the batch is drawn there, and rows on the CPU from logits that lie there already.
Milliseconds, the least of some rounds by turns. Both must draw the same tokens.

    python -m bench.engine.draws [--device cpu] [--rows 32 256] [--vocab 49152 151936] [--threads 2]
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from bench.measure import machine
from mallee.protocol.messages import Sampling
from mallee.worker.forward import Draw, LogprobQuery, TokenHistory, distinct, num_words
from mallee.worker.model.kernels.race import race
from mallee.worker.model.sampling.batched import sample_batch
from mallee.worker.model.sampling.logprobs import logprobs
from mallee.worker.model.sampling.sampler import sample

KINDS = {
    "greedy": Sampling(),
    "greedy_penalties": Sampling(repetition_penalty=1.1, presence_penalty=0.5),
    "temperature": Sampling(0.8),
    "mask": Sampling(0.8),
    "top_k": Sampling(0.8, 50),
    "top_p": Sampling(0.8, 0, 0.9),
    "all": Sampling(0.8, 50, 0.9, 0, 0.02, 1.1, 0.5),
}


def some_draws(kind: str, batch: torch.Tensor) -> list[Draw]:
    """One draw from each row, each with a mask or a past of its own where the kind has one."""
    size, rng = batch.shape[1], np.random.default_rng(0)
    draws = []
    for i, row in enumerate(batch.unbind(0)):
        past = allowed = None
        if kind in ("greedy_penalties", "all"):
            past = TokenHistory(distinct(rng.integers(0, size, 1500).tolist()))
            for token in rng.integers(0, size, 200).tolist():
                past.add(token)
        if kind == "mask":
            bits = rng.random(32 * num_words(size)) < 0.5
            allowed = np.packbits(bits, bitorder="little").view("<i4")
        draws.append(Draw(row, KINDS[kind], i, 7, past, allowed))
    return draws


def by_turns(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds of each call, the least of all rounds but one before."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            found[name].append(1e3 * (time.perf_counter() - begin))
    return {name: round(min(times[1:]), 3) for name, times in found.items()}


def measured(num_rows: int, size: int, device: str, rounds: int) -> dict[str, dict[str, float]]:
    """Times by kind of settings, and of log-probabilities with five likeliest."""
    generator = torch.Generator().manual_seed(0)
    batch = (3 * torch.randn(num_rows, size, generator=generator)).bfloat16()
    there = batch.to(device)
    found = {}
    for kind in KINDS:
        draws = some_draws(kind, batch)
        moved = [d._replace(logits=row) for d, row in zip(draws, there.unbind(0), strict=True)]
        if sample_batch(moved) != sample(draws):
            raise SystemExit(f"{kind}: the batch draws other tokens than the rows")
        calls = {"rows": lambda d=draws: sample(d), "batch": lambda d=moved: sample_batch(d)}
        found[kind] = by_turns(calls, rounds)
    queries = [LogprobQuery(row, 7, 5) for row in there.unbind(0)]
    calls = {
        "rows": lambda: [logprobs([query]) for query in queries],
        "batch": lambda: logprobs(queries),
    }
    return {**found, "logprobs": by_turns(calls, rounds)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--vocab", type=int, nargs="+", default=[49_152, 151_936])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    race.compile()
    result = {}
    with torch.inference_mode():
        for size in args.vocab:
            for num_rows in args.rows:
                found = measured(num_rows, size, args.device, args.rounds)
                result[f"{num_rows}x{size}"] = found
                for kind, times in found.items():
                    print(f"{num_rows:>4} x {size:<7} {kind:<17} {times}", flush=True)
    conditions = {"device": args.device, "threads": args.threads, "torch": torch.__version__}
    print(json.dumps({"ms": result, **conditions, **machine()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
