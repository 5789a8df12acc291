"""Cost of a draw: the sampler by rows and options, and how much of a grammar's masks is hidden.

Times are medians on this machine; `masks.py` has those of masks. `overlap`: an engine whose forward pass
sleeps for 5 ms and whose masks sleep for 2 ms, with masks computed beside the forward pass and before it.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.doubles.forward import MockForward
from bench.doubles.structures import MockStructures
from bench.measure import machine
from mallee.mocker.passes import mock_spec
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Generate, Grammar, Limits, Sampling, pack_tokens
from mallee.worker.engine import Engine
from mallee.worker.forward import Draw, ForwardBatch, Logits, TokenHistory, distinct
from mallee.worker.model.sampling.sampler import sample
from mallee.worker.records import EngineConfig

VOCAB = 49152
FORWARD_S, MASKS_S = 0.005, 0.002
OPTIONS = {
    "greedy": Sampling(),
    "temperature": Sampling(1.0),
    "top_k": Sampling(1.0, 50),
    "top_p": Sampling(1.0, 0, 0.9),
    "penalties": Sampling(1.0, 50, repetition_penalty=1.1, presence_penalty=0.5),
}


def median_ms(call: Callable[[], object], repeats: int) -> float:
    call()
    samples = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        samples.append(1e3 * (time.perf_counter() - begin))
    return round(statistics.median(samples), 3)


def sampler_ms(rows: Sequence[int], repeats: int) -> dict[str, dict[str, float]]:
    """By option and rows: one call over as many rows of one bfloat16 batch."""
    found: dict[str, dict[str, float]] = {}
    generator = torch.Generator().manual_seed(0)
    for name, sampling in OPTIONS.items():
        for n in rows:
            batch = (3 * torch.randn(n, VOCAB, generator=generator)).bfloat16().unbind(0)
            history = TokenHistory(distinct(range(0, 4000, 3))) if name == "penalties" else None
            draws = [Draw(row, sampling, i, 7, history) for i, row in enumerate(batch)]
            with torch.inference_mode():
                times = median_ms(lambda d=draws: sample(d), max(3, repeats // n))
            found.setdefault(name, {})[str(n)] = times
    return found


class SlowForward(MockForward):
    """Takes FORWARD_S."""

    def forward(self, batch: ForwardBatch) -> list[Logits]:
        time.sleep(FORWARD_S)
        return list(super().forward(batch))


def overlap_ms(steps: int) -> dict[str, float]:
    """A step of one constrained branch, with the masks beside the forward pass and before it."""
    found = {}
    for overlap in (True, False):
        structures = MockStructures(64, (63,), lambda _: time.sleep(MASKS_S))
        forward = SlowForward(mock_spec(eos_token_ids=(63,)), num_blocks=64, block_size=16)
        engine = Engine(
            forward,
            config=EngineConfig(overlap=overlap),
            clock=time.monotonic,
            worker=WorkerId("w0"),
            incarnation=Incarnation(1),
            structures=structures,
        )
        path = Grammar("choice", json.dumps([[i % 60 for i in range(steps + 4)]]))
        engine.submit(Generate("r", pack_tokens([1]), Limits(steps + 9), grammar=path), "g")
        found["beside" if overlap else "before"] = median_ms(engine.step, steps)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result: dict[str, Any] = {
        "vocab_size": VOCAB,
        "sampler_ms": sampler_ms(args.rows, args.repeats),
        "overlap_ms": overlap_ms(40),
        "threads": args.threads,
        "torch": torch.__version__,
        **machine(),
    }
    for key, value in result.items():
        print(f"{key:>12}  {value}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
