"""A router that forwards requests itself: connections over a `Front`, and pages of its own."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import parse_qs

import msgspec

from mallee.actors.front.front import Front
from mallee.actors.front.http.messages import CREDENTIALS, Page, value_of
from mallee.actors.front.placement import Refusal
from mallee.actors.front.proxy.client import ClientConnection
from mallee.actors.front.proxy.config import ProxyConfig
from mallee.actors.front.proxy.counts import ProxyCounts
from mallee.actors.front.proxy.exchange import Request
from mallee.actors.front.proxy.selection import RELEASE, booking, named
from mallee.actors.front.proxy.streams import Room
from mallee.gateway.access.access import Access
from mallee.gateway.bodies import decisions_body, workers_body
from mallee.protocol.errors import NotFound, Unauthorized
from mallee.protocol.ids import RequestId, WorkerId
from mallee.router.views import away
from mallee.runtime.addresses import listener
from mallee.runtime.telemetry.families import CONTENT_TYPE, exposition
from mallee.runtime.telemetry.tracing.provider import Tracing, open_tracing

if TYPE_CHECKING:
    from mallee.actors.front.proxy.spans import ForwardSpans

SWEEP_S: Final = 0.25
BACKLOG: Final = 1024
HEALTH: Final = (b"/health", b"/router/health")
PAGES: Final = "/health, /metrics, /router/backends, /v1/router/workers, /v1/router/explain"


class Proxy(Front):
    """One router. Belongs to one event loop; use as an asynchronous context manager."""

    kind: ClassVar = "router"

    def __init__(self, config: ProxyConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        """As `Front`. Raises MalleeError."""
        self.counts: ProxyCounts = ProxyCounts()
        super().__init__(config, self.counts, clock=clock)
        self.config = config
        self.front: Front = self
        self.retries = config.retries
        self.silence_s = config.silence_s
        self.head_s, self.body_s = config.head_s, config.body_s
        self.keep_alive_s = config.keep_alive_s
        self.max_body_nbytes = config.max_body_mb << 20
        self.max_buffered_nbytes = config.max_buffered_mb << 20
        self.max_connections = config.max_requests
        self.num_buffered = 0
        self.room = Room(self.max_buffered_nbytes)
        self.connections: set[ClientConnection] = set()
        self.is_draining = False
        self.now = 0.0  # of the loop, as of the last sweep
        self.port = 0
        self.access = Access(config.keys_path, os.environ)
        self.counts.show_access(self.access)
        self._tracing = open_tracing("router", self.name)
        self.spans = None if self._tracing is None else _spans(self._tracing)
        self.tasks.include(self.access.tasks)
        self._server: asyncio.Server | None = None

    async def _open(self) -> None:
        host, _, port = self.config.listen.rpartition(":")
        host = host.strip("[]")
        self.access.check_listening(host)
        self.access.start_up()
        loop = asyncio.get_running_loop()
        self.now = loop.time()
        self._server = await loop.create_server(
            lambda: ClientConnection(self), sock=listener(host, int(port)), backlog=BACKLOG
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self.tasks.spawn(self._sweep())

    async def _shut(self, drain_s: float) -> None:
        self.is_draining = True
        if self._server is not None:
            self._server.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while self.connections:  # they end by themselves
                    for connection in list(self.connections):
                        connection.close_if_idle()
                    await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.cut_off()
        await self.access.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    async def _sweep(self) -> None:
        """Look at every connection now and then: a timer for each would cost more."""
        loop = asyncio.get_running_loop()
        while True:
            self.now = loop.time()
            for connection in list(self.connections):
                connection.sweep()
            await asyncio.sleep(SWEEP_S)

    def admit(self, request: Request) -> Refusal | None:
        """Refuses those without a key, where there are keys; limits of the key count in `visit`."""
        if not self.access.has_keys or request.target in HEALTH:
            return None
        try:
            request.visit = self.access.caller(_token(request), None).visit
        except Unauthorized as error:
            return Refusal.of(error)
        return None

    def hand_over(self, request: Request) -> None:
        """Keep the router's keys from the backends, and show them their own."""
        own = self.backends.credentials
        if own is not None or self.access.has_keys:
            request.lines = [each for each in request.lines if each[0] not in CREDENTIALS]
        if own is not None:
            request.lines.append(own)

    def page(self, request: Request) -> Page | Refusal:
        """A page of our own: those beside the health are an operator's."""
        path, _, query = request.target.decode("latin-1").partition("?")
        path = path.removeprefix("/router")
        if path == "/health":
            return self._health()
        if path == RELEASE.decode():
            return self._release(request.body)
        if not self.access.is_operator(_token(request)):
            return Refusal(403, "forbidden", "give an operator's key")
        match path:
            case "/metrics":
                self.counts.show(self.pods, self.router)
                page = b"".join(exposition(self.counts.registry, ""))
                return Page(200, page, CONTENT_TYPE.encode())
            case "/backends":
                views = [view._asdict() | view.knowledge._asdict() for view in self.pods.views()]
                for view in views:
                    del view["knowledge"]  # its fields stand beside the others
                return Page(200, msgspec.json.encode({"backends": views}))
            case "/v1/router/workers":
                return Page(200, msgspec.json.encode(self._workers()))
            case "/v1/router/explain":
                return self._decisions({key: value[-1] for key, value in parse_qs(query).items()})
        return Refusal(404, "not_found", f"pages here: {PAGES}")

    def _workers(self) -> dict[str, Any]:
        """The backends as a service lists its workers; those that get no requests are among them."""
        pods = {WorkerId(pod.address): pod for pod in self.pods.views()}
        found = {view.worker: view for view in self.router.all_workers()}
        body = workers_body([found.get(name) or away(name) for name in pods], {})
        for row in body["data"]:
            pod = pods[row["worker"]]
            row |= {"cache": pod.knowledge.state, "cache_reason": pod.knowledge.reason}
            row["use"] = {
                "running_branches": pod.running,
                "waiting_branches": pod.waiting,
                "live_blocks": row["active_blocks"],
                "cached_blocks": pod.num_blocks_known,
                "capsules": 0,
                "cached_tokens": pod.cached_tokens,
                "prefill_tokens": max(0, pod.queried_tokens - pod.cached_tokens),
                "evicted_blocks": 0,
                "preemptions": 0,
            }
        return body

    def _decisions(self, query: dict[str, str]) -> Page | Refusal:
        """The last decisions, as a service explains them."""
        name = query.get("request")
        try:
            limit, most = (int(query.get(key, 16)) for key in ("limit", "candidates"))
        except ValueError:
            return Refusal(400, "bad_request", "limit and candidates are numbers")
        try:
            request = None if name is None else RequestId(name)
            body = decisions_body(self.router, request, max(1, limit), max(1, most))
        except NotFound as error:
            return Refusal.of(error)
        return Page(200, msgspec.json.encode(body))

    def _release(self, raw: bytes) -> Page | Refusal:
        """End the booking of a selection."""
        found = named(raw)
        if found is None or found.request_id is None:
            return Refusal(400, "bad_request", "give a JSON object with request_id")
        name = booking(found.request_id)
        was_booked = self.router.is_booked(name)
        if was_booked:
            self.placement.first_token(name)
            if found.cached_tokens is not None:
                self.placement.observe_hit(name, found.cached_tokens)
            self.placement.free(name)
        return Page(200, msgspec.json.encode({"released": was_booked}))

    def _health(self) -> Page:
        """200 while requests can be served."""
        states: dict[str, int] = {}
        for view in self.pods.views():
            states[view.knowledge.state] = states.get(view.knowledge.state, 0) + 1
        num_ready = len(self.router.workers())
        is_well = self.is_ready and not self.is_draining and num_ready > 0
        found = {
            "status": ("degraded" if states.get("blind") else "ok") if is_well else "unavailable",
            "gateway": self.name,
            "ready": num_ready,
            "backends": states,
        }
        return Page(200 if is_well else 503, msgspec.json.encode(found))


def _spans(tracing: Tracing) -> "ForwardSpans":
    from mallee.actors.front.proxy.spans import ForwardSpans  # an extra

    return ForwardSpans(tracing)


def _token(request: Request) -> str | None:
    """The API key of a request, as OpenAI's or as Anthropic's clients send it."""
    kind, _, token = value_of(request.lines, b"authorization").decode("latin-1").partition(" ")
    if kind.lower() == "bearer" and token:
        return token.strip()
    return value_of(request.lines, b"x-api-key").decode("latin-1") or None
