"""Medians, verdicts, tables and choices of the benches."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import measure
from bench.block_tables import Shape, Shared, Steps, compare, placements, reason_to_skip
from bench.report import headline, tables
from bench.router import ranking
from bench.search.__main__ import interval

CPU = torch.device("cpu")
SHAPE = Shape(rows=32, context=256, layers=2)


@pytest.mark.parametrize(
    ("rounds", "p50_us", "slow_us"),
    [
        ([[500.0] * 5, *[[2.0, 2.0, 3.0], [40.0, 50.0, 50.0]] * 2], 2.0, 50.0),
        ([[9.0], [2.0, 2.0], [3.0, 3.0]], 2.5, None),  # noise is not a mode
        ([[1.0, 2.0, 9.0]], 2.0, None),
    ],
)
def test_two_modes_of_rounds_are_told_apart(
    rounds: list[list[float]], p50_us: float, slow_us: float | None
) -> None:
    """The first round warms up, but if it is the only one."""
    times = measure.times_of(rounds)
    assert (times.p50_us, times.slow_us) == (p50_us, slow_us)


def test_cases_take_turns_and_every_input_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gc.collect", lambda: 0)  # of all that the test process holds
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
    figures = {"a": 123456.0, "b": 7, "c": {"d": 0.0012345}}
    assert measure.rounded(figures) == {"a": 123500.0, "b": 7, "c": {"d": 0.001234}}


def test_intervals_hold_their_median() -> None:
    """D26, part."""
    values = [float(i) for i in range(11)]
    found = interval(values)
    assert found["median"] == 5.0
    assert 1.0 <= found["low"] < 5.0 < found["high"] <= 9.0
    assert interval(values) == found
    assert interval([2.0] * 10) == {"median": 2.0, "low": 2.0, "high": 2.0}


def test_the_page_is_fresh_and_has_every_result() -> None:
    assert tables.PAGE.read_text() == tables.page(), "run make figures"
    assert tables.FIDELITY.read_text() == tables.fidelity_page(), "run make figures"
    results = {path.stem for path in tables.RESULTS.glob("*.json")} - {"nightly"}  # `make nightly`
    assert results == set(tables.SECTIONS)


def test_the_table_of_the_readme_is_made_of_the_results_with_losses_in_bold() -> None:
    """D40: no figure of README's table is typed."""
    text = headline.README.read_text()
    assert text == headline.readme(), "run make figures"
    bold = re.findall(r"^\| \*\*(.+?)\*\*", headline.figures(), re.MULTILINE)
    assert any(name.startswith("replay of 12,031 requests on 4 workers") for name in bold)
    assert any("requests/s with 1 / 16 / 64" in name for name in bold)
    assert not any(name.startswith("decode") for name in bold)


def test_a_mask_over_129_thousand_tokens_takes_less_than_a_tenth_of_a_millisecond() -> None:
    """D10, part, I16, part: committed figures: p50 and mean; constrained steps cost 5 %, counted ones 15."""
    found = json.loads((tables.RESULTS / "masks.json").read_text())
    large = [each for each in found["tokenizers"].values() if each["vocab_size"] > 100_000]
    assert large
    for each in large:
        assert each["all"]["p50_us"] < each["all"]["mean_us"] < 100
        assert each["share_of_8b_step"]["1"] < 0.05
    for kinds in found["steps"].values():
        assert kinds["constrained"]["overhead"] < 0.05
        assert kinds["counted"]["overhead"] < 0.15


def runs(*pairs: tuple[float, float]) -> list[ranking.Figures]:
    return [ranking.Figures(p50, p99, 0.5, 1.0, 0.5, 0, "d") for p50, p99 in pairs]


def test_cost_wins_only_with_both_medians_against_everybody() -> None:
    others = {policy: runs((3, 30), (3, 30)) for policy in ranking.POLICIES[1:]}
    assert ranking.cost_wins({"cost": runs((1, 10), (4, 29)), **others})
    assert not ranking.cost_wins({"cost": runs((3, 10)), **others})
    assert not ranking.cost_wins({"cost": runs((1, 31)), **others})
    beaten = {**others, "random": runs((0.5, 30))}
    assert not ranking.cost_wins({"cost": runs((1, 10)), **beaten})
    found = {"cost": runs((1, 40), (2, 20)), **others}
    rows = list(ranking.table(ranking.Scene("s", Path("t.jsonl"), 10, 3), found))
    assert rows[3].startswith("| cost | 2 (1 to 2) | 30 (20 to 40) | - |")
    assert rows[4].startswith("| round_robin | 3 (3 to 3) | 30 (30 to 30) | 2, 1 of 2 |")


def test_block_tables_are_compared_on_a_gb10_alone() -> None:
    """D25: off a GB10 nothing is claimed."""
    assert "no CUDA device" in reason_to_skip(False, "", any_device=True)
    assert "NVIDIA H200 is no GB10" in reason_to_skip(True, "NVIDIA H200", any_device=False)
    assert reason_to_skip(True, "NVIDIA H200", any_device=True) == ""
    assert reason_to_skip(True, "NVIDIA GB10", any_device=False) == ""


def test_every_placement_of_block_tables_reads_what_was_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """D25: also through memory that both sides reach, which a CPU's is; an old table is found out."""
    steps = Steps(SHAPE, CPU)
    known = placements(steps.first, CPU)
    view = np.zeros_like(steps.first)
    known["unified"] = Shared(view, torch.from_numpy(view), steps.first)
    expected = steps.first.copy()
    for _ in range(5):
        entries = steps.entries()
        rows, places, blocks = entries
        expected[rows, places] = blocks
        assert len({steps.run(each, entries)[1] for each in known.values()}) == 1
        for each in known.values():
            assert np.array_equal(each.table.numpy(), expected)
    monkeypatch.setattr("bench.block_tables.DeviceEntries.write", lambda *args: None)
    with pytest.raises(RuntimeError, match="placements read different tables"):
        compare(SHAPE, CPU, 20)
