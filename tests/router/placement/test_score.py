"""The price of every worker and the choice, against the formulas in plain Python; the ring of decisions."""

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from mallee.protocol.hashing import NO_HASHES
from mallee.protocol.ids import RequestId, WorkerId
from mallee.router.config import CostModel, Policy, RouterConfig, SpillModel
from mallee.router.load import layout
from mallee.router.placement.decisions import Decision, Entry, last
from mallee.router.placement.fanout_pricing import Prices, Share
from mallee.router.placement.kernels import score
from mallee.router.placement.pricing import (
    POLICIES,
    WARM_UP_PRICE_S,
    Choice,
    Cost,
    Demand,
    Offers,
    Pricer,
)

MODEL = CostModel(
    prefill_token_s=0.001,
    prefill_weight=3.0,
    step_base_s=0.01,
    step_row_s=0.002,
    step_block_s=0.0001,
    host_block_s=0.003,
    disk_block_s=0.02,
    expected_output_tokens=10,
)
PULLS = SpillModel(migrate_latency_s=0.02, migrate_byte_s=0.001, kv_block_nbytes=4)
BLOCK = 16
NOW = 50.0


class Bench:
    """A pricer over `num_workers` idle workers of 1000 blocks, to be loaded by hand."""

    def __init__(
        self,
        num_workers: int,
        policy: Policy = "cost",
        temperature: float = 0.0,
        draw: Callable[[], float] = lambda: 0.0,
        model: CostModel = MODEL,
    ) -> None:
        self.num_workers = num_workers
        self.loads = np.zeros((layout.NUM_LOADS, num_workers + 5))
        self.loads[layout.LOAD_ROOM, :num_workers] = 1000
        self.loads[layout.LOAD_FREE, :num_workers] = 1000
        config = RouterConfig(
            cost=model, spill=PULLS, policy=policy, temperature=temperature, busy_ratio=0.8
        )
        self.held = np.zeros((3, num_workers + 5), dtype=np.int32)
        self.active = np.zeros(num_workers + 5, dtype=np.int32)
        self.pricer = Pricer(config, self.loads, draw)
        self.choice: Choice | None = None

    def choose(
        self, demand: Demand, *, num_tiers: int = 1, prefers_new: bool = False, now: float = NOW
    ) -> Choice | None:
        """Keeps the choice, for its terms."""
        held = np.ascontiguousarray(self.held[:num_tiers])
        self.choice = self.pricer.choose(
            demand,
            Offers(NO_HASHES, held, self.active),
            now=now,
            width=self.num_workers,
            prefers_new=prefers_new,
        )
        return self.choice

    @property
    def terms(self) -> np.ndarray:
        assert self.choice is not None
        return self.choice.terms

    @property
    def totals(self) -> list[float]:
        return self.terms[score.TERM_TOTAL, : self.num_workers].tolist()


def expected_pull(bench: Bench, num_tiers: int, w: int, overlap: int) -> tuple[float, int]:
    """Seconds and blocks that worker `w` pulls from the one that lends and has most; disks aren't lent."""
    lends = bench.loads[layout.LOAD_LENDS].tolist()
    tier = 1 if num_tiers > 1 else 0
    others = [int(bench.held[tier, x]) for x in range(bench.num_workers) if lends[x] and x != w]
    num = max(others, default=0) - overlap
    first_s, block_s = bench.loads[
        layout.LOAD_PEER_FIRST_S : layout.LOAD_PEER_BLOCK_S + 1, w
    ].tolist()
    if not block_s:
        first_s, block_s = PULLS.migrate_latency_s, PULLS.kv_block_nbytes * PULLS.migrate_byte_s
    seconds = first_s + num * block_s
    token_s = float(bench.loads[layout.LOAD_TOKEN_S, w]) or MODEL.prefill_token_s
    if not lends[w] or num <= 0 or seconds > num * BLOCK * token_s:
        return 0.0, 0
    return seconds, num


