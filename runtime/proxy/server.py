"""The HTTP server of a process that no proxy stands before: uvicorn, without its hold on the process.

It waits for clients as long as they like: what other machines reach has HAProxy before it, which does not.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from mallee.runtime.proxy.protocol import Protocol


class Server(uvicorn.Server):
    """Leaves the process's signals and loggers alone, and takes no WebSockets."""

    def __init__(self, app: ASGIApp, **options: Any) -> None:
        config = uvicorn.Config(
            app,
            http=Protocol,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,  # it would close the handlers that there are
            proxy_headers=False,  # nothing here depends on the client's address
            **options,
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
