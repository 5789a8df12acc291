"""The end of a session whose capsules' workers refuse, are silent, or whose news come late."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mallee.gateway.records import SharedRecords
from mallee.gateway.sessions import sessions as closing
from mallee.gateway.sessions.sessions import GatewaySessions, SessionLimits
from mallee.protocol.codec import encode
from mallee.protocol.errors import CapsuleLost, InternalError, MalleeError, Unavailable
from mallee.protocol.gateways.session_notes import NodeNote, SessionNote, SessionNotes
from mallee.protocol.hashing import NO_HASHES, as_tokens
from mallee.protocol.ids import CapsuleId, RequestId, Scope
from mallee.router.config import RouterConfig
from mallee.router.dispatch.jobs import PrefillJob, QueueTerms
from support.plain_ids import SCOPES
from support.waiting import elapse

SCOPE = Scope("a")
ERRORS: dict[str, MalleeError] = {
    "r.0": InternalError("its blocks are damaged"),
    "r.1": CapsuleLost("r.1", "it went before"),
    "r.2": Unavailable("its worker is silent"),
}


class SilentBus:
    """A bus that nobody listens to."""

    def publish(self, subject: str, raw: bytes) -> None:
        pass


def made(release: Callable[[CapsuleId, Scope], Awaitable[None]]) -> GatewaySessions:
    bus: Any = SilentBus()
    named: Any = {"gateway": "g", "fleet": "f"}
    process: Any = SimpleNamespace(
        **named,
        bus=bus,
        ids=SCOPES,
        wall_clock=lambda: 1000.0,
        router=SimpleNamespace(config=RouterConfig(block_size=4)),
    )
    shell: Any = SimpleNamespace(give_up=lambda request, error: None)
    capsules: Any = SimpleNamespace(
        release=release, hashes=lambda capsule: NO_HASHES, watch=lambda observer: None
    )
    records = SharedRecords(bus, **named, others=lambda: None, belongs=SCOPES.belongs)
    return GatewaySessions(process, shell, capsules, records, SessionLimits())


def told(*notes: SessionNote) -> bytes:
    return encode(SessionNotes("other", notes))


async def test_a_refusal_of_any_kind_keeps_no_other_capsule() -> None:
    """Capsules that no worker refuses are released, and the end of a last request is no failure of the
    gateway."""
    released: list[CapsuleId] = []

    async def release(capsule: CapsuleId, scope: Scope) -> None:
        assert scope == SCOPE
        if capsule in ERRORS:
            raise ERRORS[capsule]
        released.append(capsule)

    sessions = made(release)

    def leave_four(*, ends_session: bool) -> None:
        terms = QueueTerms(session="s", ends_session=ends_session)
        sessions.begin(RequestId("r"), PrefillJob(as_tokens([1]), scope=SCOPE, terms=terms))
        for i in range(4):
            sessions.left(RequestId("r"), CapsuleId(f"r.{i}"), 1, NO_HASHES)

    leave_four(ends_session=False)
    closed = await sessions.close("s", SCOPE)
    assert (closed.released, closed.num_left) == (("r.3",), 2)
    leave_four(ends_session=True)
    sessions.ended(RequestId("r"))
    await sessions.tasks.finish()
    assert sessions.tasks.failure is None
    assert released == ["r.3", "r.3"]


async def test_silent_workers_hold_a_close_up_for_a_while_in_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(closing, "CLOSE_S", 0.05)

    async def release(capsule: CapsuleId, scope: Scope) -> None:
        if int(capsule) % 2:
            await elapse(60)

    sessions = made(release)
    nodes = tuple(NodeNote(str(i), "", "r", 1, 900.0) for i in range(40))
    sessions._on_told(told(SessionNote(SCOPE, "s", nodes=nodes)))
    async with asyncio.timeout(5):
        closed = await sessions.close("s", SCOPE)
    assert (len(closed.released), closed.num_left) == (20, 20)


async def test_a_close_elsewhere_releases_what_was_left_just_before() -> None:
    """The gateway that was asked may not have heard of it."""
    released: list[CapsuleId] = []

    async def release(capsule: CapsuleId, scope: Scope) -> None:
        released.append(capsule)

    sessions = made(release)
    nodes = [NodeNote("old", "", "r", 1, 900.0), NodeNote("new", "", "r", 1, 990.0)]
    root = NodeNote("root", "", "r", 1, 995.0, is_root=True)
    sessions._on_told(told(SessionNote(SCOPE, "s", nodes=(*nodes, root))))
    sessions._on_told(told(SessionNote(SCOPE, "s", is_closed=True)))
    await sessions.tasks.finish()
    assert released == ["new"]
