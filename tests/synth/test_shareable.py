"""X9, part: what is shared of a session model holds no request, and generates traffic like the source's."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.errors import ConfigError
from mallee.synth.analysis.analysis import Analysis, analyze
from mallee.synth.compare.distances import ks
from mallee.synth.core.arrivals import WINDOW_BEGINS
from mallee.synth.core.prefix_tree import PrefixTree
from mallee.synth.saved import load_model, save_model
from mallee.synth.session.fit import fit_session
from mallee.synth.session.shareable.begins import draw_begins, fit_begins
from mallee.synth.session.shareable.model import SharedModel, to_shareable
from mallee.synth.session.shareable.tables import MINORS, Cells, K, cells_of, joined
from mallee.traces.read import read_workload
from mallee.traces.trace import Trace, trace_of
from mallee.traces.workload import Request, Runs, Workload
from support.examples import examples
from support.public_traces import PUBLIC, needs_public
from support.synth.families import FAMILIES
from support.synth.sources import agents

SIZE = 16


def odd(num: int = 60) -> Workload:
    """Sessions of calls whose lengths and times occur nowhere else: none is like another's."""
    rng = np.random.default_rng(7)
    calls = []
    first = 0
    for session in range(num):
        at_s, blocks = 40.0 * session * rng.random(), 0
        for _ in range(2 + int(rng.integers(9))):
            blocks += 1 + int(rng.lognormal(3.0, 1.0))
            tokens = blocks * SIZE + int(rng.integers(SIZE))
            calls.append((at_s, first, blocks, tokens, int(rng.integers(10**6, 10**7)), session))
            at_s += rng.lognormal(2.0, 1.5)
        first += blocks
    calls.sort()
    requests = [
        Request(i, at_s, Runs([(low, count)]), tokens, answer, f"s{session}", "turn")
        for i, (at_s, low, count, tokens, answer, session) in enumerate(calls)
    ]
    return Workload("odd", SIZE, lambda: iter(requests))


@pytest.fixture(scope="module")
def trace() -> Trace:
    return trace_of(odd())


@pytest.fixture(scope="module")
def shared(trace: Trace) -> SharedModel:
    return to_shareable(fit_session(trace))


def parts(value: Any) -> Iterator[Any]:
    """Contents of a tally: arrays and numbers, and the tables themselves."""
    if isinstance(value, tuple):
        for each in value:
            yield from parts(each)
    elif is_dataclass(value):
        yield value
        for field in fields(value):
            yield from parts(getattr(value, field.name))
    else:
        yield value


def made(model: SharedModel, num: int, seed: int = 1, size: int | None = None) -> Trace:
    return trace_of(model.generate(requests=num, seed=seed), block_size=size)


def test_a_file_holds_no_value_of_a_request(trace: Trace, shared: SharedModel) -> None:
    """X9, part: no length, gap or time of the source is among the numbers of the file.

    Answers and gaps were made so that none occurs twice: one that is found was copied. Counts and bins are
    small whole numbers and below them.
    """
    steps = fit_session(trace).steps
    raw = np.concatenate([steps.output, steps.gap_s, steps.think_s, trace.arrival_s])
    raw = np.unique(raw[raw > 0])
    numbers = [
        np.asarray(each, np.float64).ravel()
        for each in parts(shared.summary)
        if isinstance(each, np.ndarray | int | float)
    ]
    for values in numbers:
        large = values[np.abs(values - np.rint(values)) > 1e-9]  # means and times, no counts
        large = np.append(large, values[values > 10**5])
        near = raw[np.minimum(np.searchsorted(raw, large), len(raw) - 1)]
        assert not np.any(np.abs(near - large) < 1e-9 * np.maximum(1.0, near))


def test_each_group_is_of_many(shared: SharedModel) -> None:
    """X9, part: no mean of a file is of fewer than 20 values."""
    tables = [each for each in parts(shared.summary) if isinstance(each, Cells)]
    assert sum(len(each.counts) * each.means.shape[1] for each in tables) >= 10
    for each in tables:
        table = np.floor(each.edges + 1e-12).astype(int)
        sizes = np.diff(np.append(each.edges, len(each.counts))) * each.counts[table]
        assert each.counts.min(initial=K) >= K
        assert sizes.min(initial=K) >= K - 1e-6


