"""Prompt cache keys: the homes of keys, and what one is worth in a price."""

from collections import Counter

import pytest

from mallee.protocol.ids import RequestId
from mallee.router.config import CostModel
from support.fleet_bench import FleetBench, prompt, stored

COST = CostModel()
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
        bench = FleetBench(2)
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
