"""Closed forms, and what an engine adds to them."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mallee.mocker.timing import ClosedForm, Fixed, Plane, Timing, TimingModel
from mallee.mocker.timing.closed import Experts
from mallee.mocker.timing.dynamo import Polynomial
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
rows = st.integers(1, 300)
contexts = st.integers(0, 1_000_000)


def test_prefill_is_the_formula() -> None:
    """K19: quadratic in new tokens, linear in the prefix for each of them."""
    n, p = 500, 2000
    wanted = 3e-3 + 1e-5 * n + 8e-10 * n * (p + n / 2) + 1e-10 * p
    assert DENSE.prefill_s(n, p) == pytest.approx(wanted, rel=1e-12)
    assert DENSE.prefill_s(0, p) == 0.0


def test_decode_is_the_largest_plane() -> None:
    """K19: linear in rows and in what they read."""
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


@given(models, st.integers(0, 300), contexts, st.integers(1, 400), st.sampled_from((1.0, 4.0)))
def test_a_stride_is_the_sum_of_its_steps(
    model: TimingModel, b: int, context: int, num_steps: int, speedup: float
) -> None:
    timing = Timing(model, overhead_s=1e-3, speedup=speedup)
    steps = [timing.step_s([], b, context + i * b) for i in range(num_steps)]
    assert timing.multi_step_s(b, context, num_steps) == pytest.approx(math.fsum(steps), rel=1e-9)


@given(
    st.lists(st.tuples(*[st.floats(0, 1e-2)] * 3), min_size=1, max_size=4),
    rows,
    contexts,
    st.integers(1, 200),
)
def test_strides_follow_any_number_of_planes(
    planes: Sequence[tuple[float, float, float]], b: int, context: int, num_steps: int
) -> None:
    model = replace(DENSE, planes=tuple(Plane(x, y, z * 1e-5) for x, y, z in planes))
    steps = math.fsum(model.decode_s(b, context + i * b) for i in range(num_steps))
    assert model.decodes_s(b, context, num_steps) == pytest.approx(steps, rel=1e-9, abs=1e-15)


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


def test_fixed_costs_don_t_depend_on_sizes() -> None:
    timing = Timing(Fixed(0.01, 0.002))
    assert timing.step_s([(1, 0), (4000, 9)], 0, 0) == pytest.approx(0.02)
    assert timing.step_s([(5, 0)], 7, 1e6) == pytest.approx(0.012)
    assert timing.step_s([], 7, 1e6) == 0.002


def test_speedup_divides_steps() -> None:
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


@examples(20)
@given(rows, contexts)
def test_what_is_said_is_a_plain_float(b: int, context: int) -> None:
    for model in MODELS:
        timing = Timing(model)
        assert type(timing.step_s([(b, context)], b, context)) is float
        assert type(timing.multi_step_s(b, context, 3)) is float
