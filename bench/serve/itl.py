"""Time between tokens of a real model's stream: as a client sees it, beside the steps of the same engine.

`mallee serve` over Ray and HTTP with one worker, and an engine with the same settings in this process;
they take turns on the same prompts, and one waits while the other computes. A gap ends where a token's
event arrives at the client. What it adds to a step is the cost of gateway, sockets, HTTP and the worker's
own loop.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import httpx

from bench.serve.sides import MODEL, answering
from mallee.actors.build import load_forward, make_engine
from mallee.api.text.tokenizer import Tokenizer
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Generate, Limits, Sampling, pack_tokens
from mallee.runtime.addresses import free_port
from mallee.runtime.config import AppConfig, EngineSettings
from mallee.worker.engine import Engine
from mallee.worker.model.loading.source import resolve_model

WEIGHTS: Final = "smollm2"
THREADS: Final = 1
PROMPT: Final = "A long story of a river, number {}. Once upon a time"
GREEDY: Final = Sampling(temperature=0.0, logprobs=0)


def step_ms(engine: Engine, name: str, prompt: list[int], max_tokens: int) -> list[float]:
    """The engine's steps that draw one token each, the first left out."""
    engine.submit(
        Generate(name, pack_tokens(prompt), Limits(max_tokens, ignore_eos=True), GREEDY), "bench"
    )
    found = []
    while engine.has_work:
        begin = time.perf_counter()
        frames = engine.step().frames
        took = (time.perf_counter() - begin) * 1000
        num = sum(len(u.tokens) for frame in frames.values() for u in frame.updates)
        assert num <= 1, "a step of several tokens"
        found += [took] * num
    assert len(found) == max_tokens
    return found[1:]


def gap_ms(client: httpx.Client, prompt: list[int], max_tokens: int) -> list[float]:
    """The pauses between the tokens of a stream. Tokens that come together have no pause between them."""
    body = {
        **{"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0},
        **{"ignore_eos": True, "stream": True, "logprobs": 0},
    }
    at: list[float] = []
    with client.stream("POST", "/v1/completions", json=body) as answer:
        for event in _events(answer):
            now = time.perf_counter()
            for choice in event["choices"]:
                at += [now] * len((choice.get("logprobs") or {}).get("tokens", ()))
    assert len(at) == max_tokens, f"{len(at)} tokens of {max_tokens}"
    return [(b - a) * 1000 for a, b in pairwise(at)]


def _events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def bench(rounds: int, max_tokens: int) -> dict[str, float]:
    """Medians of the rounds' medians, milliseconds."""
    config = AppConfig(model=WEIGHTS, engine=EngineSettings(kv_tokens=16384, threads=THREADS))
    port = free_port()
    command = [sys.executable, "-m", "mallee.cli", "serve", "--model", WEIGHTS, "--port", str(port)]
    for setting in (f"served_model_name={MODEL}", "engine.kv_tokens=16384"):
        command += ["--set", setting]
    command += ["--set", f"engine.threads={THREADS}"]
    tokenizer = Tokenizer.load(resolve_model(WEIGHTS))
    forward = load_forward(config, THREADS)
    engine = make_engine(config, forward, WorkerId("bench"), Incarnation(1))
    steps, gaps = [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        answering(command, port, Path(folder)) as url,
        httpx.Client(base_url=url, timeout=120) as client,
    ):
        for number in range(rounds + 1):
            prompt = [int(token) for token in tokenizer.encode(PROMPT.format(number))]
            ours = step_ms(engine, f"r{number}", prompt, max_tokens)
            seen = gap_ms(client, prompt, max_tokens)
            if number == 0:
                continue  # it warms up
            steps.append(statistics.median(ours))
            gaps.append(statistics.median(seen))
            print(
                f"round {number}: step {steps[-1]:.3f} ms, gap {gaps[-1]:.3f} ms", file=sys.stderr
            )
    added = statistics.median(gap - step for gap, step in zip(gaps, steps, strict=True))
    return {
        "step_p50_ms": statistics.median(steps),
        "itl_p50_ms": statistics.median(gaps),
        "added_ms": added,
    }
