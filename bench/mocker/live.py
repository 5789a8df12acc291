"""A live fleet of mocked engines: how soon it stands, what it weighs, what it answers.

    python -m bench.mocker.live [--engines 1000] [--register 5000] [--rounds 3] [--quick]

Everything on this machine and its cores: nats-server, one process of engines, the gateway (HTTP,
tokenizer, router; no Ray), the load generator.

ready: a fresh fleet whose gateway routes round robin. Seconds from the start of the command until all
engines are registered, and until every engine has computed a prompt of its own and the gateway knows
what each holds: its digest of every worker must be that of a router which was told the engines' own
snapshots alone. load: streamed completions in a closed loop (`bench.gateway.load`: 460 words, 50 shared
beginnings, 8 tokens, 64 connections), nothing takes time but the stack itself; medians of the rounds.
idle: share of one core, of all processes together, over `--idle-s` seconds without requests.
register: how long a larger fleet takes. Memory is the sum of resident sets. The last line is one JSON.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import psutil

from bench import measure
from mallee.actors.mock.process import run
from mallee.actors.mock.stack import MockStack
from mallee.protocol.events import AskSnapshot, decode_leases, decode_snapshot, encode_host_ask
from mallee.protocol.ids import WorkerId
from mallee.protocol.subjects import Subjects
from mallee.router.config import RouterConfig
from mallee.router.router import Router
from mallee.runtime.addresses import free_port
from mallee.runtime.bus.access import BrokerAccess
from mallee.runtime.bus.nats import NatsBus
from mallee.runtime.config import AppConfig, EngineSettings, MockSettings, RoutingSettings

FLEET = "bench"
DIGESTS = Subjects.of(FLEET).bookings_snapshot("bench")  # a subject that a gateway may serve
TIMEOUT_S = 120.0
PROMPT_CHARS = 2215  # 460 words


def config_of(args: argparse.Namespace) -> AppConfig:
    return AppConfig(
        model=args.model,
        served_model_name="m",
        workers=args.processes,
        fleet=FLEET,
        routing=RoutingSettings(policy=args.policy),
        engine=EngineSettings(kind="mock", kv_tokens=args.blocks * 16),
        mock=MockSettings(engines_per_worker=args.engines // args.processes, speedup=0.0),
    )


async def serve(args: argparse.Namespace) -> None:
    """The stack of `mallee mock`, which also answers what its router knows."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    stack = MockStack(config_of(args), port=args.port)
    await stack.start(TIMEOUT_S)
    registered = time.time()
    bus = NatsBus(stack.access("gateway"), fleet=FLEET)

    async def digests(_: bytes) -> bytes:
        views = stack.router.workers()
        found = {view.worker: stack.router.digest(view.worker) for view in views}
        return json.dumps({"digests": found, "gaps": stack.router.stats().gaps}).encode()

    await bus.connect()
    await bus.serve(DIGESTS, digests)
    assert stack.broker is not None
    pids = {
        "broker": [stack.broker.pid],
        "engines": [child.pid for child in stack.children.values()],
    }
    pids["gateway"] = [os.getpid()]
    nats = asdict(stack.access("gateway"))
    print(json.dumps({"nats": nats, "pids": pids, "registered": registered}), flush=True)
    await stop.wait()
    await bus.close()
    await stack.close()


class Stack:
    """A running stack, seen from outside."""

    def __init__(
        self, process: asyncio.subprocess.Process, port: int, said: dict[str, Any]
    ) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.broker = BrokerAccess(**said["nats"])
        self.registered: float = said["registered"]
        self.parts = {name: [psutil.Process(pid) for pid in pids]
                      for name, pids in said["pids"].items()}  # fmt: skip

    def cpu_s(self) -> dict[str, float]:
        return {name: sum(sum(p.cpu_times()[:2]) for p in ps) for name, ps in self.parts.items()}

    def rss_mb(self) -> dict[str, float]:
        found = {n: sum(p.memory_info().rss for p in ps) / 1e6 for n, ps in self.parts.items()}
        return found | {"all": sum(found.values())}

    async def load(self, **options: Any) -> dict[str, Any]:
        command = [sys.executable, "-m", "bench.gateway.load", "--url", self.url, "--stream"]
        command += ["--prompt-chars", str(PROMPT_CHARS), "--prompts", "4000"]
        for name, value in options.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        child = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        out, _ = await child.communicate()
        result: dict[str, Any] = json.loads(out.decode().splitlines()[-1])
        first_error = result.pop("first_error")
        if result["errors"] or not result["requests"]:
            raise RuntimeError(
                f"{result['errors']} of {result['requests']} requests failed: {first_error}"
            )
        return result


