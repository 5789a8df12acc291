"""The router as a gateway uses it: real parts, a clock by hand."""

import numpy as np
import pytest

from mallee.protocol.errors import KVMemoryExceeded, NoWorker, UnknownCapsule
from mallee.protocol.events import (
    CapsuleStored,
    Removed,
    Snapshot,
    Stored,
    pack_hashes,
)
from mallee.protocol.ids import CapsuleId, Incarnation, RequestId, WorkerId
from mallee.router.config import CostModel
from support.fleet_bench import FleetBench, hashes, prompt, stored

COST = CostModel()
W0, W1 = WorkerId("w0"), WorkerId("w1")


class Bench(FleetBench):
    """A small fleet of workers whose caches may have holes."""

    def __init__(self, num_workers: int = 2, *, num_blocks: int = 1000) -> None:
        super().__init__(num_workers, num_blocks=num_blocks, is_prefix_closed=False, max_workers=8)

    def indexed(self) -> dict[str, int]:
        return {view.worker: view.indexed_blocks for view in self.router.workers()}


def test_nobody_alive_is_no_worker() -> None:
    bench = Bench(0)
    with pytest.raises(NoWorker, match="none is alive"):
        bench.route("r", prompt(1))
    assert bench.router.stats().refused == 1
    bench.router.set_broker_up(False)
    with pytest.raises(NoWorker, match=r"none is known.*NATS.*not reached"):
        bench.route("r", prompt(1))


def test_a_request_goes_where_its_prefix_is() -> None:
    bench = Bench(3)
    bench.events("w2", stored(prompt(1, 400)))
    placement = bench.route("r", [*prompt(1, 400), 7])
    assert placement.worker == "w2"
    assert placement.address == "w2/1"
    assert (placement.overlap_blocks, placement.best_overlap_blocks) == (100, 100)
    assert placement.cost.prefill_s == pytest.approx(COST.prefill_token_s * COST.prefill_weight)


def test_a_booking_changes_the_next_choice_at_once() -> None:
    """The second arrival avoids the worker the first was just booked on."""
    bench = Bench(2)
    bench.events("w0", stored(prompt(1, 8)))
    assert bench.route("a", prompt(1, 400)).worker == W0
    assert bench.route("b", [*prompt(1, 8), *prompt(2, 400)]).worker == W1


def test_cold_siblings_follow_the_first_to_the_prefix_it_computes() -> None:
    bench = Bench(4)
    first = bench.route("a", [*prompt(1, 2000), 1])
    second = bench.route("b", [*prompt(1, 2000), 2])
    assert first.overlap_blocks == 0
    assert second.worker == first.worker
    assert second.overlap_blocks == 500


def test_a_popular_prefix_spills_when_its_worker_is_too_busy() -> None:
    bench = Bench(2)
    bench.events("w0", stored(prompt(1, 40)))
    chosen = [bench.route(f"r{i}", [*prompt(1, 40), i], max_tokens=256).worker for i in range(64)]
    assert 24 <= chosen.count(W0) <= 40


def test_a_request_no_worker_has_room_for_is_refused_with_the_numbers() -> None:
    bench = Bench(1, num_blocks=10)
    bench.route("fits", prompt(1, 32), max_tokens=8)
    with pytest.raises(
        KVMemoryExceeded, match=r"needs 11 KV blocks.* has 10 in all; split"
    ) as caught:
        bench.route("too-long", prompt(1, 32), max_tokens=9)
    assert caught.value.status == 400
    assert "retry" not in caught.value.message
    assert bench.router.stats().refused == 1
    bench.lease("w1", num_blocks=11)
    assert bench.route("too-long", prompt(1, 32), max_tokens=9).worker == W1


def test_a_fork_goes_to_its_capsule_however_busy_and_computes_the_suffix_only() -> None:
    """Every child goes to the worker that holds its parent capsule."""
    bench = Bench(4)
    parent = prompt(1, 42)
    bench.router.learn_capsule(CapsuleId("c"), W1, 42, hashes(parent))
    for i in range(32):
        placement = bench.fork(f"r{i}", "c", [3])
        assert placement.worker == W1
        assert placement.overlap_blocks == 10
        assert placement.cost.prefill_s == pytest.approx(
            3 * COST.prefill_token_s * COST.prefill_weight
        )
    assert bench.router.stats().routed_to_capsule == 32


