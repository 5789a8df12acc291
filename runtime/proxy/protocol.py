"""uvicorn's side of a connection, but that all writes of a turn of the loop go out as one.

An answer's head and its first bytes come in one turn: as two writes they would be two system calls, and wake
the client, or the proxy before us, twice.
"""

import asyncio
from typing import Any, Final, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_GATHERED_NBYTES: Final = 64 << 10  # as much a transport holds before it has its writer wait


class Protocol(HttpToolsProtocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = cast(asyncio.Transport, _Gathering(transport))


class _Gathering:
    """A transport that writes at the end of a turn of the loop, or once it has much to write."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._gathered = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._gathered:
            self._loop.call_soon(self._flush)
        self._gathered += data
        if len(self._gathered) > MAX_GATHERED_NBYTES:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, b""
        if gathered and not self._transport.is_closing():
            self._transport.write(gathered)
