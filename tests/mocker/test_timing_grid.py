"""Grids of measured passes."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mallee.mocker.timing import Timing
from mallee.mocker.timing.grid import Decodes, Grid, Prefills, power_sum
from mallee.mocker.timing.table import monotone
from mallee.protocol.errors import ConfigError
from support.examples import examples

NEW, PREFIX = (16, 128, 512, 2048), (0, 1024, 8192)
ROWS, CONTEXT = (1, 2, 8, 64), (32, 512, 4096)
PREFILL = [[0.004 + 1e-5 * n + 1e-9 * n * (p + n / 2) for p in PREFIX] for n in NEW]
DECODE = [[0.004 + 1e-5 * b + 3e-8 * b * c for c in CONTEXT] for b in ROWS]


def grid() -> Grid:
    return Grid(Prefills(NEW, PREFIX, PREFILL), Decodes(ROWS, CONTEXT, DECODE))


def test_a_grid_is_exact_at_its_points() -> None:
    """K20: and so is Dynamo's NPZ, see test_timing_files."""
    model = grid()
    for (i, n), (j, p) in product(enumerate(NEW), enumerate(PREFIX)):
        assert model.prefill_s(n, p) == PREFILL[i][j]
    for (i, b), (j, c) in product(enumerate(ROWS), enumerate(CONTEXT)):
        assert model.decode_s(b, b * c) == DECODE[i][j]


def test_a_power_law_is_met_between_points() -> None:
    seconds = [[1e-6 * b * c for c in CONTEXT] for b in ROWS]
    model = Grid(Prefills(NEW, PREFIX, PREFILL), Decodes(ROWS, CONTEXT, seconds))
    for b, mean in ((1, 100), (3, 77), (40, 3000), (64, 512)):
        assert model.decode_s(b, b * mean) == pytest.approx(1e-6 * b * mean, rel=1e-9)


def test_outside_it_is_clamped() -> None:
    model = grid()
    assert model.prefill_s(1, 0) == PREFILL[0][0]
    assert model.prefill_s(10**6, 10**6) == PREFILL[-1][-1]
    assert model.decode_s(1, 1) == DECODE[0][0]
    assert model.decode_s(1000, 1000 * 10**6) == DECODE[-1][-1]
    assert model.prefill_s(0, 100) == 0.0
    assert model.decode_s(0, 0) == 0.0


@given(st.integers(1, 5000), st.integers(0, 20_000), st.integers(1, 200), st.integers(0, 9000))
def test_more_never_costs_less(n: int, p: int, b: int, mean: int) -> None:
    model, more = grid(), 1 + 1e-12
    assert model.prefill_s(n, p) <= model.prefill_s(n + 1, p) * more
    assert model.prefill_s(n, p) <= model.prefill_s(n, p + 1) * more
    assert model.decode_s(b, b * mean) <= model.decode_s(b, b * (mean + 1)) * more
    assert model.decode_s(b, b * mean) <= model.decode_s(b + 1, (b + 1) * mean) * more


@given(st.integers(0, 70), st.integers(0, 300_000), st.integers(1, 900))
def test_a_stride_is_the_sum_of_its_steps(b: int, context: int, num_steps: int) -> None:
    timing = Timing(grid(), overhead_s=1e-3)
    steps = [timing.step_s([], b, context + i * b) for i in range(num_steps)]
    assert timing.multi_step_s(b, context, num_steps) == pytest.approx(math.fsum(steps), rel=1e-9)


@given(st.floats(0, 1000), st.integers(1, 5000), st.floats(0, 3))
def test_sums_of_powers_need_no_loop(first: float, count: int, power: float) -> None:
    wanted = math.fsum((first + i) ** power for i in range(count))
    assert power_sum(first, count, power) == pytest.approx(wanted, rel=1e-10)


def test_chunks_of_a_pass_count_as_one_of_as_many_tokens_and_pairs() -> None:
    timing = Timing(grid())
    pairs = 100 * (1000 + 50) + 400 * (200 + 200)
    alike = round(pairs / 500 - 250)
    together = timing.step_s([(100, 1000), (400, 200)], 0, 0)
    assert together == pytest.approx(timing.step_s([(500, alike)], 0, 0), rel=1e-3)
    assert timing.step_s([(100, 0), (400, 0)], 0, 0) == timing.step_s([(500, 0)], 0, 0)
    beside = timing.step_s([(512, 0)], 8, 8 * 512) - timing.step_s([(512, 0)], 0, 0)
    assert beside == pytest.approx(DECODE[2][1] - grid().base_s)


tables = arrays.arrays(
    np.float64,
    arrays.array_shapes(min_dims=1, max_dims=2, max_side=5),
    elements=st.floats(-5, 5, width=32),
)


@examples(50)
@given(tables)
def test_fitted_tables_do_not_fall_along_any_axis(
    table: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]",
) -> None:
    fitted = monotone(table)
    for axis in range(table.ndim):
        assert (np.diff(fitted, axis=axis) >= 0).all()
    again = monotone(fitted)
    np.testing.assert_allclose(again, fitted, atol=1e-9)


def test_neighbours_that_fall_are_pooled() -> None:
    assert monotone(np.array([1.0, 4.0, 2.0, 5.0])).tolist() == [1.0, 3.0, 3.0, 5.0]
    assert monotone(np.array([[1.0, 2.0], [3.0, 4.0]])).tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_a_noisy_table_is_made_monotone() -> None:
    noisy = [row.copy() for row in PREFILL]
    noisy[2][0] = noisy[3][0] * 2
    model = Grid(Prefills(NEW, PREFIX, noisy), Decodes(ROWS, CONTEXT, DECODE))
    costs = [model.prefill_s(n, 0) for n in range(1, 3000, 7)]
    assert costs == sorted(costs)
    assert PREFILL[2][0] < model.prefill_s(512, 0) < noisy[2][0]


@pytest.mark.parametrize(
    ("prefill", "decode", "named"),
    [
        ((NEW, PREFIX, PREFILL[:-1]), None, "prefill.seconds: 3 rows, its axis has 4"),
        ((NEW, PREFIX, [*PREFILL[:-1], [1.0]]), None, "prefill.seconds[3]: 1 values"),
        (((16, 16, 512, 2048), PREFIX, PREFILL), None, "prefill.new[1]=16 after 16"),
        (((0, 128, 512, 2048), PREFIX, PREFILL), None, "prefill.new[0]=0"),
        ((NEW, (0, -1, 5), PREFILL), None, "prefill.prefix[1]=-1"),
        (((), PREFIX, []), None, "prefill.new=[]"),
        (None, (ROWS, (32, math.nan, 64), DECODE), "decode.context[1]=nan"),
        (None, (ROWS, CONTEXT, [[0.0] * 3, *DECODE[1:]]), "decode.seconds[0][0]=0"),
        (None, (ROWS, CONTEXT, [[math.nan] * 3, *DECODE[1:]]), "decode.seconds[0][0]=nan"),
        (None, (ROWS, CONTEXT, [[-1.0] * 3, *DECODE[1:]]), "decode.seconds[0][0]=-1"),
        (None, ((1, 2, 2, 3), CONTEXT, DECODE), "decode.rows[2]=2 after 2"),
    ],
)
def test_wrong_tables_are_refused_by_field_and_value(
    prefill: tuple[object, ...] | None, decode: tuple[object, ...] | None, named: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Grid(
            Prefills(*(prefill or (NEW, PREFIX, PREFILL))),  # type: ignore[arg-type]
            Decodes(*(decode or (ROWS, CONTEXT, DECODE))),  # type: ignore[arg-type]
        )
    assert named in str(caught.value)