def expected(bench: Bench, policy: Policy, demand: Demand, num_tiers: int, w: int) -> list[float]:
    """The terms of worker `w`, from the text of router.cost and Dynamo's published formula."""
    load = bench.loads[:, w].tolist()
    active = int(bench.active[w])
    device, host, disk = (max(active, int(held)) for held in bench.held[:, w])
    if num_tiers == 1:
        host = disk = device
    dynamo_credit = device + 0.75 * (host - device) + 0.25 * (disk - host)
    overlap, fetch_s = device, 0.0
    token_s, host_first, host_s, disk_first, disk_s, _, _ = load[layout.LOADS_FETCH]
    compute_s = (token_s or MODEL.prefill_token_s) * BLOCK
    for end, first_s, block_s in (
        (host, host_first, host_s or MODEL.host_block_s),
        (disk, disk_first, disk_s or MODEL.disk_block_s),
    ):
        num = end - overlap
        if num and first_s + num * block_s > num * compute_s:
            break
        overlap, fetch_s = end, fetch_s + (first_s + num * block_s if num else 0.0)
    unconfirmed = load[layout.LOAD_PREFILL] * MODEL.prefill_token_s
    queued = max(0.25 * unconfirmed, min(unconfirmed, load[layout.LOAD_PREFILL_ENDS] - NOW))
    queued += load[layout.LOAD_EXTRA_PREFILL] * MODEL.prefill_token_s
    pull_s, pulled = 0.0, 0
    if policy == "cost":
        pull_s, pulled = expected_pull(bench, num_tiers, w, overlap)
    there = overlap + pulled
    unpaid = max(0, demand.shared_blocks - there) * (1.0 - demand.copy_share)
    prefill = max(1, demand.prompt_tokens - (there + unpaid) * BLOCK)
    prefill = prefill if demand.fixed_prefill < 0 else demand.fixed_prefill
    rows = load[layout.LOAD_ROWS] + load[layout.LOAD_EXTRA_ROWS]
    blocks = load[layout.LOAD_BLOCKS] + load[layout.LOAD_EXTRA_BLOCKS]
    there = MODEL.step_row_s * rows + MODEL.step_block_s * blocks
    new_blocks = demand.num_blocks + demand.own_blocks - active
    added = MODEL.step_row_s * demand.rows + MODEL.step_block_s * new_blocks
    weight = 1.0 if demand.home == w else MODEL.prefill_weight
    cost = Cost(
        queued,
        MODEL.prefill_token_s * weight * prefill,
        demand.steps * (MODEL.step_base_s + there + added * (rows + demand.rows) / demand.rows),
        fetch_s,
        displaced(demand, load, overlap, is_home=demand.home == w),
        pull_s,
    )
    waiting = (load[layout.LOAD_PREFILL] + demand.prompt_tokens) / BLOCK - dynamo_credit
    total = {
        "cost": cost.total_s,
        "dynamo": max(0.0, waiting) + load[layout.LOAD_BLOCKS] + new_blocks,
        "least_loaded": rows,
        "prefix_only": -overlap,
    }.get(policy, 0.0)
    return [overlap, pulled, *cost, total]


def displaced(demand: Demand, load: list[float], overlap: int, *, is_home: bool) -> float:
    """Seconds for what a text displaces: all it brings, as far as that is not free and not spoken for."""
    brings = max(0, demand.num_blocks + demand.own_blocks - overlap)
    free = load[layout.LOAD_FREE] - load[layout.LOAD_PREFILL] / BLOCK
    if not is_home:
        brings, free = brings * demand.growth, free - load[layout.LOAD_GROWTH]
    again_s = min(MODEL.prefill_token_s * BLOCK, load[layout.LOAD_HOST_BLOCK_S] or math.inf)
    return MODEL.displaced_weight * again_s * min(brings, max(0.0, brings - free))


