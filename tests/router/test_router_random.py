"""Random lives of a small fleet: the router's invariants hold after every call."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.errors import KVMemoryExceeded, NoWorker, UnknownCapsule
from mallee.protocol.events import (
    CapsuleStored,
    Event,
    EventBatch,
    Lease,
    Removed,
    Snapshot,
    Stored,
    pack_hashes,
)
from mallee.protocol.hashing import block_hashes
from mallee.protocol.ids import CapsuleId, Incarnation, RequestId, WorkerId
from mallee.router.config import RouterConfig
from mallee.router.router import Router
from support.examples import examples

VERBS = ["lease", "lease", "events", "events", "snapshot", "route", "route", "fork"]
VERBS += ["first", "free", "hit", "lose", "expire", "broker"]
calls = st.lists(
    st.tuples(
        st.sampled_from(VERBS),
        st.integers(0, 3),  # which worker, or request
        st.integers(1, 3),  # which life
        st.integers(0, 6),  # a length, a sequence number
    ),
    max_size=60,
)


def events(number: int) -> tuple[Event, ...]:
    run = pack_hashes(block_hashes(range(4 * number), 4))
    return (Stored(run), Removed(run[-8:]), CapsuleStored(f"c{number}", 4 * number, run))


class Gateway:
    """Makes the calls, and knows which requests it has booked."""

    def __init__(self) -> None:
        self.now = 0.0
        config = RouterConfig(block_size=4, max_workers=3, lease_s=2.0)
        self.router = Router(config, clock=lambda: self.now)
        self.booked: set[str] = set()

    def call(self, verb: str, which: int, life: int, number: int) -> None:
        worker, request = f"w{which}", RequestId(f"r{which}")
        self.now += 0.25
        match verb:
            case "lease":
                lease = Lease(worker, life, "a", "m", "f", 4, 50, 8, 99, number, number == 6)
                lease = msgspec.structs.replace(lease, lends_at="at" if number % 2 else "")
                self.router.on_lease(lease)
            case "events":
                self.router.on_events(EventBatch(worker, life, number, events(number)))
            case "snapshot":
                run = pack_hashes(block_hashes(range(4 * number), 4))
                self.router.on_snapshot(Snapshot(worker, life, number, run, ()), asked_at=self.now)
            case "route" | "fork":
                self._route(request, number, CapsuleId(f"c{number}") if verb == "fork" else None)
            case "first":
                self.router.first_token(request)
            case "free":
                self.router.free(request)
                self.booked.discard(request)
            case "hit":
                self.router.observe_hit(request, 4 * number)
            case "lose":
                lost = self.router.lose_worker(WorkerId(worker), Incarnation(life))
                assert set(lost) <= self.booked
                self.booked -= set(lost)
            case "expire":
                self.router.expire_leases()
            case "broker":
                self.router.set_broker_up(bool(number % 2))

    def _route(self, request: RequestId, number: int, capsule: CapsuleId | None) -> None:
        if request in self.booked:
            return
        hashes = block_hashes(range(4 * number), 4)
        try:
            if capsule is None:
                placement = self.router.route(
                    request, hashes, prompt_tokens=4 * number + 1, max_tokens=5
                )
            else:
                (part,) = self.router.route_fanout(
                    [request],
                    hashes,
                    prompt_tokens=0,
                    max_tokens=5,
                    suffix_tokens=[1, 2],
                    capsule=capsule,
                )
                placement = part.placement
        except (KVMemoryExceeded, NoWorker, UnknownCapsule):
            return
        self.booked.add(request)
        alive = {view.worker: view.incarnation for view in self.router.workers()}
        assert alive[placement.worker] == placement.incarnation
        assert placement.overlap_blocks <= placement.best_overlap_blocks <= number


@examples(150)
@given(calls)
def test_invariants_hold_and_every_booking_is_either_live_or_orphaned(
    stream: list[tuple[str, int, int, int]],
) -> None:
    """K5: whatever happens, freeing every request leaves no load anywhere."""
    gateway = Gateway()
    for call in stream:
        gateway.call(*call)
        gateway.router.check()
        stats = gateway.router.stats()
        assert stats.booked_requests + stats.num_orphans == len(gateway.booked)
    for request in gateway.booked:
        gateway.router.free(RequestId(request))
    for view in gateway.router.workers():
        assert (view.rows, view.prefill_tokens, view.active_blocks) == (0, 0, 0)
    assert gateway.router.stats().num_orphans == 0
