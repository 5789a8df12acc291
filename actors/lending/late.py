"""A lending server that listens only once something is lent: few gateways ever import a capsule."""

from collections.abc import Callable
from threading import Lock

from mallee.actors.lending.server import LendingServer


class LateListener:
    """Has `server` listen when its address is asked for.

    `socket_path()` names a new Unix socket. `tcp_host()` is where to listen on TCP too; None: not now.
    """

    def __init__(
        self,
        server: LendingServer,
        *,
        socket_path: Callable[[], str],
        tcp_host: Callable[[], str | None],
    ) -> None:
        self._server = server
        self._socket_path = socket_path
        self._tcp_host = tcp_host
        self._lock = Lock()

    def address(self) -> str:
        """May block for a moment; from any thread. Raises OSError, ConfigError."""
        with self._lock:
            if not self._server.address.path:
                self._server.listen_unix(self._socket_path())
            if self._server.address.tcp is None and (host := self._tcp_host()) is not None:
                self._server.listen_tcp(host)
            return str(self._server.address)
