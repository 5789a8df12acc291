"""The bus in memory, by what every bus does."""

import pytest

from mallee.actors.bus.bus import Bus
from mallee.actors.bus.nats import SendQueue
from mallee.testing.bus import LocalBus, LocalHub
from support.buses import *  # noqa: F403
from support.buses import Place


class LocalPlace:
    def __init__(self) -> None:
        self.hub = LocalHub()

    async def bus(self) -> Bus:
        bus = LocalBus(self.hub)
        await bus.connect()
        return bus

    async def down(self) -> None:
        self.hub.set_up(False)

    async def up(self) -> None:
        self.hub.set_up(True)

    async def close(self) -> None:
        pass


@pytest.fixture
def place() -> Place:
    return LocalPlace()


async def test_an_outbox_refuses_what_is_beyond_its_bounds() -> None:
    outbox = SendQueue(max_messages=2, max_bytes=10)
    assert outbox.put("s", b"12345")
    assert not outbox.put("s", b"123456")
    assert outbox.put("s", b"1")
    assert not outbox.put("s", b"")
    outbox.check()
    assert await outbox.take() == ("s", b"12345")
    assert outbox.clear() == 1
    outbox.check()