def test_a_group_fork_books_its_rows_and_all_its_suffix_tokens() -> None:
    bench = Bench(2)
    bench.router.learn_capsule(CapsuleId("c"), W1, 40, hashes(prompt(1)))
    bench.fork("r", "c", [4] * 5, max_tokens=4)
    view = bench.router.workers()[1]
    assert (view.rows, view.prefill_tokens) == (5, 20)
    assert view.active_blocks == 10 + 5 * 2


@pytest.mark.parametrize("first_sign", ["lease", "events"])
def test_a_restart_in_the_same_slot_has_its_own_kind_of_cache(first_sign: str) -> None:
    """X5: the life that ended kept prefixes whole; the one that begins has a hole at block 3."""
    bench = FleetBench(1, max_workers=8)
    bench.events("w0", stored(prompt(1, 160)))
    assert bench.route("a", prompt(1, 160)).overlap_blocks == 40
    path = hashes(prompt(1, 160))
    holes = Stored(pack_hashes(np.delete(path, 3)))
    if first_sign == "events":
        bench.events("w0", holes, life=2)
    bench.lease("w0", life=2, is_prefix_closed=False)
    if first_sign == "lease":
        bench.events("w0", holes, life=2)
    assert bench.route("b", prompt(1, 160)).overlap_blocks == 3


def test_a_restart_in_a_running_fleet_is_new_again() -> None:
    """K28, part: a life that begins is cold, whatever slot it has."""
    bench = Bench(2)
    bench.now = 100.0
    for worker in ("w0", "w1"):
        bench.lease(worker)
    assert not any(view.is_new for view in bench.router.workers())
    bench.lease("w0", life=2)
    assert {view.worker: view.is_new for view in bench.router.workers()} == {W0: True, W1: False}


def test_events_of_a_new_life_before_its_lease_count_but_draw_no_requests() -> None:
    """X5: the old life ends with the first sign of the new one, whose address isn't known yet."""
    bench = Bench(2)
    bench.events("w0", stored(prompt(1)))
    bench.events("w0", stored(prompt(2)), life=2)
    assert bench.route("a", prompt(1)).worker == W1
    assert not bench.lease("w0", life=1)
    assert [view.worker for view in bench.router.workers()] == ["w1"]
    assert not bench.lease("w0", life=2)
    assert bench.indexed() == {"w0": 10, "w1": 0}
    assert bench.route("b", prompt(2)).address == "w0/2"


def test_a_lost_worker_returns_its_requests_and_only_a_younger_life_revives_it() -> None:
    bench = Bench(2)
    bench.book("b", prompt(1), "w0")
    bench.book("a", prompt(2), "w0")
    assert bench.router.lose_worker(W0, Incarnation(1)) == ["a", "b"]
    assert bench.router.lose_worker(W0, Incarnation(1)) == []
    bench.lease("w0", life=1)
    assert [view.worker for view in bench.router.workers()] == ["w1"]
    assert bench.route("a", prompt(2)).worker == W1
    bench.lease("w0", life=2)
    assert [view.worker for view in bench.router.workers()] == ["w0", "w1"]
    assert bench.router.lose_worker(W0, Incarnation(1)) == []
    assert len(bench.router.workers()) == 2


def test_the_loss_of_a_life_already_replaced_still_returns_its_requests() -> None:
    bench = Bench(1)
    bench.route("old", prompt(1))
    bench.lease("w0", life=2)
    bench.route("new", prompt(1))
    assert bench.router.lose_worker(W0, Incarnation(1)) == ["old"]
    assert bench.router.stats().booked_requests == 1


