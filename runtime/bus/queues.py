"""Depths of the gateways' queues over the bus: gateways publish theirs, worker processes add them up."""

import asyncio
from collections.abc import Callable

import msgspec

from mallee.protocol.codec import Decoder, encode
from mallee.protocol.subjects import Subjects
from mallee.runtime.bus.bus import Bus

PERIOD_S = 2.0
_STALE_S = 3 * PERIOD_S


class QueueDepth(msgspec.Struct, frozen=True, array_like=True):
    """Requests that wait in a gateway."""

    gateway: str
    waiting: int


_decode = Decoder(QueueDepth, "a queue's depth")


async def publish_depth(bus: Bus, fleet: str, gateway: str, waiting: Callable[[], int]) -> None:
    """Publish what waits in `gateway`, until cancelled."""
    subject = Subjects.of(fleet).queues(gateway)
    while True:
        bus.publish(subject, encode(QueueDepth(gateway, waiting())))
        await asyncio.sleep(PERIOD_S)


class QueueDepths:
    """Sum of the queues of all gateways of a fleet, by their last reports. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._reported: dict[str, tuple[float, int]] = {}

    async def start_up(self, bus: Bus, fleet: str) -> None:
        """Listen from now on."""
        await bus.subscribe(Subjects.of(fleet).queues(), self._on_depth)

    def total(self) -> int:
        """Requests that wait; a gateway that is silent counts no more."""
        since = self._clock() - _STALE_S
        self._reported = {name: each for name, each in self._reported.items() if each[0] >= since}
        return sum(waiting for _, waiting in self._reported.values())

    def _on_depth(self, raw: bytes) -> None:
        depth = _decode(raw)
        self._reported[depth.gateway] = (self._clock(), depth.waiting)
