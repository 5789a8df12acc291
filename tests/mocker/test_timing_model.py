"""Closed forms and grids of measured passes, and what an engine adds to them."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from msgspec.structs import replace

from mallee.mocker.timing import ClosedForm, Fixed, Plane, Timing, TimingModel
from mallee.mocker.timing.closed import Experts
from mallee.mocker.timing.dynamo import Polynomial
from mallee.mocker.timing.grid import Decodes, Grid, Prefills, power_sum
from mallee.mocker.timing.table import monotone
from mallee.protocol.errors import ConfigError
from support.examples import examples

DENSE = ClosedForm(3e-3, 1e-5, 8e-10, 1e-10, (Plane(4e-3, 1e-5, 3e-8),))
BENT = replace(DENSE, planes=(Plane(4e-3, 0.0, 1e-8), Plane(1e-3, 1e-4, 4e-8)))
EXPERTS = Experts(DENSE, 1 / 16, 20e-3, 15e-3)
MODELS: tuple[TimingModel, ...] = (
    DENSE,
    BENT,
    EXPERTS,
    Fixed(0.01, 0.002),
    Polynomial(200_000),
    Polynomial(1001),
)

models = st.sampled_from(MODELS)
bent = st.builds(
    lambda planes: replace(DENSE, planes=tuple(Plane(x, y, z * 1e-5) for x, y, z in planes)),
    st.lists(st.tuples(*[st.floats(0, 1e-2)] * 3), min_size=1, max_size=4),
)
rows = st.integers(1, 300)
contexts = st.integers(0, 1_000_000)


def test_prefill_and_decode_are_the_formulas() -> None:
    """K19: quadratic in new tokens, linear in the prefix for each; linear in rows and what they read."""
    n, p = 500, 2000
    wanted = 3e-3 + 1e-5 * n + 8e-10 * n * (p + n / 2) + 1e-10 * p
    assert DENSE.prefill_s(n, p) == pytest.approx(wanted, rel=1e-12)
    assert DENSE.prefill_s(0, p) == 0.0
    # Of several planes the largest.
    assert DENSE.decode_s(8, 4000) == pytest.approx(4e-3 + 8e-5 + 1.2e-4, rel=1e-12)
    assert BENT.decode_s(1, 0) == 4e-3
    assert BENT.decode_s(100, 100_000) == pytest.approx(1e-3 + 1e-2 + 4e-3, rel=1e-12)
    assert DENSE.decode_s(0, 0) == 0.0


def test_dynamos_polynomial_gives_dynamos_figures() -> None:
    model = Polynomial(16384 * 64)
    assert model.prefill_s(0, 0) == 0.0
    assert model.prefill_s(1000, 5000) * 1000 == pytest.approx(0.4209989 + 15.18344 + 16.50142)
    half = -25.74 * 0.25 + 54.01 * 0.5 + 5.74
    assert model.decode_s(3, 16384 * 32) * 1000 == pytest.approx(half)
    assert model.decode_s(3, 1e12) == model.decode_s(3, 16384 * 64), (
        "the memory can't be more than full"
    )
    assert model.pass_s([(600, 0), (400, 100)], 0, 0) == pytest.approx(model.prefill_s(1000, 0))


@given(models, rows, contexts, st.integers(0, 4000), st.integers(0, 100_000))
def test_more_never_costs_less(model: TimingModel, b: int, context: int, n: int, p: int) -> None:
    assert model.prefill_s(n + 1, p) >= model.prefill_s(n, p)
    assert model.prefill_s(n, p + 1) >= model.prefill_s(n, p)
    assert model.decode_s(b + 1, context) >= model.decode_s(b, context)
    assert model.decode_s(b, context + 1) >= model.decode_s(b, context)


@given(
    models | bent | st.builds(lambda: grid()),
    st.integers(0, 300),
    contexts,
    st.integers(1, 900),
    st.sampled_from((1.0, 4.0)),
)
def test_a_stride_is_the_sum_of_its_steps(
    model: TimingModel, b: int, context: int, num_steps: int, speedup: float
) -> None:
    timing = Timing(model, overhead_s=1e-3, speedup=speedup)
    steps = [timing.step_s([], b, context + i * b) for i in range(num_steps)]
    found = timing.multi_step_s(b, context, num_steps)
    assert found == pytest.approx(math.fsum(steps), rel=1e-9)
    assert {type(found), type(timing.step_s([(b, context)], b, context))} == {float}


def test_a_mixed_pass_reads_the_weights_once() -> None:
    timing = Timing(DENSE, overhead_s=1e-3)
    apart = DENSE.prefill_s(100, 0) + DENSE.prefill_s(50, 7) + DENSE.decode_s(4, 800)
    together = timing.step_s([(100, 0), (50, 7)], 4, 800)
    assert together == pytest.approx(1e-3 + apart - 2 * DENSE.base_s)
    assert together > timing.step_s([(150, 0)], 0, 0)


def test_an_expert_is_read_once_in_a_pass() -> None:
    assert EXPERTS.touched(0) == 0.0
    assert EXPERTS.touched(1) == pytest.approx(1 / 16)
    lone, few = EXPERTS.decode_s(1, 10), EXPERTS.decode_s(16, 160)
    assert few - lone == pytest.approx(15e-3 * (EXPERTS.touched(16) - 1 / 16) + 15e-5 + 4.5e-6)
    everything = Timing(EXPERTS).step_s([(512, 0)], 64, 64_000)
    dense = Timing(DENSE).step_s([(512, 0)], 64, 64_000)
    assert everything - dense == pytest.approx(20e-3, rel=1e-6)


def test_fixed_costs_don_t_depend_on_sizes_and_speedup_divides_steps() -> None:
    timing = Timing(Fixed(0.01, 0.002))
    assert timing.step_s([(1, 0), (4000, 9)], 0, 0) == pytest.approx(0.02)
    assert timing.step_s([(5, 0)], 7, 1e6) == pytest.approx(0.012)
    assert timing.step_s([], 7, 1e6) == 0.002
    plain, fast = Timing(DENSE, overhead_s=1e-3), Timing(DENSE, overhead_s=1e-3, speedup=8.0)
    chunks = [(300, 16)]
    assert fast.step_s(chunks, 3, 900) == pytest.approx(plain.step_s(chunks, 3, 900) / 8)


def test_a_model_may_be_scaled() -> None:
    scaled = BENT.scaled(2.0, 3.0)
    assert scaled.prefill_s(77, 88) == pytest.approx(2 * BENT.prefill_s(77, 88))
    assert scaled.decode_s(9, 900) == pytest.approx(3 * BENT.decode_s(9, 900))
    experts = EXPERTS.scaled(2.0, 3.0)
    assert experts.prefill_s(77, 88) == pytest.approx(2 * EXPERTS.prefill_s(77, 88))
    assert experts.decode_s(9, 900) == pytest.approx(3 * EXPERTS.decode_s(9, 900))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda: Timing(DENSE, overhead_s=-1.0), "overhead_s=-1.0"),
        (lambda: Timing(DENSE, jitter=math.nan), "jitter=nan"),
        (lambda: Timing(DENSE, jitter=1000.0), "jitter=1000.0"),
        (lambda: Timing(DENSE, speedup=0.0), "speedup=0.0"),
        (lambda: Timing(DENSE, request_s=math.inf), "request_s=inf"),
        (lambda: replace(DENSE, new_s=-1e-9), "new_s=-1e-09"),
        (lambda: replace(DENSE, planes=()), "planes=()"),
        (lambda: replace(DENSE, planes=(Plane(0, math.nan, 0),)), "planes.row_s=nan"),
        (lambda: Experts(DENSE, 0.0, 1, 1), "share=0.0"),
        (lambda: Fixed(0.1, -0.1), "token_s=-0.1"),
        (lambda: Polynomial(0), "kv_tokens=0"),
    ],
)
def test_figures_that_can_t_be_are_named(wrong: object, named: str) -> None:
    assert callable(wrong)
    with pytest.raises(ConfigError) as caught:
        wrong()
    assert named in str(caught.value)


# Grids of measured passes

NEW, PREFIX = (16, 128, 512, 2048), (0, 1024, 8192)
ROWS, CONTEXT = (1, 2, 8, 64), (32, 512, 4096)
PREFILL = [[0.004 + 1e-5 * n + 1e-9 * n * (p + n / 2) for p in PREFIX] for n in NEW]
DECODE = [[0.004 + 1e-5 * b + 3e-8 * b * c for c in CONTEXT] for b in ROWS]


def grid() -> Grid:
    return Grid(Prefills(NEW, PREFIX, PREFILL), Decodes(ROWS, CONTEXT, DECODE))


def test_a_grid_is_exact_at_its_points_and_clamped_outside() -> None:
    """K20: and so is Dynamo's NPZ, see test_timing_files."""
    model = grid()
    for (i, n), (j, p) in product(enumerate(NEW), enumerate(PREFIX)):
        assert model.prefill_s(n, p) == PREFILL[i][j]
    for (i, b), (j, c) in product(enumerate(ROWS), enumerate(CONTEXT)):
        assert model.decode_s(b, b * c) == DECODE[i][j]
    assert model.prefill_s(1, 0) == PREFILL[0][0]
    assert model.prefill_s(10**6, 10**6) == PREFILL[-1][-1]
    assert model.decode_s(1, 1) == DECODE[0][0]
    assert model.decode_s(1000, 1000 * 10**6) == DECODE[-1][-1]
    assert model.prefill_s(0, 100) == 0.0
    assert model.decode_s(0, 0) == 0.0


def test_a_power_law_is_met_between_points() -> None:
    seconds = [[1e-6 * b * c for c in CONTEXT] for b in ROWS]
    model = Grid(Prefills(NEW, PREFIX, PREFILL), Decodes(ROWS, CONTEXT, seconds))
    for b, mean in ((1, 100), (3, 77), (40, 3000), (64, 512)):
        assert model.decode_s(b, b * mean) == pytest.approx(1e-6 * b * mean, rel=1e-9)


@given(st.integers(1, 5000), st.integers(0, 20_000), st.integers(1, 200), st.integers(0, 9000))
def test_more_never_costs_less_by_a_grid(n: int, p: int, b: int, mean: int) -> None:
    model, more = grid(), 1 + 1e-12
    assert model.prefill_s(n, p) <= model.prefill_s(n + 1, p) * more
    assert model.prefill_s(n, p) <= model.prefill_s(n, p + 1) * more
    assert model.decode_s(b, b * mean) <= model.decode_s(b, b * (mean + 1)) * more
    assert model.decode_s(b, b * mean) <= model.decode_s(b + 1, (b + 1) * mean) * more


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
