"""Gateways' queue depths over a bus."""

import asyncio

from mallee.actors.bus.queues import QueueDepths, tell_depth
from mallee.testing.bus import LocalBus, LocalHub
from support.waiting import until


async def test_depths_of_gateways_add_up_and_silent_ones_count_no_more() -> None:
    hub, now = LocalHub(), 0.0
    bus = LocalBus(hub)
    await bus.connect()
    depths = QueueDepths(lambda: now)
    await depths.start_up(bus, "f")
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(tell_depth(bus, fleet, name, lambda n=waiting: n))  # type: ignore[misc]
            for fleet, name, waiting in (("f", "g1", 3), ("f", "g2", 4), ("other", "g3", 9))
        ]
        await until(lambda: depths.total() == 7)
        for task in tasks:
            task.cancel()
    now = 60.0
    assert depths.total() == 0
    await bus.close()