@given(st.integers(0, 1 << 32), st.integers(-1, 8))
def test_a_copy_for_a_fan_out_displaces_what_a_text_of_its_blocks_does(
    seed: int, home: int
) -> None:
    """X25, part: by one rule, whatever is booked there and comes back from host memory."""
    bench = Bench(9)
    random = np.random.default_rng(seed)
    load_at_random(bench, random)
    blocks = random.integers(0, 60, 9)
    found = score.price_copies(
        bench.loads, blocks.astype(float), home, BLOCK, MODEL.prefill_token_s
    )
    for w, num in enumerate(blocks.tolist()):
        text, load = Demand(1, num, 0, 1, 1, 1), bench.loads[:, w].tolist()
        seconds = MODEL.displaced_weight * float(found[w])
        assert seconds == pytest.approx(displaced(text, load, 0, is_home=w == home))


def may_go(bench: Bench, demand: Demand, w: int) -> bool:
    """Whether it may go to worker `w` now."""
    load = bench.loads[:, w].tolist()
    fits = load[layout.LOAD_ROOM] >= max(1, demand.needed_blocks) and demand.only in (-1, w)
    rows, limit = load[layout.LOAD_ROWS] + load[layout.LOAD_EXTRA_ROWS], load[layout.LOAD_MAX_ROWS]
    is_busy = demand.may_wait > 0 and rows > 0 and 0 < limit * 0.8 < rows + demand.rows
    return fits and not is_busy


def load_at_random(bench: Bench, random: np.random.Generator) -> None:
    n = bench.num_workers
    for row in (*layout.LOADS_BOOKED, *layout.LOADS_REPORTED):
        bench.loads[row, :n] = random.integers(0, 5, n) * random.integers(0, 40, n)
    bench.loads[layout.LOAD_PREFILL_ENDS, :n] = NOW + random.integers(-2, 3, n) * 0.01
    bench.loads[layout.LOAD_ROOM, :n] = random.choice([0, 5, 1000], n, p=[0.1, 0.2, 0.7])
    bench.loads[layout.LOAD_MAX_ROWS, :n] = random.choice([0, 10, 200], n)
    bench.loads[layout.LOAD_WARM_AT, :n] = random.choice([0.0, NOW, NOW + 1], n)
    bench.loads[layout.LOAD_CHOSEN, :n] = random.integers(0, 4, n)
    bench.loads[layout.LOAD_LENDS, :n] = random.random(n) < random.choice([0.0, 0.5, 1.0])
    for row in range(layout.NUM_LOADS)[layout.LOADS_FETCH]:
        bench.loads[row, :n] = random.choice([0.0, 0.0005, 0.005, 0.03, 0.2], n)
    bench.loads[layout.LOAD_FREE, :n] = random.choice([0, 3, 30, 1000], n)
    bench.loads[layout.LOAD_GROWTH, :n] = random.choice([0.0, 7.5, 100.0], n)
    held = np.sort(random.integers(0, 20, (3, n)), axis=0)
    bench.held[:, :n] = held
    bench.active[:n] = random.integers(0, 12, n)


demands = st.builds(
    lambda blocks, partial, own, needed, rows, steps, fixed, only, wait, home, growth, shared, copy: (
        Demand(
            *(blocks * BLOCK + partial, blocks, own, needed, rows, steps, fixed, only, wait, home),
            *(growth, shared, copy),
        )
    ),
    st.integers(20, 40),
    st.integers(0, 15),
    st.integers(0, 9),
    st.sampled_from([0, 1, 6]),
    st.sampled_from([1, 2, 8, 50]),
    st.sampled_from([0, 1, 10]),
    st.sampled_from([-1, -1, 0, 7]),
    st.sampled_from([-1, -1, -1, 2]),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([-1, -1, 0, 2]),
    st.sampled_from([1.0, 6.0]),
    st.integers(0, 20),
    st.sampled_from([1.0, 0.25]),
)


