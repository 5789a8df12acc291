"""A gateway in uvloop's loop, as Ray runs it."""

import asyncio

import pytest
import uvloop

from mallee.mocker.passes import mock_spec
from mallee.protocol.hashing import as_tokens
from mallee.protocol.messages import Limits
from mallee.router.config import RouterConfig
from mallee.router.dispatch.jobs import GenerateJob
from support.live_fleet import LiveFleet, running

pytestmark = pytest.mark.process  # another loop, in real time


def test_requests_that_wait_are_placed_under_uvloop_too() -> None:
    """Its timers don't tell when they are due, if that is now."""
    job = GenerateJob(as_tokens(range(1, 60)), Limits(4, ignore_eos=True), n=3)

    async def work() -> None:
        fleet = LiveFleet(mock_spec(), RouterConfig(block_size=16), rows=4)
        async with running(fleet, 1) as f:
            for stream in await asyncio.gather(*(f.gateways[0].requests.start(job) for _ in "abc")):
                assert sum([len(delta.tokens) async for delta in stream]) == 12

    uvloop.run(work())