@asynccontextmanager
async def running(args: argparse.Namespace, policy: str, engines: int) -> AsyncIterator[Stack]:
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "bench.mocker.live",
        "--serve",
        "--port",
        str(port),
        "--policy",
        policy,
    ]
    command += ["--engines", str(engines), "--processes", str(args.processes)]
    command += ["--model", args.model, "--blocks", str(args.blocks)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
        if not line:
            raise RuntimeError("the stack did not start")
        yield Stack(process, port, json.loads(line))
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def truth(bus: NatsBus, num_workers: int) -> dict[str, int | None]:
    """Digests by worker, of what the engines say they hold when they are asked."""
    subjects = Subjects.of(FLEET)
    leases: dict[str, Any] = {}

    def hear(raw: bytes) -> None:
        leases.update((lease.worker, lease) for lease in decode_leases(raw))

    await bus.subscribe(subjects.lease(), hear)
    async with asyncio.timeout(10):
        while len(leases) < num_workers:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    router = Router(RouterConfig(max_workers=2 * num_workers), clock=time.monotonic)
    for lease in leases.values():
        router.on_lease(lease)
        asked = encode_host_ask(AskSnapshot(lease.worker))
        raw = await bus.request(subjects.host(lease.host), asked, 5.0)
        router.on_snapshot(decode_snapshot(raw), asked_at=time.monotonic())
        while router.work():
            pass
    return {name: router.digest(WorkerId(name)) for name in leases}


async def ready(args: argparse.Namespace) -> dict[str, Any]:
    begin = time.time()
    async with running(args, "round_robin", args.engines) as stack:
        bus = NatsBus(stack.broker, fleet=FLEET)
        await bus.connect()
        await stack.load(requests=args.engines, prompts=args.engines, concurrency=64)
        answered = time.time()
        wanted = await truth(bus, args.engines)
        known: dict[str, Any] = {}
        while known.get("digests") != wanted:
            known = json.loads(await bus.request(DIGESTS, b"", 5.0))
            if time.time() - answered > TIMEOUT_S:
                break
            await asyncio.sleep(0.01)
        right = sum(known["digests"].get(name) == digest for name, digest in wanted.items())
        result = {
            "registered_s": stack.registered - begin,
            "answered_s": answered - begin,
            "verified_s": time.time() - begin,
            "engines": args.engines,
            "digests_right": right,
            "empty": sum(not digest for digest in wanted.values()),
            "gaps": known["gaps"],
            "rss_mb": stack.rss_mb(),
        }
        await bus.close()
    return result


async def load_and_idle(args: argparse.Namespace) -> dict[str, Any]:
    async with running(args, "cost", args.engines) as stack:
        rounds = []
        for seed in range(args.rounds):
            before = stack.cpu_s()
            done = await stack.load(seconds=args.seconds, concurrency=64, warm_up_s=1.0, seed=seed)
            used = {name: cpu - before[name] for name, cpu in stack.cpu_s().items()}
            # The warm-up's requests are in the CPU time: about a second's.
            share = done["seconds"] / (done["seconds"] + 1.0)
            cpu = {f"{n}_cpu_ms": 1000 * s * share / done["requests"] for n, s in used.items()}
            rounds.append({**done, **cpu})
        load = measure.medians(rounds)
        loaded_mb = stack.rss_mb()
        await asyncio.sleep(2.0)
        before, begin = stack.cpu_s(), time.perf_counter()
        await asyncio.sleep(args.idle_s)
        wall = time.perf_counter() - begin
        idle = {name: (cpu - before[name]) / wall for name, cpu in stack.cpu_s().items()}
        idle["all"] = sum(idle.values())
    return {"load": load | {"rss_mb": loaded_mb}, "idle_cores": idle}


async def register(args: argparse.Namespace) -> dict[str, Any]:
    begin = time.time()
    async with running(args, "cost", args.register) as stack:
        registered_s = stack.registered - begin
        done = await stack.load(requests=500, concurrency=16, prompts=500)
        before, at = stack.cpu_s(), time.perf_counter()
        await asyncio.sleep(5.0)
        wall = time.perf_counter() - at
        return {
            "engines": args.register,
            "registered_s": registered_s,
            "rps_c16": done["rps"],
            "rss_mb": stack.rss_mb(),
            "idle_cores": sum(stack.cpu_s().values()) / wall - sum(before.values()) / wall,
        }


async def bench(args: argparse.Namespace) -> None:
    result: dict[str, Any] = {"ready": await ready(args)}
    print(json.dumps(measure.rounded(result)), file=sys.stderr)
    result |= await load_and_idle(args)
    print(json.dumps(measure.rounded(result)), file=sys.stderr)
    if args.register:
        result["register"] = await register(args)
    result |= measure.machine()
    print(json.dumps(measure.rounded(result)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=16_384)
    parser.add_argument("--register", type=int, default=5000, help="engines; 0: not tried")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--idle-s", type=float, default=20.0)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quick", action="store_true", help="a moment each: does it run at all")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--policy", default="cost", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.engines, args.rounds, args.seconds, args.idle_s = 40, 1, 1.0, 1.0
        args.register = min(args.register, 100)
    run(serve(args) if args.serve else bench(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
