"""Faults under load, as clients see them: processes of the service killed, stopped and hanging.

    python -m bench.failover [--quick] [--faults "worker killed,broker killed"]

`mallee serve` of SmolLM2 in float32, two workers, two gateways. 32 clients: greedy, sampled, JSON schema,
n=4, penalties, stop strings, log-probabilities, forks of a capsule; all but a few stream. They run
undisturbed, then again with each fault, which comes when three quarters of the answers are under way. Then
some of the answers' capsules are forked, and the prefix's: one that went with its worker is made again by
that, and not before. Every text, finish reason and count must be that of the
undisturbed run; a killed gateway's streams must end cleanly (no [DONE], closed within 2 s), be answered
when they are sent again, and leave nothing behind. The table goes to stderr, the last line of stdout is
one JSON object.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from bench import measure
from bench.failover.faults import Fault, faults, hang_environment, processes
from bench.failover.streams import MODEL, Ask, Round, Seen, asks, client_of, stream
from bench.processes import running, wait_for
from mallee.runtime.addresses import free_port

UNDISTURBED = "none"
PREFIX = "Rivers of Europe: the Danube, the Rhine, the Loire. " * 6
START_S = 180.0
BACK_S = 120.0  # in which a process must be back
GONE_S = 1.0  # after which a worker that was killed is known to be gone
NUM_ASKED = 8  # times; each gateway answers some of them


class Scale(NamedTuple):
    streams: int = 32
    max_tokens: int = 64
    forks: int = 8  # of capsules that answers left
    pause_s: float = 12.0  # of a worker that is stopped or hangs


QUICK = Scale(9, 24, 2, 6.0)


class Service:
    """The running service as its operator sees it."""

    def __init__(self, client: httpx.AsyncClient, pid: int) -> None:
        self.client = client
        self.pid = pid

    async def missing_workers(self) -> str:
        """The sign that a gateway can't route to every worker; "" after several answers of all of them."""
        return await self._all(self._not_whole)

    async def leftovers(self) -> str:
        """The same; or the bookings, or the kept capsules if these are not the prefix's alone."""
        return await self._all(self._not_whole, self._not_free)

    async def _all(self, *looks: Callable[[], Awaitable[str]]) -> str:
        for _ in range(NUM_ASKED):
            for look in looks:
                if found := await look():
                    return found
        return ""

    async def _not_whole(self) -> str:
        health = await self._get("/health")
        return "" if health.get("status") == "ok" else f"health: {health}"

    async def _not_free(self) -> str:
        listed = (await self._get("/v1/router/workers")).get("data")
        if listed is None or any(each["rows"] or each["active_blocks"] for each in listed):
            return f"booked: {listed}"
        kept = {each["worker"]: each["use"] and each["use"]["capsules"] for each in listed}
        is_known = None not in kept.values()
        return "" if is_known and sum(kept.values()) == 1 else f"kept capsules: {kept}"

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = (await self.client.get(path, timeout=5.0)).json()
        except (httpx.HTTPError, ValueError) as error:
            return {"error": repr(error)}
        return found

    async def wait(self, look: Callable[[], Awaitable[str]]) -> float:
        """Seconds until `look` finds nothing. Raises TimeoutError with what it found last."""
        begin = time.monotonic()
        while found := await look():
            if time.monotonic() > begin + BACK_S:
                raise TimeoutError(f"{look.__name__}: after {BACK_S:.0f} s {found}")
            await asyncio.sleep(0.05)
        return time.monotonic() - begin


