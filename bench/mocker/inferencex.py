"""Closed-loop runs of real servers, predicted: for `bench/mocker/fidelity.py --inferencex`.

A row is one run of InferenceX: so many clients at once, each sending its next request when the last is
answered, ten requests a client; prompts and answers of 0.8 to 1.0 times the nominal length; the mean
time to first token and mean time per token. It is predicted by the mocked engine under the profile of
the device in the same loop. What an engine adds (`EngineCosts`) is fitted to some rows and tested on
the others.
"""

import csv
import gzip
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from bench.mocker.one_engine import VirtualRun
from mallee.mocker.engine import MockedEngine
from mallee.mocker.texts import Texts
from mallee.mocker.timing.model import Timing
from mallee.mocker.timing.profiles import EngineCosts, fitted
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Generate, Limits, Sampling
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig

FILE = "inferencex_silicon_sample.csv.gz"
BLOCK_SIZE = 16
STEP_TOKENS = 8192  # what vLLM and TensorRT-LLM put into a step on these devices
LENGTHS_FROM = 0.8
REQUESTS_PER_CLIENT = 10


class Pair(NamedTuple):
    """One model on one device under one engine, as its rows name it, and its profile."""

    model: str
    system: str
    engine: str
    precision: str
    tp: int
    profile: str

    @property
    def name(self) -> str:
        return f"{self.profile}@{self.engine}"


PAIRS = tuple(
    Pair("meta-llama/Llama-3.1-70B", f"{gpu}_sxm", engine, "fp8", 4, f"{gpu}-llama-3.1-70b-fp8")
    for engine, gpu in (
        ("vllm", "h200"),
        ("vllm", "h100"),
        ("vllm", "b200"),
        ("trtllm", "h200"),
        ("trtllm", "b200"),
    )
)
SWEPT = (("h200_sxm", 1, "h200-llama-3.1-8b-fp8"), ("h100_sxm", 4, "h100-llama-3.1-70b-fp8"))
CALIBRATED_ON = "h200_sxm"
CALIBRATED_CLIENTS = 16  # runs with at most so many


class Run(NamedTuple):
    """Milliseconds, measured or predicted."""

    input_tokens: int
    output_tokens: int
    clients: int
    ttft_ms: float
    tpot_ms: float


def read_rows(folder: Path, pair: Pair, max_output: int) -> list[Run]:
    """The runs of `pair` with answers of at most `max_output`, smallest first."""
    found = []
    with gzip.open(folder / FILE, "rt") as file:
        for row in csv.DictReader(file):
            key = (row["model_path"], row["system"], row["backend"], row["precision"])
            is_plain = row["mode"] == "agg" and row["tp_size"] == str(pair.tp) and row["measured"]
            if key != pair[:4] or not is_plain or int(row["osl"]) > max_output:
                continue
            sizes = (int(row["isl"]), int(row["osl"]), int(row["batch_size"]))
            times = (float(row["silicon_ttft_ms"]), float(row["silicon_tpot_ms"]))
            found.append(Run(*sizes, *times))
    return sorted(found)


def predict(timing: Timing, run: Run, kv_tokens: int, *, seed: int = 0) -> Run:
    """The same loop with the mocked engine."""
    drawn = random.Random(seed)
    texts = Texts(BLOCK_SIZE)
    loop = VirtualRun(timing.request_s)
    engine = MockedEngine(
        timing=timing,
        num_blocks=kv_tokens // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        worker=WorkerId("w0"),
        incarnation=Incarnation(1),
        clock=loop.clock,
        config=EngineConfig(
            SchedulerConfig(max_step_tokens=STEP_TOKENS, max_rows=1024, policy="fcfs", gang=False),
            max_answer_capsules=0,
        ),
        texts=texts,
    )
    left = iter(range(run.clients * REQUESTS_PER_CLIENT))

    def send(_name: str = "", _branch: int = 0) -> None:
        number = next(left, None)
        if number is None:
            return
        num_in = drawn.randint(int(LENGTHS_FROM * run.input_tokens), run.input_tokens)
        num_out = drawn.randint(int(LENGTHS_FROM * run.output_tokens), run.output_tokens)
        prompt = texts.prompt((), num_in, BLOCK_SIZE)
        limits = Limits(num_out, ignore_eos=True)
        loop.send(loop.now, Generate(f"r{number}", prompt, limits, Sampling(seed=number)), 1)

    for _ in range(run.clients):
        send()
    loop.run(engine, send)
    lives = loop.lives.values()
    return run._replace(
        ttft_ms=1000 * fmean(life.ttft_s for life in lives),
        tpot_ms=1000 * fmean(life.tpot_s for life in lives),
    )


class Compared(NamedTuple):
    """Shares by which predictions miss, run by run: median and worst size, and the mean."""

    median: float
    worst: float
    bias: float

    @classmethod
    def of(cls, predicted: Iterable[float], measured: Iterable[float]) -> "Compared":
        off = [p / m - 1 for p, m in zip(predicted, measured, strict=True)]
        return cls(median(map(abs, off)), max(map(abs, off)), fmean(off))


