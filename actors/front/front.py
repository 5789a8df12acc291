"""A router in front of others' engines, put together from its settings: endpoints, router, bookings, reader.

A shell around it answers an Envoy (`picker/`) or forwards requests itself (`proxy/`).
"""

import asyncio
import itertools
import os
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AsyncExitStack
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar, Final, Self

from mallee.actors.build import build_router, freeze_heap, resolve, share_interpreter
from mallee.actors.front.config import FrontConfig
from mallee.actors.front.counts import FrontCounts
from mallee.actors.front.http.backends import Backends
from mallee.actors.front.placement import Placement
from mallee.actors.front.pods.endpoints import EndpointSource, ListedEndpoints
from mallee.actors.front.pods.kubernetes import PoolEndpoints, account_namespace, server_of
from mallee.actors.front.pods.pods import PodLimits, Pods
from mallee.actors.front.prompts import Prompt, PromptReader
from mallee.api.text.chat import ChatTemplate
from mallee.api.text.tokenizer import Tokenizer
from mallee.gateway.fleet.bookings import BookingFeed
from mallee.protocol.errors import InternalError
from mallee.protocol.ids import Incarnation, RequestId, WorkerId
from mallee.runtime.bus.access import operators_broker
from mallee.runtime.bus.inbox import WORK_BLOCKS, Pump
from mallee.runtime.bus.nats import NatsBus
from mallee.runtime.tasks import Tasks

if TYPE_CHECKING:
    import zmq.asyncio

BACKENDS_KEY: Final = "MALLEE_BACKENDS_API_KEY"  # in the environment: settings are shown
CONNECT_S: Final = 2.0  # for a connection to a pod
DRAIN_S: Final = 30.0
WATCH_S: Final = 0.5  # between two looks at what may have failed
COUNT_S: Final = 0.5  # between two counts for the metrics
_NAME_CHARS: Final = 32


