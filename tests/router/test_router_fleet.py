"""Routing beyond the cheapest worker: limits, new workers, tiers, prediction, homes of prompt cache keys."""

from collections import Counter
from math import inf, nan
from typing import Any

import msgspec
import pytest

from mallee.mocker.passes import mock_spec
from mallee.protocol.bookings import Booked, PrefillDone
from mallee.protocol.errors import KVMemoryExceeded, NoWorker, Saturated
from mallee.protocol.events import FetchPrices, Load, Stored, pack_hashes
from mallee.protocol.hashing import block_hashes
from mallee.protocol.ids import CapsuleId, Incarnation, RequestId, WorkerId
from mallee.router.config import CostModel, RouterConfig, SpillModel
from mallee.router.router import Router
from mallee.router.sync.fleet import PREDICTION_S
from mallee.router.sync.outbox import Outbox
from support.fleet_bench import SIZE, FleetBench, hashes, prompt, stored
from support.index_contents import waypoints_of

COST = CostModel()


def test_who_may_wait_is_not_sent_to_a_full_worker() -> None:
    """K11: beyond busy_ratio of its rows a worker takes only requests that can't wait."""
    bench = FleetBench(2, busy_ratio=0.5)  # 4 of 8 rows
    for i in range(4):
        bench.fan_out(f"a{i}", prompt(i), 2, parts=1, may_wait=True)
    with pytest.raises(Saturated) as caught:
        bench.route("b", prompt(9), may_wait=True)
    assert caught.value.fields == {"rows": 4, "limit": 4}
    bench.route("c", prompt(9))
    bench.router.free(RequestId("a0.0"))
    assert bench.route("d", prompt(9), may_wait=True).worker == "w0"


def test_a_worker_that_joins_a_running_fleet_gets_a_share_though_others_hold_the_prefix() -> None:
    """K28, part: one decision in eight may go to a new worker, if it is not much dearer."""
    bench = FleetBench(2)
    assert not any(view.is_new for view in bench.router.workers()), "they start together"
    bench.events("w0", stored(prompt(1, 400)))
    bench.now = 100.0
    for worker in ("w0", "w1", "w2"):
        bench.lease(worker)
    reasons = []
    for i in range(16):
        placement = bench.route(f"r{i}", prompt(1, 400))
        reasons.append((placement.worker, placement.reason))
        bench.router.first_token(RequestId(f"r{i}"))
        bench.router.free(RequestId(f"r{i}"))
    assert reasons.count(("w2", "warm_up")) == 2
    assert reasons.count(("w0", "cost")) == 14
    bench.now += 61.0
    for worker in ("w0", "w1", "w2"):
        bench.lease(worker)
    assert not any(view.is_new for view in bench.router.workers())


def priced(token_s: float, first_s: float, block_s: float) -> Load:
    """The load of an idle worker with these prices of computing, and of host memory."""
    return Load(0, 0, 0, 0, fetch=FetchPrices(token_s, first_s, block_s, 0.0, 1.0))


def test_fetches_are_priced_by_what_each_worker_measured_and_has_under_way() -> None:
    """K11, K15, part: by bandwidth and queue; a worker that would compute them has no overlap."""
    bench, tokens = FleetBench(3), prompt(1, 400)
    for worker in ("w0", "w1"):
        bench.events(worker, stored(tokens, tier=1))

    def chosen() -> tuple[str, int, float]:
        placement = bench.route("a", tokens)
        bench.router.free(RequestId("a"))
        return placement.worker, placement.overlap_blocks, placement.cost.fetch_s

    bench.lease("w0", load=priced(1e-4, 0.0, 1.2e-4))
    bench.lease("w1", load=priced(1e-4, 0.0, 8e-5))
    assert chosen() == ("w1", 100, pytest.approx(0.008))
    bench.lease("w1", load=priced(1e-4, 0.005, 8e-5))  # it has much to bring first
    assert chosen() == ("w0", 100, pytest.approx(0.012))
    bench.lease("w0", load=priced(1e-5, 0.0, 1.2e-4))  # it computes a block in a third of that
    assert chosen() == ("w1", 100, pytest.approx(0.013))
    bench.lease("w1", load=priced(1e-4, 0.035, 8e-5))  # by now it would not wait for that either
    assert chosen()[1:] == (0, 0.0)
    bench.lease("w1", life=2)
    bench.events("w1", stored(tokens, tier=1), life=2)
    assert chosen() == ("w1", 100, pytest.approx(100 * COST.host_block_s))


