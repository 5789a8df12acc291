"""A service without Ray whose every process and connection can be disturbed.

Two gateways, two processes of engines (`process.py`), the product's broker. Each connection between them
goes through a proxy of its own. A process that ends is started again, as Ray Serve would.
"""

import asyncio
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from bench.doubles.ports import free_ports
from bench.failover.faults import clock_environment, set_clock
from bench.soak.keys import Keys
from bench.soak.process import EnginesSpec, GatewaySpec, Report
from bench.soak.proxy import Proxy
from mallee.protocol.subjects import BusRole
from mallee.runtime.bus.access import BrokerAccess
from mallee.runtime.bus.broker import Broker
from mallee.runtime.bus.children import death_follower, end
from mallee.runtime.config import AppConfig
from mallee.runtime.tasks import Tasks
from mallee.runtime.transport.greeting import new_secret

log = logging.getLogger(__name__)

START_S = 90.0
REPORT_S = 20.0
REST_S = 0.3  # before a process is started again
ENGINES_PER_PROCESS = 2


class Sample(NamedTuple):
    """Memory of one life of a process at a moment."""

    at: float
    life: int
    rss_nbytes: int


class Child:
    """One process, started again when it ends. `lives` counts them."""

    def __init__(
        self, name: str, spec: Callable[[int], EnginesSpec | GatewaySpec], folder: Path
    ) -> None:
        self.name = name
        self.lives = 0
        self.ready_at = 0.0  # the last of them
        self.samples: list[Sample] = []
        self.log = folder / f"{name}.log"
        self.clock = folder / f"{name}.clock"
        self._spec = spec
        self._environment = {**os.environ, **clock_environment(self.clock), "OMP_NUM_THREADS": "1"}
        self._process: asyncio.subprocess.Process | None = None
        self._is_ready = asyncio.Event()
        self._asking = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """None while it is not ready."""
        return self._process.pid if self._process and self._is_ready.is_set() else None

    async def keep(self) -> None:
        """Run it for ever."""
        while True:
            self.lives += 1
            spec = self._spec(self.lives)
            with self.log.open("ab") as log_file:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "bench.soak.process"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log_file,
                    env=self._environment,
                    preexec_fn=death_follower(),
                    limit=1 << 24,
                )
            self._process = process
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(msgspec.json.encode(spec) + b"\n")
            if await process.stdout.readline() == b"ready\n":
                self.ready_at = time.monotonic()
                self._is_ready.set()
            await process.wait()
            self._is_ready.clear()
            await asyncio.sleep(REST_S)

    async def ready(self) -> None:
        async with asyncio.timeout(START_S):
            await self._is_ready.wait()

    async def report(self) -> Report:
        """Raises TimeoutError, ConnectionError."""
        async with self._asking, asyncio.timeout(REPORT_S):
            await self._is_ready.wait()
            process = self._process
            assert process is not None
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"\n")
            line = await process.stdout.readline()
        if not line:
            raise ConnectionError(f"{self.name} ended")
        return msgspec.convert(json.loads(line), Report)

    def sample(self) -> None:
        """Note its memory."""
        if (pid := self.pid) is None:
            return
        try:
            rss = psutil.Process(pid).memory_info().rss
        except psutil.Error:
            return
        self.samples.append(Sample(time.monotonic(), self.lives, rss))

    async def close(self) -> None:
        if self._process is not None:
            await end(self._process, 10.0)


class Plain:
    """The running service. Belongs to one event loop; an asynchronous context manager."""

    def __init__(self, config: AppConfig) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mallee-soak-"))
        self.keys = Keys(self.folder / "keys.yaml")
        http = config.http.model_copy(update={"keys_file": str(self.keys.file)})
        self.config = config.model_copy(update={"http": http})
        self.broker = Broker(fleet=config.fleet)
        self.links: dict[tuple[str, str], Proxy] = {}  # by gateway and process of engines
        self.buses: dict[str, Proxy] = {}  # by process
        self._secret = new_secret()
        self._lives = count(1)
        self._tasks = Tasks("the soaked service")
        ports = free_ports(2 + 4)
        self._ports = dict(zip(("g0", "g1", "e0", "e1"), ports[2:], strict=True))
        self.urls = [f"http://127.0.0.1:{port}" for port in ports[:2]]
        self.engines = [self._engines(i) for i in range(2)]
        self.gateways = [self._gateway(i, port) for i, port in enumerate(ports[:2])]
        self.workers = [name for i in range(2) for name in self._names(i)]

    @property
    def children(self) -> list[Child]:
        return [*self.gateways, *self.engines]

    async def __aenter__(self) -> "Plain":
        await self.broker.start()
        for name, port in self._ports.items():
            self.buses[name] = Proxy(port, self.broker.port)
        for gateway in self.gateways:
            for engines in self.engines:
                place = f"{self._socket(engines.name)}.{gateway.name}"
                link = Proxy(place, self._socket(engines.name))
                self.links[gateway.name, engines.name] = link
        for proxy in (*self.buses.values(), *self.links.values()):
            await proxy.start()
        for child in self.children:
            self._tasks.spawn(child.keep())
        await asyncio.gather(*(child.ready() for child in self.children))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.close()
        await asyncio.gather(*(child.close() for child in self.children))
        for proxy in (*self.buses.values(), *self.links.values()):
            await proxy.close()
        await self.broker.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def heal(self) -> None:
        """End every fault of a connection or a clock."""
        for proxy in (*self.buses.values(), *self.links.values()):
            proxy.pass_all()
        for child in self.children:
            set_clock(child.clock, 0.0)

    def _socket(self, name: str) -> str:
        return str(self.folder / f"{name}.sock")

    def _access(self, name: str, role: BusRole) -> BrokerAccess:
        """The way of process `name` to the broker, by its proxy."""
        return replace(self.broker.access(role), url=f"nats://127.0.0.1:{self._ports[name]}")

    def _names(self, number: int) -> tuple[str, ...]:
        first = number * ENGINES_PER_PROCESS
        return tuple(f"w{i}" for i in range(first, first + ENGINES_PER_PROCESS))

    def _engines(self, number: int) -> Child:
        name = f"e{number}"

        def spec(life: int) -> EnginesSpec:
            Path(self._socket(name)).unlink(missing_ok=True)
            return EnginesSpec(
                name=name,
                config=self.config.model_dump_json(),
                broker=self._access(name, "worker"),
                secret=self._secret,
                path=self._socket(name),
                workers=self._names(number),
                life=next(self._lives),
            )

        return Child(name, spec, self.folder)

    def _gateway(self, number: int, port: int) -> Child:
        name = f"g{number}"

        def spec(life: int) -> GatewaySpec:
            return GatewaySpec(
                name=f"{name}-{life}",
                config=self.config.model_dump_json(),
                broker=self._access(name, "gateway"),
                secret=self._secret,
                path="",
                port=port,
                way=f".{name}",
            )

        return Child(name, spec, self.folder)
