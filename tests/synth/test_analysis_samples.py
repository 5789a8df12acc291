"""Arrivals, sessions, hierarchy and forks of traces drawn by hand, where every number is known."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.synth.analysis.analysis import analyze
from mallee.synth.analysis.arrivals import counts_of, tick_of, variation
from mallee.synth.analysis.forks import forks_of
from mallee.synth.analysis.report import quantiles, report_of
from mallee.synth.analysis.sessions import sessions_of
from mallee.synth.analysis.statistics import dense, others_alive, spearman
from mallee.synth.core.threads import threads_of
from support.synth.drawn import SIZE, Line, drawn, tree_paths

# Arrivals


def test_poisson_arrivals_have_a_dispersion_of_one_at_every_width() -> None:
    """X9, part."""
    at_s = np.cumsum(np.random.default_rng(3).exponential(0.05, 400_000))
    found = counts_of(at_s)
    assert set(found) == {1.0, 10.0, 60.0, 300.0}
    for each in found.values():
        assert each.dispersion == pytest.approx(1.0, abs=0.25)
        assert each.autocorrelation == pytest.approx(0.0, abs=0.25)
    assert variation(np.diff(at_s)) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("at_s", [[], [5.0], [2.0, 2.0, 2.0], [0.0, 7.9]])
def test_short_traces_have_no_counts(at_s: list[float]) -> None:
    assert counts_of(np.array(at_s)) == {}
    assert tick_of(np.array(at_s)) is None


def test_ticks_are_seen_where_most_share_them() -> None:
    ticks = np.repeat(np.arange(0.0, 90.0, 3.0), 5)
    assert tick_of(ticks + 0.7) == 3.0
    assert tick_of(np.repeat(np.arange(0.0, 40.0), 5)) == 1.0
    assert tick_of(ticks + np.linspace(0, 1, len(ticks))) is None
    assert tick_of(np.arange(0.0, 90.0, 3.0)) is None  # nobody shares one: they may be exact


# Ranks and lives


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=8, max_size=40))
def test_rank_correlation_is_spearmans(pairs: list[tuple[int, int]]) -> None:
    """K25, part: against scipy."""
    stats = pytest.importorskip("scipy.stats")
    x, y = np.array(pairs).T
    if len(set(x.tolist())) == 1 or len(set(y.tolist())) == 1:
        assert np.isnan(spearman(x, y))
        return
    assert spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic)
    assert np.isnan(spearman(x[:7], y[:7]))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(0, 6)), max_size=20))
def test_others_alive_are_those_that_have_begun_and_not_ended(
    lives: list[tuple[int, int, int]],
) -> None:
    group = np.array([g for g, _, _ in lives], np.int64)
    begin_s = np.array([b / 3 for _, b, _ in lives])
    end_s = begin_s + np.array([n / 3 for _, _, n in lives])
    expected = [
        sum(
            j != i and group[j] == group[i] and begin_s[j] <= begin_s[i] <= end_s[j]
            for j in range(len(lives))
        )
        for i in range(len(lives))
    ]
    assert others_alive(dense(group), begin_s, end_s).tolist() == expected


# Sessions


def test_a_partial_last_block_is_no_part_of_what_a_turn_has_to_keep() -> None:
    lines = [Line([1, 2, 3], 0.0, 2 * SIZE + 1, session="a"), Line([1, 2, 4], 1.0, session="a")]
    trace = drawn(lines, rule="auto")
    assert sessions_of(trace, threads_of(trace)).relations["extends"] == 1


def family(*, has_edges: bool) -> list[Line]:
    """A session that spawns two sub-agents at 10 s, which end at 31 and 40 s, and goes on at 50 s."""
    main, sub = {"session": "a", "cls": "turn"}, {"session": "a", "cls": "sub-agent"}

    def line(ids: list[int], at_s: float, kind: dict[str, str], *waits: int) -> Line:
        return Line(ids, at_s, waits=waits if has_edges else (), **kind)  # type: ignore[arg-type]

    return [
        line([1], 0.0, main),
        line([1, 2], 10.0, main, 0),
        line([20], 11.0, sub, 1),
        line([30], 14.0, sub, 1),
        line([20, 21], 31.0, sub, 2),
        line([30, 31], 40.0, sub, 3),
        line([1, 2, 3], 50.0, main, 1, 4, 5),
        line([1, 2, 3, 4], 60.0, main, 6),
    ]


# Forks


def search() -> list[Line]:
    """A root with three children, one of which is forked twice when all three have ended.

    0 -+- 1 -+- 4
       +- 2  `- 5
       `- 3
    """
    return [
        Line([1, 2], 5.0, answer=0, session="t"),
        Line((), 5.0, 0, answer=10, session="t", parent=0),
        Line((), 5.0, 0, answer=30, session="t", parent=0),
        Line((), 5.0, 0, answer=20, session="t", parent=0),
        Line((), 5.0, 0, answer=5, session="t", parent=1, waits=(1, 2, 3)),
        Line((), 5.0, 0, answer=5, session="t", parent=1, waits=(1, 2, 3)),
    ]


def test_backtracks_of_a_depth_first_search() -> None:
    """K25, part: 0 - 1 - 2 - 3, back to 1 for 4, down to 5, back to the root for 6."""
    parents = [-1, 0, 1, 2, 1, 4, 0]
    lines = [Line([1], 0.0, answer=0)] + [
        Line((), 0.0, 0, answer=4, parent=parent, waits=(i,) if i else ())
        for i, parent in enumerate(parents[1:])
    ]
    assert forks_of(drawn(lines)).backtracks.tolist() == [2.0, 3.0]


def test_a_trace_with_forks_shows_the_tree_of_its_requests() -> None:
    found = analyze(drawn(search()))
    assert found.roots == 1
    assert found.branch_widths.tolist() == [3.0, 2.0]
    assert found.family.children_per_spawn.tolist() == [3.0, 2.0]
    assert not len(found.gaps_s)  # one tree arrived
    assert found.sessions.turns_per_session.tolist() == [6.0]


# The whole


@given(tree_paths(30), st.sampled_from([0.0, 1.5, 400.0]))
def test_any_tree_is_analysed_and_told_in_json(paths: list[list[int]], gap_s: float) -> None:
    """K22, part: X9's summary of any trace: tiny ones, and those that arrive all at once."""
    lines = [Line(p, i * gap_s, max(1, SIZE * len(p))) for i, p in enumerate(paths)]
    found = analyze(drawn(lines))
    told = json.loads(json.dumps(report_of(found).data, allow_nan=False))
    assert told["requests"] == len(paths)
    assert told["tree"]["blocks"] == found.num_blocks
    assert len(told["reuse"]["lru"]) == (8 if found.num_blocks else 0)
    assert sum(found.sessions.turns_per_thread) == len(paths)
    if found.num_blocks:
        assert told["reuse"]["ideal_hit"] == pytest.approx(found.curve.ideal)
    assert len(found.branch_widths) == len(found.branch_depths)
    again = pickle.loads(pickle.dumps(found))
    assert again.hits_at(found.mrc_sizes).tolist() == found.mrc_hits.tolist()


def test_quantiles_are_those_of_numpy() -> None:
    values = np.arange(101.0)
    found = quantiles(values)
    assert found == {
        "count": 101,
        "mean": 50.0,
        **{f"p{share}": float(share) for share in (5, 25, 50, 75, 90, 99)},
        "max": 100.0,
    }
    assert quantiles(np.empty(0)) is None
