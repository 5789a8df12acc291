"""A transport within one process, for tests: the real ends of a connection, over pairs of sockets."""

import asyncio
import socket
from collections.abc import Mapping
from functools import partial

from mallee.runtime.transport import wire
from mallee.runtime.transport.address import Way
from mallee.runtime.transport.greeting import COMMANDS, DialerGreeting, Secret
from mallee.runtime.transport.link import Connection, Dial, LinkTimes, Transport
from mallee.runtime.transport.listener import Listener, Opening
from mallee.runtime.transport.server import CommandServer, HostLike

SECRET = Secret(b"known to tests alone")


class LocalTransport(Transport):
    """A `Transport` to hosts in this process, by address."""

    def __init__(
        self, gateway: str, hosts: Mapping[str, HostLike], *, times: LinkTimes | None = None
    ) -> None:
        super().__init__(gateway, SECRET, times=times)
        self._here = hosts

    def _way_to(self, address: str) -> tuple[Way, Dial]:
        return address, partial(self._dial, address)

    async def _dial(self, address: str, connection: Connection) -> None:
        host = self._here.get(address)
        if host is None:
            raise ConnectionError(f"there is no host at {address}")
        listener = Listener(CommandServer(host, SECRET))
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: Opening(listener, None), theirs)
        await loop.create_connection(lambda: connection, sock=ours)


class ByHand:
    """A gateway's connection to a host whose greeting was right, and which reads when a test does."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def to(cls, path: str, secret: Secret = SECRET) -> "ByHand":
        found = cls(*await asyncio.open_unix_connection(path, limit=4096))
        found.writer.write(COMMANDS.first)
        greeting = DialerGreeting(secret, "by hand", COMMANDS)
        answer = greeting.take((await found.receive())[1])
        assert answer is not None
        found.send(wire.GREETING, answer)
        assert greeting.take((await found.receive())[1]) is None
        return found

    async def receive(self) -> tuple[int, bytes]:
        """The kind of a message, and its body."""
        head = await self.reader.readexactly(5)
        return head[4], await self.reader.readexactly(int.from_bytes(head[:4], "little"))

    def send(self, kind: int, body: bytes) -> None:
        self.writer.write(wire.message(kind, body))
