"""Medians, intervals and verdicts of benches."""

import pytest

from bench import measure


def test_two_modes_of_rounds_are_told_apart() -> None:
    warm_up, fast, slow = [500.0] * 5, [2.0, 2.0, 3.0], [40.0, 50.0, 50.0]
    times = measure.times_of([warm_up, fast, slow, fast, slow])
    assert times.p50_us == 2.0
    assert times.slow_us == 50.0


def test_noise_is_not_a_mode() -> None:
    times = measure.times_of([[9.0], [2.0, 2.0], [3.0, 3.0]])
    assert times.p50_us == pytest.approx(2.5)
    assert times.slow_us is None


def test_one_round_is_its_own_result() -> None:
    assert measure.times_of([[1.0, 2.0, 9.0]]).p50_us == 2.0


def test_cases_take_turns_and_every_input_is_used() -> None:
    seen: list[object] = []
    times = measure.take_turns({"a": seen.append, "b": seen.append}, {"a": [1, 2], "b": [3]}, 2)
    assert seen == [2, 1, 2, 3, 3] * 2  # the last input first, as a warm-up that is not timed
    assert set(times) == {"a", "b"}


def test_ratios_say_how_many_times_better_ours_is() -> None:
    ours = {"x": 2.0, "y": {"p50": 4.0}, "only": 1.0}
    peer = {"x": 6.0, "y": {"p50": 2.0}}
    assert measure.ratios(ours, peer, lower_is_better=True) == {"x": 3.0, "y": {"p50": 0.5}}
    assert measure.ratios(10.0, 5.0, lower_is_better=False) == 2.0
    assert measure.ratios(0.0, 5.0, lower_is_better=True) is None


def test_figures_are_cut_to_four_digits() -> None:
    assert measure.rounded({"a": 123456.0, "b": 7, "c": {"d": 0.0012345}}) == {
        "a": 123500.0,
        "b": 7,
        "c": {"d": 0.001234},
    }
