"""One process's own HTTP server: metrics and health, on a port beside that of the API.

Loaded only where it is wanted: a server takes memory, and ten turns of the event loop a second.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mallee.runtime.addresses import first_free_listener
from mallee.runtime.config import TelemetrySettings
from mallee.runtime.proxy.server import Server
from mallee.runtime.tasks import Tasks
from mallee.runtime.telemetry.families import content_type

LOOPBACK: Final = "127.0.0.1"
NUM_PORTS: Final = 32  # that are tried
MAX_CONNECTIONS: Final = 64
STOP_S: Final = 2.0  # for a scrape to end
_EVERYWHERE: Final = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound


class Readers(Protocol):
    """The callers that may read metrics."""

    def check_listening(self, host: str) -> None:
        """Raises ConfigError if other machines could reach `host` without a key."""
        ...

    def is_operator(self, token: str | None) -> bool:
        """Whether the bearer of that key is an operator."""
        ...


class MetricsListener:
    """Serves `/metrics`, `/health/live` and `/health/ready`. Belongs to one event loop.

    `render(accept)` is the exposition for that header, `is_ready()` whether requests can be served.
    """

    def __init__(
        self,
        render: Callable[[str], Awaitable[bytes]],
        is_ready: Callable[[], bool],
        readers: Readers,
        *,
        settings: TelemetrySettings,
        own_ip: str,
    ) -> None:
        """`own_ip`: of the machine, for scrapers where `settings` say to listen everywhere."""
        self._render = render
        self._is_ready = is_ready
        self._readers = readers
        self._settings = settings
        self._own_ip = own_ip
        self.tasks = Tasks("the metrics listener")
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._socket: socket.socket | None = None

    def start_up(self) -> str:
        """Listen at the first port that is free; the address for scrapers. Raises ConfigError."""
        host, first_port = self._settings.metrics_host or LOOPBACK, self._settings.metrics_port
        assert first_port is not None, "no listener without a port"
        self._readers.check_listening(host)
        self._socket = first_free_listener(host, first_port, NUM_PORTS)
        routes = [
            Route("/metrics", self._metrics),
            Route("/health/live", self._live),
            Route("/health/ready", self._ready),
        ]
        self._server = Server(
            Starlette(routes=routes), limit_concurrency=MAX_CONNECTIONS, log_level="error"
        )
        serving = self._server.serve(sockets=[self._socket])
        self._serving = self.tasks.spawn(serving, name="the server of metrics")
        shown = self._own_ip if host in _EVERYWHERE else host
        port = self._socket.getsockname()[1]
        return f"[{shown}]:{port}" if ":" in shown else f"{shown}:{port}"

    async def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = True
        await asyncio.wait((self._serving,), timeout=STOP_S)
        self._server.force_exit = True
        await asyncio.wait((self._serving,), timeout=STOP_S)
        await self.tasks.close()
        if self._socket is not None:
            self._socket.close()

    async def _metrics(self, request: Request) -> Response:
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        if not self._readers.is_operator(token.strip() if kind.lower() == "bearer" else None):
            text = "metrics need an operator's key: Authorization: Bearer KEY\n"
            return Response(text, 401, {"www-authenticate": "Bearer"}, "text/plain")
        accept = request.headers.get("accept", "")
        headers = {"content-type": content_type(accept)}
        return Response(await self._render(accept), headers=headers)

    async def _live(self, _: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def _ready(self, _: Request) -> Response:
        if self._is_ready():
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "unavailable"}, 503)