def test_an_expired_worker_gets_nothing_until_its_next_lease_and_keeps_what_it_has() -> None:
    bench = Bench(2)
    bench.events("w0", stored(prompt(1)))
    bench.book("r", prompt(1), "w0")
    bench.now = 2.0
    bench.lease("w1")
    bench.now = 3.0
    assert bench.router.expire_leases() == ["w0"]
    assert bench.router.expire_leases() == []
    bench.router.check()
    assert bench.route("a", prompt(1)).worker == W1
    with pytest.raises(NoWorker):
        bench.book("b", prompt(1), "w0")
    assert not bench.lease("w0"), "nothing was missed"
    (view,) = [view for view in bench.router.workers() if view.worker == W0]
    assert (view.indexed_blocks, view.rows) == (10, 1)
    bench.router.free(RequestId("r"))
    assert bench.router.stats().booked_requests == 1  # "a"


def test_a_worker_without_a_lease_goes_on_while_its_link_is_heard() -> None:
    """X8, part: what it holds is predicted meanwhile, and once both are silent it gets nothing."""
    bench = Bench(2)
    heard = {"w0"}

    def is_heard(worker: WorkerId, incarnation: Incarnation) -> bool:
        return worker in heard and incarnation == 1

    bench.now = 3.0
    assert bench.router.expire_leases(is_heard) == ["w1"]
    assert bench.route("a", prompt(1)).worker == W0
    bench.router.free(RequestId("a"))
    assert bench.route("b", prompt(1)).overlap_blocks == 10
    assert bench.router.stats().num_unleased == 1
    heard.clear()
    bench.now = 4.0
    assert bench.router.expire_leases(is_heard) == ["w0"]
    assert not bench.router.has_workers
    heard.update(("w0", "w1"))
    assert bench.router.expire_leases(is_heard) == []
    assert [view.worker for view in bench.router.workers()] == ["w0", "w1"]
    bench.router.check()


def test_a_detached_worker_is_forgotten_until_its_next_lease() -> None:
    bench = Bench(1)
    bench.events("w0", stored(prompt(1)))
    bench.route("r", prompt(1))
    assert bench.router.detach_worker(W0, Incarnation(1)) == ["r"]
    assert bench.router.workers() == ()
    assert bench.lease("w0"), "its blocks are unknown: a snapshot is needed"
    assert bench.indexed() == {"w0": 0}
    bench.router.check()


def test_a_reply_does_not_shorten_what_an_event_said_of_a_capsule() -> None:
    bench = Bench(1)
    capsule = CapsuleId("c")
    bench.events("w0", CapsuleStored("c", 40, pack_hashes(hashes(prompt(1)))))
    bench.router.learn_capsule(capsule, W0, 40, hashes(prompt(1))[:2])
    assert len(bench.router.capsule(capsule).hashes) == 10


def test_branches_of_a_capsule_whose_hashes_are_unknown_share_its_blocks_all_the_same() -> None:
    bench = Bench(1)
    none = hashes(prompt(1))[:0]
    bench.router.learn_capsule(CapsuleId("c"), W0, 160, none)
    bench.fork("r", "c", [0] * 8, max_tokens=4)
    (view,) = bench.router.workers()
    assert view.active_blocks <= 8


def test_no_lease_runs_out_while_the_broker_is_down() -> None:
    """With the broker gone routing goes on, and says so; after it every lease has a period."""
    bench = Bench(2)
    bench.router.set_broker_up(False)
    bench.now = 60.0
    assert bench.router.expire_leases() == []
    assert bench.route("a", prompt(1)).worker == W0
    assert not bench.router.stats().is_broker_up
    bench.router.set_broker_up(True)
    bench.now = 62.9
    assert bench.router.expire_leases() == []
    bench.now = 63.0
    assert bench.router.expire_leases() == ["w0", "w1"]


def test_a_leaving_worker_is_gone_at_once_and_stays_gone() -> None:
    bench = Bench(2)
    bench.lease("w0", is_leaving=True)
    bench.lease("w0")
    assert [view.worker for view in bench.router.workers()] == ["w1"]


def test_a_block_reported_again_meanwhile_is_not_taken_for_stale() -> None:
    """K9, part: the late report of an eviction and the new copy's report may overtake the reply."""
    bench = Bench(1)
    bench.events("w0", stored(prompt(1, 40)))
    bench.route("a", prompt(1, 42))
    bench.events("w0", Removed(pack_hashes(hashes(prompt(1))[3:])), stored(prompt(1, 40)))
    assert bench.router.observe_hit(RequestId("a"), 12) == 0
    assert bench.indexed()["w0"] == 10


