"""Draws of a step: times by settings, rows and vocabulary.

By the sampler of the device, from packing to tokens on the host: a CPU draws row by row, CUDA all at once.
There `device_ms` is the device's own part, and `others` the share of tokens that a CPU draws otherwise from
the same logits: near ties. Milliseconds, the least of some rounds.

    python -m bench.engine.draws [--device cpu] [--rows 32 256] [--vocab 49152 151936] [--threads 2]
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from msgspec import structs

from bench.measure import machine
from mallee.protocol.messages import Sampling
from mallee.worker.forward import Draw, LogprobQuery, TokenHistory, distinct, num_words
from mallee.worker.model.backend import choose_sampler
from mallee.worker.model.cpu.race import race
from mallee.worker.model.sampling.sampler import sample

KINDS = {
    "greedy": Sampling(),
    "greedy_penalties": Sampling(repetition_penalty=1.1, presence_penalty=0.5),
    "temperature": Sampling(0.8),
    "mask": Sampling(0.8),
    "top_k": Sampling(0.8, 50),
    "top_p": Sampling(0.8, 0, 0.9),
    "all": Sampling(
        temperature=0.8,
        top_k=50,
        top_p=0.9,
        seed=0,
        min_p=0.02,
        repetition_penalty=1.1,
        presence_penalty=0.5,
    ),
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


def least_ms(call: Callable[[], Any], rounds: int) -> float:
    """The least of all rounds but one before."""
    times = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begin))
    return round(min(times[1:]), 3)


def device_ms(call: Callable[[], Any], rounds: int) -> float:
    """CUDA's own time for what `call` launches, which it finds enqueued behind work of some 10 ms."""
    times = []
    for _ in range(rounds + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20_000_000)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return round(min(times[1:]), 3)


def measured(num_rows: int, size: int, device: str, rounds: int) -> dict[str, dict[str, float]]:
    """By kind of settings, and of log-probabilities with five likeliest."""
    generator = torch.Generator().manual_seed(0)
    batch = (3 * torch.randn(num_rows, size, generator=generator)).bfloat16()
    there = batch.to(device)
    sampler = choose_sampler(device, batch.dtype, size)
    found: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        draws = some_draws(kind, batch)
        moved = [
            structs.replace(d, logits=row) for d, row in zip(draws, there.unbind(0), strict=True)
        ]
        found[kind] = {"ms": least_ms(lambda d=moved: sampler.sample(d), rounds)}
        if device != "cpu":
            pairs = zip(sampler.sample(moved), sample(draws), strict=True)
            found[kind]["others"] = sum(a != b for a, b in pairs) / num_rows
            found[kind]["device_ms"] = device_ms(lambda d=moved: sampler.launch(d), rounds)
    queries = [LogprobQuery(row, 7, 5) for row in there.unbind(0)]
    found["logprobs"] = {"ms": least_ms(lambda: sampler.logprobs(queries), rounds)}
    return found


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
                for kind, figures in found.items():
                    print(f"{num_rows:>4} x {size:<7} {kind:<17} {figures}", flush=True)
    conditions = {"device": args.device, "threads": args.threads, "torch": torch.__version__}
    print(json.dumps({"draws": result, **conditions, **machine()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
