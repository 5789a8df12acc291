"""K26: a sweep finds the fleets that nobody beats; it survives children that die."""

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from mallee.cli.main import cli
from mallee.figures.replays.sweep_charts import pareto_figure
from mallee.figures.replays.write_sweep import (
    CSV_COLUMNS,
    about_seeds,
    advice,
    cells,
    head,
    write_sweep,
)
from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.sweeps.pool import Done, Run
from mallee.mocker.sweeps.sweep import (
    Fleet,
    Grid,
    Spread,
    Sweep,
    _bisected,
    dominates,
    interval_of,
    mark_frontier,
    spread_of,
)
from mallee.mocker.sweeps.sweep import sweep as run_sweep
from mallee.mocker.sweeps.trials import Trials
from mallee.mocker.timing.files import GridData, TimingFile
from mallee.mocker.timing.grid import Decodes, Prefills
from mallee.protocol.errors import ConfigError
from mallee.traces.read import read_workload

DATA = Path(__file__).resolve().parents[1] / "traces" / "data"
TRACE = DATA / "mooncake.jsonl"

make = partial(read_workload, TRACE)


def made_run(ttft_ms: float = 1.0, goodput: float = 1.0, slo_share: float = 1.0) -> Run:
    summary = {
        "ttft_ms": {"p50": ttft_ms},
        "itl_ms": {"p50": 1.0, "p99": None},
        "goodput_per_s": goodput,
        "slo_share": slo_share,
        "virtual_requests_per_s": 1.0,
        "hit_rate": 0.5,
        "prefix_copies": 1.0,
        "utilisation": {"mean": 0.5},
        "errors": {},
        "lost": 0,
        "digest": f"{ttft_ms}",
        "duration_s": 1800.0,
    }
    return Run(summary, {"trace": "t", "engines": 1, "gpus": 4}, np.full(1001, ttft_ms))


def fleet(engines: int, blocks: int, ttft_ms: float, goodput: float, share: float = 1.0) -> Fleet:
    return Fleet(engines, "cost", blocks, {0: made_run(ttft_ms, goodput, share)})


fleets = st.lists(
    st.builds(fleet, *[st.integers(1, 4)] * 2, st.integers(1, 4), st.integers(1, 4)), max_size=12
)


# The frontier


@given(fleets)
def test_the_frontier_is_what_nobody_dominates_and_dominates_the_rest(found: list[Fleet]) -> None:
    marked = mark_frontier(found)
    best = [f for f in marked if f.on_frontier]
    for one in marked:
        beaten = any(dominates(other, one) for other in marked)
        assert one.on_frontier == (not beaten)
        assert one.on_frontier or any(dominates(other, one) for other in best)


def test_fleets_that_failed_are_never_on_the_frontier() -> None:
    failed = Fleet(1, "cost", 1, {}, "it died")
    good = fleet(8, 8, 5.0, 1.0)
    assert [f.on_frontier for f in mark_frontier([failed, good])] == [False, True]
    never_began = fleet(1, 1, float("inf"), 0.5)
    assert [f.on_frontier for f in mark_frontier([never_began, good])] == [False, True]
    assert failed.row()["error"] == "it died"
    assert set(failed.row()) == set(good.row())
    assert [set(row) <= set(CSV_COLUMNS) for f in (failed, good) for row in f.rows()] == [True] * 2


LOAD = ("", 1.0)
CONDITIONS = {"slo_ttft_ms": 2000.0, "slo_itl_ms": 50.0}


def advised(*found: Fleet, good_share: float = 0.95) -> str:
    return advice(Sweep(mark_frontier(found), CONDITIONS, good_share))


def test_the_smallest_fleet_that_is_good_enough_is_named() -> None:
    found = [
        fleet(8, 64, 1.0, 9.0, 0.99),
        fleet(4, 64, 2.0, 8.0, 0.96),
        fleet(2, 64, 9.0, 3.0, 0.5),
    ]
    enough = Sweep(mark_frontier(found), CONDITIONS, 0.95)
    best = enough.smallest_good(LOAD)
    assert best is not None
    assert (best.engines, enough.most_too_few(best)) == (4, 2)
    assert [f.engines for f in enough.frontier] == [2, 4, 8]
    assert best.row()["gpu_hours"] == 4 * 0.5
    assert advised(*found, good_share=1.0).startswith("No fleet here")


def test_engines_are_enough_only_if_fewer_were_tried_and_failed() -> None:
    """K26, part: friction 4 of planners: the fewest that were tried may be more than are needed."""
    good, fewer = fleet(4, 64, 2.0, 8.0, 0.96), fleet(2, 64, 9.0, 3.0, 0.5)
    named = "4 engines with KV for 64 tokens and policy cost"
    assert advised(good).startswith(f"{named} give first tokens")
    assert advised(good).endswith("No fewer were tried: fewer may do.")
    assert advised(good, fleet(2, 128, 9.0, 3.0, 0.5)).endswith("fewer may do."), "another memory"
    assert advised(good, fewer).startswith(f"{named} are enough, 2 are not (3 was not tried): ")
    assert advised(good, fleet(3, 64, 9.0, 3.0, 0.5)).startswith(f"{named} are enough, 3 are not: ")
    assert advised(fleet(1, 64, 2.0, 8.0)).startswith("1 engine with KV for 64 tokens and")


