"""A gateway's end of a stream, in the host's own process, without a connection in between."""

import asyncio

from mallee.actors.hosting.host import Host
from mallee.protocol.codec import encode
from mallee.protocol.messages import Command, Generate, Limits, Update, pack_tokens
from mallee.protocol.parcels import Parcel, Report, decode_reports


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

    async def hello(self) -> None:
        """No reports: says that the stream is open."""
        assert decode_reports(await anext(self)) == ()

    async def reports(self, ends: int) -> list[Report]:
        """Until so many branches have ended."""
        found: list[Report] = []
        async for raw in self:
            found += decode_reports(raw)
            if sum(u.finish is not None for r in found for u in r.frame.updates) >= ends:
                return found
        raise AssertionError(f"the stream ended after {found}")

    async def updates(self, ends: int) -> list[Update]:
        return [update for report in await self.reports(ends) for update in report.frame.updates]


def generate(request: str, max_tokens: int = 4, n: int = 1) -> Generate:
    prompt = pack_tokens(range(1, 11))
    return Generate(request, prompt, Limits(max_tokens, ignore_eos=True), n=n)


def batch(*commands: Command, worker: str = "w0", incarnation: int = 1) -> bytes:
    return encode([Parcel(worker, incarnation, commands)] if commands else [])
