"""`mallee router` beside other routers: conversation hits, fan-outs, CPU for a request, added latency.

    python -m bench.front.routers [--seconds 2] [--pods 4] [--vllm-router PATH] [--smg PATH]

Stub pods of vLLM in one process, each router in its own, the clients here: all on this machine's cores.
Rounds by turns; medians. Prompts are token ids. Pods publish no KV events: all predict. `round_robin` is
Mallee's router with that policy. PATHs are the programs of vllm-router and smg (PyPI), in environments of
their own.

    conversation  growing conversations: cached tokens, as a share of those that could be
    warm          8 branches of a prompt that was computed before: cached, as a share of it
    cold          8 branches at once of a new prompt: times that it was computed
    cpu_us        of the router for a streamed answer of 8 tokens, with 8 clients and with 1
    p50_ms        of the same with 1 client, beside a pod asked directly

The last line is one JSON object.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

import httpx
import psutil

from bench.front.picker import Client, counts_of, cpu_s, hits, pods_beside
from bench.measure import machine, rounded
from mallee.runtime.addresses import free_port

ROUNDS = 5
BRANCHES = 8
PREFIX = 1600  # tokens
FAN_OUTS = 6
STARTS: Callable[[], int] = itertools.count(10_000_000, 10_000).__next__


def body(tokens: Sequence[int], *, is_streamed: bool = False) -> bytes:
    values = {"model": "m", "prompt": list(tokens), "max_tokens": 8, "stream": is_streamed}
    return json.dumps(values).encode()


@asynccontextmanager
async def running(command: Sequence[str], port: int) -> AsyncIterator[int]:
    """The process of a router that answers at `port`."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with httpx.AsyncClient() as client:
            for _ in range(600):
                with contextlib.suppress(httpx.HTTPError):
                    found = await client.get(f"http://127.0.0.1:{port}/v1/models")
                    if found.status_code == 200:
                        break
                assert process.returncode is None, f"{command[0]} has ended"
                await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)
        yield process.pid
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def commands(
    args: argparse.Namespace, pods: Sequence[str], port: Callable[[], int]
) -> dict[str, Any]:
    """Port and command of each router."""
    urls = [f"http://{pod}" for pod in pods]

    def ours(at: int, *more: str) -> tuple[str, ...]:
        own = (sys.executable, "-m", "mallee.cli", "router", "--listen", f"127.0.0.1:{at}")
        return (*own, "--backends", ",".join(urls), *more)

    def theirs(program: str, at: int, policy: str, *more: str) -> tuple[str, ...]:
        return (program, "--worker-urls", *urls, "--policy", policy, "--port", str(at), *more)

    made: dict[str, Any] = {}
    at = port()
    made["mallee"] = (at, ours(at))
    at = port()
    made["round_robin"] = (at, ours(at, "--set", "routing.policy=round_robin"))
    if args.vllm_router:
        for policy in ("cache_aware", "round_robin"):
            at = port()
            more = ("--prometheus-port", str(port()))
            made[f"vllm_router_{policy}"] = (at, theirs(args.vllm_router, at, policy, *more))
    if args.smg:
        at = port()
        more = ("--prometheus-port", str(port()))
        launch = theirs(args.smg, at, "cache_aware", *more)
        made["smg_cache_aware"] = (at, (launch[0], "launch", *launch[1:]))
    return made


async def fan_out(url: str, pipe: Connection, *, is_warm: bool) -> float:
    """Of branches at once: the share of the prefix that was cached, or the times that it was computed."""
    found = []
    for _ in range(FAN_OUTS):
        start = STARTS()
        prefix = range(start, start + PREFIX)
        clients = [Client(url) for _ in range(BRANCHES)]
        if is_warm:
            await clients[0].ask(body(prefix))
            await asyncio.sleep(0.05)
        before = counts_of(pipe)
        prompts = [[*prefix, *range(k * 64, k * 64 + 64)] for k in range(BRANCHES)]
        await asyncio.gather(*(c.ask(body(p)) for c, p in zip(clients, prompts, strict=True)))
        after = counts_of(pipe)
        for client in clients:
            client.close()
        cached = after[0] - before[0]
        share = cached / (PREFIX * BRANCHES)
        found.append(share if is_warm else BRANCHES * (1 - share))
    return statistics.median(found)


async def load(url: str, seconds: float, num_clients: int) -> list[float]:
    """Milliseconds of each streamed answer."""
    until = time.perf_counter() + seconds
    times: list[float] = []

    async def ask_on(start: int) -> None:
        client = Client(url)
        while time.perf_counter() < until:
            start += 200
            times.append(await client.ask(body(range(start, start + 200), is_streamed=True)))
        client.close()

    await asyncio.gather(*(ask_on(STARTS()) for _ in range(num_clients)))
    return times


async def measure(
    args: argparse.Namespace, pods: Sequence[str], pipe: Connection
) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        ways: dict[str, tuple[str, int]] = {"direct": (f"http://{pods[0]}", 0)}
        for name, (port, command) in commands(args, pods, free_port).items():
            pid = await stack.enter_async_context(running(command, port))
            ways[name] = (f"http://127.0.0.1:{port}", pid)
        found: dict[str, dict[str, Any]] = {name: {} for name in ways}
        rows: dict[str, dict[str, list[float]]] = {name: {} for name in ways}
        for _ in range(ROUNDS):
            for name, (url, pid) in ways.items():
                for num in (1, 8):
                    begun = cpu_s(pid) if pid else 0.0
                    times = await load(url, args.seconds / 2, num)
                    if pid:
                        cost = (cpu_s(pid) - begun) / len(times) * 1e6
                        rows[name].setdefault(f"cpu_us_{num}", []).append(cost)
                    if num == 1:
                        rows[name].setdefault("p50_ms", []).append(statistics.median(times))
        for name, kinds in rows.items():
            found[name] |= {kind: statistics.median(each) for kind, each in kinds.items()}
        for name, (url, pid) in ways.items():
            if pid:
                found[name]["conversation"] = await hits(
                    url, pipe, STARTS() // 10_000, args.conversations
                )
                found[name]["warm"] = await fan_out(url, pipe, is_warm=True)
                found[name]["cold"] = await fan_out(url, pipe, is_warm=False)
                found[name]["rss_mb"] = psutil.Process(pid).memory_info().rss / 2**20
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--pods", type=int, default=4)
    parser.add_argument("--conversations", type=int, default=30)
    parser.add_argument("--vllm-router", default="")
    parser.add_argument("--smg", default="")
    args = parser.parse_args()
    with pods_beside(args.pods) as (pods, pipe):
        found = asyncio.run(measure(args, pods, pipe))
    print(json.dumps(rounded({"machine": machine(), "pods": args.pods, **found})))


if __name__ == "__main__":
    main()