@given(
    st.sampled_from(sorted(POLICIES)),
    st.integers(3, 12),
    st.integers(0, 1 << 32),
    st.sampled_from([1, 3]),
    demands,
)
def test_prices_and_choice_equal_the_formulas(
    policy: Policy, num_workers: int, seed: int, num_tiers: int, demand: Demand
) -> None:
    """K11, X11; X6, part: all terms, who may not be chosen, and the cheapest with the documented ties."""
    bench = Bench(num_workers, policy)
    load_at_random(bench, np.random.default_rng(seed))
    choice = bench.choose(demand, num_tiers=num_tiers)
    allowed = [may_go(bench, demand, w) for w in range(num_workers)]
    assert (choice is None) == (not any(allowed))
    if choice is None:
        return
    totals = bench.totals
    for w in range(num_workers):
        want = expected(bench, policy, demand, num_tiers, w)
        got = bench.terms[:, w].tolist()
        total, want_total = got.pop(score.TERM_TOTAL), want.pop(score.TERM_TOTAL)
        assert got == pytest.approx(want, rel=1e-5, abs=1e-6)
        assert total == (pytest.approx(want_total, rel=1e-5) if allowed[w] else math.inf)
    best = min(totals)
    ties = [w for w in range(num_workers) if totals[w] == best]
    if policy != "random":
        assert choice.slot == min(ties, key=lambda w: (bench.loads[layout.LOAD_CHOSEN, w], w))
    terms = bench.terms[:, choice.slot].tolist()
    assert choice.overlap_blocks == terms[score.TERM_OVERLAP]
    assert choice.pulled_blocks == terms[score.TERM_PULLED]
    assert list(choice.cost) == terms[score.TERM_QUEUED : score.TERM_TOTAL]
    overlaps = bench.terms[score.TERM_OVERLAP, :num_workers]
    assert choice.best_overlap_blocks == overlaps[allowed].max()


HAND_MADE = [
    # An idle worker: 10 steps of base + own row + own 5 blocks.
    ((0, 0, 0), Demand(100, 5, 0, 1, 1, 10), (0.0, 0.3, 10 * (0.01 + 0.002 + 0.0005))),
    # Queued prefill is waited for.
    ((400, 0, 0), Demand(100, 5, 0, 1, 1, 10), (0.4, 0.3, 10 * (0.01 + 0.002 + 0.0005))),
    # 3 rows over 20 blocks: they slow the newcomer, the newcomer slows all 4.
    ((0, 3, 20), Demand(0, 5, 0, 1, 1, 10), (0.0, 0.003, 10 * (0.01 + 0.008 + 4 * 0.0025))),
    # Two own rows: everybody's slowdown is shared out over them.
    ((0, 2, 0), Demand(0, 5, 0, 1, 2, 10), (0.0, 0.003, 10 * (0.01 + 0.004 + 2 * 0.0045))),
    # No decode (a prefill for a capsule), nothing computed.
    ((0, 7, 70), Demand(0, 5, 0, 1, 1, 0, 0), (0.0, 0.0, 0.0)),
]


@pytest.mark.parametrize(("loads", "demand", "want"), HAND_MADE)
def test_cost_is_the_documented_sum(
    loads: tuple[int, int, int], demand: Demand, want: tuple[float, float, float]
) -> None:
    """K11: queued prefill + own prefill + decode slowdown, each term as computed by hand."""
    bench = Bench(1)
    prefill, rows, blocks = loads
    bench.loads[[layout.LOAD_PREFILL, layout.LOAD_ROWS, layout.LOAD_BLOCKS], 0] = (
        prefill,
        rows,
        blocks,
    )
    bench.loads[layout.LOAD_PREFILL_ENDS, 0] = NOW + 1000
    choice = bench.choose(demand)
    assert choice is not None
    assert tuple(choice.cost) == pytest.approx((*want, 0.0, 0.0, 0.0), rel=1e-5)
    assert bench.totals == pytest.approx([sum(want)], rel=1e-5)


COST_TABLE = [
    # tokens queued at the holder, seconds a block pulled, and what is cheapest
    (0, 0.004, "wait"),
    (400, 0.004, "move"),  # 60 blocks: 0.26 s pulled, 0.96 s x 3 computed
    (200, 0.004, "wait"),
    (100, 0.050, "wait"),  # a pull would take longer than computing
    (4000, 0.050, "recompute"),
]