def test_recomputing_the_last_full_block_of_a_prompt_proves_nothing() -> None:
    bench = Bench(1)
    bench.events("w0", stored(prompt(1, 40)))
    bench.route("a", prompt(1, 40))
    assert bench.router.observe_hit(RequestId("a"), 36) == 0
    assert bench.router.observe_hit(RequestId("never"), 0) == 0
    assert bench.indexed()["w0"] == 10


def test_a_snapshot_drops_vanished_capsules_but_none_learned_since_it_was_asked_for() -> None:
    bench = Bench(1)
    bench.router.learn_capsule(CapsuleId("vanished"), W0, 40, hashes(prompt(1)))
    bench.now = 1.0
    bench.seq["w0", 1] = 3
    assert bench.lease("w0")
    bench.now = 2.0
    bench.router.learn_capsule(CapsuleId("young"), W0, 40, hashes(prompt(1)))
    bench.router.on_snapshot(Snapshot("w0", 1, 3, b"", ()), asked_at=1.0)
    assert bench.router.capsule(CapsuleId("young")).worker == W0
    with pytest.raises(UnknownCapsule):
        bench.router.capsule(CapsuleId("vanished"))


def test_events_of_a_worker_without_lease_are_ignored_and_shown_by_its_lease() -> None:
    bench = Bench(0)
    assert not bench.events("w0", stored(prompt(1)))
    assert bench.router.stats().ignored_messages == 1
    assert bench.lease("w0")


def test_a_lease_that_cannot_serve_is_refused_and_named_to_whom_asks() -> None:
    bench = Bench(0)
    bench.lease("w0", block_size=16)
    bench.lease("w0", num_blocks=0)
    with pytest.raises(NoWorker, match=r"refused: w0 has 0 KV blocks"):
        bench.route("r", prompt(1))
    assert bench.router.stats().refused_leases == 2


def test_workers_beyond_the_table_are_refused_and_slots_are_reused() -> None:
    bench = Bench(8)
    bench.events("w3", stored(prompt(1)))
    bench.lease("w8")
    assert len(bench.router.workers()) == 8
    bench.router.lose_worker(WorkerId("w3"), Incarnation(1))
    bench.lease("w8")
    assert bench.indexed()["w8"] == 0
    assert bench.route("r", prompt(1)).best_overlap_blocks == 0


def test_an_event_that_the_snapshot_outran_leaves_no_capsule_behind() -> None:
    """K9: announced and released while the snapshot was on its way, which knows of neither."""
    bench = Bench(1)
    asked_at = bench.now
    bench.now += 1.0
    bench.events("w0", CapsuleStored("gone", 40, pack_hashes(hashes(prompt(1)))))
    bench.router.learn_capsule(CapsuleId("gone"), W0, 40, hashes(prompt(1)))
    last = Snapshot(W0, Incarnation(1), bench.seq["w0", 1] + 1, b"", ())  # its release is in there
    bench.router.on_snapshot(last, asked_at=asked_at)
    with pytest.raises(UnknownCapsule):
        bench.router.capsule(CapsuleId("gone"))
    bench.router.check()


def test_a_capsule_that_no_event_announced_is_asked_for() -> None:
    """K9: a reply slower than the events of its capsule's making and end; a snapshot settles it."""
    bench = Bench(1)
    bench.router.learn_capsule(CapsuleId("late"), W0, 40, hashes(prompt(1)))
    bench.now += 0.5
    assert not bench.lease("w0"), "its event may still be on its way"
    bench.now += 0.5
    assert bench.lease("w0")
    bench.router.on_snapshot(Snapshot(W0, Incarnation(1), 0, b"", ()), asked_at=bench.now)
    with pytest.raises(UnknownCapsule):
        bench.router.capsule(CapsuleId("late"))
    assert not bench.lease("w0")
    bench.router.check()
