"""Hostile load: requests no client should send, clients that hang up by the thousand, one that hardly reads.

    python -m bench.soak.flood [--seed 1] [--requests 20000] [--disconnects 10000] [--model FOLDER]

`mallee mock` with engines that take little time, without Ray. While it is sent hostile
requests of all kinds (`hostile.py`), then while streams are left in the middle, one client reads a byte a
second. No answer may be a 5xx other than 503, every whole HTTP request has an answer, memory keeps its
level after the first part of each, and at the end nothing runs, is booked or open. The last line of stdout
is one JSON object; the exit status is 1 if anything was wrong.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from bench import measure
from bench.failover.streams import MODEL, WORDS
from bench.processes import running
from bench.soak import hostile
from bench.soak.raw import exchange, leave, trickle
from mallee.runtime.addresses import free_port

AT_ONCE: Final = 16
ANSWER_S: Final = 30.0
START_S: Final = 60.0
REST_S: Final = 60.0
ENGINES: Final = 8
WARM_SHARE: Final = 0.35  # of the requests, before memory has its level
WINDOW: Final = 0.15  # of the samples, over which it is averaged
MAX_GROWTH: Final = 1.05


class Flood:
    """One run against the service at `url`, whose first process is `pid`."""

    def __init__(self, url: str, pid: int, *, seed: int) -> None:
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._url = url
        self._process = psutil.Process(pid)
        self._seed = seed
        self._samples: dict[str, list[float]] = {}

    async def run(self, num_requests: int, num_left: int) -> dict[str, Any]:
        before = self._open()
        slow = asyncio.create_task(self._read_slowly())
        hostile_s = await self._many(num_requests, "hostile", self._send_hostile)
        left_s = await self._many(num_left, "left", self._leave)
        slow.cancel()
        (num_slow,) = await asyncio.gather(slow, return_exceptions=True)
        remaining, rest_s = await self._rest(before)
        levels = {name: level(samples) for name, samples in self._samples.items()}
        return {
            "requests": num_requests,
            "disconnects": num_left,
            "ends": dict(sorted(self.ends.items())),
            "wrong": self.wrong[:20],
            "num_wrong": len(self.wrong),
            "left": remaining + [f"{n}: {a:.0f} to {b:.0f} MB" for n, (a, b) in grown(levels)],
            "memory_mb": levels,
            "hostile_s": hostile_s,
            "left_s": left_s,
            "rest_s": rest_s,
            "is_slow_reader_served": not isinstance(num_slow, Exception),
        }

    async def _many(
        self, num: int, name: str, send: Callable[[random.Random], Awaitable[None]]
    ) -> float:
        """`num` of them, several at a time; the seconds."""
        begin = time.monotonic()
        every = max(1, num // 200)
        rngs = [random.Random(f"{self._seed} {name} {i}") for i in range(AT_ONCE)]
        numbers = iter(range(num))

        async def client(rng: random.Random) -> None:
            for number in numbers:
                await send(rng)
                if number % every == 0:
                    self._sample(name)

        await asyncio.gather(*map(client, rngs))
        return time.monotonic() - begin

    async def _send_hostile(self, rng: random.Random) -> None:
        sent = hostile.request(rng)
        found = await exchange(self._url, sent.raw, timeout_s=ANSWER_S, ends=not sent.is_http)
        problem = hostile.problem(sent, found)
        if problem:
            self.wrong.append(f"{problem} after {sent}")
            print(f"  wrong: {self.wrong[-1][:1200]}", file=sys.stderr)
        self.ends[f"{sent.what.split(' ')[0]}: {found.status}"] += 1

    async def _leave(self, rng: random.Random) -> None:
        """Hang up after some bytes of a stream that is longer; sometimes of a chat or a fork of many."""
        words = " ".join(rng.choices(WORDS, k=rng.choice((5, 60))))
        body: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": 400,
            "stream": True,
            "ignore_eos": True,
        }
        path, text = rng.choice(
            (("/v1/completions", "prompt"), ("/v1/chat/completions", "messages"))
        )
        body[text] = words if text == "prompt" else [{"role": "user", "content": words}]
        body["n"] = rng.choice((1, 1, 1, 8))
        after = rng.choice((0, 0, 20, 300, 3000))
        try:
            found = await leave(self._url, path, body, after_nbytes=after)
        except OSError:
            self.ends["left: refused"] += 1
            return
        is_sound = not found or found.startswith((b"HTTP/1.1 200", b"HTTP/1.1 503")[: len(found)])
        if found and b"HTTP/1.1 5" in found[:12] and b"HTTP/1.1 503" not in found[:12]:
            is_sound = False
        if not is_sound:
            self.wrong.append(f"left: {found[:300]!r}")
        self.ends["left: left"] += 1

    async def _read_slowly(self) -> int:
        body = {"model": MODEL, "prompt": "slow", "max_tokens": 1500, "stream": True, "n": 8}
        seconds = float("inf")
        return await trickle(self._url, "/v1/completions", body, seconds=seconds, period_s=1.0)

    # State of the service

    def _processes(self) -> list[psutil.Process]:
        return [self._process, *self._process.children(recursive=True)]

    def _sample(self, phase: str) -> None:
        rss = sum(each.memory_info().rss for each in self._processes()) / 1e6
        self._samples.setdefault(phase, []).append(rss)

    def _open(self) -> int:
        return sum(each.num_fds() for each in self._processes())

    async def _rest(self, before: int) -> tuple[list[str], float]:
        begin = time.monotonic()
        async with httpx.AsyncClient(base_url=self._url, timeout=ANSWER_S) as client:
            while True:
                found = await self._remaining(client, before)
                seconds = time.monotonic() - begin
                if not found or seconds > REST_S:
                    return found, seconds
                await asyncio.sleep(0.5)

    async def _remaining(self, client: httpx.AsyncClient, before: int) -> list[str]:
        health = (await client.get("/health")).json()
        workers = (await client.get("/v1/router/workers")).json()["data"]
        metrics = (await client.get("/metrics")).text.splitlines()
        found = [] if health["status"] == "ok" else [f"health: {health}"]
        found += [f"{w['worker']}: {w['rows']} rows" for w in workers if w["rows"] or w["waiting"]]
        capsules = {w["worker"]: w["use"] and w["use"]["capsules"] for w in workers}
        found += [f"{worker}: {num} capsules" for worker, num in capsules.items() if num != 0]
        gauges = ("mallee_branches_in_flight", "mallee_requests_waiting", "mallee_booked")
        found += [x for x in metrics if x.startswith(gauges) and float(x.rsplit(" ", 1)[1])]
        opened = self._open() - before
        return found + ([f"{opened} descriptors more"] if opened > 2 else [])


def level(samples: list[float]) -> tuple[float, float]:
    """Memory, MB, once it should be level, and at the end."""
    num, begin = max(1, int(WINDOW * len(samples))), int(WARM_SHARE * len(samples))
    early, late = samples[begin : begin + num], samples[-num:]
    return sum(early) / len(early), sum(late) / len(late)


def grown(levels: dict[str, tuple[float, float]]) -> list[tuple[str, tuple[float, float]]]:
    return [(name, pair) for name, pair in levels.items() if pair[1] > MAX_GROWTH * pair[0]]


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """The figures of a service of its own."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        log, url = Path(folder) / "log", f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "mallee.cli", "mock", "--engines", str(ENGINES)]
        command += ["--model", args.model, "--port", str(port), "--speedup", "20"]
        command += ["--set", f"served_model_name={MODEL}", "--set", "engine.kv_tokens=16384"]
        with running(command, log) as process:
            deadline = time.monotonic() + START_S
            while time.monotonic() < deadline:
                try:
                    if len(httpx.get(f"{url}/health").json()["workers"]) == ENGINES:
                        break
                except (httpx.HTTPError, KeyError, ValueError):
                    time.sleep(0.1)
            flood = Flood(url, process.pid, seed=args.seed)
            found = asyncio.run(flood.run(args.requests, args.disconnects))
            found["has_ended"] = process.poll() is not None
        said = log.read_text(errors="replace")
        found["tracebacks"] = said.count("Traceback")
        if found["tracebacks"]:
            print(said[-6000:], file=sys.stderr)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--disconnects", type=int, default=10_000)
    parser.add_argument("--model", default="smollm2", help="tokenizer and config.json of a model")
    args = parser.parse_args()
    found = measured(args)
    print(json.dumps(measure.rounded(found) | {"seed": args.seed, **measure.machine()}))
    return 1 if found["num_wrong"] or found["left"] or found["has_ended"] else 0


if __name__ == "__main__":
    sys.exit(main())