@pytest.mark.parametrize(("queued", "block_s", "cheapest"), COST_TABLE)
def test_a_prompt_waits_moves_or_is_computed_again(
    queued: int, block_s: float, cheapest: str
) -> None:
    """X6, part: the cost table, on a holder with a queue and an idle worker beside it."""
    bench = Bench(2)
    bench.loads[layout.LOAD_LENDS, :2] = 1
    bench.loads[layout.LOAD_PREFILL, 0] = queued
    bench.loads[layout.LOAD_PREFILL_ENDS, 0] = NOW + queued * MODEL.prefill_token_s
    bench.held[:, 0] = 60
    spill = replace(PULLS, migrate_byte_s=block_s / PULLS.kv_block_nbytes)
    bench.pricer = Pricer(RouterConfig(cost=MODEL, spill=spill), bench.loads, lambda: 0.0)
    demand = Demand(960, 60, 1, 1, 1, 1)
    choice = bench.choose(demand)
    assert choice is not None
    wait_s, compute_s = queued * MODEL.prefill_token_s, 959 * MODEL.prefill_token_s
    move_s = spill.migrate_latency_s + 60 * block_s
    ways = {"wait": wait_s, "recompute": compute_s * MODEL.prefill_weight}
    if move_s <= 960 * MODEL.prefill_token_s:
        ways["move"] = move_s
    assert min(ways, key=lambda way: ways[way]) == cheapest
    chosen = "wait" if choice.slot == 0 else "move" if choice.pulled_blocks else "recompute"
    assert chosen == cheapest


@pytest.mark.parametrize("policy", ["cost", "round_robin", "least_loaded", "dynamo"])
def test_equally_cheap_workers_take_turns(policy: Policy) -> None:
    """K11, K12: temperature 0 is deterministic; ties go to the one chosen longest ago, then the lowest."""
    bench = Bench(4, policy)
    chosen = []
    for number in range(1, 10):
        choice = bench.choose(Demand(100, 6, 0, 1, 1, 10))
        assert choice is not None
        again = bench.choose(Demand(100, 6, 0, 1, 1, 10))
        assert again is not None
        assert structs.replace(choice, terms=again.terms) == again
        bench.loads[layout.LOAD_CHOSEN, choice.slot] = number
        chosen.append(choice.slot)
    assert chosen == [0, 1, 2, 3, 0, 1, 2, 3, 0]


def shares(bench: Bench, demand: Demand) -> list[float]:
    """Counts of choices by worker, for evenly spread draws."""
    n = 2000
    slots = Counter[int]()
    for i in range(n):
        bench.pricer._draw = lambda i=i: (i + 0.5) / n
        choice = bench.choose(demand)
        assert choice is not None
        slots[choice.slot] += 1
    return [slots[w] / n for w in range(bench.num_workers)]


@pytest.mark.parametrize("temperature", [0.05, 0.3, 2.0])
def test_temperature_draws_by_the_softmax_of_prices(temperature: float) -> None:
    """K11: scaled to the range of prices, as Dynamo does; workers that are out are never drawn."""
    bench = Bench(5, temperature=temperature)
    bench.loads[layout.LOAD_ROWS, :5] = (4, 9, 0, 1, 30)
    bench.loads[layout.LOAD_ROOM, 2] = 0
    got = shares(bench, Demand(100, 6, 0, 1, 1, 10))
    totals = np.array(bench.totals)
    finite = totals[np.isfinite(totals)]
    weights = np.exp((finite.min() - totals) / (finite.max() - finite.min()) / temperature)
    assert got == pytest.approx((weights / weights.sum()).tolist(), abs=2e-3)
    assert got[2] == 0.0


@pytest.mark.parametrize("policy", ["random", "cost"])
def test_equal_prices_are_drawn_evenly(policy: Policy) -> None:
    """K12: so is the random policy, whatever the load."""
    bench = Bench(4, policy, temperature=0.0 if policy == "random" else 0.5)
    if policy == "random":
        bench.loads[layout.LOAD_ROWS, :4] = (1, 2, 3, 4)
    assert shares(bench, Demand(100, 6, 0, 1, 1, 10)) == pytest.approx([0.25] * 4, abs=1e-3)
    bench.pricer._draw = lambda: math.nextafter(1.0, 0.0)
    choice = bench.choose(Demand(100, 6, 0, 1, 1, 10))
    assert choice is not None
    assert choice.slot == 3


