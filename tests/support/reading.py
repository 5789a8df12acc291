"""A gateway's end of a stream, in the host's own process, without a connection in between."""

import asyncio

from mallee.actors.hosting.host import Host
from mallee.protocol.codec import encode


class Reader:
    """Takes what a host sends to `gateway`, after an empty message. A `Sink`.

    `is_slow` is the test's to set.
    """

    def __init__(self, host: Host, gateway: str) -> None:
        self.is_slow = False
        self._out: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._out.put_nowait(encode(()))
        self.stream = host.open(gateway, self)

    def send(self, raw: bytes) -> None:
        assert not self.is_slow
        self._out.put_nowait(raw)

    def finish(self, refusal: str | None = None) -> None:
        self._out.put_nowait(None)

    def resume(self) -> None:
        self.is_slow = False
        self.stream.resume()

    async def submit(self, raw: bytes) -> None:
        """Return when the engines have taken the batch."""
        taken = self.stream.submit(raw)
        if taken is not None:
            await taken

    def __aiter__(self) -> "Reader":
        return self

    async def __anext__(self) -> bytes:
        raw = await self._out.get()
        if raw is None:
            self._out.put_nowait(None)
            raise StopAsyncIteration
        return raw

    async def aclose(self) -> None:
        self.stream.close()
