"""Distances against scipy's, and against a transport problem solved whole."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.synth.compare.distances import emd, ks, relative, w1_share
from support.examples import examples

stats = pytest.importorskip("scipy.stats", reason="distances are checked against scipy's")

samples = st.lists(st.integers(-20, 20), min_size=1, max_size=40).map(
    lambda values: np.array(values, np.float64)
)
branches = st.lists(st.tuples(st.integers(1, 40), st.integers(2, 12)), min_size=1, max_size=12).map(
    lambda pairs: np.array(pairs, np.float64).T
)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the p-value, which is not ours
@given(samples, samples)
def test_ks_is_scipys(a: np.ndarray, b: np.ndarray) -> None:
    assert ks(a, b) == pytest.approx(stats.ks_2samp(a, b).statistic)
    assert ks(a, b) == ks(b, a)
    assert ks(a, a) == 0.0


@given(samples, samples)
def test_w1_is_scipys(a: np.ndarray, b: np.ndarray) -> None:
    mean = float(np.abs(a).mean())
    shift = stats.wasserstein_distance(a, b)
    if mean:
        assert w1_share(a, b) == pytest.approx(shift / mean)
    else:
        assert w1_share(a, b) == (0.0 if shift == 0 else math.inf)


@given(branches, branches)
@examples(40)
def test_earth_movers_distance_is_the_transport_problems(a: np.ndarray, b: np.ndarray) -> None:
    found = emd(a[0], a[1], b[0], b[1])
    assert found == pytest.approx(_transport(a, b), abs=1e-8)
    assert emd(a[0], a[1], a[0], a[1]) == pytest.approx(0.0, abs=1e-9)


def _transport(a: np.ndarray, b: np.ndarray) -> float:
    """By an assignment of equal shares: each branch counts as many times as the other trace has."""
    from scipy.optimize import linear_sum_assignment

    one = np.repeat(np.floor(np.log2(a)), b.shape[1], axis=1)
    other = np.repeat(np.floor(np.log2(b)), a.shape[1], axis=1)
    cost = np.abs(one[:, :, None] - other[:, None, :]).sum(axis=0)
    row, column = linear_sum_assignment(cost)
    return float(cost[row, column].mean())


def test_relative_differences() -> None:
    assert relative(4.0, 5.0) == 0.25
    assert relative(4.0, 3.0) == -0.25
    assert relative(0.0, 0.0) == 0.0
    assert relative(0.0, 1.0) == math.inf
    assert math.isnan(relative(math.inf, math.inf))
