"""Tenants at different live gateways share workers by their weights."""

from support.contending import WEIGHTS, contend


async def test_tenants_of_two_gateways_are_served_by_their_weights() -> None:
    """The one with three times the weight gets three times as much, at whichever gateway it waits."""
    served = await contend(200)
    total = sum(served.values())
    for tenant, weight in WEIGHTS.items():
        share = weight / sum(WEIGHTS.values())
        assert abs(served[tenant] / total / share - 1.0) < 0.1, served
