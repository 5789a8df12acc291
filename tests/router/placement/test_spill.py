"""Splitting fan-outs: against every possible split of small cases, and tables for what it is for."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.router.config import CostModel, SpillModel
from mallee.router.placement.fanout_pricing import (
    RowGroup,
    Split,
    SplitPlanner,
    Workers,
    work_weight,
)
from support.examples import examples

BLOCK = 16
COST = CostModel(prefill_token_s=2.2e-5, step_base_s=4.8e-3, step_row_s=1.3e-5, step_block_s=4.6e-7)
SPILL = SpillModel()
EAGER = replace(SPILL, min_gain=0.0, min_gain_fitting=0.0)
PLANNER = SplitPlanner(COST, SPILL, block_size=BLOCK)
EAGER_PLANNER = SplitPlanner(COST, EAGER, block_size=BLOCK)
WARM_512 = RowGroup(512, 4096, 512 * 128, 32)


def fleet(
    n: int, *, held: int = 0, prefix: int = 4096, max_rows: int = 256, num_blocks: int = 40_000
) -> Workers:
    """Idle workers; worker 0 holds `held` tokens of `prefix`."""
    zeros = np.zeros(n, dtype=np.int64)
    prefix_s = np.full(n, prefix * COST.prefill_token_s)
    prefix_s[0] -= held * COST.prefill_token_s
    pull_s = SPILL.migrate_latency_s + prefix // BLOCK * SPILL.block_s
    return Workers(
        *(np.zeros(n), prefix_s, zeros, zeros.copy(), zeros + max_rows, zeros + num_blocks),
        pull_s=np.full(n, pull_s),
        may_pull=np.zeros(n, dtype=np.bool_),
        displaced_s=np.zeros(n),
    )


def plan(
    group: RowGroup,
    workers: Workers,
    owner: int = 0,
    *,
    migrate: bool = False,
    planner: SplitPlanner = PLANNER,
) -> Split:
    workers = workers._replace(may_pull=np.full(len(workers.rows), migrate))
    split = planner.plan(group, workers, owner, max_parts=64, can_recompute=True)
    assert sum(share.rows for share in split.shares) == group.rows
    assert all(share.rows > 0 for share in split.shares)
    assert len({share.slot for share in split.shares}) == len(split.shares)
    return split


# A model in plain words, wave by wave.


def finish_s(
    group: RowGroup, workers: Workers, slot: int, rows: int, how: str
) -> tuple[float, float]:
    """Time at which the last of `rows` rows is done there, and the work that staying would not take."""
    shared = group.prefix_tokens // BLOCK
    suffix = group.suffix_tokens / group.rows
    tail = group.prefix_tokens % BLOCK + int(np.ceil(suffix)) + group.steps
    own = max(1, -(-tail // BLOCK))
    queued = float(workers.queued_s[slot])
    pull = float(workers.pull_s[slot])
    copy = pull if how == "migrate" else float(workers.prefix_s[slot])
    now = max(queued, pull) if how == "migrate" else queued + copy
    now += rows * suffix * COST.prefill_token_s
    others, active = int(workers.rows[slot]), int(workers.active_blocks[slot])
    work = copy + float(workers.displaced_s[slot])
    work += 0.0 if others else group.steps * COST.step_base_s
    left = rows
    while left:
        free = (int(workers.num_blocks[slot]) - shared - active) // own
        ours = min(left, max(0, min(int(workers.max_rows[slot]) - others, free)))
        if not others and not active:
            ours = max(1, ours)
        blocks = active + ours * own + (shared if ours else 0)
        now += group.steps * (
            COST.step_base_s + COST.step_row_s * (others + ours) + COST.step_block_s * blocks
        )
        others = active = 0
        left -= ours
    return now, 0.0 if how == "stay" else work


def every_split(
    group: RowGroup, workers: Workers, owner: int, hows: tuple[str, ...]
) -> Iterator[list[tuple[int, int, str]]]:
    def counts(left: int, places: int) -> Iterator[tuple[int, ...]]:
        if places == 1:
            yield (left,)
            return
        for n in range(left + 1):
            for rest in counts(left - n, places - 1):
                yield (n, *rest)

    def ways_of(slot: int) -> list[str]:
        if slot == owner:
            return ["stay"]
        return [how for how in hows if how != "migrate" or workers.may_pull[slot]]

    num_workers = len(workers.rows)
    for rows in counts(group.rows, num_workers):
        used = [slot for slot in range(num_workers) if rows[slot]]
        ways = [ways_of(slot) for slot in used]
        for chosen in product(*ways):
            yield [(slot, rows[slot], how) for slot, how in zip(used, chosen, strict=True)]


def cost_of(group: RowGroup, workers: Workers, shares: Sequence[tuple[int, int, str]]) -> float:
    ends = [finish_s(group, workers, *share) for share in shares]
    weight = (COST.prefill_weight - 1.0) / group.rows
    return max(end for end, _ in ends) + weight * sum(work for _, work in ends)


@st.composite
def cases(draw: st.DrawFn) -> tuple[RowGroup, Workers, int]:
    n = draw(st.integers(1, 4))
    rows = draw(st.integers(1, 8 if n < 4 else 6))
    prefix = draw(st.sampled_from([0, 40, 500, 4096, 16_384]))
    group = RowGroup(rows, prefix, rows * draw(st.integers(0, 300)), draw(st.integers(0, 64)))

    def each(strategy: st.SearchStrategy[int]) -> np.ndarray:
        return np.array(draw(st.lists(strategy, min_size=n, max_size=n)), dtype=np.int64)

    max_rows = each(st.integers(1, 6))
    rows_there = np.minimum(each(st.integers(0, 6)), max_rows)
    missing = each(st.sampled_from([0, prefix - prefix // 2, prefix, prefix, prefix]))
    fetched = each(st.sampled_from([0, 0, 0, 40]))
    workers = Workers(
        each(st.integers(0, 400)) / 1000,
        missing * COST.prefill_token_s + fetched / 1000,
        rows_there,
        rows_there * each(st.integers(1, 400)),
        max_rows,
        np.full(n, 40_000),
        pull_s=SPILL.migrate_latency_s + each(st.integers(0, prefix // BLOCK)) * SPILL.block_s,
        may_pull=np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n))),
        displaced_s=each(st.sampled_from([0, 0, 200])) / 1000,
    )
    return group, workers, draw(st.integers(0, n - 1))


@given(cases(), st.sampled_from([("recompute",), ("migrate",), ("recompute", "migrate")]))
@examples(150)
def test_a_split_is_within_five_percent_of_the_best_of_all_splits(
    case: tuple[RowGroup, Workers, int], hows: tuple[str, ...]
) -> None:
    """X6, part: wait, move and recompute are weighed against each other, against brute force."""
    group, workers, owner = case
    workers = workers._replace(may_pull=workers.may_pull & ("migrate" in hows))
    split = EAGER_PLANNER.plan(
        group, workers, owner, max_parts=64, can_recompute="recompute" in hows
    )
    chosen = [(share.slot, share.rows, share.how) for share in split.shares]
    best = min(
        cost_of(group, workers, shares) for shares in every_split(group, workers, owner, hows)
    )
    assert sum(share.rows for share in split.shares) == group.rows
    assert cost_of(group, workers, chosen) <= 1.05 * best + 1e-9
    predicted = split.finish_s + work_weight(COST, group.rows) * split.work_s
    assert predicted == pytest.approx(cost_of(group, workers, chosen))
    stay, _ = finish_s(group, workers, owner, group.rows, "stay")
    assert split.stay_s == pytest.approx(stay)
    assert split.finish_s <= split.stay_s
    for share in split.shares:
        for how, price in (
            ("recompute", share.prices.recompute_s),
            ("migrate", share.prices.migrate_s),
        ):
            if share.how != "stay":
                assert price == pytest.approx(
                    finish_s(group, workers, share.slot, share.rows, how)[0]
                )
        assert share.prices.wait_s == split.stay_s


# What it is for


@pytest.mark.parametrize("num_workers", [4, 1000])
@pytest.mark.parametrize("rows", [2, 8, 32, 64])
@pytest.mark.parametrize("there", [0, 64, 192])
def test_a_fan_out_that_fits_stays_whole(num_workers: int, rows: int, there: int) -> None:
    """X1: up to 64 branches beside up to 192, on 4 and on 1000 otherwise idle workers."""
    workers = fleet(num_workers, held=4096)
    workers.rows[0], workers.active_blocks[0] = there, there * 20
    for steps in (16, 256):
        split = plan(RowGroup(rows, 4096, rows * 32, steps), workers, migrate=True)
        assert [(s.slot, s.rows, s.how) for s in split.shares] == [(0, rows, "stay")]
        assert split.finish_s == split.stay_s


@pytest.mark.parametrize(("migrate", "how"), [(False, "recompute"), (True, "migrate")])
def test_a_fan_out_of_512_spreads_over_8_workers(migrate: bool, how: str) -> None:
    """X6, part: the slowest of 512 takes at most a quarter of what it would where the prefix is."""
    split = plan(WARM_512, fleet(8, held=4096), migrate=migrate)
    assert split.shares[0].how == "stay"
    assert {share.how for share in split.shares[1:]} == {how}
    assert len(split.shares) == 8
    assert split.finish_s <= 0.25 * split.stay_s
    for share in split.shares[1:]:
        assert share.prices.migrate_s < share.prices.recompute_s < share.prices.wait_s


def test_a_worker_without_room_gets_nothing() -> None:
    """Capacity is a hard filter: full, too small, or not routable (no blocks at all)."""
    workers = fleet(4, held=4096, num_blocks=2000)
    workers.num_blocks[1] = 0
    workers.num_blocks[2] = 4096 // BLOCK + 3  # the prefix and not one row
    split = plan(WARM_512, workers)
    assert {share.slot for share in split.shares} == {0, 3}
    nobody = PLANNER.plan(WARM_512, workers, 0, max_parts=64, can_recompute=False)
    assert [share.how for share in nobody.shares] == ["stay"]


def test_more_parts_than_allowed_are_not_made() -> None:
    few = SplitPlanner(COST, replace(SPILL, min_gain=0.1), block_size=BLOCK)
    split = few.plan(WARM_512, fleet(100, held=4096), 0, max_parts=3, can_recompute=True)
    assert len(split.shares) == 3
