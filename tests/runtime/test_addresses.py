"""Sockets that services listen at."""

import asyncio
import socket

import pytest

from mallee.runtime.addresses import listener

pytestmark = pytest.mark.real_time  # it asks the kernel


async def test_connections_wait_for_no_acknowledgement() -> None:
    """A small answer in two writes would take 44 ms with Nagle's algorithm and delayed acknowledgements."""
    found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken: socket.socket = writer.get_extra_info("socket")
        found.set_result(taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    sock = listener("127.0.0.1", 0)
    async with await asyncio.start_server(accept, sock=sock):
        _, writer = await asyncio.open_connection(*sock.getsockname())
        async with asyncio.timeout(10):
            assert await found
        writer.close()
