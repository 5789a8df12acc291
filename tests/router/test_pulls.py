"""X6, part: requests that pull what other workers have, from whom, and what a router shows of it."""

from typing import Any

import pytest
from msgspec.structs import replace

from mallee.protocol.events import FetchPrices, Load
from mallee.protocol.ids import CapsuleId, RequestId, WorkerId
from mallee.protocol.messages import Holder
from mallee.protocol.model import WeightVersion
from mallee.router.config import CostModel, SpillModel
from support.fleet_bench import SIZE, FleetBench, hashes, prompt, stored

FAST = SpillModel(migrate_latency_s=1e-4, migrate_byte_s=1e-9, kv_block_nbytes=1000)  # 1 us a block
SLOW = SpillModel(migrate_latency_s=10.0)
COST = CostModel(prefill_token_s=1e-3)  # 4 ms a block
LONG = prompt(1, 400)


def lending(num_workers: int, *, spill: SpillModel = FAST, **config: Any) -> FleetBench:
    """Workers that lend each other KV."""
    bench = FleetBench(num_workers, spill=spill, cost=COST, **config)
    for i in range(num_workers):
        lend(bench, f"w{i}")
    return bench


def lend(bench: FleetBench, worker: str, life: int = 1, **changes: Any) -> None:
    bench.lease(worker, life, serves_kv=True, **changes)


def holder(worker: str, num_tokens: int, capsule: str = "", life: int = 1) -> Holder:
    return Holder(worker, life, f"{worker}/1", num_tokens, capsule)


def test_an_idle_worker_pulls_what_a_loaded_one_holds() -> None:
    """X6, part, X11, part: a wait of seconds beside a pull of a millisecond; the decision shows both."""
    bench = lending(2)
    bench.events("w0", stored(LONG))
    waits = bench.route("a", LONG)
    assert (waits.worker, waits.pull) == ("w0", None)
    bench.book("q", prompt(9, 4000), "w0")
    placed = bench.route("b", LONG)
    assert (placed.worker, placed.overlap_blocks) == ("w1", 0)
    assert placed.pull is not None
    assert placed.pull.holders == (holder("w0", 400),)
    assert (placed.pull.num_blocks, placed.pull.nbytes) == (100, 100 * 1000)
    assert placed.cost.pull_s == pytest.approx(1e-4 + 100 * 1e-6)
    assert placed.cost.prefill_s == pytest.approx(COST.prefill_token_s * COST.prefill_weight)
    prices = placed.pull.prices
    assert prices.migrate_s < prices.recompute_s < prices.wait_s
    assert prices.recompute_s - prices.migrate_s == pytest.approx(400 * 2e-3 - 2e-4, rel=1e-3)
    (view,) = [each for each in bench.router.workers() if each.worker == "w1"]
    assert view.prefill_tokens == 1
    stats = bench.router.stats()
    assert (stats.pulls, stats.pulled_nbytes) == ({"prefix": 1}, {"prefix": 100_000})
    (decision,) = bench.router.decisions(of=RequestId("b"))
    assert decision.pull == placed.pull
    pulled = {
        each.worker: (each.overlap_blocks, each.pulled_blocks) for each in decision.candidates
    }
    assert pulled == {"w0": (100, 0), "w1": (0, 100)}


def test_a_worker_that_measured_pulls_is_priced_by_them() -> None:
    """X6, part: until then by the bytes of its blocks and of a text's state, if it tells them."""
    bench = lending(2)
    bench.events("w0", stored(LONG))
    bench.book("q", prompt(9, 8000), "w0")
    prices = FetchPrices(0.0, 0.0, 0.0, 0.0, 0.0)
    for fetch, state_rows, pull_s in (
        (prices, 0, 1e-4 + 100 * 5e-4),
        (prices, 40, 1e-4 + 140 * 5e-4),
        (replace(prices, peer_first_s=0.02, peer_block_s=0.003), 0, 0.32),
        (replace(prices, peer_first_s=0.02, peer_block_s=0.005), 0, 0.0),  # computed: 0.004 a block
    ):
        lend(bench, "w1", load=Load(0, 0, 0, 0, None, fetch, 500_000, state_rows))
        placed = bench.route("b", LONG)
        assert placed.cost.pull_s == pytest.approx(pull_s)
        assert placed.pull is None or placed.pull.nbytes == (100 + state_rows) * 500_000
        bench.router.free(RequestId("b"))


