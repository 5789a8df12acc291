"""k mocked engines on one time-sliced device in virtual time, beside one engine with all their rows.

An 8B model in FP8 on an H200. Memory is the device's: each engine has its own weights, so k engines have
less room for KV together than one (`kv_tokens_of`).
"""

import random
from typing import Any, Final, NamedTuple

from bench.doubles.workloads import made
from mallee.mocker.device import DeviceConfig
from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.replay.run import replay
from mallee.mocker.timing.profiles import fitted
from mallee.traces.workload import Request, Workload

PROFILE: Final = "h200-llama-3.1-8b-fp8"
WIDER: Final = "h200-llama-3.1-8b-bf16"  # its weights take twice the bytes
ID_TOKENS: Final = 16


class Load(NamedTuple):
    """`clients` in a closed loop, or arrivals at `per_s` if that is above 0."""

    requests: int
    clients: int
    per_s: float = 0.0
    prompt_tokens: int = 1024
    output_tokens: int = 128  # on average: any length up to twice as many is as likely


def weight_tokens() -> int:
    """The room of one engine's weights, in tokens of KV: the wider profile lacks as much."""
    profiles = fitted().profiles
    return profiles[PROFILE].kv_tokens - profiles[WIDER].kv_tokens


def kv_tokens_of(engines: int) -> int:
    """KV of each of the engines on one device. They all hold the weights."""
    weights = weight_tokens()
    return (fitted().profiles[PROFILE].kv_tokens + weights) // engines - weights


def workload(load: Load, seed: int) -> Workload:
    """Prompts with nothing in common."""
    draw = random.Random(seed)  # a workload
    per_prompt, now, requests = load.prompt_tokens // ID_TOKENS, 0.0, []
    for number in range(load.requests):
        now += draw.expovariate(load.per_s) if load.per_s else 0.0
        ids = range(number * per_prompt, (number + 1) * per_prompt)
        answer = draw.randrange(1, 2 * load.output_tokens)
        requests.append(Request(number, now, ids, load.prompt_tokens, answer))
    return made(requests, name="contention", id_tokens=ID_TOKENS)


def run(load: Load, engines: int, rows: int, device: DeviceConfig, seed: int) -> dict[str, Any]:
    """Figures of `engines` on one device with `rows` together, or of one if `engines` is 1."""
    config = ReplayConfig(
        engines=engines,
        kv_tokens=kv_tokens_of(engines),
        timing=PROFILE,
        max_rows=rows // engines,
        concurrency=0 if load.per_s else load.clients,
        device=device,
        seed=seed,
    )
    found = replay(workload(load, seed), config).summary
    assert not found["errors"], found["reasons"]
    devices = found["devices"] or {"switching": 0.0}
    return {
        "tokens_per_s": found["output_tokens_per_s"],
        "ttft_p50_ms": found["ttft_ms"]["p50"],
        "ttft_p99_ms": found["ttft_ms"]["p99"],
        "itl_p50_ms": found["itl_ms"]["p50"],
        "itl_p99_ms": found["itl_ms"]["p99"],
        "switching": devices["switching"],
    }