def test_a_new_worker_is_preferred_unless_it_is_much_dearer() -> None:
    """K28, part: by WARM_UP_PRICE_S; the prices in the log are those of all workers."""
    bench = Bench(3)
    demand = Demand(1600, 100, 0, 1, 1, 10)
    bench.loads[layout.LOAD_WARM_AT, 2] = NOW + 1
    bench.held[0, 0] = 10
    for overlap, is_new in ((10, True), (100, False)):  # 0.48 s and 4.8 s of prefill saved
        bench.held[0, 0] = overlap
        choice = bench.choose(demand, prefers_new=True)
        assert choice is not None
        assert (choice.is_new, choice.slot) == (is_new, 2 if is_new else 0)
        assert (bench.totals[2] - bench.totals[0] <= WARM_UP_PRICE_S) == is_new
        assert all(map(math.isfinite, bench.totals))
        assert choice.best_overlap_blocks == overlap
    bench.held[0, 0] = 0
    choice = bench.choose(demand, prefers_new=True, now=NOW + 1)
    assert choice is not None
    assert (choice.is_new, choice.slot) == (False, 0)


def test_output_beyond_the_expected_length_is_not_priced() -> None:
    assert MODEL.steps(3) == 3
    assert MODEL.steps(1_000_000) == 10


NAMES = (WorkerId("a"), None, WorkerId("c"))


def terms(seed: float) -> np.ndarray:
    """Prices of three slots, of which the second is empty."""
    made = np.full((score.NUM_TERMS, 3), np.inf, dtype=np.float32)
    for slot, total in ((0, 2.0), (1, 0.0), (2, 1.0)):
        made[:, slot] = (seed, 3.0, 0.25, 0.5, 1.5, 0.75, 2.0, 0.125, seed + total)
    return made


def entry(number: int, name: str, seed: float) -> Entry:
    demand = Demand(100, 6, 1, 7, 2, 10)
    return Entry(number, RequestId(name), 2, "cost", seed, demand, terms(seed), NAMES, None)


@given(st.integers(1, 5), st.lists(st.integers(0, 4), max_size=30))
def test_the_last_decisions_are_kept_with_their_own_prices(size: int, stream: list[int]) -> None:
    """X11"""
    log: deque[Entry] = deque(maxlen=size)
    truth: list[tuple[int, str, float]] = []
    for at, number in enumerate(stream):
        name = f"r{number}"
        log.append(entry(at, name, float(at)))
        truth.append((len(truth), name, float(at)))
        kept = truth[-size:][::-1]
        assert [key(d) for d in last(log, 100)] == kept
        assert [key(d) for d in last(log, 2)] == kept[:2]
        assert last(log, 0) == last(log, -1) == []
        for name in ("r0", "r1", "never"):
            found = last(log, 100, of=RequestId(name))
            assert [key(d) for d in found] == [each for each in kept if each[1] == name]


def key(decision: Decision) -> tuple[int, str, float]:
    assert all(each.overlap_blocks == decision.at for each in decision.candidates)
    return (decision.number, decision.request, decision.at)


def test_a_decision_shows_every_candidate_cheapest_first() -> None:
    """X11: names as they were then; workers where it could not go are dearest of all."""
    spill = Share(2, 2, "migrate", Prices(3.0, 1.0, 2.0))
    made = entry(9, "r", 7.0)
    made.terms[score.TERM_TOTAL, 0] = np.inf
    made = structs.replace(made, reason="fan_out", at=5.5, share=spill)
    (decision,) = last([made], 1, of=RequestId("r"))
    assert decision[:8] == (9, 5.5, "r", "c", "fan_out", 100, 6, 2)
    assert decision.spill == spill
    assert [each.worker for each in decision.candidates] == ["c", "a"]
    assert [each.total for each in decision.candidates] == [8.0, math.inf]
    cost = decision.candidates[0].cost
    assert tuple(cost) == (0.25, 0.5, 1.5, 0.75, 2.0, 0.125)
    assert decision.candidates[0].pulled_blocks == 3
    assert cost.total_s == pytest.approx(5.125)
