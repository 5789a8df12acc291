"""Ordered commands to workers and their frames back, by any carrier."""

from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from mallee.actors.transport.link import Channel, HostLink, LinkTimes, OnFrame, OnLost
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Command
from mallee.protocol.parcels import Life


class Link(Protocol):
    """A gateway's connection to one life of one worker."""

    def send(self, command: Command) -> None:
        """Queue a command; the worker takes commands in this order. Ignored after loss or close."""
        ...

    async def close(self) -> None:
        """No more callbacks; the worker ends what this gateway has running. Idempotent."""
        ...


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