def test_a_worker_without_events_is_believed_to_hold_what_was_sent_there() -> None:
    """K29: approximate mode: the cache is predicted from all gateways' routing, for a while."""
    bench = FleetBench(0)

    def leases() -> None:
        for worker in ("w0", "w1"):
            bench.lease(worker, kv_events=False)

    leases()
    first = bench.route("a", prompt(1, 400))
    bench.router.first_token(RequestId("a"))
    bench.router.free(RequestId("a"))
    again = bench.route("b", prompt(1, 400))
    assert (again.worker, again.overlap_blocks) == (first.worker, 100)
    bench.router.free(RequestId("b"))
    waypoints = pack_hashes(waypoints_of(hashes(prompt(2, 400))))
    assert bench.router.book_remote(Booked("t", "w1", 1, waypoints, 100, 1, 9, 1, 8))
    bench.router.free_remote(RequestId("t"))
    theirs = bench.route("mine", prompt(2, 400))
    assert (theirs.worker, theirs.overlap_blocks) == ("w1", 100)
    bench.router.free(RequestId("mine"))
    bench.now = PREDICTION_S + 1.0
    bench.router.work()
    leases()
    assert bench.route("c", prompt(1, 400)).overlap_blocks == 0


def test_a_request_goes_to_one_of_those_that_may_take_it() -> None:
    """Dearer ones, too; unknown names are no workers, and the others are as they were afterwards."""
    bench = FleetBench(3)
    bench.events("w2", stored(prompt(1, 400)))
    allowed = [WorkerId("w0"), WorkerId("w1"), WorkerId("w9")]
    assert bench.route("a", prompt(1, 400), among=allowed).worker in allowed
    for none in ([], [WorkerId("w9")]):
        with pytest.raises(NoWorker):
            bench.route("b", prompt(1), among=none)
    with pytest.raises(KVMemoryExceeded):
        bench.route("b", prompt(1), max_tokens=10**6, among=allowed)
    assert bench.route("b", prompt(1, 400)).worker == "w2"


@pytest.mark.parametrize("switched_off", ["kv_events", "active_blocks"])
def test_each_view_can_be_switched_off_alone(switched_off: str) -> None:
    """K29: cached blocks and active blocks are separate states, and routing works without either."""
    bench = FleetBench(2, **{switched_off: False})
    bench.events("w1", stored(prompt(1, 400)))
    cached = bench.route("a", prompt(1, 400))
    assert (cached.overlap_blocks == 100) == (switched_off == "active_blocks")
    running = bench.route("b", [*prompt(2, 400)])
    sibling = bench.route("c", [*prompt(2, 400), 5])
    if switched_off == "kv_events":
        assert sibling.worker == running.worker
    assert bench.router.stats().routed == 3


def test_bookings_are_told_to_the_outbox_and_count_in_another_router() -> None:
    """K10: another gateway's bookings weigh like our own, until it frees them."""
    here, there = FleetBench(2), FleetBench(2)
    outbox = here.router.outbox = Outbox("g0", Incarnation(1))
    here.router = Router(here.router.config, clock=lambda: here.now, outbox=outbox)
    here.lease("w0")
    here.route("r", prompt(1, 400))
    batch = outbox.take()
    assert batch is not None
    (booked,) = batch.ops
    assert isinstance(booked, Booked)
    assert there.router.book_remote(booked)
    assert there.route("s", prompt(2)).worker == "w1"
    here.router.first_token(RequestId("r"))
    batch = outbox.take()
    assert batch is not None
    assert batch.ops == (PrefillDone("r"),)
    assert there.router.prefill_done_remote(RequestId("r"))
    here.router.free(RequestId("r"))
    assert there.router.free_remote(RequestId("r"))
    assert not there.router.free_remote(RequestId("r"))
    assert there.router.stats().remote_requests == 0


