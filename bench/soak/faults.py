"""Faults of a plain service, one after the other and some at once, as a seed says."""

import asyncio
import contextlib
import os
import random
import resource
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from typing import Final, NamedTuple

import httpx
import psutil

from bench.failover.faults import set_clock
from bench.failover.streams import MODEL
from bench.soak.plain import Child, Plain
from bench.soak.proxy import Direction, Proxy

MAX_AT_ONCE: Final = 2
GAP_S: Final = (0.5, 3.0)  # between the beginnings of two faults
LENGTH_S: Final = (0.5, 7.0)
PULSE_S: Final = (0.15, 0.05)  # stopped and running, of a slow process
EXCUSE_S: Final = 3.0  # for which a fault explains what comes after it
MAX_JUMP_S: Final = 7200.0
UNLOGGED_S: Final = 20.0  # before a fault, of requests that it may have ended


class Past(NamedTuple):
    """A fault that was."""

    at_s: float
    name: str
    target: str
    seconds: float


class Chaos:
    """Plays faults until it is cancelled; ends those under way. Gateway 0 and engines 0 are never killed.

    So the memory of these is seen over the whole run.
    """

    def __init__(self, plain: Plain, key: str, *, seed: int) -> None:
        """`key`: of the requests that it sends."""
        self.plain = plain
        self._key = key
        self.past: list[Past] = []
        self._rng = random.Random(f"{seed} faults")
        self._began = time.monotonic()
        self._cuts: list[tuple[int, float, float]] = []  # gateway, begin, end
        self._busy: set[str] = set()
        self.unlogged: dict[str, list[tuple[float, float]]] = defaultdict(list)
        """Times by process whose requests may be in no log: it was killed, or could not write."""

    @property
    def urls(self) -> list[str]:
        return self.plain.urls

    @property
    def minutes(self) -> float:
        """Since the beginning."""
        return (time.monotonic() - self._began) / 60

    def may_cut(self, gateway: int, since: float) -> bool:
        child, now = self.plain.gateways[gateway], time.monotonic()
        if child.pid is None or child.ready_at > since:
            return True
        return any(of == gateway and begin <= now and end >= since for of, begin, end in self._cuts)

    async def play(self) -> None:
        async with asyncio.TaskGroup() as under_way:
            limit = asyncio.Semaphore(MAX_AT_ONCE)
            while True:
                await limit.acquire()
                task = under_way.create_task(self._play_one())
                task.add_done_callback(lambda _: limit.release())
                await asyncio.sleep(self._rng.uniform(*GAP_S))

    async def _play_one(self) -> None:
        seconds = self._rng.uniform(*LENGTH_S)
        name, work, target = self._choose()
        if target in self._busy:
            return
        self._busy.add(target)
        begin = time.monotonic()
        try:
            await work(seconds)
        finally:
            self._busy.discard(target)
            past = Past(begin - self._began, name, target, time.monotonic() - begin)
            self.past.append(past)
            print(f"  {past.at_s:6.1f} s {name} {target} {past.seconds:.1f} s", file=sys.stderr)

    def _choose(self) -> tuple[str, Callable[[float], Awaitable[None]], str]:
        rng, plain = self._rng, self.plain
        engines, gateway = rng.choice(plain.engines), rng.choice(plain.gateways)
        child = rng.choice(plain.children)
        link, bus = rng.choice(sorted(plain.links)), rng.choice(sorted(plain.buses))
        ways: tuple[tuple[Direction, ...], ...] = (("up",), ("down",), ("up", "down"))
        way = rng.choice(ways)
        link_name, last = f"{link[0]}-{link[1]}", plain.engines[1]
        faults: list[tuple[str, Callable[[float], Awaitable[None]], str]] = [
            ("engines killed", lambda _: self._kill(last), last.name),
            ("engines stopped", lambda s: self._stop(engines, s), engines.name),
            ("engines slow", lambda s: self._slow(engines, s), engines.name),
            ("gateway killed", lambda _: self._kill(plain.gateways[1]), plain.gateways[1].name),
            ("gateway stopped", lambda s: self._stop(gateway, s), gateway.name),
            ("broker killed", lambda _: self._kill_broker(), "broker"),
            ("broker stopped", lambda s: self._stop_broker(s), "broker"),
            ("link cut", lambda s: self._cut(plain.links[link], s), link_name),
            ("link silent", lambda s: self._silence(plain.links[link], way, s), link_name),
            ("link slow", lambda s: self._delay(plain.links[link], s), link_name),
            ("bus cut", lambda s: self._cut(plain.buses[bus], s), f"bus-{bus}"),
            ("bus silent", lambda s: self._silence(plain.buses[bus], way, s), f"bus-{bus}"),
            ("clock jump", lambda _: self._jump(child), child.name),
            ("disk full", lambda s: self._fill_disk(child, s), child.name),
            ("no descriptors", lambda s: self._take_descriptors(gateway, s), gateway.name),
            ("memory pressure", lambda _: self._flood(), "kv"),
        ]
        return rng.choice(faults)

    # Processes

    async def _kill(self, child: Child) -> None:
        lives, now = child.lives, time.monotonic()
        if child in self.plain.gateways:  # clients may know before this process does
            self._cuts.append((self.plain.gateways.index(child), now, now + EXCUSE_S))
        self.unlogged[child.name].append((now - UNLOGGED_S, now + EXCUSE_S))
        _signal(child.pid, signal.SIGKILL)
        while child.lives == lives or child.pid is None:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)

    async def _stop(self, child: Child, seconds: float) -> None:
        with _stopped(child.pid):
            await asyncio.sleep(seconds)

    async def _slow(self, child: Child, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with _stopped(child.pid):
                await asyncio.sleep(PULSE_S[0])
            await asyncio.sleep(PULSE_S[1])

    async def _kill_broker(self) -> None:
        restarts = self.plain.broker.restarts
        _signal(self.plain.broker.pid, signal.SIGKILL)
        while self.plain.broker.restarts == restarts:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)

    async def _stop_broker(self, seconds: float) -> None:
        with _stopped(self.plain.broker.pid):
            await asyncio.sleep(seconds)

    # Connections

    async def _cut(self, proxy: Proxy, seconds: float) -> None:
        proxy.cut()
        await _then_heal(proxy, seconds)

    async def _silence(self, proxy: Proxy, ways: tuple[Direction, ...], seconds: float) -> None:
        proxy.silence(*ways)
        await _then_heal(proxy, seconds)

    async def _delay(self, proxy: Proxy, seconds: float) -> None:
        proxy.delay_s = self._rng.uniform(0.02, 0.3)
        await _then_heal(proxy, seconds)

    # What processes stand on

    async def _jump(self, child: Child) -> None:
        set_clock(child.clock, self._rng.uniform(-MAX_JUMP_S, MAX_JUMP_S))

    async def _fill_disk(self, child: Child, seconds: float) -> None:
        """Every write to a file fails: of all that it writes, those are its logs."""
        now = time.monotonic()
        self.unlogged[child.name].append((now - UNLOGGED_S, now + seconds + EXCUSE_S))
        with _limited(child.pid, resource.RLIMIT_FSIZE, 0):
            await asyncio.sleep(seconds)

    async def _take_descriptors(self, child: Child, seconds: float) -> None:
        if (pid := child.pid) is None:
            return
        place, begin = self.plain.gateways.index(child), time.monotonic()
        self._cuts.append((place, begin, begin + seconds + EXCUSE_S))
        with contextlib.suppress(psutil.Error):
            num_fds = psutil.Process(pid).num_fds()
            with _limited(pid, resource.RLIMIT_NOFILE, num_fds + 2):
                await asyncio.sleep(seconds)

    async def _flood(self) -> None:
        """Prompts that together are far longer than the KV memory of all engines."""
        config = self.plain.config
        assert config.engine.kv_tokens is not None
        length = config.engine.kv_tokens // 3
        firsts = [self._rng.randrange(100) for _ in range(12)]
        headers = {"authorization": f"Bearer {self._key}"}
        async with httpx.AsyncClient(timeout=60.0, headers=headers) as client:
            await asyncio.gather(
                *(
                    client.post(
                        f"{self._rng.choice(self.urls)}/v1/completions",
                        json={
                            "model": MODEL,
                            "prompt": [first + i % 97 for i in range(length)],
                            "max_tokens": 8,
                        },
                    )
                    for first in firsts
                ),
                return_exceptions=True,
            )


async def _then_heal(proxy: Proxy, seconds: float) -> None:
    try:
        await asyncio.sleep(seconds)
    finally:
        proxy.pass_all()


def _signal(pid: int | None, number: signal.Signals) -> None:
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.contextmanager
def _stopped(pid: int | None) -> Iterator[None]:
    _signal(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(pid, signal.SIGCONT)


@contextlib.contextmanager
def _limited(pid: int | None, what: int, limit: int) -> Iterator[None]:
    """A soft limit of another process."""
    if pid is None:
        yield
        return
    try:
        before = resource.prlimit(pid, what)
        resource.prlimit(pid, what, (limit, before[1]))
    except ProcessLookupError:
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, what, before)