def test_what_comes_with_any_text_is_in_the_price_of_a_pull() -> None:
    """X3, part: the rows of a state, however short the text."""
    bench = lending(2)
    bench.events("w0", stored(LONG))
    bench.book("q", prompt(9, 8000), "w0")
    prices = FetchPrices(0.0, 0.0, 0.0, 0.0, 0.0)
    for fetch, pull_s in (
        (prices, 1e-4 + (100 + 40) * 5e-4),
        (replace(prices, peer_first_s=0.02, peer_block_s=0.001), 0.02 + (100 + 40) * 0.001),
        (replace(prices, peer_first_s=0.02, peer_block_s=0.003), 0.0),  # for blocks alone it would
    ):
        lend(bench, "w1", load=Load(0, 0, 0, 0, None, fetch, 500_000, side_blocks=40))
        placed = bench.route("b", LONG)
        assert placed.cost.pull_s == pytest.approx(pull_s)
        assert placed.pull is None or placed.pull.nbytes == (100 + 40) * 500_000
        bench.router.free(RequestId("b"))


def test_two_holders_are_named_the_most_blocks_and_the_least_load_first() -> None:
    bench = lending(5)
    for worker in ("w0", "w1", "w2"):
        bench.events(worker, stored(LONG))
        bench.book(f"q {worker}", prompt(9, 8000), worker)
    bench.events("w3", stored(LONG[:200]))
    bench.book("more", prompt(8, 8), "w0")
    bench.book("q3", prompt(9, 8000), "w3")
    placed = bench.route("b", LONG)
    assert placed.worker == "w4"
    assert placed.pull is not None
    assert placed.pull.holders == (holder("w1", 400), holder("w2", 400))


STATES = {
    "draining": ({"is_draining": True}, True),
    "does not lend": ({"serves_kv": False}, False),
    "another fingerprint": ({"fingerprint": "other"}, False),
    "new weights": ({"weights": WeightVersion(1, "next", "", "")}, False),
}


@pytest.mark.parametrize("state", STATES)
def test_whether_a_worker_lends(state: str) -> None:
    """X6, part: also while it drains; never to workers of another model or other weights."""
    bench = lending(3)
    bench.events("w0", stored(LONG))
    bench.book("q", prompt(9, 8000), "w0")
    changes, lends = STATES[state]
    bench.lease("w0", **{"serves_kv": True, **changes})
    pull = bench.route("b", LONG).pull
    assert (None if pull is None else pull.holders) == ((holder("w0", 400),) if lends else None)


@pytest.mark.parametrize("end", ["suspended", "silent", "lost", "detached", "restarted"])
def test_a_life_that_is_over_or_makes_no_progress_lends_nothing(end: str) -> None:
    """X6, part: holders never name it."""
    bench = lending(3)
    bench.events("w0", stored(LONG))
    w0, life = WorkerId("w0"), 1
    match end:
        case "suspended":
            bench.router.suspend(w0, life)  # type: ignore[arg-type]
        case "silent":
            bench.now = 4.0
            lend(bench, "w1")
            lend(bench, "w2")
            bench.router.expire_leases()
        case "lost":
            bench.router.lose_worker(w0, life)  # type: ignore[arg-type]
        case "detached":
            bench.router.detach_worker(w0, life)  # type: ignore[arg-type]
        case "restarted":
            lend(bench, "w0", 2)
    bench.router.check()
    assert bench.route("b", LONG).pull is None
    if end == "suspended":  # until it goes on
        bench.router.free(RequestId("b"))
        bench.router.resume(w0, life)  # type: ignore[arg-type]
        bench.book("q", prompt(9, 8000), "w0")
        assert bench.route("c", LONG).pull is not None


