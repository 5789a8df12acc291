"""The end of a session whose capsules' workers refuse."""

from typing import Any

from mallee.actors.gateway.sessions.sessions import GatewaySessions, SessionLimits
from mallee.protocol.errors import CapsuleLost, InternalError, MalleeError, Unavailable
from mallee.protocol.hashing import NO_HASHES, as_tokens
from mallee.protocol.ids import CapsuleId, RequestId, Scope
from mallee.router.dispatch.jobs import PrefillJob, QueueTerms

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


async def test_a_refusal_of_any_kind_keeps_no_other_capsule() -> None:
    """Capsules that no worker refuses are released, and the end of a last request is no failure of the
    gateway."""
    released: list[CapsuleId] = []

    async def release(capsule: CapsuleId, scope: Scope) -> None:
        assert scope == SCOPE
        if capsule in ERRORS:
            raise ERRORS[capsule]
        released.append(capsule)

    bus: Any = SilentBus()
    sessions = GatewaySessions(
        bus,
        gateway="g",
        fleet="f",
        limits=SessionLimits(),
        block_size=4,
        hashes_of=lambda capsule: NO_HASHES,
        release=release,
        give_up=lambda request, error: None,
        clock=lambda: 0.0,
    )

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
