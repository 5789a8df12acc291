"""Ordered commands to workers and their frames back, by any carrier."""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Protocol

from mallee.actors.transport.link import Channel, HostLink, LinkStats, LinkTimes, OnFrame, OnLost
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Command
from mallee.protocol.parcels import Life


class Link(Protocol):
    """One life of one worker, as a gateway sees it."""

    def send(self, command: Command) -> None:
        """Queue a command; the worker takes commands in this order. Ignored after loss or close."""
        ...

    async def close(self) -> None:
        """No more callbacks; the worker ends what this gateway has running. Idempotent."""
        ...

    def stats(self) -> LinkStats: ...


class Transport(Protocol):
    """Makes links. `on_lost(reason)` is called at most once, and not after `close`."""

    def link(
        self,
        worker: WorkerId,
        incarnation: Incarnation,
        address: str,
        on_frame: OnFrame,
        on_lost: OnLost,
    ) -> Link: ...


class ChannelTransport:
    """A `Transport` over channels: one way to each address, shared by the workers there."""

    def __init__(
        self, open_channel: Callable[[str], Channel], *, times: LinkTimes | None = None
    ) -> None:
        self._open = open_channel
        self._times = times or LinkTimes()
        self._hosts: dict[str, HostLink] = {}

    def link(
        self,
        worker: WorkerId,
        incarnation: Incarnation,
        address: str,
        on_frame: OnFrame,
        on_lost: OnLost,
    ) -> Link:
        host = self._hosts.get(address)
        if host is None:
            host = HostLink(address, self._open(address), self._times, self._forget)
            self._hosts[address] = host
        return host.attach(Life(worker, incarnation), on_frame, on_lost)

    def _forget(self, host: HostLink) -> None:
        if self._hosts.get(host.address) is host:
            del self._hosts[host.address]


class HostLike(Protocol):
    """A host as channels and socket servers need it."""

    async def submit(self, gateway: str, raw: bytes) -> None: ...

    def frames(self, gateway: str) -> AsyncGenerator[bytes, None]: ...


class LocalTransport(ChannelTransport):
    """A `Transport` to hosts in this process, by address."""

    def __init__(
        self, gateway: str, hosts: Mapping[str, HostLike], *, times: LinkTimes | None = None
    ) -> None:
        super().__init__(lambda address: _LocalChannel(gateway, address, hosts), times=times)


class _LocalChannel:
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
