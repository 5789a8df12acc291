"""Engines that share one device, by their number: throughput and latencies, and one engine beside them.

    python -m bench.contention [--quick] [--engines 1,2,4,8] [--rounds 3] [--no-processes]

In virtual time (`virtual.py`): mocked engines on a device whose time is sliced, clients in a closed loop
that keep it busy, then few arrivals that don't; then by the length of the slice and by the price of a
change. As real processes (`processes.py`): engines of SmolLM2 on this machine's cores, by turns in every
round, medians of the rounds. Every number of engines serves the same load with as many rows together; "1" is
the engine that has them all. The table goes to stderr, the last line of stdout is one JSON object.
"""

import argparse
import json
import sys
from math import inf
from typing import Any, NamedTuple

from bench import measure
from bench.contention.processes import Share, together
from bench.contention.virtual import PROFILE, Load, kv_tokens_of, run
from mallee.mocker.device import DeviceConfig


class Scale(NamedTuple):
    engines: tuple[int, ...] = (1, 2, 4, 8)
    rows: int = 64
    requests: int = 512
    quiet_per_s: float = 4.0
    seeds: int = 3
    slices_ms: tuple[float, ...] = (0.5, 2.0, 8.0, 30.0, inf)
    switches_ms: tuple[float, ...] = (0.0, 0.2, 1.0)
    rounds: int = 3
    processes: tuple[int, ...] = (1, 2)
    share: Share = Share(rows=8, requests=16, prompt_tokens=64, output_tokens=24)


QUICK = Scale(
    engines=(1, 2),
    rows=8,
    requests=24,
    quiet_per_s=4.0,
    seeds=1,
    slices_ms=(2.0, inf),
    switches_ms=(0.0, 0.2),
    rounds=1,
    processes=(1, 2),
    share=Share(2, 4, 32, 4),
)


def replays(scale: Scale) -> dict[str, Any]:
    """scene -> engines or milliseconds -> figures: medians of the seeds."""
    busy, quiet = (
        Load(scale.requests, scale.rows),
        Load(scale.requests // 2, scale.rows, scale.quiet_per_s),
    )
    middle = scale.engines[len(scale.engines) // 2]

    def of(load: Load, engines: int, device: DeviceConfig) -> dict[str, float]:
        seeds = range(scale.seeds)
        return measure.medians([run(load, engines, scale.rows, device, seed) for seed in seeds])

    return {
        "busy": {str(k): of(busy, k, DeviceConfig(k)) for k in scale.engines},
        "quiet": {str(k): of(quiet, k, DeviceConfig(k)) for k in scale.engines},
        "slices": {
            "whole steps" if ms == inf else f"{ms:g} ms": of(
                busy, middle, DeviceConfig(middle, slice_s=ms * 1e-3)
            )
            for ms in scale.slices_ms
        },
        "switches": {
            f"{ms:g} ms": of(busy, middle, DeviceConfig(middle, switch_s=ms * 1e-3))
            for ms in scale.switches_ms
        },
        "middle": middle,
        "kv_tokens": {str(k): kv_tokens_of(k) for k in scale.engines},
    }


def processes(scale: Scale, model: str, threads: int) -> dict[str, dict[str, float]]:
    """engines -> figures: medians of the rounds, in which each number of engines has its turn."""
    rounds: dict[str, list[dict[str, float]]] = {str(k): [] for k in scale.processes}
    for _ in range(scale.rounds):
        for k in scale.processes:
            rounds[str(k)].append(together(k, scale.share, model, threads))
    return {k: measure.medians(runs) for k, runs in rounds.items()}


def _print(found: dict[str, Any]) -> None:
    for scene in ("busy", "quiet", "slices", "switches", "processes"):
        for name, figures in found.get(scene, {}).items():
            print(f"{scene:>10} {name:>12} {measure.rounded(figures)}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a moment each: does it run at all")
    parser.add_argument("--engines", default="", help="numbers on one device, with commas")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--model", default="smollm2", help="of the real engines")
    parser.add_argument("--threads", type=int, default=2, help="of each real engine")
    parser.add_argument("--no-processes", action="store_true", help="leave the real engines out")
    options = parser.parse_args()
    scale = QUICK if options.quick else Scale()
    if options.engines:
        scale = scale._replace(engines=tuple(map(int, options.engines.split(","))))
    if options.rounds is not None:
        scale = scale._replace(rounds=options.rounds)
    default = DeviceConfig()
    found = {
        "profile": PROFILE,
        "slice_ms": default.slice_s * 1e3,
        "switch_ms": default.switch_s * 1e3,
        **replays(scale),
    }
    if not options.no_processes:
        found["processes"] = processes(scale, options.model, options.threads)
    _print(found)
    known = {key: str(value) if value == inf else value for key, value in scale._asdict().items()}
    known["slices_ms"] = [None if ms == inf else ms for ms in scale.slices_ms]
    print(json.dumps(measure.rounded({**found, "scale": known, **measure.machine()})))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