def test_a_pull_teaches_the_router_nothing_wrong() -> None:
    """X6, part: tokens that came by a pull count as cached; one that failed belies no index."""
    for cached in (400, 0):
        bench = lending(2)
        bench.events("w0", stored(LONG))
        bench.book("q", prompt(9, 8000), "w0")
        placed = bench.route("b", LONG)
        assert placed.pull is not None
        assert bench.router.observe_hit(RequestId("b"), cached) == 0
        bench.router.free(RequestId("q"))
        assert bench.route("c", LONG).overlap_blocks == 100
        assert bench.router.stats().repaired_blocks == 0


def test_a_capsule_that_is_made_again_names_its_worker_first() -> None:
    """X6, part: also where its hashes are not known; other holders of its prefix come after it."""
    bench = lending(4)
    tokens = prompt(1, 402)
    bench.events("w1", stored(LONG))
    bench.router.learn_capsule(CapsuleId("c"), WorkerId("w0"), 402, hashes([]))
    lend(bench, "w0", is_draining=True)
    bench.book("q", prompt(9, 8000), "w1")
    placed = bench.route("b", tokens, source=CapsuleId("c"), why="drain")
    assert placed.pull is not None
    assert placed.pull.holders == (holder("w0", 402, "c"), holder("w1", 400))
    assert placed.pull.reason == "drain"
    assert bench.router.stats().pulls == {"drain": 1}


def test_a_capsule_is_pulled_by_name_though_its_blocks_are_computed_sooner() -> None:
    """X6, part: with its state; the worker decides by what it measured. Booked is what the price says."""
    bench = lending(2, spill=SLOW)
    bench.router.learn_capsule(CapsuleId("c"), WorkerId("w0"), 400, hashes(LONG))
    lend(bench, "w0", is_draining=True)
    placed = bench.route("b", LONG, source=CapsuleId("c"), why="drain")
    assert placed.pull is not None
    assert placed.pull.holders == (holder("w0", 400, "c"),)
    assert placed.pull.prices.recompute_s < placed.pull.prices.migrate_s
    (view,) = bench.router.workers()
    assert view.prefill_tokens == 400


def test_a_capsule_whose_worker_does_not_lend_is_no_source() -> None:
    bench = lending(2)
    bench.router.learn_capsule(CapsuleId("c"), WorkerId("w0"), 400, hashes(LONG))
    bench.lease("w0")
    assert bench.route("b", LONG, source=CapsuleId("c"), why="drain").pull is None
    assert bench.route("d", LONG, source=CapsuleId("unknown"), why="drain").pull is None


def test_a_fan_out_whose_text_is_not_known_moves_nowhere() -> None:
    """X6, part: a pull that fails must be computed."""
    bench = lending(4)
    bench.router.learn_capsule(CapsuleId("c"), WorkerId("w1"), 400, hashes(LONG))
    (part,) = bench.fan_out("f", [], 64, capsule="c", can_recompute=False, max_tokens=64)
    assert part.placement.worker == "w1"


def test_a_fan_out_of_a_prompt_is_pulled_from_any_worker_that_has_it() -> None:
    """X6, part: the pull is in the price of the prefix."""
    bench = lending(3)
    bench.events("w0", stored(LONG))
    parts = bench.fan_out("f", LONG, 64, max_tokens=64)
    by_worker = {part.placement.worker: part.placement.pull for part in parts}
    assert by_worker["w0"] is None
    for worker in ("w1", "w2"):
        pull = by_worker[WorkerId(worker)]
        assert pull is not None
        assert pull.holders == (holder("w0", 400),)
    assert len(LONG) == SIZE * 100


def test_baselines_pull_nothing() -> None:
    bench = lending(2, policy="round_robin")
    bench.events("w0", stored(LONG))
    assert [bench.route(name, LONG).pull for name in "abcd"] == [None] * 4
