"""A real broker whose disk takes no more: what is asked for is told, and nothing is lost that waits."""

import asyncio
import os
import resource
from functools import partial
from pathlib import Path

import pytest

from mallee.gateway.store.store import FULL_S, Store, StoreTerms
from mallee.protocol.errors import StoreFull
from mallee.protocol.ids import COMMON
from mallee.runtime.addresses import free_port
from mallee.runtime.bus import jetstream
from mallee.runtime.bus.access import BrokerAccess
from mallee.runtime.bus.broker import find_binary
from mallee.runtime.bus.children import end
from mallee.runtime.bus.nats import NatsBus
from support.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.nats]

ROOM_NBYTES = 256 << 10


async def serve(folder: Path, port: int, room_nbytes: int) -> asyncio.subprocess.Process:
    """A nats-server that can write so much into a file: beyond that it fails as on a full disk."""
    conf = folder / "conf"
    conf.write_text(f'listen: "127.0.0.1:{port}"\njetstream {{store_dir: "{folder}/store"}}\n')
    limits = (room_nbytes, resource.RLIM_INFINITY)
    return await asyncio.create_subprocess_exec(
        str(find_binary()),
        "-c",
        str(conf),
        stderr=asyncio.subprocess.DEVNULL,
        preexec_fn=partial(resource.setrlimit, resource.RLIMIT_FSIZE, limits),
    )


async def test_a_full_disk_is_told_and_what_waits_is_stored_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X8, part: reads go on meanwhile."""
    monkeypatch.setattr(jetstream, "ANSWER_S", 0.5)
    port = free_port()
    server = await serve(tmp_path, port, ROOM_NBYTES)
    bus = NatsBus(BrokerAccess(f"nats://127.0.0.1:{port}"), fleet="f")
    store = Store(bus, StoreTerms("f"))
    bucket = store.bucket("texts", bytes, version=1, ttl_s=60.0)
    try:
        await bus.connect()
        await until(lambda: bus.is_up)
        await bucket.put(COMMON, "first", b"1")
        assert not store.is_full
        for i in range(3):
            await bucket.put(COMMON, f"{i}", os.urandom(ROOM_NBYTES // 4))
        with pytest.raises(StoreFull, match="disk takes nothing") as caught:
            await bucket.put(COMMON, "3", os.urandom(ROOM_NBYTES // 4))
        assert caught.value.retry_after_s == FULL_S
        assert (store.is_full, store.num_refused) == (True, 1)
        bucket.put_soon(COMMON, "later", b"2")
        assert not await store.flush(1.0)
        with pytest.raises(StoreFull, match="earlier writes"):
            await bucket.put(COMMON, "later", b"too early")
        assert await bucket.get(COMMON, "first") is not None
        await end(server)
        server = await serve(tmp_path, port, resource.RLIM_INFINITY)
        assert await store.flush(10.0)
        assert not store.is_full
        for name, value in (("first", b"1"), ("later", b"2")):
            found = await bucket.get(COMMON, name)
            assert found is not None
            assert found.value == value
    finally:
        await store.close()
        await bus.close()
        await end(server)
