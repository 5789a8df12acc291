"""Tenants at different gateways share workers by their weights, over a real broker."""

import pytest

from mallee.runtime.bus.broker import Broker
from mallee.runtime.bus.nats import NatsBus
from support.contending import WEIGHTS, contend

pytestmark = [pytest.mark.process, pytest.mark.nats]


async def test_tenants_of_two_gateways_are_served_by_their_weights() -> None:
    """As in memory: the one with three times the weight gets three times as much."""
    broker = Broker(fleet="test")
    await broker.start()
    try:
        served = await contend(300, lambda role: NatsBus(broker.access(role), fleet="test"))
    finally:
        await broker.stop()
    total = sum(served.values())
    for tenant, weight in WEIGHTS.items():
        share = weight / sum(WEIGHTS.values())
        assert abs(served[tenant] / total / share - 1.0) < 0.1, served