def test_no_combination_of_a_request_comes_back(trace: Trace, shared: SharedModel) -> None:
    """X9, part: (input, output, gap) of generated requests is never one of the source's."""
    steps = fit_session(trace).steps
    ours = set(zip(steps.context.tolist(), steps.output.tolist(), strict=True))
    drawn = set(zip(shared.steps.context.tolist(), shared.steps.output.tolist(), strict=True))
    assert len(ours & drawn) <= 1  # answers are of a range of nine million


def test_few_sessions_are_not_shared() -> None:
    with pytest.raises(ConfigError, match="19 sessions: 20 or more"):
        to_shareable(fit_session(trace_of(odd(19))))


def test_sharing_again_changes_nothing(shared: SharedModel, tmp_path: Path) -> None:
    """X9, part: what is generated at once is what the file gives, and the file of that is the same file."""
    assert to_shareable(shared) is shared
    one, other = tmp_path / "one.model", tmp_path / "other.model"
    save_model(shared, one)
    loaded = load_model(one)
    save_model(to_shareable(loaded), other)
    assert one.read_bytes() == other.read_bytes()
    a, b = (each.generate(requests=500, seed=3) for each in (shared, loaded))
    assert [(r.arrival_s, list(r.ids), r.output_tokens) for r in a] == [
        (r.arrival_s, list(r.ids), r.output_tokens) for r in b
    ]


@examples(50)
@given(
    values=st.lists(
        st.one_of(st.floats(0, 1e6), st.integers(0, 3).map(float)), min_size=K, max_size=600
    ),
    seed=st.integers(0, 9),
)
def test_tables_keep_means_and_limits(values: list[float], seed: int) -> None:
    keys = np.repeat([0, MINORS], [K, len(values)])
    cells = Cells.fit(keys, np.array([7.0] * K + values)[:, None])
    drawn = cells.spread_out(MINORS, 4000, np.random.default_rng(seed))[:, 0]
    largest = max(values)
    assert drawn.mean() == pytest.approx(np.mean(values), rel=0.05, abs=0.02 * largest + 1e-9)
    assert drawn.min() >= -1e-9
    assert ks(drawn, np.array(values)) <= max(0.5, 2 * K / len(values))
    assert cells.spread_out(0, 50, np.random.default_rng(seed)).tolist() == [[7.0]] * 50