async def forks(
    client: httpx.AsyncClient, prefix: str, seen: Sequence[Seen], num: int, max_tokens: int
) -> list[Seen]:
    """Answers of forks of the prefix's capsule, and of `num` that `seen` left at most."""
    body = {"n": 2, "max_tokens": max_tokens, "temperature": 1.0, "ignore_eos": True}
    body |= {"seed": 5, "stream": True}
    chosen = [
        sorted(each.capsules.items())[-1][1]
        for each in seen[:: max(1, len(seen) // num)]
        if each.capsules
    ]
    capsules = [prefix, *chosen[:num]]
    asked = [Ask("fork", f"/v1/capsules/{capsule}/fork", body) for capsule in capsules]
    return await Round(client, asked).whole()


class Run(NamedTuple):
    """Answers of a round, and of forks of them."""

    seen: list[Seen]
    forked: list[Seen]
    figures: dict[str, Any]


async def play(
    service: Service, scale: Scale, prefix: str, asked: Sequence[Ask], fault: Fault | None
) -> Run:
    """One round, with `fault` in the middle. `prefix`: its capsule."""
    began = Round(service.client, asked)
    await began.under_way()
    figures: dict[str, Any] = {}
    if fault is not None:
        figures = await disturb(service, scale, fault)
    seen = await began.whole()
    if "killed_at" in figures:
        figures |= await after_gateway(service, asked, seen, figures.pop("killed_at"))
    forked = await forks(service.client, prefix, seen, scale.forks, 8)
    return Run(seen, forked, figures)


async def disturb(service: Service, scale: Scale, fault: Fault) -> dict[str, Any]:
    """Do it to one process, and see when all workers are there again (after the fault has ended)."""
    pid = processes(service.pid, fault.part)[0]
    begin = time.monotonic()
    fault.begin(pid)
    if fault.part == "gateway":
        return {"killed_at": begin}
    if fault.part == "broker":
        return {}
    if fault.end is not None:
        await asyncio.sleep(scale.pause_s)
        fault.end(pid)
        return {"back_s": await service.wait(service.missing_workers)}
    await asyncio.sleep(GONE_S)
    return {"back_s": GONE_S + await service.wait(service.missing_workers)}


async def after_gateway(
    service: Service, asked: Sequence[Ask], seen: list[Seen], killed_at: float
) -> dict[str, Any]:
    """Send again what broke with a gateway; the new answers take the places of the old."""
    broken = [i for i, each in enumerate(seen) if not each.is_whole]
    ends_s = [seen[i].ended - killed_at for i in broken]
    unclean = sum(seen[i].is_done for i in broken)
    again = [await stream(service.client, asked[i], Seen()) for i in broken]
    for i, each in zip(broken, again, strict=True):
        seen[i] = each
    return {
        "broken": len(broken),
        "unclean_ends": unclean,
        "end_s_max": max(ends_s, default=0.0),
        "failed_retries": sum(not each.is_whole for each in again),
    }


def compared(run: Run, undisturbed: Run) -> dict[str, Any]:
    """Figures of a round beside the undisturbed one."""
    ours, theirs = [*run.seen, *run.forked], [*undisturbed.seen, *undisturbed.forked]
    differences = [a.difference(b) for a, b in zip(ours, theirs, strict=True)]
    for each, difference in zip(ours, differences, strict=True):
        if difference or not each.is_whole:
            print(f"  {each.error or difference}", file=sys.stderr)
    stalls = sorted(each.stall_s for each in run.seen)
    return {
        "requests": len(run.seen),
        "failed": sum(not each.is_whole for each in run.seen),
        "equal": sum(not difference for difference in differences[: len(run.seen)]),
        "forks": len(run.forked),
        "equal_forks": sum(not difference for difference in differences[len(run.seen) :]),
        "stall_p50_s": stalls[len(stalls) // 2],
        "stall_p99_s": stalls[min(len(stalls) - 1, len(stalls) * 99 // 100)],
        **run.figures,
    }


async def bench(service: Service, scale: Scale, wanted: list[str], order: Path) -> dict[str, Any]:
    """fault -> figures."""
    made = await service.client.post("/v1/capsules", json={"model": MODEL, "prompt": PREFIX})
    prefix = made.json()["id"]
    asked = asks(scale.streams, scale.max_tokens, prefix)
    await Round(service.client, asked).whole()  # caches are warm in every round
    undisturbed = await play(service, scale, prefix, asked, None)
    found = {UNDISTURBED: compared(undisturbed, undisturbed)}
    print(f"{UNDISTURBED}: {measure.rounded(found[UNDISTURBED])}", file=sys.stderr)
    for name, fault in faults(order).items():
        if wanted and name not in wanted:
            continue
        run = await play(service, scale, prefix, asked, fault)
        found[name] = compared(run, undisturbed) | {
            "clean_s": await service.wait(service.leftovers)
        }
        print(f"{name}: {measure.rounded(found[name])}", file=sys.stderr)
    return found


def measured(scale: Scale, wanted: list[str], extra: Sequence[str] = ()) -> dict[str, Any]:
    """The figures of a service of its own."""
    with tempfile.TemporaryDirectory() as folder:
        order, log = Path(folder) / "hang", Path(folder) / "log"
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "mallee.cli", "serve", "--model", "smollm2"]
        command += ["--dtype", "float32", "--workers", "2", "--threads", "1", "--port", str(port)]
        command += ["--kv-tokens", "16384", "--served-model-name", MODEL]
        command += ["--set", "gateways=2", *extra]
        with running(command, log, hang_environment(order), stop_s=60.0) as process:
            wait_for(url, process, log, START_S)

            async def run() -> dict[str, Any]:
                async with client_of(url) as client:
                    return await bench(Service(client, process.pid), scale, wanted, order)

            return asyncio.run(run())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="9 clients, short answers")
    parser.add_argument("--faults", default="", help="some of them, with commas; all by default")
    parser.add_argument("--streams", type=int)
    return parser.parse_args()


def main() -> int:
    args = _arguments()
    scale = QUICK if args.quick else Scale()
    if args.streams is not None:
        scale = scale._replace(streams=args.streams)
    found = measured(scale, [name for name in args.faults.split(",") if name])
    print(json.dumps(measure.rounded(found) | {"scale": scale._asdict(), **measure.machine()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