def calibrate(pair: Pair, runs: Sequence[Run], source: str, *, rounds: int = 6) -> EngineCosts:
    """Costs that the engine of `pair` adds, fitted to `runs`: least squares of log ratios.

    Gauss-Newton with differences: four figures, none below 0, factors not below 0.5.
    """
    profile = fitted().profiles[pair.profile]
    device = profile.model.model()
    measured = np.log([time for run in runs for time in (run.ttft_ms, run.tpot_ms)])

    def misses(at: "np.ndarray[Any, np.dtype[np.float64]]") -> Any:
        costs = EngineCosts(float(at[0]), float(at[1]), at[2] / 1000, at[3] / 1000, source)
        timing = costs.timing(device)
        runs_now = [predict(timing, run, profile.kv_tokens) for run in runs]
        return np.log([t for run in runs_now for t in (run.ttft_ms, run.tpot_ms)]) - measured

    at = np.array([1.0, 1.0, 0.3, 20.0])  # factors, milliseconds
    least, nudges = np.array([0.5, 0.5, 0.0, 0.0]), np.array([0.02, 0.02, 0.1, 2.0])
    best, off = at, misses(at)
    for _ in range(rounds):
        slopes = np.stack([(misses(best + nudges * one) - off) for one in np.eye(4)], axis=1)
        step = np.linalg.lstsq(slopes, -off, rcond=None)[0] * nudges
        for shrink in (1.0, 0.5, 0.25):
            at = np.maximum(best + shrink * step, least)
            now = misses(at)
            if (now**2).sum() < (off**2).sum():
                best, off = at, now
                break
        else:
            break
    figures = [round(float(value), 4) for value in best]
    return EngineCosts(figures[0], figures[1], figures[2] / 1000, figures[3] / 1000, source)


def report(folder: Path, max_output: int, *, fit: bool) -> dict[str, Any]:
    """Every pair's runs beside their predictions. With `fit` engines are calibrated anew first."""
    engines: dict[str, EngineCosts] = {}
    if fit:
        for pair in PAIRS:
            if pair.system == CALIBRATED_ON:
                runs = [run for run in read_rows(folder, pair, max_output) if is_fitted(pair, run)]
                source = (
                    f"InferenceX, {pair.model.split('/')[-1]} {pair.precision} on {pair.tp}"
                    f" {pair.system}, {len(runs)} runs of up to {CALIBRATED_CLIENTS} clients"
                )
                engines[pair.engine] = calibrate(pair, runs, source)
                print(f"  {pair.engine}: {engines[pair.engine]}", flush=True)
    else:
        engines = fitted().engines
    pairs = {}
    for pair in PAIRS:
        profile = fitted().profiles[pair.profile]
        timing = engines[pair.engine].timing(profile.model.model())
        runs = read_rows(folder, pair, max_output)
        guesses = [predict(timing, run, profile.kv_tokens) for run in runs]
        pairs[pair.name] = _compared(pair, runs, guesses)
    for gpu, tp, profile in SWEPT:
        pairs[f"{profile}@vllm-0.10.1"] = _swept(folder, gpu, tp, profile, engines["vllm"])
    return {"engines": {name: _plain(costs) for name, costs in engines.items()}, "pairs": pairs}


def _swept(folder: Path, gpu: str, tp: int, profile: str, costs: EngineCosts) -> dict[str, Any]:
    """Dynamo's sweep of an older vLLM: lone prompts, and batches that only decode."""
    timing = costs.timing(fitted().profiles[profile].model.model())
    ttft, itl = [], []
    for row in _rows_of(folder / "dynamo_preswept_prefill.csv", gpu, tp):
        isl = int(row["isl"])
        chunks = [(min(STEP_TOKENS, isl - start), start) for start in range(0, isl, STEP_TOKENS)]
        predicted = timing.request_s + sum(timing.step_s([chunk], 0, 0) for chunk in chunks)
        ttft.append((1000 * predicted, float(row["ttft_ms"])))
    for row in _rows_of(folder / "dynamo_preswept_decode.csv", gpu, tp):
        active = float(row["kv_usage"]) * float(row["max_kv_tokens"])
        rows = round(active / float(row["context_length"]))
        itl.append((1000 * timing.step_s([], rows, active), float(row["itl_ms"])))
    found = {
        "ttft": Compared.of(*zip(*ttft, strict=True))._asdict(),
        "itl": Compared.of(*zip(*itl, strict=True))._asdict(),
    }
    print(f"{profile}@vllm-0.10.1 (Dynamo's sweep): {found}")
    return {"tested": {"points": len(ttft) + len(itl), **found}}


def _rows_of(path: Path, gpu: str, tp: int) -> list[dict[str, str]]:
    with path.open() as file:
        return [r for r in csv.DictReader(file) if r["gpu"] == gpu and r["tp"] == str(tp)]


def is_fitted(pair: Pair, run: Run) -> bool:
    """Whether engines are calibrated on it; the others test them."""
    return pair.system == CALIBRATED_ON and run.clients <= CALIBRATED_CLIENTS


def _compared(pair: Pair, runs: Sequence[Run], guesses: Sequence[Run]) -> dict[str, Any]:
    print(pair.name)
    groups: dict[str, list[tuple[Run, Run]]] = {"fitted": [], "tested": []}
    for run, guess in zip(runs, guesses, strict=True):
        group = "fitted" if is_fitted(pair, run) else "tested"
        groups[group].append((run, guess))
        print(
            f"  {run.input_tokens:>5} / {run.output_tokens:<5} x {run.clients:<4}"
            f" ttft {run.ttft_ms:>8.1f} predicted {guess.ttft_ms:>8.1f}"
            f"   tpot {run.tpot_ms:>6.2f} predicted {guess.tpot_ms:>6.2f}   {group}",
            flush=True,
        )
    return {name: _misses(group) for name, group in groups.items() if group}


def _misses(group: Sequence[tuple[Run, Run]]) -> dict[str, Any]:
    ttft = Compared.of((g.ttft_ms for _, g in group), (r.ttft_ms for r, _ in group))
    tpot = Compared.of((g.tpot_ms for _, g in group), (r.tpot_ms for r, _ in group))
    return {"runs": len(group), "ttft": ttft._asdict(), "tpot": tpot._asdict()}


def _plain(costs: EngineCosts) -> dict[str, Any]:
    return {name: getattr(costs, name) for name in costs.__struct_fields__}
