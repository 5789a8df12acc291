"""The end of a session whose capsules' workers refuse, are silent, or whose gateways can't be asked."""

import asyncio

import pytest

from bench.doubles.bus import LocalHub
from mallee.gateway.sessions import sessions as closing
from mallee.protocol.errors import CapsuleLost, InternalError, MalleeError, Unavailable
from mallee.protocol.ids import CapsuleId, Scope
from support.session_gateways import SCOPE, Release, SessionGateway
from support.waiting import elapse

ERRORS: dict[str, MalleeError] = {
    "r.0": InternalError("its blocks are damaged"),
    "r.1": CapsuleLost("r.1", "it went before"),
    "r.2": Unavailable("its worker is silent"),
}


async def made(release: Release) -> SessionGateway:
    gateway = SessionGateway("g", LocalHub(), lambda: 1000.0, release=release)
    await gateway.start_up()
    return gateway


async def test_a_refusal_of_any_kind_keeps_no_other_capsule() -> None:
    """Capsules that no worker refuses are released, and the end of a last request is no failure of the
    gateway."""
    released: list[CapsuleId] = []

    async def release(capsule: CapsuleId, scope: Scope) -> None:
        assert scope == SCOPE
        if capsule in ERRORS:
            raise ERRORS[capsule]
        released.append(capsule)

    gateway = await made(release)

    def leave_four(*, ends_session: bool) -> None:
        gateway.begin("r", "s", ends_session=ends_session)
        for i in range(4):
            gateway.leave("r", i)

    leave_four(ends_session=False)
    await gateway.quiet()
    closed = await gateway.sessions.close("s", SCOPE)
    assert (closed.released, closed.num_left, closed.num_cancelled) == (("r.3",), 2, 1)
    await gateway.quiet()
    leave_four(ends_session=True)
    gateway.end("r")
    await gateway.quiet()
    assert released == ["r.3", "r.3"]
    assert await gateway.sessions.page(SCOPE, "", 9) == []
    await gateway.close()


async def test_silent_workers_hold_a_close_up_for_a_while_in_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(closing, "CLOSE_S", 0.05)

    async def release(capsule: CapsuleId, scope: Scope) -> None:
        if int(capsule.partition(".")[2]) % 2:
            await elapse(60)

    gateway = await made(release)
    gateway.begin("r", "s")
    for i in range(40):
        gateway.leave("r", i)
    await gateway.quiet()
    async with asyncio.timeout(5):
        closed = await gateway.sessions.close("s", SCOPE)
    assert (len(closed.released), closed.num_left) == (20, 20)
    await gateway.close()


async def test_a_close_releases_what_another_gateway_has_not_stored_yet() -> None:
    hub = LocalHub()
    names = ["g0", "g1"]
    one, two = (
        SessionGateway(name, hub, lambda: 1000.0, others=lambda own=name: {*names} - {own})
        for name in names
    )
    for gateway in (one, two):
        await gateway.start_up()
    one.ask("r1", "s")
    await one.quiet()
    two.begin("r2", "s")
    await two.quiet()
    two.store._bus = two.bus  # its writes wait from now on
    two.bus.signals.set_up(False)
    two.leave("r2")
    closed = await one.sessions.close("s", SCOPE)
    assert (set(closed.released), closed.num_cancelled) == ({"r1.0", "r2.0"}, 1)
    two.bus.signals.set_up(True)
    await two.quiet()
    assert not two.running
    for gateway in (one, two):
        assert await gateway.sessions.page(SCOPE, "", 9) == []
        await gateway.close()
