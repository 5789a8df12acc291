"""Coefficients from measured passes; the shipped ones against the published tables."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from mallee.mocker.timing import ClosedForm, Plane
from mallee.mocker.timing.closed import Experts
from mallee.mocker.timing.fit import (
    Decode,
    Prefill,
    decode_errors,
    errors_of,
    fit_closed_form,
    fit_experts,
    fit_nonnegative,
    prefill_errors,
)
from mallee.mocker.timing.profiles import fitted
from mallee.mocker.timing.published import dynamo_swept, fit_published, without_outliers
from mallee.protocol.errors import ConfigError

PROFILES = Path(__file__).resolve().parents[3] / "shared" / "traces" / "profiles"
FORM = ClosedForm(3e-3, 1e-5, 8e-10, 1e-9, (Plane(4e-3, 1e-5, 3e-8),))
NEW, PREFIX = (16, 256, 1024, 8192), (0, 1024, 65536)
ROWS, CONTEXT = (1, 4, 16, 64, 256), (128, 2048, 32768)


def prefills(form: ClosedForm | Experts) -> list[Prefill]:
    return [Prefill(n, p, form.prefill_s(n, p)) for n, p in product(NEW, PREFIX)]


def decodes(form: ClosedForm | Experts) -> list[Decode]:
    return [Decode(b, float(b * c), form.decode_s(b, b * c)) for b, c in product(ROWS, CONTEXT)]


def test_a_closed_form_is_found_again() -> None:
    found = fit_closed_form(prefills(FORM), decodes(FORM))
    assert found.prefill_s(500, 3000) == pytest.approx(FORM.prefill_s(500, 3000), rel=1e-6)
    assert found.pair_s == pytest.approx(FORM.pair_s, rel=1e-4)
    assert len(found.planes) == 1
    assert found.planes[0] == pytest.approx(FORM.planes[0], rel=1e-6)


def test_two_planes_are_found_where_one_does_not_do() -> None:
    bent = ClosedForm(3e-3, 1e-5, 8e-10, 0.0, (Plane(8e-3, 0.0, 0.0), Plane(1e-3, 2e-5, 4e-8)))
    found = fit_closed_form(prefills(bent), decodes(bent))
    assert len(found.planes) == 2
    assert decode_errors(found, decodes(bent)).worst < 0.02


def test_experts_are_found_again() -> None:
    experts = Experts(FORM, 1 / 16, 20e-3, 15e-3)
    points = [*decodes(experts), Decode(8, 1024.0, experts.decode_s(8, 1024.0))]
    found = fit_experts(prefills(experts), points, 1 / 16)
    assert found.all_decode_s == pytest.approx(15e-3, rel=1e-4)
    assert prefill_errors(found, prefills(experts)).worst < 1e-4


def test_no_coefficient_is_below_0() -> None:
    drawn = np.random.default_rng(0)
    for _ in range(20):
        at = drawn.uniform(0, 1, (12, 4))
        seconds = np.abs(at @ drawn.normal(0, 1, 4)) + 0.01
        found = fit_nonnegative(at, seconds)
        assert (found >= 0).all()
        least = ((at @ found / seconds - 1) ** 2).sum()
        for nudge in np.eye(4) * 1e-4:  # nothing near is better
            for near in (found + nudge, np.maximum(found - nudge, 0)):
                assert ((at @ near / seconds - 1) ** 2).sum() >= least - 1e-12


def test_outliers_are_no_slower_than_more_work() -> None:
    points = [
        Decode(1, 10.0, 9.0),
        Decode(2, 20.0, 3.0),
        Decode(4, 40.0, 5.0),
        Decode(4, 80.0, 4.0),
    ]
    assert [p.seconds for p in without_outliers(points)] == [3.0, 3.0, 4.0, 4.0]


def test_errors_are_nearest_ranks_of_relative_sizes() -> None:
    measured = [1.0] * 100
    predicted = [1 + i / 1000 for i in range(100)]
    median, p95, worst, bias, n = errors_of(predicted, measured)
    assert (median, p95, worst, n) == pytest.approx((0.049, 0.094, 0.099, 100))
    assert bias == pytest.approx(0.0495)
    with pytest.raises(ConfigError, match="give at least 4"):
        fit_closed_form(prefills(FORM)[:3], decodes(FORM))


@pytest.mark.skipif(
    not PROFILES.exists(), reason="the published tables are not beside this checkout"
)
def test_the_shipped_profiles_are_what_the_tables_give() -> None:
    """K19: coefficients fitted from measured kernels; their errors are as stated."""
    found = fit_published(PROFILES)
    assert found == fitted().profiles
    assert {fit.gpu for fit in found.values()} == {"h100", "h200", "b200", "gb10"}
    for fit in found.values():
        if fit.prefill_error is not None and fit.decode_error is not None:
            assert fit.prefill_error.median < 0.1
            assert fit.decode_error.median < 0.1


@pytest.mark.skipif(
    not PROFILES.exists(), reason="the published tables are not beside this checkout"
)
def test_dynamos_sweeps_become_tables() -> None:
    """K20: the preswept tables of Dynamo, noise and all."""
    model = dynamo_swept(PROFILES, "h200_sxm", 1)
    assert model.prefill_s(1117, 0) == pytest.approx(38.4941e-3)
    assert model.decode_s(1, 350.0) == pytest.approx(4.3799e-3, rel=1e-2)
    for mean in (350, 1000, 5000):
        costs = [model.decode_s(rows, float(rows * mean)) for rows in range(1, 200)]
        assert costs == sorted(costs)
    with pytest.raises(ConfigError, match="tp=3"):
        dynamo_swept(PROFILES, "h200_sxm", 3)
