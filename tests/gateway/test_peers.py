"""Questions from gateway to gateway, and how one knows that another is gone."""

from collections.abc import Collection

import pytest

from bench.doubles.bus import LocalBus, LocalHub
from mallee.gateway.peers import SETTLE_S, Peers, PeerSilent
from mallee.protocol.ids import Scope
from support.plain_ids import SCOPES


async def test_a_gateway_is_gone_once_all_that_live_must_have_been_heard_of() -> None:
    """Not just after this one has come, nor just after its broker was away."""
    hub, now = LocalHub(), 0.0
    bus = LocalBus(hub)
    await bus.connect()
    heard: list[str] = []
    peers = Peers(
        bus, gateway="g0", store="test", others=lambda: heard, ids=SCOPES, clock=lambda: now
    )
    await peers.start_up()
    assert not await peers.is_gone("g1")
    now = SETTLE_S
    assert await peers.is_gone("g1")
    assert not await peers.is_gone("g0")
    heard.append("g1")
    assert not await peers.is_gone("g1")
    hub.set_up(False)
    heard.clear()
    now = 100.0
    assert not await peers.is_gone("g1")
    hub.set_up(True)
    assert not await peers.is_gone("g1")
    now += SETTLE_S
    assert await peers.is_gone("g1")
    await bus.close()


@pytest.mark.parametrize("others", [None, ()])
async def test_one_that_is_alone_for_good_knows_at_once(others: Collection[str] | None) -> None:
    bus = LocalBus(LocalHub())
    await bus.connect()
    peers = Peers(
        bus, gateway="g0", store="test", others=lambda: others, ids=SCOPES, clock=lambda: 0.0
    )
    await peers.start_up()
    assert await peers.is_gone("g1") == (others is None)
    await bus.close()


async def test_a_question_that_a_gateway_died_with_finds_nothing() -> None:
    """It was sent before the broker noticed: silence of one that lives is an error, of a dead one none."""
    hub, now, heard = LocalHub(), 0.0, ["g1"]
    buses = [LocalBus(hub), LocalBus(hub)]
    asking, dead = (
        Peers(bus, gateway=name, store="test", others=lambda: heard, ids=SCOPES, clock=lambda: now)
        for bus, name in zip(buses, ("g0", "g1"), strict=True)
    )
    for bus, peers in zip(buses, (asking, dead), strict=True):
        await bus.connect()
        await peers.start_up()
    buses[1].is_mute = True
    now = SETTLE_S
    with pytest.raises(PeerSilent):
        await asking.ask("g1", "kind", "name", Scope("s"), wait_s=0.01)
    heard.clear()
    assert await asking.ask("g1", "kind", "name", Scope("s"), wait_s=0.01) is None
    for bus in buses:
        await bus.close()


async def test_a_gateway_of_another_fleet_that_shares_the_store_is_not_gone_while_it_answers() -> (
    None
):
    """X24, part: while a new fleet follows an old one."""
    hub, made = LocalHub(), list[Peers]()
    buses = [LocalBus(hub) for _ in range(2)]
    for i, bus in enumerate(buses):
        await bus.connect()
        made.append(
            Peers(
                bus,
                gateway=f"g{i}",
                store="test",
                others=lambda: None,
                ids=SCOPES,
                clock=lambda: 0.0,
            )
        )
        await made[i].start_up()
    assert not await made[0].is_gone("g1")
    await buses[1].close()
    assert await made[0].is_gone("g1")
    await buses[0].close()
