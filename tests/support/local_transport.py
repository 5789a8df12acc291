"""A transport within one process, for tests."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from mallee.actors.transport.link import ChannelTransport, HostLike, LinkTimes


class LocalTransport(ChannelTransport):
    """A `Transport` to hosts in this process, by address."""

    def __init__(
        self, gateway: str, hosts: Mapping[str, HostLike], *, times: LinkTimes | None = None
    ) -> None:
        super().__init__(lambda address: LocalChannel(gateway, address, hosts), times=times)


class LocalChannel:
    def __init__(self, gateway: str, address: str, hosts: Mapping[str, HostLike]) -> None:
        self._gateway = gateway
        self._address = address
        self._hosts = hosts

    async def submit(self, raw: bytes) -> None:
        await self._host().submit(self._gateway, raw)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._host().frames(self._gateway)) as frames:
            async for raw in frames:
                yield raw

    def _host(self) -> HostLike:
        host = self._hosts.get(self._address)
        if host is None:
            raise ConnectionError(f"there is no host at {self._address}")
        return host
