"""`bench.guard`: figures of two sides by turns."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import ROOT, guard

BENCH = guard.Bench(("any",), more=("rate", "of/rates", "lacking"), less=("time_us",))


def runs(*values: float) -> list[Any]:
    return [{"rate": v, "of": {"rates": 2 * v}, "time_us": 1 / v} for v in values]


def test_a_figure_is_the_best_of_its_turns_and_more_than_one_is_better() -> None:
    found = {f.path: f.ratio for f in guard.compare(BENCH, runs(8.0, 10.0), runs(4.0, 5.0))}
    assert found == {"rate": 2.0, "of/rates": 2.0, "time_us": 2.0}  # what a side lacks is left out


@pytest.mark.parametrize(
    ("speeds", "turns", "ratio"),
    [
        ([9.6, 9.7, 9.8], 3, 0.98),
        ([9.0, 9.0, 9.0, 9.9, 9.0, 9.0], 6, 0.99),  # a busy moment: more turns show it
        ([9.0] * 6, 6, 0.90),
    ],
)
def test_more_turns_are_taken_where_a_figure_is_below_the_bar(
    monkeypatch: pytest.MonkeyPatch, speeds: list[float], turns: int, ratio: float
) -> None:
    told: Iterator[float] = iter(speeds)
    sides: list[Path] = []

    def turn(tree: Path, bench: guard.Bench) -> Any:
        sides.append(tree)
        return runs(next(told) if tree == ROOT else 10.0)[0]

    monkeypatch.setattr(guard, "turn", turn)
    base = Path("base")
    (figure, *_) = guard.judge(BENCH, base, 3)
    assert sides == [base, ROOT] * turns
    assert figure.ratio == pytest.approx(ratio)


def test_every_figure_is_in_the_committed_results() -> None:
    """A path with a typing error would be left out in silence."""
    for name, bench in guard.BENCHES.items():
        result = guard.load(name)
        result = {**result, **result.get("plain", {})}
        lacking = [p for p in (*bench.more, *bench.less) if guard.at(result, p) is None]
        assert not lacking, name