def test_a_remote_booking_on_an_unknown_life_is_refused_and_a_lost_worker_drops_it() -> None:
    bench = FleetBench(1)
    booking = Booked("r", "w0", 2, b"", 0, 5, 16, 1, 8)
    assert not bench.router.book_remote(booking)
    bench.lease("w0", life=2)
    assert bench.router.book_remote(booking)
    assert bench.router.lose_worker(WorkerId("w0"), Incarnation(2)) == []  # not ours to redo
    assert bench.router.stats().booked_requests == 0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("tenant a", ""), ("tenant b", "")),
        (("t", "sql"), ("t", "")),
        (("b/c", "a"), ("c", "a/b")),
        (("", "a"), ("a", "")),
    ],
)
def test_tenants_and_adapters_never_share_a_block(
    one: tuple[str, str], other: tuple[str, str]
) -> None:
    """Hits are separated by the seed of the hash: tenant, adapter and model are in it."""
    spec = mock_spec()
    twin = msgspec.structs.replace(spec, fingerprint="e" * 16)
    tokens = prompt(1, 400)
    bench = FleetBench(2)
    kept = block_hashes(tokens, SIZE, salt=spec.salt(*one))
    bench.events("w1", Stored(pack_hashes(kept)))
    for salt in (spec.salt(*other), twin.salt(*one)):
        foreign = block_hashes(tokens, SIZE, salt=salt)
        assert not set(foreign.tolist()) & set(kept.tolist())
        placement = bench.router.route(RequestId(salt), foreign, prompt_tokens=400, max_tokens=8)
        assert placement.best_overlap_blocks == 0


def test_a_fan_out_too_wide_for_one_worker_is_split_at_a_price_that_is_logged() -> None:
    """X6, part: every spilled part has its three prices, and rows are neither lost nor doubled."""
    bench = FleetBench(4)
    bench.events("w2", stored(prompt(1, 400)))
    parts = bench.fan_out("f", prompt(1, 400), 64, max_tokens=64)
    assert [row for part in parts for row in part.rows] == list(range(64))
    assert (parts[0].placement.worker, parts[0].how) == ("w2", "stay")
    assert len(parts) == 4
    for i, part in enumerate(parts[1:], 1):
        assert part.how == "recompute"
        assert part.prices.recompute_s < part.prices.wait_s
        (decision,) = bench.router.decisions(1, of=RequestId(f"f.{i}"))
        assert decision.spill is not None
        assert (decision.spill.how, decision.spill.prices) == (part.how, part.prices)
    assert bench.router.stats().spilled == {("recompute", "full"): 3}
    for i in range(4):
        bench.router.free(RequestId(f"f.{i}"))
    assert bench.router.stats().booked_rows == 0


@pytest.mark.parametrize("way", ["events", "no events", "no broker", "host memory"])
def test_a_fan_out_stays_with_its_prefix_however_that_is_known(way: str) -> None:
    """X1: 96 rows over 16,000 tokens fit the worker that holds them, by events, prediction or tier."""
    bench = FleetBench(
        4, num_blocks=1_000_000, kv_events=way != "no events", cost=CostModel(host_block_s=1e-6)
    )
    for i in range(4):
        bench.lease(f"w{i}", max_rows=128)
    tokens = list(range(16_000))
    if way in ("events", "host memory"):
        bench.events("w2", stored(tokens, tier=int(way == "host memory")))
    else:
        bench.router.set_broker_up(way != "no broker")
        bench.book("first", prompt(8, 40), "w0")  # so that the prefix goes elsewhere
        assert bench.route("warm", tokens).worker == "w1"
        for name in ("warm", "first"):
            bench.router.first_token(RequestId(name))
            bench.router.free(RequestId(name))
    (part,) = bench.fan_out("f", tokens, 96, max_tokens=64)
    assert part.placement.worker == ("w2" if way in ("events", "host memory") else "w1")
    assert (part.how, part.rows) == ("stay", range(96))
    assert part.placement.overlap_blocks == 4_000


def test_a_full_worker_that_alone_is_allowed_is_the_one_that_is_named() -> None:
    """K11: other workers' room says nothing about a fork that may not leave its capsule."""
    bench = FleetBench(4)
    bench.router.learn_capsule(CapsuleId("c"), WorkerId("w2"), 40, hashes(prompt(1)))
    for i in range(8):
        bench.book(f"b{i}", prompt(2 + i), "w2")
    with pytest.raises(Saturated) as caught:
        bench.fork("f", "c", [0], may_wait=True)
    assert caught.value.fields == {"rows": 8, "limit": 8}
    bench.lease("w0", num_blocks=90_000)
    with pytest.raises(KVMemoryExceeded, match=r"25003 KV blocks.* has 10000 in all"):
        bench.fork("g", "c", [0], max_tokens=99_972)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4])