def test_fleets_of_other_devices_or_loads_do_not_compete() -> None:
    one = replace(fleet(4, 64, 2.0, 8.0), timing="a", speedup=2.0)
    other = replace(fleet(2, 64, 1.0, 9.0), timing="b")
    both = Sweep(mark_frontier([one, other]), CONDITIONS, 0.95)
    assert [f.on_frontier for f in both.fleets] == [True, True]
    assert [line.partition(":")[0] for line in advice(both).splitlines()] == [
        *("a, speedup 2", "b, speedup 1")
    ]
    assert head(both)[3:5] == ("timing", "speedup")
    assert cells(both, one)[3:5] == ("a", "2")
    assert (
        len(head(both)) == len(cells(both, one)) == len(cells(both, Fleet(1, "cost", 1, {}, "x")))
    )


def test_grids_are_tried_in_the_order_given_and_each_combination_once() -> None:
    grid = Grid([4, 2, 4], ["cost", "random"], [64])
    rows = grid.configs([ReplayConfig()], 16)
    assert [[(c.engines, c.policy) for c in row] for row in rows] == [
        [(4, "cost"), (2, "cost")],
        [(4, "random"), (2, "random")],
    ]
    bases = [ReplayConfig(kv_tokens=640), ReplayConfig(kv_tokens=320)]
    rows = Grid([1], ["cost"]).configs(bases, 16)
    assert [row[0].kv_tokens for row in rows] == [640, 320], "each base has its own device's"
    with pytest.raises(ConfigError, match="policy='x'"):
        Grid([1], ["x"], [64]).configs([ReplayConfig()], 16)
    with pytest.raises(ConfigError, match="engines"):
        Grid([], ["cost"]).configs([ReplayConfig()], 16)


# Bisection and resumption


@given(st.integers(1, 40), st.integers(0, 41))
def test_bisection_finds_the_fewest_engines_and_shows_that_one_less_is_not_enough(
    num: int, needed: int
) -> None:
    """K26, part: as many are enough as an exhaustive sweep finds, with a logarithm of its replays."""
    played: list[int] = []

    def play(configs: Sequence[ReplayConfig]) -> list[Fleet]:
        played.extend(config.engines for config in configs)
        return [fleet(c.engines, 64, 1.0, 1.0, float(c.engines >= needed)) for c in configs]

    row = [ReplayConfig(engines=engines) for engines in range(1, num + 1)]
    found = _bisected([row], play, 0.95)
    assert [f.engines for f in found] == sorted(played)
    assert (
        len(played) == len(set(played)) <= Grid(range(1, num + 1), ["cost"], (), True).most_replays
    )
    shown = Sweep(mark_frontier(found), CONDITIONS, 0.95)
    best = shown.smallest_good(LOAD)
    if needed > num:
        assert best is None
        assert num in played
    else:
        assert best is not None
        assert best.engines == max(1, needed)
        assert shown.most_too_few(best) == best.engines - 1


def test_an_interrupted_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    """K26, part: replays that ended are not done again, and the result is that of one run."""
    short = partial(read_workload, TRACE, limit=40)
    bases = [ReplayConfig(kv_tokens=65_536)]
    grid = Grid([1, 2], ["cost"])
    whole = run_sweep({0: short}, bases, grid, processes=1)
    path = tmp_path / "trials.jsonl"

    def interrupt(index: int, done: Done) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(
            *({0: short}, bases, grid), processes=1, trials=Trials(path, "o"), on_done=interrupt
        )
    path.write_text(path.read_text() + '["torn')
    trials = Trials(path, "o")
    again = run_sweep({0: short}, bases, grid, processes=1, trials=trials)
    assert trials.num_found == 1
    assert [f.row()["digests"] for f in again.fleets] == [f.row()["digests"] for f in whole.fleets]
    once_more = Trials(path, "o")
    kept = run_sweep({0: short}, bases, grid, processes=1, trials=once_more)
    assert once_more.num_found == 2
    assert kept.as_json() == again.as_json()
    other = Trials(path, "another trace")
    run_sweep({0: short}, bases, grid, processes=1, trials=other)
    assert other.num_found == 0
    path.write_text("{}\n")
    with pytest.raises(ConfigError, match=r"trials\.jsonl: no trials of a sweep"):
        Trials(path, "o")


