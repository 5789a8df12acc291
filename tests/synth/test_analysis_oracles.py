"""Measures of a trace, against their definitions carried out one request at a time, and on traces by hand."""

import json
import pickle
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.synth.analysis.analysis import analyze
from mallee.synth.analysis.arrivals import BINS_S, counts_of, tick_of
from mallee.synth.analysis.forks import forks_of, times_of
from mallee.synth.analysis.report import quantiles, report_of
from mallee.synth.analysis.sessions import RELATIONS, family_of, sessions_of
from mallee.synth.analysis.statistics import spearman
from mallee.synth.core.pace import TOKEN_S
from mallee.synth.core.threads import threads_of
from mallee.traces.trace import Trace
from support.synth.drawn import SIZE, Line, drawn, tree_paths

# Arrivals


@given(
    st.lists(st.integers(0, 40), min_size=2, max_size=60),
    st.sampled_from([0.25, 1.0, 7.0, 300.0]),
    st.sampled_from([0.0, -1000.0, 1e9]),
)
def test_counts_are_those_of_bins_filled_one_by_one(
    steps: list[int], step_s: float, begin_s: float
) -> None:
    """X9, part: variance / mean, and correlation with the bin before, as defined."""
    at_s = begin_s + step_s * np.cumsum(steps)
    found = counts_of(at_s)
    for width in BINS_S:
        num = int((at_s[-1] - at_s[0]) // width)
        if num < 8:
            assert width not in found
            continue
        counts = [0.0] * num
        for at in at_s.tolist():
            if int((at - at_s[0]) // width) < num:
                counts[int((at - at_s[0]) // width)] += 1
        apart = np.array(counts) - np.mean(counts)
        assert found[width].dispersion == pytest.approx(np.var(counts) / np.mean(counts))
        if apart.any():
            lagged = sum(a * b for a, b in pairwise(apart)) / (apart @ apart)
            assert found[width].autocorrelation == pytest.approx(lagged, abs=1e-9)
        else:
            assert np.isnan(found[width].autocorrelation)


def test_a_gap_of_fifty_years_takes_no_memory() -> None:
    """X9, part: one row from 0, one by the clock."""
    found = counts_of(np.array([0.0, 0.5, 1.7e9]))
    assert set(found) == set(BINS_S)
    for width, each in found.items():
        num = int(1.7e9 / width)  # the last arrival is on the end of the last bin
        assert each.dispersion == pytest.approx(2 - 2 / num)
        assert each.autocorrelation == pytest.approx(-1 / num**2, rel=0.01, abs=0.0)


# Sessions


@st.composite
def sessions(draw: st.DrawFn) -> list[Line]:
    """Requests of a few sessions in any order, some named, some waiting for others of theirs."""
    paths = draw(tree_paths(20))
    has_names, has_waits = draw(st.booleans()), draw(st.booleans())
    at_s, found = 0.0, list[Line]()
    for i, path in enumerate(paths):
        at_s += draw(st.sampled_from([0.0, 1.0, 2.5, 400.0]))
        session = f"s{draw(st.integers(0, 2))}" if has_names else ""
        mine = [j for j in range(i) if found[j].session == session]
        waits = draw(st.sets(st.sampled_from(mine), max_size=3)) if mine and has_waits else set()
        cls = draw(st.sampled_from(["turn", "sub-agent"]))
        tokens = SIZE * len(path) + draw(st.integers(0, SIZE - 1)) or 1
        found.append(Line(path, at_s, tokens, 1, session, cls, tuple(sorted(waits))))
    return found


def shared(trace: Trace, one: int, other: int) -> int:
    same = 0
    for a, b in zip(trace.path(one), trace.path(other), strict=False):
        if a != b:
            break
        same += 1
    return same


@given(sessions())
def test_sizes_and_relations_are_those_of_the_lines(lines: list[Line]) -> None:
    """K22, part."""
    trace = drawn(lines)
    told = threads_of(trace)
    found = sessions_of(trace, told)
    by_session, by_line = defaultdict(list), defaultdict(list)
    for i in range(len(trace)):
        by_session[int(told.session[i])].append(i)
        by_line[int(told.thread[i])].append(i)
    at_s = trace.arrival_s
    assert found.turns_per_session.tolist() == [len(by_session[s]) for s in sorted(by_session)]
    assert found.turns_per_thread.tolist() == [len(by_line[s]) for s in sorted(by_line)]
    assert found.threads_per_session.tolist() == [
        len({int(told.thread[i]) for i in by_session[s]}) for s in sorted(by_session)
    ]
    assert found.duration_s.tolist() == [
        at_s[by_session[s][-1]] - at_s[by_session[s][0]] for s in sorted(by_session)
    ]
    counts: dict[str, int] = defaultdict(int)
    lost = []
    gaps = {}
    for members in by_line.values():
        for before, i in pairwise(members):
            gaps[i] = at_s[i] - at_s[before]
            whole = trace.input_tokens[before] // SIZE
            if told.source[i] != before:
                counts["returns"] += 1
            elif shared(trace, i, before) >= whole:
                counts["extends"] += 1
            elif 2 * shared(trace, i, before) >= whole:
                counts["rolls_back"] += 1
                lost.append((i, SIZE * (whole - shared(trace, i, before))))
            elif 2 * trace.input_tokens[i] < trace.input_tokens[before]:
                counts["resets"] += 1
            else:
                counts["diverges"] += 1
    assert found.relations == {name: counts[name] for name in RELATIONS}
    assert found.rollback_tokens.tolist() == [tokens for _, tokens in sorted(lost)]
    assert found.turn_gaps_s.tolist() == [gaps[i] for i in sorted(gaps)]


@given(sessions())
def test_families_are_those_of_the_lines(lines: list[Line]) -> None:
    """K22, part: children, who of them is alive, who joins them and when."""
    trace = drawn(lines)
    told = threads_of(trace)
    found = family_of(trace, told)
    members = defaultdict(list)
    for i, line in enumerate(told.thread.tolist()):
        members[line].append(i)
    heads = [int(i) for i in told.heads if told.parent[i] >= 0]
    spawns = defaultdict(list)  # by spawning request, heads of its children
    for head in heads:
        spawns[int(told.parent[head])].append(head)
    at_s = trace.arrival_s
    assert found.children_per_spawn.tolist() == [len(spawns[s]) for s in sorted(spawns)]
    staggers = {h: at_s[h] - at_s[s[0]] for s in spawns.values() for h in s[1:]}
    assert found.start_stagger_s.tolist() == [staggers[h] for h in sorted(staggers)]

    def end_of(head: int) -> float:
        return float(at_s[members[int(told.thread[head])][-1]])

    alive = []
    for head in heads:
        family = [h for h in heads if told.thread[told.parent[h]] == told.thread[told.parent[head]]]
        alive.append(sum(at_s[h] <= at_s[head] <= end_of(h) for h in family) - 1)
    assert found.live_siblings.tolist() == alive
    joins, waits = [], []
    for spawn in sorted(spawns):
        ends = {members[int(told.thread[h])][-1] for h in spawns[spawn]}
        mine = members[int(told.thread[spawn])]
        if told.has_edges:
            join = next((i for i in mine if ends & set(lines[i].waits)), None)
        else:
            join = next((i for i in mine if i > max(ends)), None)
        if join is not None:
            joins.append(max(0.0, at_s[join] - min(at_s[e] for e in ends)))
            waits.append(at_s[join] - at_s[spawn])
    assert found.join_wait_s.tolist() == joins
    assert found.spawn_wait_s.tolist() == waits
    for head, share in zip(heads, found.shared_with_parent.tolist(), strict=True):
        depth = len(trace.path(head))
        expected = shared(trace, head, int(told.parent[head])) / depth if depth else 0.0
        assert share == pytest.approx(expected)


# Forks


@st.composite
def searches(draw: st.DrawFn) -> list[Line]:
    """Requests that fork, wait for and stand beside each other."""
    found = [Line((1, 2), 0.0, tokens=SIZE * 2, answer=draw(st.integers(0, 3)))]
    for i in range(1, draw(st.integers(2, 16))):
        parent = draw(st.integers(-1, i - 1))
        others = draw(st.sets(st.integers(0, i - 1), max_size=3)) - {parent}
        found.append(
            Line(
                ids=() if parent >= 0 else (10 * i,),
                at_s=draw(st.sampled_from([found[-1].at_s, found[-1].at_s + 0.01])),
                tokens=draw(st.integers(0 if parent >= 0 else 1, SIZE)),
                answer=draw(st.integers(0, 3)),
                waits=tuple(sorted(others)),
                tool_s=draw(st.sampled_from([0.0, 0.02])),
                parent=parent,
                branches=draw(st.integers(1, 3)),
            )
        )
    parent = draw(st.integers(0, len(found) - 1))
    return [*found, Line((), found[-1].at_s, tokens=1, parent=parent)]


@given(searches())
def test_trees_of_forks_are_those_of_their_requests(lines: list[Line]) -> None:
    """K22, part."""
    trace = drawn(lines)
    found = forks_of(trace)
    num = len(lines)
    begin, end = [0.0] * num, [0.0] * num
    for i, line in enumerate(lines):
        awaited = [*line.waits, *([line.parent] if line.parent >= 0 else [])]
        ready = max((end[j] for j in awaited), default=None)
        begin[i] = line.at_s if ready is None else ready + line.tool_s
        end[i] = begin[i] + TOKEN_S * line.answer
    assert [each.tolist() for each in times_of(trace)] == [begin, end]
    children = [sum(x.branches for x in lines if x.parent == i) for i in range(num)]
    depth = [1] * num
    for i, line in enumerate(lines):
        depth[i] = 1 if line.parent < 0 else depth[line.parent] + 1
    expanded = [i for i in range(num) if children[i]]
    assert found.trees == sum(1 for i in expanded if lines[i].parent < 0)
    assert found.family.children_per_spawn.tolist() == [children[i] for i in expanded]
    assert found.depths.tolist() == [depth[i] for i in expanded]
    leaves = [i for i in range(num) if not children[i] and lines[i].parent >= 0]
    assert found.leaf_depths.tolist() == [depth[i] for i in leaves]
    forks = [i for i in range(num) if lines[i].parent >= 0]
    inner = [i for i in forks if children[i]]
    assert found.expanded_share == len(inner) / len(forks)
    each = [i for i in forks for _ in range(lines[i].branches)]
    assert found.family.live_siblings.tolist() == [
        sum(lines[j].parent == lines[i].parent and begin[j] <= begin[i] <= end[j] for j in each) - 1
        for i in each
    ]
    waits, seen = [], set()
    for i, line in enumerate(lines):
        if len(line.waits) >= 2 and line.waits not in seen:
            seen.add(line.waits)
            waits.append(begin[i] - min(end[j] for j in line.waits))
    assert found.family.join_wait_s.tolist() == waits
    whole = analyze(trace)
    assert whole.family.children_per_spawn.tolist() == found.family.children_per_spawn.tolist()
    assert whole.branch_widths.tolist() == [children[i] for i in expanded if children[i] > 1]
    assert whole.roots == found.trees


# All of it


@given(sessions() | searches())
def test_whatever_is_drawn_is_told_in_json(lines: list[Line]) -> None:
    """K22, part: no NaN, no infinity, no warning; what is told is what was measured."""
    found = analyze(drawn(lines))
    told = json.loads(json.dumps(report_of(found).data, allow_nan=False))
    assert told["requests"] == len(lines)
    assert told["tree"]["blocks"] == found.num_blocks
    assert len(told["reuse"]["lru"]) == (8 if found.num_blocks else 0)
    if found.num_blocks:
        assert told["reuse"]["ideal_hit"] == pytest.approx(found.curve.ideal)
    again = pickle.loads(pickle.dumps(found))
    assert again.hits_at(found.mrc_sizes).tolist() == found.mrc_hits.tolist()


# By hand: every number is known


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


def test_a_partial_last_block_is_no_part_of_what_a_turn_has_to_keep() -> None:
    lines = [Line([1, 2, 3], 0.0, 2 * SIZE + 1, session="a"), Line([1, 2, 4], 1.0, session="a")]
    trace = drawn(lines, rule="auto")
    assert sessions_of(trace, threads_of(trace)).relations["extends"] == 1


def test_backtracks_of_a_depth_first_search() -> None:
    """K25, part: 0 - 1 - 2 - 3, back to 1 for 4, down to 5, back to the root for 6."""
    parents = [-1, 0, 1, 2, 1, 4, 0]
    lines = [Line([1], 0.0, answer=0)] + [
        Line((), 0.0, 0, answer=4, parent=parent, waits=(i,) if i else ())
        for i, parent in enumerate(parents[1:])
    ]
    assert forks_of(drawn(lines)).backtracks.tolist() == [2.0, 3.0]


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