def test_a_fan_out_leaves_its_capsules_worker_whole_if_that_is_much_sooner(rows: int) -> None:
    """X6, part: a queue of half a minute there, none elsewhere; the placement is what was priced."""
    bench = FleetBench(4, num_blocks=1_000_000)
    bench.router.learn_capsule("c", WorkerId("w1"), 400, hashes(prompt(1, 400)))  # type: ignore[arg-type]
    bench.book("q", prompt(9, 1_600_000), "w1")
    (part,) = bench.fan_out("f", [], rows, capsule="c")
    assert (part.how, part.rows) == ("recompute", range(rows))
    assert part.placement.worker != "w1"
    assert bench.router.stats().spilled == {("recompute", "sooner"): 1}
    (stays,) = bench.fan_out("g", [], rows, capsule="c", can_recompute=False)
    assert stays.placement.worker == "w1"


def test_a_fan_out_of_a_capsule_whose_worker_is_gone_is_refused_before_anything_is_booked() -> None:
    bench = FleetBench(2)
    bench.router.learn_capsule("c", WorkerId("w1"), 400, hashes(prompt(1, 400)))  # type: ignore[arg-type]
    bench.now = 4.0
    bench.lease("w0")
    bench.router.expire_leases()
    with pytest.raises(NoWorker, match="w1"):
        bench.fan_out("f", [], 8, capsule="c")
    assert bench.router.stats().booked_requests == 0


def test_a_booking_that_nobody_frees_runs_out() -> None:
    """K10, part: a lost gateway's or client's claim does not stay for ever."""
    bench = FleetBench(1, booking_s=30.0)
    bench.route("lost", prompt(1))
    bench.route("long", prompt(2))
    assert bench.router.book_remote(Booked("theirs", "w0", 1, b"", 0, 5, 16, 1, 8))
    bench.now = 20.0
    bench.router.touch(RequestId("long"))
    bench.now = 31.0
    bench.router.work()
    assert bench.router.decisions(1, of=RequestId("lost"))
    stats = bench.router.stats()
    assert (stats.booked_requests, stats.expired_bookings, stats.remote_requests) == (2, 1, 1)
    bench.now = 51.0
    bench.router.work()
    assert bench.router.stats().booked_requests == 1  # theirs ends with their gateway


@pytest.mark.parametrize(
    ("settings", "name", "values"),
    [
        (RouterConfig, "policy", ["best"]),
        (RouterConfig, "temperature", [-1.0]),
        (RouterConfig, "busy_ratio", [0.0]),
        (RouterConfig, "max_workers", [0]),
        (CostModel, "step_row_s", [-1.0, nan, inf]),
        (SpillModel, "migrate_latency_s", [-1.0]),
        (SpillModel, "migrate_byte_s", [inf]),
        (SpillModel, "min_gain", [1.0]),
        (SpillModel, "kv_block_nbytes", [0]),
    ],
)
def test_a_bad_setting_is_named(settings: Any, name: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=name):
            settings(**{name: value})


def test_a_fan_out_that_no_worker_has_room_for_waits_unless_it_is_split() -> None:
    """K11: a fan-out obeys busy_ratio as any request does."""
    bench = FleetBench(1)
    bench.fan_out("first", prompt(2), 7, parts=1)
    with pytest.raises(Saturated):
        bench.fan_out("f", prompt(1, 400), 8, may_wait=True)
    assert bench.router.stats().booked_requests == 1
    assert bench.fan_out("g", prompt(1, 400), 8)[0].rows == range(8)


def test_what_was_freed_here_since_the_last_report_is_no_extra_load() -> None:
    """K10, part: a report measured before our frees does not make an idle worker look busy."""
    bench = FleetBench(1)
    bench.fan_out("r", prompt(1), 8, parts=1)
    bench.router.free(RequestId("r.0"))
    bench.lease("w0", load=Load(rows=8, waiting=0, active_blocks=12, prefill_tokens=40))
    bench.fan_out("s", prompt(2), 8, parts=1, may_wait=True)
    bench.router.free(RequestId("s.0"))
    bench.lease("w0", load=Load(rows=0, waiting=0, active_blocks=0, prefill_tokens=0))
    bench.lease("w0", load=Load(rows=8, waiting=0, active_blocks=0, prefill_tokens=0))
    with pytest.raises(Saturated):  # theirs
        bench.route("t", prompt(3), may_wait=True)


