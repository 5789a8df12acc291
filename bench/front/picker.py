"""The endpoint picker behind a real Envoy: added latency, decisions a second, hits against round robin.

    python -m bench.front.picker [--seconds 4] [--pods 4] [--conversations 30]

Stub pods of vLLM in one process, `mallee picker` in one or two, Envoy with one thread, the clients here: all
on this machine's cores. Envoy without a picker goes round robin. Prompts are token ids, so that no time is
the tokenizer's. The pods publish no KV events: the pickers predict. `two_pickers` share their bookings over
NATS, `two_pickers_apart` have no broker.

Requests a second are medians of rounds, in which the ways take turns: other work on the machine moved single
measurements of one way by a factor of four. `picker_cpu_us`, of all pickers of a way for a request, hardly
depends on it, and bounds what a core can do. The last line is one JSON object.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from bench.doubles.envoy import envoy
from bench.doubles.vllm_pod import KVPublisher, PodTiming, VllmPod
from bench.measure import machine, rounded
from mallee.runtime.addresses import free_port
from mallee.runtime.bus.broker import Broker

SIZES = {"500": 500, "4000": 4000, "30000": 30_000}  # tokens of a prompt
CLIENTS = 32
WARM = 5  # requests that don't count
TURNS, TURN_TOKENS = 6, 600
POD_BLOCKS = 2400  # a pod holds a few of the conversations
ROUNDS = 5


async def serve_pods(pipe: Connection, num: int, with_events: bool) -> None:
    """Pods until the pipe is closed; a line of it asks for their counts."""
    timing = PodTiming(prompt_token_s=2e-6, output_token_s=0.0)
    async with AsyncExitStack() as stack:
        made = [
            VllmPod(
                num_blocks=POD_BLOCKS,
                timing=timing,
                publisher=KVPublisher() if with_events else None,
                tells_sources=with_events,
            )
            for _ in range(num)
        ]
        pods = [await stack.enter_async_context(pod) for pod in made]
        pipe.send([pod.address for pod in pods])
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, pipe.poll, None):
            try:
                pipe.recv()
            except EOFError:
                return
            pipe.send([(p.counts.cached_tokens, p.counts.prompt_tokens) for p in pods])


def pods_process(pipe: Connection, num: int, with_events: bool) -> None:
    asyncio.run(serve_pods(pipe, num, with_events))


class Client:
    """Requests over one connection."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._where = (host, int(port))
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, raw: bytes) -> float:
        """Milliseconds until the answer is there; raises if it is no 200."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(*self._where, limit=1 << 20)
        assert self._reader is not None
        lines = "host: x\r\ncontent-type: application/json\r\n"
        head = f"POST /v1/completions HTTP/1.1\r\n{lines}content-length: {len(raw)}\r\n\r\n"
        begin = time.perf_counter()
        self._writer.write(head.encode() + raw)
        found = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        assert " 200 " in found.split("\r\n")[0], found
        if "content-length: " in found:
            await self._reader.readexactly(int(found.split("content-length: ")[1].split("\r\n")[0]))
        else:
            while size := int(await self._reader.readline(), 16):
                await self._reader.readexactly(size + 2)
            await self._reader.readline()
        return (time.perf_counter() - begin) * 1000

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def body(tokens: Sequence[int]) -> bytes:
    return json.dumps({"model": "m", "prompt": list(tokens), "max_tokens": 8}).encode()


@asynccontextmanager
async def picker(folder: Path, pods: Sequence[str], **more: Any) -> AsyncIterator[tuple[int, int]]:
    """Port and process of a picker that is ready."""
    port = free_port()
    file = folder / f"{port}.yaml"
    file.write_text(json.dumps({"listen": f"127.0.0.1:{port}", "endpoints": list(pods), **more}))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "mallee.cli", "picker", "--config", str(file)),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            assert process.returncode is None, "the picker has ended"
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.5)  # it asks the pods
        yield port, process.pid
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def latencies(urls: dict[str, str], seconds: float) -> dict[str, Any]:
    """Of one client, by way and size of the prompt; ways take turns request by request."""
    found: dict[str, Any] = {}
    for size, num in SIZES.items():
        clients = {way: Client(url) for way, url in urls.items()}
        times: dict[str, list[float]] = {way: [] for way in urls}
        raw = body(range(num))
        until = time.perf_counter() + seconds
        while time.perf_counter() < until or len(times["picker"]) < 2 * WARM:
            for way, client in clients.items():
                times[way].append(await client.ask(raw))
        for client in clients.values():
            client.close()
        found[size] = {
            way: {
                "p50_ms": statistics.median(ms[WARM:]),
                "p99_ms": sorted(ms[WARM:])[int(len(ms[WARM:]) * 0.99)],
            }
            for way, ms in times.items()
        }
    return found


async def throughput(url: str, seconds: float) -> float:
    """Requests a second of many clients, each with prompts of its own of 500 tokens."""
    until = time.perf_counter() + seconds
    counts = [0] * CLIENTS

    async def ask_on(number: int) -> None:
        client = Client(url)
        raw = body(range(number * 1000, number * 1000 + 500))
        while time.perf_counter() < until:
            await client.ask(raw)
            counts[number] += 1
        client.close()

    begin = time.perf_counter()
    await asyncio.gather(*map(ask_on, range(CLIENTS)))
    return sum(counts) / (time.perf_counter() - begin)


async def hits(url: str, pipe: Connection, seed: int, num: int) -> float:
    """Cached tokens of conversations that grow side by side, as a share of those that could be."""
    before = counts_of(pipe)
    gate = asyncio.Semaphore(8)

    async def converse(family: int) -> None:
        client = Client(url)
        start = (seed * num + family) * 10_000
        for turn in range(1, TURNS + 1):
            async with gate:
                await client.ask(body(range(start, start + turn * TURN_TOKENS)))
            await asyncio.sleep(0.02)
        client.close()

    await asyncio.gather(*map(converse, range(num)))
    after = counts_of(pipe)
    cached, tokens = (after[i] - before[i] for i in (0, 1))
    return cached / (tokens - num * TURNS * TURN_TOKENS)


def counts_of(pipe: Connection) -> tuple[int, int]:
    pipe.send(None)
    counts = pipe.recv()
    return sum(c for c, _ in counts), sum(t for _, t in counts)


class Way(NamedTuple):
    """An Envoy, and the processes of the pickers that it asks."""

    url: str
    pids: tuple[int, ...]


async def throughputs(
    ways: dict[str, Way], seconds: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Requests a second, and microseconds of the pickers' CPU for each request: medians of rounds."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    costs: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            begin, begun = time.perf_counter(), sum(map(cpu_s, way.pids))
            rate = await throughput(way.url, seconds / 2)
            requests = rate * (time.perf_counter() - begin)
            rates[name].append(rate)
            costs[name].append((sum(map(cpu_s, way.pids)) - begun) / requests * 1e6)
    return (
        {name: statistics.median(found) for name, found in rates.items()},
        {name: statistics.median(found) for name, found in costs.items() if ways[name].pids},
    )


async def measure(
    pods: Sequence[str], pipe: Connection, seconds: float, num: int
) -> dict[str, Any]:
    broker = Broker(fleet="bench")
    await broker.start()
    access = broker.access("gateway")
    found: dict[str, Any] = {}
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            login = folder / "login"
            login.write_text(str(access.login))
            shared = {"nats_url": access.url, "nats_credentials": str(login), "fleet": "bench"}
            async with AsyncExitStack() as stack:
                ways = {
                    "round_robin": Way(await stack.enter_async_context(envoy(folder, pods, ())), ())
                }

                async def add(way: str, num_pickers: int, **more: Any) -> None:
                    made = [
                        await stack.enter_async_context(picker(folder, pods, **more))
                        for _ in range(num_pickers)
                    ]
                    front = envoy(folder, pods, [port for port, _ in made])
                    url = await stack.enter_async_context(front)
                    ways[way] = Way(url, tuple(pid for _, pid in made))

                await add("picker", 1)
                urls = {way: each.url for way, each in ways.items()}
                found["latency"] = await latencies({"direct": f"http://{pods[0]}", **urls}, seconds)
                await add("two_pickers", 2, **shared)
                await add("two_pickers_apart", 2)
                found["rps"], found["picker_cpu_us"] = await throughputs(ways, seconds)
                found["hits"] = {
                    way: await hits(each.url, pipe, seed, num)
                    for seed, (way, each) in enumerate(ways.items(), start=1)
                }
    finally:
        await broker.stop()
    return found


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


@contextlib.contextmanager
def pods_beside(num: int, *, with_events: bool = False) -> Iterator[tuple[Any, Connection]]:
    """So many pods in a process of their own: what it says of them, and the pipe to it."""
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=pods_process, args=(there, num, with_events), daemon=True)
    process.start()
    there.close()
    try:
        yield here.recv(), here
    finally:
        here.close()
        process.join(timeout=5)
        process.kill()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--pods", type=int, default=4)
    parser.add_argument("--conversations", type=int, default=30)
    args = parser.parse_args()
    with pods_beside(args.pods) as (pods, pipe):
        found = asyncio.run(measure(pods, pipe, args.seconds, args.conversations))
    print(json.dumps(rounded({"machine": machine(), "pods": args.pods, **found})))


if __name__ == "__main__":
    main()
