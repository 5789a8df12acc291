"""Whole messages over one blocking socket, each within a time."""

import socket
import ssl
import time
from contextlib import suppress
from threading import Lock
from typing import Final, TypeAlias

from mallee.runtime.transport.wire import HEAD, too_long

Part: TypeAlias = bytes | memoryview

BUFFER_NBYTES: Final = 4 << 20
SLOW_NBYTES_S: Final = 1 << 20
"""An end that takes or gives fewer bytes a second is not waited for."""


class Stream:
    """One end of a connection. Belongs to one thread at a time, but for `cut`.

    Its methods raise OSError: TimeoutError, or ConnectionError when the other end has closed.
    """

    __slots__ = ("_is_closed", "_lock", "_message_s", "_sock")

    def __init__(self, sock: socket.socket, message_s: float) -> None:
        """Takes over `sock`. A message that has begun may take `message_s`, and a second for each MiB."""
        self._sock = sock
        self._message_s = message_s
        self._lock = Lock()
        self._is_closed = False
        if sock.family == socket.AF_UNIX:
            # TCP finds its own sizes; a fixed one would keep it small.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_NBYTES)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self, tls: ssl.SSLContext | None, wait_s: float) -> None:
        """Go on with TLS, if there is any. Waits so long for each answer of the other end."""
        if tls is None:
            return
        is_server = tls.protocol == ssl.PROTOCOL_TLS_SERVER
        with self._lock:
            self._sock.settimeout(wait_s)
            self._sock = wrapped = tls.wrap_socket(
                self._sock, server_side=is_server, do_handshake_on_connect=False
            )
        wrapped.do_handshake()

    def receive(self, wait_s: float, max_nbytes: int) -> tuple[int, bytes]:
        """Kind and bytes of the next message, which begins within `wait_s`. Raises CodecError: too long."""
        kind, size = self.receive_head(wait_s)
        return kind, self.receive_rest(size, max_nbytes)

    def receive_head(self, wait_s: float) -> tuple[int, int]:
        """Kind of the next message, and the number of bytes that follow."""
        head = bytearray(HEAD.size)
        self.fill(memoryview(head), time.monotonic() + wait_s)
        size, kind = HEAD.unpack(head)
        return kind, size

    def receive_rest(self, size: int, max_nbytes: int) -> bytes:
        """The bytes of a message whose head was received. Raises CodecError before they are."""
        if size > max_nbytes:
            raise too_long(size, max_nbytes)
        raw = bytearray(size)
        self.fill(memoryview(raw), self.deadline(size))
        return bytes(raw)

    def deadline(self, nbytes: int) -> float:
        """The time by which a message of `nbytes` that begins now must be over."""
        return time.monotonic() + self._message_s + nbytes / SLOW_NBYTES_S

    def fill(self, view: memoryview, deadline: float) -> None:
        """Receive as many bytes as `view` has."""
        while view.nbytes:
            self._limit(deadline)
            num = self._sock.recv_into(view)
            if not num:
                raise ConnectionResetError("it closed the connection")
            view = view[num:]

    def send(self, kind: int, *parts: Part) -> None:
        """Send a message, which is `parts` one after the other."""
        views = [memoryview(part) for part in parts]
        nbytes = sum(view.nbytes for view in views)
        deadline = self.deadline(nbytes)
        views.insert(0, memoryview(HEAD.pack(nbytes, kind)))
        if isinstance(self._sock, ssl.SSLSocket):  # it gathers nothing
            for view in views:
                self._limit(deadline)
                self._sock.sendall(view)
            return
        while views:
            self._limit(deadline)
            sent = self._sock.sendmsg(views)
            while views and sent >= views[0].nbytes:
                sent -= views.pop(0).nbytes
            if views and sent:
                views[0] = views[0][sent:]

    def cut(self) -> None:
        """Have every wait of its thread end with an error. From any thread."""
        with self._lock:
            if not self._is_closed:
                # Not the one of TLS, which would take the ground from under the thread's feet.
                with suppress(OSError):
                    socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._sock.close()

    def _limit(self, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("it took too long")
        self._sock.settimeout(left_s)
