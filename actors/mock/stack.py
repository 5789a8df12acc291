"""A whole Mallee with mocked engines on this machine, without Ray: broker, engines, gateway, HTTP.

The gateway runs in this process, the engines in others, which reach it over Unix sockets in a private
folder. Only the computing is mocked: router, transport, NATS and HTTP are those of a real fleet.
"""

import asyncio
import logging
import shutil
import socket
import sys
import tempfile
from pathlib import Path

import msgspec

from mallee.actors.build import (
    GatewayProcess,
    build_gateway,
    build_router,
    build_transport,
    freeze_heap,
    open_access,
)
from mallee.actors.mock.fleet import MockPlan
from mallee.actors.mock.process import ProcessSpec
from mallee.protocol.errors import ConfigError, InternalError, NoWorker
from mallee.protocol.subjects import BusRole
from mallee.runtime.addresses import base_url, checked_path, listener
from mallee.runtime.bus.access import BrokerAccess, operators_broker
from mallee.runtime.bus.broker import Broker, check_operators_broker
from mallee.runtime.bus.children import Pauses, death_follower, end
from mallee.runtime.config import AppConfig
from mallee.runtime.proxy.server import Server
from mallee.runtime.tasks import Tasks
from mallee.runtime.transport.greeting import Secret, new_secret

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 2.0
LOOK_S = 0.02
PAUSES_S = (0.1, 30.0, 10.0)
WATCH_S = 0.5  # between two checks of what may have ended
GATEWAY = "g0"


class MockStack:
    """A running service at `base_url`, with `config.workers` processes of mocked engines.

    A process that ends is started again, and its engines join in another life; meanwhile requests go on
    elsewhere. Belongs to one event loop. Use as an asynchronous context manager.
    """

    def __init__(self, config: AppConfig, *, host: str = "127.0.0.1", port: int = 8000) -> None:
        """Raises ConfigError if the engines are not mocked, or their number should follow the load."""
        if not config.is_mocked:
            raise ConfigError(
                f"engine.kind={config.engine.kind!r}: only mocked engines run without Ray"
            )
        if (most := config.autoscaling.max_workers) is not None:
            raise ConfigError(
                f"autoscaling.max_workers={most}: Ray Serve adds and drains workers, and mocked engines"
                " run without it here: use `mallee serve --set engine.kind=mock`, or leave `autoscaling` out"
            )
        self.config = config
        self.base_url = base_url(host, port)
        self.broker = None
        if config.nats_url is None:
            self.broker = Broker(fleet=config.fleet, store=config.store.name)
        self.router = build_router(config)
        self.children: dict[int, asyncio.subprocess.Process] = {}  # by number
        self._keepers = Tasks("the processes of mocked engines")
        self._listen = (host, port)
        self._secret = new_secret()
        self._folder = Path(tempfile.mkdtemp(prefix="mallee-"))
        self._listener: socket.socket | None = None
        self._gateway: GatewayProcess | None = None
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def nats_url(self) -> str:
        """Without credentials."""
        return self.broker.url if self.broker is not None else str(self.config.nats_url)

    def access(self, role: BusRole) -> BrokerAccess:
        """The broker as a gateway or a process of engines uses it. Raises ConfigError."""
        if self.broker is not None:
            return self.broker.access(role)
        return operators_broker(self.config, role)

    async def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Returns when every engine is registered. Raises MalleeError; then nothing is left running."""
        try:
            open_access(self.config).check_listening(self._listen[0])
            self._listener = listener(*self._listen)  # what is wrong with the settings shows here
            plan = MockPlan.of(self.config)
            if self.broker is not None:
                await self.broker.start()
            else:
                await asyncio.to_thread(check_operators_broker, self.config)
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(self._spawn(i) for i in range(self.config.workers)))
                await self._start_gateway(plan, self._listener)
                await asyncio.gather(*map(self._ready, self.children))
                while len(self.router.workers()) < self.config.num_workers:  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_S)
        except TimeoutError as error:
            seen = len(self.router.workers())
            await self.close()
            raise NoWorker(
                f"{seen} of {self.config.num_workers} engines registered in {timeout_s:.0f} s"
            ) from error
        except BaseException:
            await self.close()
            raise
        for number in self.children:
            self._keepers.spawn(self._keep(number))
        freeze_heap()

    async def wait(self) -> None:
        """Wait for the end of the server.

        Raises what ended it, and InternalError: a task failed, or a process of engines does not start again.
        """
        assert self._serving is not None, "start comes first"
        assert self._gateway is not None
        while not self._serving.done():
            await asyncio.wait((self._serving,), timeout=WATCH_S)
            if self.broker is not None and not self.broker.is_running:
                raise InternalError("the broker's supervisor failed")
            failure = self._keepers.failure or self._gateway.gateway.operator.failure
            if failure is not None:
                raise InternalError(f"a task failed: {failure!r}") from failure
        await self._serving

    async def close(self) -> None:
        """End the server, the gateway, the engines and the broker. Idempotent."""
        if self._server is not None:
            self._server.should_exit = True
        if self._gateway is not None:
            await self._gateway.close()  # streams end, or the server would wait for them
        if self._server is not None and self._serving is not None:
            await asyncio.wait((self._serving,), timeout=STOP_TIMEOUT_S)
            self._server.force_exit = True  # a client does not read
            await asyncio.wait((self._serving,))
        await self._keepers.close()
        await asyncio.gather(*map(end, self.children.values()))
        if self.broker is not None:
            await self.broker.stop()
        if self._listener is not None:
            self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def __aenter__(self) -> "MockStack":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _spawn(self, number: int) -> None:
        path = checked_path(self._folder / f"{number}.sock")
        spec = ProcessSpec(
            number=number,
            path=path,
            secret=self._secret,
            broker=self.access("worker"),
            config=self.config.model_dump_json(),
        )
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "mallee.actors.mock.process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            preexec_fn=death_follower(),
        )
        self.children[number] = child
        assert child.stdin is not None
        child.stdin.write(msgspec.json.encode(spec) + b"\n")

    async def _keep(self, number: int) -> None:
        """Start the process again whenever it ends. Raises ConfigError if it does not start."""
        pauses, clock = Pauses(*PAUSES_S), asyncio.get_running_loop().time
        while True:
            began, child = clock(), self.children[number]
            status = await child.wait()
            pause_s = pauses.after(clock() - began)
            if pauses.num_young <= 1:  # once, of many that come one after the other
                text = "process %d of engines ended with status %d: it is started again%s"
                more = ", and later each time that it ends at once" if pauses.num_young else ""
                log.warning(text, child.pid, status, more)
            await asyncio.sleep(pause_s)
            await self._spawn(number)
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    await self._ready(number)
            except TimeoutError as error:
                raise ConfigError(
                    f"a process of mocked engines did not start again in {START_TIMEOUT_S:.0f} s"
                ) from error

    async def _ready(self, number: int) -> None:
        child = self.children[number]
        assert child.stdout is not None
        if await child.stdout.readline() != b"ready\n":
            raise ConfigError("a process of mocked engines did not start; what it says is above")

    async def _start_gateway(self, plan: MockPlan, listener: socket.socket) -> None:
        self._gateway = await build_gateway(
            self.config,
            GATEWAY,
            broker=self.access("gateway"),
            transport=build_transport(self.config, GATEWAY, Secret(self._secret)),
            router=self.router,
            model=plan.served,
            secret=Secret(self._secret),
        )
        await self._gateway.start()
        self._server = Server(self._gateway.api, log_level="error")
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
