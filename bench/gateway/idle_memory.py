"""Memory of a whole idle service on this machine: Ray, broker, gateway, two workers.

    python -m bench.gateway.idle_memory [--workers 2] [--model smollm2]

Sums the proportional set size (PSS: shared pages counted once) of every process that the service
started, after one request a worker. The last line is one JSON object; sizes are in MB.
"""

import argparse
import json
import sys
import time
from collections import defaultdict

import psutil

from mallee.actors.config import AppConfig
from mallee.actors.local import LocalStack
from mallee.client import Mallee


def name_of(process: psutil.Process) -> str:
    title = (process.cmdline() or ["?"])[0]  # Ray's actors write their class here
    for name in ("Gateway", "Worker", "Broker", "ServeController", "ProxyActor", "nats-server"):
        if name in title:
            return name
    return "ray: " + process.name()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args()
    config = AppConfig(model=options.model, workers=options.workers)
    begin = time.perf_counter()
    with LocalStack(config, port=8123) as stack:
        ready_s = time.perf_counter() - begin
        with Mallee(stack.base_url) as client:
            for i in range(options.workers):
                client.complete("Hello", max_tokens=2, cache_salt=f"warm-{i}")
        time.sleep(2)
        sizes: dict[str, float] = defaultdict(float)
        counts: dict[str, int] = defaultdict(int)
        for process in psutil.Process().children(recursive=True):
            sizes[name_of(process)] += process.memory_full_info().pss / 1e6
            counts[name_of(process)] += 1
        own = psutil.Process().memory_full_info().pss / 1e6
    result = {
        "total_mb": round(sum(sizes.values()) + own),
        "processes": sum(counts.values()) + 1,
        "ready_s": round(ready_s, 1),
        "by_kind_mb": {k: round(v) for k, v in sorted(sizes.items(), key=lambda kv: -kv[1])},
        "counts": dict(counts),
        "starter_mb": round(own),
        "workers": options.workers,
        "model": options.model,
    }
    print(json.dumps(result, indent=2))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
