"""A proxy of bytes between two processes, which can be cut, silenced one way or both, and slowed."""

import asyncio
import contextlib
from typing import Literal

Place = str | int
"""The path of a Unix socket, or a port of this machine."""
Direction = Literal["up", "down"]  # towards the target, and from it

CHUNK = 1 << 16


class Proxy:
    """Passes on what comes. Belongs to one event loop."""

    def __init__(self, place: Place, target: Place) -> None:
        self.delay_s = 0.0
        self.nbytes: dict[Direction, int] = {"up": 0, "down": 0}  # that came
        self._place = place
        self._target = target
        self._is_cut = False
        self._open: dict[Direction, asyncio.Event] = {
            "up": asyncio.Event(),
            "down": asyncio.Event(),
        }
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.pass_all()

    async def start(self) -> None:
        if isinstance(self._place, str):
            self._server = await asyncio.start_unix_server(self._connected, self._place)
        else:
            self._server = await asyncio.start_server(self._connected, "127.0.0.1", self._place)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def cut(self) -> None:
        """End all connections, and every new one at once."""
        self._is_cut = True
        for task in self._connections:
            task.cancel()

    def silence(self, *directions: Direction) -> None:
        """Pass on nothing that way; it waits, as behind a network that drops packets."""
        for each in directions:
            self._open[each].clear()

    def pass_all(self) -> None:
        """End every fault."""
        self._is_cut, self.delay_s = False, 0.0
        for event in self._open.values():
            event.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if not self._is_cut:
                await self._serve(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # one end has gone, or it is cut
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if isinstance(self._target, str):
            theirs = await asyncio.open_unix_connection(self._target)
        else:
            theirs = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass(reader, theirs[1], "up"))
                both.create_task(self._pass(theirs[0], writer, "down"))
        except* (OSError, _Ended):
            pass
        finally:
            theirs[1].transport.abort()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        while data := await reader.read(CHUNK):
            self.nbytes[direction] += len(data)
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            await self._open[direction].wait()
            writer.write(data)
            await writer.drain()
        await self._open[direction].wait()
        with contextlib.suppress(OSError):
            writer.write_eof()
        raise _Ended


class _Ended(Exception):
    """One side has closed its end."""