class Front(ABC):
    """The parts that every shell has. Belongs to one event loop; use as an asynchronous context manager.

    Any number of them share a pool: with a broker they count each other's requests, without each counts
    its own and what pods report.
    """

    kind: ClassVar[str]
    """The process's name in logs."""

    def __init__(
        self,
        config: FrontConfig,
        counts: FrontCounts,
        *,
        fallbacks: int = 0,
        objectives: dict[str, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Loads the tokenizer and compiles the router, which goes by `clock`. Raises MalleeError."""
        self._front_config = config
        self.name = _name()
        self.counts = counts
        app = config.app
        self.router = build_router(app, shared_as=self.name, clock=clock)
        self._reader = _reader(config)
        self._source = _source(config)
        self.backends = Backends(CONNECT_S, key=os.environ.get(BACKENDS_KEY, ""))
        self._context = _context(config)
        self.pods = Pods(
            self.router,
            self.backends,
            self._context,
            _limits(config),
            max_pods=app.worker_room,
            on_join=self._joined,
        )
        self._pump = Pump(work=lambda: self.router.work(WORK_BLOCKS), clock=time.monotonic)
        self._bus: NatsBus | None = None
        self._bookings: BookingFeed | None = None
        if config.nats_url is not None:
            access = operators_broker(app, "gateway")
            self._bus = NatsBus(access, fleet=config.fleet, name=f"mallee-{self.name}")
            assert self.router.outbox is not None
            self._bookings = BookingFeed(
                self._bus,
                self.router,
                self.router.outbox,
                pump=self._pump,
                fleet=config.fleet,
                clock=time.monotonic,
            )
        self.placement = Placement(
            self.router,
            block_size=config.block_size,
            default_max_tokens=config.routing.expected_output_tokens,
            fallbacks=fallbacks,
            objectives=objectives or {},
        )
        self._numbers = itertools.count()
        self._end_metrics: Callable[[], None] | None = None
        self.tasks = Tasks(f"{self.kind} {self.name}")
        self.tasks.include(self.pods.tasks)
        if self._bookings is not None:
            self.tasks.include(self._bookings.tasks)

    @property
    def is_ready(self) -> bool:
        """Whether the pool is known, and each endpoint that it had then was asked once."""
        return self.pods.is_synced and self.failure is None

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended a task; this process should be replaced."""
        return self.tasks.failure or (None if self._bus is None else self._bus.failure)

    def new_id(self) -> RequestId:
        """A name for a booking."""
        return RequestId(f"{self.name}-{next(self._numbers)}")

    def read(self, headers: dict[str, str], raw: bytes) -> Prompt:
        """The prompt of a request. Safe to call in any thread."""
        return self._reader.read(headers, raw, adapters=self.pods.served.adapters)

    def encoded(self, text: str) -> list[int] | None:
        """The tokens of a text; None without a tokenizer. Safe to call in any thread."""
        return self._reader.encoded(text)

    async def read_aside(self, headers: dict[str, str], raw: bytes) -> Prompt:
        """As `read`, in a thread: of long bodies."""
        return await asyncio.to_thread(self.read, headers, raw)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as unless_started:
            unless_started.push_async_callback(self.close, 0.0)
            await self._start()
            await self._open()
            unless_started.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close(DRAIN_S)

    async def wait(self) -> None:
        """Raises InternalError once a task has failed."""
        while self.failure is None:  # noqa: ASYNC110 # failures are of several owners
            await asyncio.sleep(WATCH_S)
        raise InternalError(f"a task of the {self.kind} failed: {self.failure!r}") from self.failure

    async def close(self, drain_s: float) -> None:
        """Let requests under way end for so long, then end everything."""
        await self._shut(drain_s)
        await self.tasks.close()
        if self._bookings is not None:
            await self._bookings.close()
        self._pump.close()
        if self._bus is not None:
            await self._bus.close()
        await self.pods.close()
        self.backends.close()
        if self._end_metrics is not None:
            self._end_metrics()
        if self._context is not None:
            self._context.destroy(linger=0)

    @abstractmethod
    async def _open(self) -> None:
        """Listen for requests. Raises ConfigError."""

    @abstractmethod
    async def _shut(self, drain_s: float) -> None:
        """Take no new requests, and let those under way end for so long."""

    async def _start(self) -> None:
        config = self._front_config
        share_interpreter()
        freeze_heap()
        self.tasks.watch_callbacks()
        if self._bus is not None and self._bookings is not None:
            await self._bus.connect()
            await self._bookings.start_up()
        self.pods.start_up()
        self.tasks.spawn(self._source.follow(self.pods.update), name="the endpoints")
        self.tasks.spawn(self._recount())
        if config.metrics_listen is not None:
            self._end_metrics = self.counts.serve(config.metrics_listen)

    def _joined(self, worker: WorkerId, incarnation: Incarnation) -> None:
        if self._bookings is not None:
            self._bookings.replicas.worker_joined(worker, incarnation)

    async def _recount(self) -> None:
        """Count here what the thread of the metrics must not go through."""
        while True:
            self.counts.show(self.pods, self.router)
            self.backends.sweep()
            await asyncio.sleep(COUNT_S)


def _name() -> str:
    """A name that no other router has, in letters that subjects may have."""
    host = "".join(c if c.isalnum() and c.isascii() else "-" for c in socket.gethostname())
    return f"{host[:_NAME_CHARS]}-{secrets.token_hex(4)}"


def _reader(config: FrontConfig) -> PromptReader:
    if config.model is None:
        return PromptReader(None, None, config.block_size)
    path = resolve(config.model)
    tokenizer = Tokenizer.load(path)
    chat = ChatTemplate.load(path, special_tokens=tokenizer.special_tokens, protects=False)
    return PromptReader(tokenizer, chat, config.block_size)


def _source(config: FrontConfig) -> EndpointSource:
    if config.pool is not None:
        namespace = config.namespace or account_namespace(os.environ)
        return PoolEndpoints(
            server_of(config.kubernetes_url), namespace=namespace, pool=config.pool
        )
    return ListedEndpoints(config.endpoints_path or config.endpoints)


def _context(config: FrontConfig) -> "zmq.asyncio.Context | None":
    if config.model is None or (config.events_port is None and find_spec("zmq") is None):
        return None  # KV events name blocks by their tokens
    import zmq.asyncio  # without KV events it is not needed

    return zmq.asyncio.Context()


def _limits(config: FrontConfig) -> PodLimits:
    return PodLimits(
        block_size=config.block_size,
        num_blocks=max(1, config.kv_tokens // config.block_size),
        max_rows=config.max_rows,
        scrape_s=config.scrape_s,
        events_port=config.events_port,
        replay_port=config.replay_port,
        topic=config.events_topic,
    )
