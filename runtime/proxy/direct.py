"""Requests go from a gateway's own HTTP server straight to its API, past Ray Serve's handling of them.

In HAProxy mode Serve runs an HTTP server in each gateway replica, and between it and the application: a
task that reads the whole body, however long, another for the answer, a thread for the application's loop,
metadata, metrics. That costs 0.8 ms of the 1.2 ms that `GET /v1/models` takes, and hides from the
application that a client doesn't read. `ENVIRONMENT` makes Ray call `middlewares` in the gateway's process,
and run the application in the loop of the server. Behind the Python proxy
nothing of this is used: requests come as calls.

Ray doesn't count these requests, so it doesn't wait for them either; its server does when it is stopped.
"""

from typing import Final

import uvicorn.config
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from mallee.runtime.proxy import protocol

ENVIRONMENT: Final = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{__name__}:middlewares",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
"""For the runtime environment of gateways."""

_PATHS = (
    "/v1/",
    "/health",
    "/metrics",
)  # of the API; Ray answers others, and all under a route prefix

_app: ASGIApp | None = None  # of this process: Ray makes the server's middlewares, not we


def serve_here(app: ASGIApp) -> None:
    """Answer the requests of this process's HTTP server by `app`."""
    global _app
    _app = app


def middlewares() -> list[Middleware]:
    """Called by Ray when it starts an HTTP server, whose protocol it leaves to uvicorn."""
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{protocol.__name__}:Protocol"
    return [Middleware(_Direct)]


class _Direct:
    def __init__(self, app: ASGIApp) -> None:
        self._ray = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _app is not None and scope.get("path", "").startswith(_PATHS):
            await _app(scope, receive, send)
        else:
            await self._ray(scope, receive, send)