@given(
    keys=st.lists(
        st.builds(lambda major, minor: MINORS * major + minor, st.integers(0, 2), st.integers(0, 9))
    )
)
def test_cells_are_of_many(keys: list[int]) -> None:
    """X9, part: neighbours are joined until each cell has enough, majors never; too small ones have none."""
    counts = np.bincount(np.array(keys, np.int64) // MINORS, minlength=3)
    cell = cells_of(
        joined(np.array(keys, np.int64), np.ones(len(keys)), K), np.array(keys, np.int64)
    )
    assert (np.bincount(cell[cell >= 0]) >= K).all()
    for key, found in zip(keys, cell.tolist(), strict=True):
        assert (found >= 0) == (counts[key // MINORS] >= K)
    assert len({(key // MINORS, found) for key, found in zip(keys, cell, strict=True)}) == len(
        set(cell[cell >= 0].tolist())
    ) + len({key // MINORS for key, found in zip(keys, cell, strict=True) if found < 0})


@examples(30)
@given(num=st.integers(K, 300), seed=st.integers(0, 99), burst=st.floats(0.1, 3))
def test_begins_keep_their_rate(num: int, seed: int, burst: float) -> None:
    """X9, part: every window takes about as long as it did, however bursty."""
    rng = np.random.default_rng(seed)
    gaps = rng.lognormal(0, burst, num) * np.repeat(rng.random(-(-num // 32)) + 0.1, 32)[:num]
    law = fit_begins(gaps)
    drawn = draw_begins(law, rng).gaps_s
    assert len(drawn) == num
    assert drawn.min() >= 0
    whole = WINDOW_BEGINS * (len(law.windows_s) - 1)
    sums = drawn[:whole].reshape(-1, WINDOW_BEGINS).sum(1)
    assert sums == pytest.approx(law.windows_s[:-1])
    assert drawn.sum() == pytest.approx(gaps.sum(), rel=0.02)


def distance(name: str, one: Analysis, other: Analysis) -> float:
    return ks(getattr(one, name), getattr(other, name))


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["tool_agents", "chats", "best_of", "retries", "two_tenants", "single_turns"]
)
def test_families_come_back(family: str) -> None:
    """X9, part: lengths, reuse and the cache curve of traces of many sorts, from tables alone."""
    trace = trace_of(FAMILIES[family](3000, 1))
    model = to_shareable(fit_session(trace))
    again = made(model, len(trace), size=trace.block_size)
    PrefixTree.of(again)
    a, b = analyze(trace), analyze(again)
    for name in ("isl", "osl", "new_tokens", "gaps_s"):
        assert distance(name, a, b) < 0.06, name
    assert distance("reuse_gap_s", a, b) < 0.1
    error = np.abs(a.mrc_hits - b.hits_at(a.mrc_sizes))
    assert error.mean() < 0.03


def test_traces_without_ids_or_edges() -> None:
    trace = trace_of(FAMILIES["without_ids"](2000, 1))
    again = made(to_shareable(fit_session(trace)), 2000)
    assert not len(again.blocks)
    assert distance("isl", analyze(trace), analyze(again)) < 0.03


def test_slow_sessions_stay_slow() -> None:
    """X9, part: what a whole line has of its own is told too: sessions differ as much as they did."""
    rng = np.random.default_rng(1)
    requests, calls = [], []
    for session in range(300):
        at_s, pace = 30.0 * session, rng.lognormal(0, 1.0)
        for turn in range(12):
            calls.append((at_s, session, turn))
            at_s += pace * rng.lognormal(1.0, 0.3)
    for i, (at_s, session, turn) in enumerate(sorted(calls)):
        ids = Runs([(1000 * session, 5 + 2 * turn)])
        requests.append(Request(i, at_s, ids, SIZE * len(ids), 10, f"s{session}", "turn"))
    trace = trace_of(Workload("paces", SIZE, lambda: iter(requests)))
    steps = to_shareable(fit_session(trace)).steps
    took = np.bincount(steps.thread, steps.gap_s)
    ours = fit_session(trace).steps
    theirs = np.bincount(ours.thread, ours.gap_s)
    assert np.std(np.log(took + 1)) == pytest.approx(np.std(np.log(theirs + 1)), rel=0.25)


def test_children_keep_their_place() -> None:
    """X9, part: spawned threads hang on steps of threads above them; nothing waits for them."""
    trace = trace_of(FAMILIES["spawns"](3000, 1))
    source = fit_session(trace)
    model = to_shareable(source)
    steps = model.steps
    spawned = steps.heads[steps.parent_step[steps.heads] >= 0]
    assert len(spawned) == (source.steps.parent_step[source.steps.heads] >= 0).sum()
    assert (steps.kind[steps.parent_step[spawned]] < steps.kind[spawned]).all()  # above them
    widths, theirs = (
        np.unique(each.parent_step[each.parent_step >= 0], return_counts=True)[1]
        for each in (steps, source.steps)
    )
    assert widths.mean() == pytest.approx(theirs.mean(), rel=0.25)
    assert (steps.join < 0).all()
    PrefixTree.of(made(model, len(trace), size=trace.block_size))


def test_sub_agents_have_a_root_of_their_own() -> None:
    trace = trace_of(agents())
    source, model = fit_session(trace), to_shareable(fit_session(trace))
    assert (source.steps.parent_step >= 0).sum() < K  # too few to tell: left out
    assert not (model.steps.parent_step >= 0).any()
    assert model.classes == ("turn",)


@needs_public
def test_mooncake_from_tables() -> None:
    """X9, part: a real trace; the tables' own loss is what these bounds allow."""
    trace = trace_of(read_workload(PUBLIC / "mooncake_conversation.jsonl.gz", seed=1))
    model = to_shareable(fit_session(trace))
    a, b = analyze(trace), analyze(made(model, len(trace)))
    for name in ("isl", "osl", "new_tokens", "gaps_s", "reuse_gap_s"):
        assert distance(name, a, b) < 0.05, name
    error = np.abs(a.mrc_hits - b.hits_at(a.mrc_sizes))
    assert error.mean() < 0.02
    assert error.max() < 0.05