def test_a_report_does_not_outlast_a_lease_though_the_broker_is_down() -> None:
    """X8, part: the last news of a worker must not keep requests waiting through an outage."""
    bench = FleetBench(1)
    bench.lease("w0", load=Load(rows=8, waiting=0, active_blocks=12, prefill_tokens=40))
    bench.router.set_broker_up(False)
    with pytest.raises(Saturated):
        bench.route("r", prompt(1), may_wait=True)
    bench.now = 3.0
    assert bench.router.expire_leases() == []
    bench.route("r", prompt(1), may_wait=True)


# Prompt cache keys

KEYS = [0x9E3779B97F4A7C15 * (i + 1) % (1 << 64) for i in range(160)]


def home(bench: FleetBench, key: int) -> str:
    """The worker that a cold prompt with `key` goes to while nothing else runs."""
    placement = bench.route("probe", prompt(9), affinity=key)
    bench.router.free(RequestId("probe"))
    return placement.worker


def test_requests_of_a_key_go_to_one_worker_and_keys_to_all() -> None:
    """F31, part: prompts that have nothing in common yet, in two gateways that tell each other nothing."""
    bench, other = FleetBench(8), FleetBench(8)
    homes = {key: home(bench, key) for key in KEYS}
    assert homes == {key: home(other, key) for key in reversed(KEYS)}
    shares = Counter(homes.values())
    assert len(shares) == 8
    assert all(8 <= n <= 36 for n in shares.values()), shares


@pytest.mark.slow
def test_a_worker_that_comes_or_goes_moves_only_its_own_keys() -> None:
    bench = FleetBench(5)
    before = {key: home(bench, key) for key in KEYS}
    bench.lease("w2", is_draining=True)
    after = {key: home(bench, key) for key in KEYS}
    assert {key for key in KEYS if before[key] != after[key]} == {
        key for key in KEYS if before[key] == "w2"
    }
    bench.lease("w2")
    assert {key: home(bench, key) for key in KEYS} == before
    bench.lease("w5")
    after = {key: home(bench, key) for key in KEYS}
    moved = {key for key in KEYS if before[key] != after[key]}
    assert moved == {key for key in KEYS if after[key] == "w5"}
    assert 12 <= len(moved) <= 45


def test_a_prefix_outweighs_the_home_and_the_home_decides_between_equal_ones() -> None:
    """K11, part: a token found elsewhere saves two, the home saves one a token."""
    bench = FleetBench(2)
    key = next(key for key in KEYS if home(bench, key) == "w0")
    text = prompt(1, 400)
    bench.events("w1", stored(text[:240]))
    assert bench.route("a", text, affinity=key).worker == "w1", (
        "600 tokens are dearer than 160 twice"
    )
    bench.router.free(RequestId("a"))
    bench.events("w0", stored(text[:240]))
    for name in ("b", "c", "d"):
        placement = bench.route(name, [*text[:240], *prompt(2, 100)], affinity=key)
        assert placement.worker == "w0"
        assert placement.cost.prefill_s == pytest.approx(100 * COST.prefill_token_s)
        bench.router.free(RequestId(name))


def test_a_request_leaves_a_busy_home_once_its_queue_is_longer_than_its_own_prefill() -> None:
    """K11, part: never longer, so that no key makes its worker slow for all."""
    for queued, goes_home in ((3800, True), (4200, False)):
        bench = FleetBench(2, num_blocks=100_000)
        key = next(key for key in KEYS if home(bench, key) == "w1")
        bench.book("first", prompt(1, queued), "w1", max_tokens=0)
        placement = bench.route("second", prompt(2, 4000), max_tokens=0, affinity=key)
        assert (placement.worker == "w1") == goes_home


def test_branches_of_one_prompt_go_to_its_home_together() -> None:
    bench = FleetBench(4)
    for key in KEYS[:20]:
        (part,) = bench.fan_out("many", prompt(3, 100), 2, affinity=key)
        bench.router.free(RequestId("many.0"))
        assert part.placement.worker == home(bench, key)


def test_another_policy_knows_no_homes() -> None:
    bench = FleetBench(4, policy="round_robin")
    assert [home(bench, KEYS[0]) for _ in range(4)] == ["w0", "w1", "w2", "w3"]