def test_a_measured_timing_is_known_by_the_content_of_its_file(tmp_path: Path) -> None:
    """K26, part: an interrupted sweep goes on with the same times, and starts again with others."""

    def save(decode_s: float) -> ReplayConfig:
        decodes = Decodes((1, 8), (32, 512), ((decode_s, decode_s), (decode_s, decode_s)))
        prefills = Prefills((16, 64), (0, 256), ((0.01, 0.02), (0.03, 0.04)))
        TimingFile(model=GridData(prefills, decodes)).save(tmp_path / "cpu.json")
        return ReplayConfig(timing=str(tmp_path / "cpu.json"), kv_tokens=65_536)

    path = tmp_path / "trials.jsonl"
    Trials(path, "o").add(save(0.01), Run({}, {}, np.array([1.0])))
    assert Trials(path, "o").find(save(0.01)) is not None
    assert Trials(path, "o").find(save(0.02)) is None


# Seeds


def test_intervals_leave_out_what_a_coin_would() -> None:
    """Distribution-free: 95 of 100 times the median of all seeds lies inside."""
    assert [interval_of(n)[0] for n in (1, 2, 5, 6, 8, 9, 12, 20)] == [0, 0, 0, 0, 0, 1, 2, 5]
    assert interval_of(5)[1] == pytest.approx(1 - 2 / 32)
    assert interval_of(9)[1] == pytest.approx(1 - 2 * (1 + 9) / 512)
    drawn = np.random.default_rng(0).exponential(1.0, (2000, 12))
    inside = 0
    for values in drawn.tolist():
        _, low, high = spread_of(values)
        inside += low <= np.log(2) <= high
    assert 0.95 < inside / 2000 < 0.99
    assert spread_of([3.0, 1.0, float("inf"), 2.0]) == Spread(2.5, 1.0, float("inf"))
    assert spread_of([float("nan"), 2.0]) == Spread(2.0, 2.0, 2.0)


def test_a_fleet_over_seeds_has_medians_and_intervals_and_is_written_down(tmp_path: Path) -> None:
    runs = {
        seed: made_run(ms, 1.0, share)
        for seed, ms, share in ((1, 5.0, 0.9), (2, 1.0, 1), (3, 2.0, 0.99))
    }
    several = Fleet(2, "cost", 64, runs)
    row = several.row()
    assert (row["ttft_p90_ms"], row["intervals"]["ttft_p90_ms"]) == (2, [1, 5])
    conditions = {"trace": "t", "slo_ttft_ms": 1.0, "slo_itl_ms": 1.0}
    failed = Fleet(4, "random", 64, {}, "it <died>")
    found = Sweep(mark_frontier([several, failed]), conditions, 0.95, (1, 2, 3))
    assert "2 ms\n1 to 5 ms" in cells(found, several)
    assert found.smallest_good(LOAD) is None, "one seed is too slow"
    assert "Medians of 3 seeds" in about_seeds(found)
    assert found.as_json()["confidence"] == 0.75
    axes = pareto_figure(found).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "4"], "what was tried"
    paths = write_sweep(found, tmp_path)
    assert [path.name for path in paths] == ["sweep.csv", "sweep.json", "pareto.png", "sweep.html"]
    with paths[0].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["seed"], row["ttft_p90_ms"], row["on_frontier"]) for row in rows] == [
        *(("1", "5.0", "True"), ("2", "1.0", "True"), ("3", "2.0", "True"), ("", "", "False"))
    ]
    assert {row["trace"] for row in rows} == {"t"}
    data = json.loads(paths[1].read_text())
    assert (len(data["points"]), data["failed"]) == (2, 1)
    assert "it &lt;died&gt;" in paths[3].read_text()
    same = Fleet(2, "cost", 64, dict.fromkeys((1, 2, 3), made_run()))
    assert "nothing to chance" in about_seeds(Sweep((same,), conditions, 0.95, (1, 2, 3)))


# Files and commands


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["sweep", "none.jsonl"], "no such file"),
        (["sweep", str(TRACE), "--engines", "0"], "--engines=0"),
        (["sweep", str(TRACE), "--engines", "two"], "--engines=two"),
        (["sweep", str(TRACE), "--engines", "4..2"], "--engines=4..2: give FIRST..LAST"),
        (["sweep", str(TRACE), "--speedup", "1,-2"], "--speedup=1,-2: give numbers above 0"),
        (["sweep", str(TRACE), "--kv-tokens", ","], "--kv-tokens"),
        (["sweep", str(TRACE), "--policy", "best"], "policy='best'"),
        (["sweep", str(TRACE), "--timing", "abacus"], "abacus"),
        (["sweep", str(TRACE), "--processes", "0"], "--processes=0"),
        (["sweep", str(TRACE), "--good-share", "2"], "good_share=2"),
        (["sweep", str(TRACE), "--requests", "0"], "--requests=0"),
        (["sweep", str(TRACE), "--slo-itl-ms", "0"], "--slo-itl-ms=0"),
    ],
)
def test_wrong_options_are_named(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, arguments)
    assert isinstance(done.exception, ConfigError)
    assert says in str(done.exception)
