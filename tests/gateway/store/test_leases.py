"""Holders of leases: lives of gateways, and when theirs end."""

from mallee.gateway.store.leases import Lessee
from support.lessees import lessee


async def test_a_holder_is_gone_with_its_gateway_or_with_that_life_of_it() -> None:
    living = {"g0", "g1"}
    keys = iter("abc")
    here = lessee("g0", living, lambda: next(keys))
    assert here.name == here.name == "g0/a"
    assert here.num_gateways == 2
    assert await here.gone({"g0/a", "g1/x", "g2/y"}) == {"g2/y"}
    again = lessee("g0", living, lambda: next(keys))
    assert await again.gone({"g0/a", "g0/b", "g1/x"}) == {"g0/a"}
    living.discard("g1")
    assert await again.gone({"g0/b", "g1/x", "g1/z"}) == {"g1/x", "g1/z"}
    assert again.num_gateways == 1


async def test_nobody_is_asked_about_the_own_life() -> None:
    async def is_gone(gateway: str) -> bool:
        raise AssertionError(gateway)

    alone = Lessee("g0", others=lambda: None, is_gone=is_gone, new_key=lambda: "a")
    assert alone.num_gateways == 0
    assert await alone.gone({"g0/a", "g0/before"}) == {"g0/before"}
