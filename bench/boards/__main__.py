"""Draws the dashboards of a local deployment under load, as they stand in docs/pictures.

    python -m bench.boards [SECONDS]

Two gateways and eight mocked workers in two processes (an 8B model on an H200, in real time) serve three
tenants; after half of the time a process of four workers is killed.
"""

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from bench.boards.chart import DASHBOARDS, RULES, dashboard
from bench.boards.deployment import Deployment, deployment
from bench.boards.pictures import Span, draw
from bench.boards.prometheus import missing, prometheus
from bench.boards.traffic import Traffic

PICTURES: Final = Path(__file__).resolve().parents[2] / "docs" / "pictures"
SETTINGS: Final = (
    *("gateways=2", "workers=2", "mock.engines_per_worker=4", "scheduler.max_rows=32"),
    *("engine.kv_tokens=65536", "mock.host_kv_tokens=32768", "mock.disk_kv_tokens=262144"),
)
CLIENTS: Final = 48
SECONDS: Final = 240.0


async def load(served: Deployment, seconds: float) -> dict[int, int]:
    """Ask for so long, with a fault in the middle. Returns answers by their status."""
    async with Traffic(served, words=400, max_tokens=64) as traffic:
        async with asyncio.TaskGroup() as group:
            group.create_task(traffic.run(seconds, CLIENTS))
            await asyncio.sleep(seconds / 2)
            served.workers()[0].kill()
        return traffic.statuses


def main() -> None:
    if (reason := missing()) is not None:
        sys.exit(reason)
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            deployment(folder, "smollm2", SETTINGS) as served,
            prometheus(served.scrapes(), [RULES]) as server,
        ):
            begin = time.time()
            statuses = asyncio.run(load(served, seconds))
            span = Span(begin, time.time())
            for name in DASHBOARDS:
                draw(server, dashboard(name), span, PICTURES / f"{name}.png")
            firing = sorted(
                {each["labels"]["alertname"] for each in server.get("alerts")["alerts"]}
            )
    print(json.dumps({"seconds": seconds, "answers": statuses, "alerts": firing}))


if __name__ == "__main__":
    main()
