"""The price of a worker, by hand."""

import numpy as np
import pytest

from mallee.router.cost import CostModel, Demand, price
from mallee.router.slots import Loads

MODEL = CostModel(
    prefill_token_s=0.001,
    prefill_weight=3.0,
    step_base_s=0.01,
    step_row_s=0.002,
    step_block_s=0.0001,
    expected_output_tokens=10,
)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize(
    ("loads", "demand", "want"),
    [
        # An idle worker: 10 steps of base + own row + own 5 blocks.
        ((0, 0, 0), (100, 5, 1, 10), (0.0, 0.3, 10 * (0.01 + 0.002 + 0.0005))),
        # Queued prefill is waited for.
        ((400, 0, 0), (100, 5, 1, 10), (0.4, 0.3, 10 * (0.01 + 0.002 + 0.0005))),
        # 3 rows over 20 blocks: they slow the newcomer, the newcomer slows all 4.
        ((0, 3, 20), (1, 5, 1, 10), (0.0, 0.003, 10 * (0.01 + 0.008 + 4 * 0.0025))),
        # Two own rows: everybody's slowdown is shared out over them.
        ((0, 2, 0), (1, 5, 2, 10), (0.0, 0.003, 10 * (0.01 + 0.004 + 2 * 0.0045))),
        # No decode (a prefill for a capsule), nothing computed.
        ((0, 7, 70), (0, 5, 1, 0), (0.0, 0.0, 0.0)),
    ],
)
def test_cost_is_the_documented_sum(
    loads: tuple[int, int, int],
    demand: tuple[int, int, int, int],
    want: tuple[float, float, float],
) -> None:
    """K11: queued prefill + own prefill + decode slowdown, each term as computed by hand."""
    prefill, blocks, rows, steps = demand
    costs = price(
        MODEL, Loads(*(ints(x) for x in loads)), Demand(ints(prefill), ints(blocks), rows, steps)
    )
    assert costs.at(0) == pytest.approx(want)
    assert costs.at(0).total_s == pytest.approx(sum(want))
    assert costs.total_s[0] == pytest.approx(sum(want))


def test_each_kind_of_load_makes_a_worker_dearer() -> None:
    """K11: rows, unique active blocks and queued tokens each raise the price on their own."""
    loads = Loads(ints(0, 1, 0, 0), ints(0, 0, 1, 0), ints(0, 0, 0, 1))
    demand = Demand(ints(8, 8, 8, 8), ints(2, 2, 2, 2), 1, 4)
    total = price(MODEL, loads, demand).total_s
    assert (total[1:] > total[0]).all()


def test_output_beyond_the_expected_length_is_not_priced() -> None:
    assert MODEL.steps(3) == 3
    assert MODEL.steps(1_000_000) == 10


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_figure_that_is_no_duration_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="step_row_s"):
        CostModel(step_row_s=value)
