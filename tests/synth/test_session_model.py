"""K24, K25, X9: the session model keeps what a source did and makes new sessions of it."""

import functools
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.errors import ConfigError
from mallee.synth.analysis.analysis import analyze
from mallee.synth.compare.distances import ks
from mallee.synth.core.arrivals import fit_starts, fit_turnstile
from mallee.synth.core.jitter import Ranks
from mallee.synth.core.knobs import Knobs
from mallee.synth.session.fit import fit_session
from mallee.synth.session.recombine import recombine
from mallee.traces.trace import Trace, trace_of
from mallee.traces.workload import Request, Runs, Workload
from support.made_workloads import sessions_workload
from support.synth.families import FAMILIES

SIZE = 16


@functools.cache
def family(name: str, num: int) -> tuple[Request, ...]:
    return tuple(FAMILIES[name](num, 1))


def source_of(requests: Sequence[Request]) -> Trace:
    return trace_of(Workload("family", 64, lambda: iter(requests)))


def test_every_step_is_done_once_and_at_its_position() -> None:
    """X9, part: recombining keeps each step, so what steps add, answer and wait keeps its distribution."""
    steps = fit_session(source_of(family("best_of", 2000))).steps
    plan = recombine(steps, np.random.default_rng(1))
    assert sorted(plan.steps.tolist()) == list(range(len(steps)))
    for low, high in zip(plan.starts[:-1], plan.starts[1:], strict=True):
        line = plan.steps[low:high]
        assert steps.position[line].tolist() == list(range(len(line)))
        assert len(set(steps.kind[line].tolist())) == 1
    inside = np.ones(len(steps), np.bool_)
    inside[plan.starts[1:] - 1] = False
    follows = plan.steps[1:][inside[:-1]] == steps.following[plan.steps[:-1][inside[:-1]]]
    assert 0.03 < 1 - follows.mean() < 0.8  # some sessions went on as others did


def test_joins_wait_for_the_last_call_of_every_child() -> None:
    """K25: sub-agents have their own lines, and who joins them waits for the last calls of those."""
    spawns = family("spawns", 1200)
    source = source_of(spawns)
    workload = fit_session(source).generate(requests=len(source), seed=3)
    made = list(workload)
    joins, then = (
        [r for r in requests if r.cls == "level0" and len(r.wait_for) > 1]
        for requests in (made, spawns)
    )
    assert abs(len(joins) - len(then)) <= 4  # where the trace ends, some are cut off
    for join in joins:
        children = [made[other] for other in join.wait_for if made[other].cls != "level0"]
        assert children
        for child in children:
            later = [r for r in made if child.number in r.wait_for and r.cls == child.cls]
            assert not later  # it was its line's last
    a, b = analyze(source), analyze(trace_of(workload))
    assert ks(a.family.children_per_spawn, b.family.children_per_spawn) < 0.05


def test_a_part_of_a_trace_has_the_rate_of_the_whole() -> None:
    """X9, part: fewer requests are fewer sessions at the same rate, each of them whole."""
    rows = family("best_of", 2000)
    late_s = rows[-1].arrival_s + 3000.0
    late = msgspec.structs.replace(rows[-1], number=len(rows), arrival_s=late_s)
    model = fit_session(source_of([*rows, late]))
    assert model.cut_off is None  # for long nobody began: all sessions ended
    made = list(model.generate(requests=len(rows) // 4, seed=0))
    begun_s = max(
        min(r.arrival_s for r in made if r.session == name) for name in {r.session for r in made}
    )
    assert abs(begun_s / rows[-1].arrival_s - 0.25) < 0.1


def test_hit_rates_do_not_drift_with_length() -> None:
    """X9, part: stationary: sixteen times as much has the same ideal hit rate."""
    source = trace_of(sessions_workload(1500, seed=2))
    model = fit_session(source)
    rates = []
    for times in (1, 4, 16):
        trace = trace_of(model.generate(requests=times * len(source), seed=0))
        first = np.searchsorted(trace.starts, trace.starts[len(source) // 5])
        seen = len(np.unique(trace.blocks[: trace.starts[first]]))
        rates.append(1 - (trace.num_blocks - seen) / (trace.starts[-1] - trace.starts[first]))
    assert max(rates) - min(rates) < 0.02


def test_sessions_go_on_where_the_source_was_cut_off() -> None:
    """X9, part: no seam: when the source's time has passed, as many calls go on as at any time."""
    rng = np.random.default_rng(3)
    rows: list[tuple[float, Request]] = []
    for session in range(600):
        at_s = float(rng.uniform(0.0, 3000.0))
        for turn in range(1 + int(rng.geometric(0.3))):
            ids = range(100 * session, 100 * session + turn + 1)
            rows.append((at_s, Request(0, at_s, ids, SIZE * (turn + 1), 5, f"s{session}")))
            at_s += float(rng.exponential(100.0))
    rows = sorted((row for row in rows if 0 <= row[0] < 3000.0), key=lambda row: row[0])
    known = [msgspec.structs.replace(r, number=i) for i, (_, r) in enumerate(rows)]
    source = trace_of(_as_workload(known))
    model = fit_session(source)
    period_s = model.starts.period_s
    made = list(model.generate(requests=int(2.5 * len(source)), seed=0))
    begun: set[str] = set()
    going_on: list[bool] = []
    for r in made:
        going_on.append(r.session in begun)
        begun.add(r.session)
    at_s = np.array([r.arrival_s for r in made])
    seam = (at_s > period_s) & (at_s < 1.1 * period_s)
    middle = (at_s > 1.3 * period_s) & (at_s < 1.8 * period_s)
    shares = np.array(going_on)
    assert abs(shares[seam].mean() - shares[middle].mean()) < 0.06
    assert abs(10 * seam.sum() / (2 * middle.sum()) - 1) < 0.12


def test_contexts_stay_below_a_limit() -> None:
    """X9, part: lines exchange rests that suit what they hold: compaction keeps them below its limit."""
    rng = np.random.default_rng(5)
    rows: list[Request] = []
    limit, fresh = 200, 0
    for session in range(150):
        runs: list[tuple[int, int]] = []
        held = 0
        for turn in range(40):
            more = int(rng.integers(1, 40))
            if held + more > limit:
                runs, held = [], 0
            fresh += more
            runs, held = [*runs, (fresh - more, more)], held + more
            at_s = 10.0 * session + 3.0 * turn + float(rng.random())
            rows.append(Request(0, at_s, Runs(runs), SIZE * held, 5, f"s{session}"))
    source = trace_of(workload(rows))
    made = trace_of(fit_session(source).generate(requests=2 * len(source), seed=0))
    assert made.input_tokens.max() <= 1.2 * source.input_tokens.max()
    assert ks(source.input_tokens, made.input_tokens) < 0.05


def test_who_does_a_task_again_says_the_same_for_a_while() -> None:
    """X9, part: lines that share more than their first request go on sharing it call by call."""
    rows = []
    for session in range(30):
        task = session // 2  # each task twice; the third call is everybody's own
        own = [90_000 + session, 95_000 + session]
        for turn, (depth, more) in enumerate(((9, 0), (12, 0), (14, 1), (14, 2))):
            ids = [*range(1000 * task, 1000 * task + depth), *own[:more]]
            at_s = 40.0 * session + turn
            rows.append(Request(0, at_s, tuple(ids), SIZE * len(ids), 4, f"s{session}"))
    source = trace_of(workload(rows))
    model = fit_session(source)
    assert sorted(set(model.forest.depth.tolist())) == [14]
    assert sorted(set(model.forest.first.tolist())) == [9]
    a, b = analyze(source), analyze(trace_of(model.generate(requests=len(source), seed=1)))
    assert a.curve.ideal == pytest.approx(b.curve.ideal, abs=0.01)
    assert a.roots == b.roots == 15
    assert sorted(a.branch_depths) == sorted(b.branch_depths) == [14.0] * 15


def test_text_is_replaced_as_time_goes_on() -> None:
    """X9, part: the shared forest keeps growing: rare prompts are replaced, one that all have stays."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(400):
        tool = 1 + int(rng.integers(5)) if i % 2 else 100 + i // 8
        rows.append(Request(i, float(i), (0, 1000 + tool, 10_000 + i), 3 * SIZE, 4, f"s{i}"))
    source = trace_of(Workload("tools", SIZE, lambda: iter(rows)))
    model = fit_session(source)
    trace = trace_of(model.generate(requests=4 * len(source), seed=0))
    second = Counter(trace.blocks[trace.starts[:-1] + 1].tolist())
    assert len(set(trace.blocks[trace.starts[:-1]].tolist())) == 1  # one root for all
    popular = [block for block, uses in second.items() if uses >= 100]
    assert 5 <= len(popular) <= 8  # the five stay, or nearly
    assert len(second) > 2.5 * len(set(source.blocks[source.starts[:-1] + 1].tolist())) - 10


def test_begins_keep_their_course_and_bursts() -> None:
    """X9, part: the rate over time, gaps and dispersion of session begins."""
    rng = np.random.default_rng(4)
    quiet = np.cumsum(rng.exponential(2.0, 300))
    busy = quiet[-1] + np.cumsum(rng.exponential(0.1, 900))
    begins = np.concatenate([quiet, busy])
    starts = fit_starts(begins, float(begins[-1]))
    made = starts.draw(np.random.default_rng(1), len(begins))
    assert np.all(np.diff(made) >= 0)
    assert abs(np.searchsorted(made, quiet[-1]) - 300) < 12
    assert ks(np.diff(begins), np.diff(made)) < 0.03
    again = starts.draw(np.random.default_rng(1), 3 * len(begins))
    assert abs(again[-1] - begins[0] - 3 * starts.period_s) < 5.0


def test_what_begins_after_a_silence_stays_there() -> None:
    """X9, part: a nightly batch and who calls by day are not mixed."""
    rng = np.random.default_rng(0)
    rows = []
    for day in range(4):
        night = [(day * 86400 + each, 0) for each in rng.uniform(0, 60, 200).tolist()]
        calls = [(day * 86400 + each, 1) for each in rng.uniform(40000, 43000, 30).tolist()]
        rows += sorted(night + calls)
    known = [
        Request(i, at_s, (text, 100 + i), 2 * SIZE, 4, f"s{i}")
        for i, (at_s, text) in enumerate(rows)
    ]
    source = trace_of(_as_workload(known))
    model = fit_session(source)
    assert model.starts.stretches.max() == 7
    for seed in range(3):
        made = model.generate(requests=len(source), seed=seed)
        by_day = np.array([(r.arrival_s + 1000) % 86400 > 30000 for r in made])
        trace = trace_of(made)
        text = trace.blocks[trace.starts[:-1]]
        assert len(set(text[by_day].tolist())) == len(set(text[~by_day].tolist())) == 1
        assert text[by_day][0] != text[~by_day][0]


def test_clients_that_wait_for_their_turn_are_known() -> None:
    """X9, part: a fixed number of clients is no Poisson process, and is not made into one."""
    rng = np.random.default_rng(0)
    ends = [0.0] * 4
    begins = []
    finished = []
    for _ in range(200):
        place = int(np.argmin(ends))
        begins.append(ends[place] + float(rng.exponential(0.2)))
        ends[place] = begins[-1] + float(rng.exponential(30.0))
        finished.append(ends[place])
    found = fit_turnstile(np.array(begins), np.array(finished))
    assert found is not None
    assert len(found.opened_s) == 4
    poisson = np.cumsum(rng.exponential(10.0, 200))
    assert fit_turnstile(poisson, poisson + rng.exponential(30.0, 200)) is None


@given(st.lists(st.integers(0, 9), min_size=1, max_size=50), st.integers(0, 1000))
def test_values_near_others_stay_in_range_and_keep_what_many_share(
    values: list[int], seed: int
) -> None:
    """X9, part: jitter by rank leaves limits and zeros alone."""
    array = np.array(values, np.float64)
    near = Ranks(array).near(np.arange(len(array)), np.random.default_rng(seed))
    assert near.min() >= array.min()
    assert near.max() <= array.max()
    assert abs(near.mean() - array.mean()) <= 1.0


def test_what_cannot_be_turned_or_learned_is_refused() -> None:
    model = fit_session(source_of(family("best_of", 2000)))
    with pytest.raises(ConfigError, match="requests=0"):
        model.generate(requests=0, seed=0)
    with pytest.raises(ConfigError, match="speedup=-1"):
        model.generate(requests=5, seed=0, knobs=Knobs(speedup=-1))


def _as_workload(requests: Sequence[Request]) -> Workload:
    return Workload("made", SIZE, lambda: iter(requests))


# Short turns, few sessions, or all at once


def workload(requests: list[Request]) -> Workload:
    """The requests in order of time, numbered."""
    ordered = sorted(requests, key=lambda each: each.arrival_s)
    return _as_workload([msgspec.structs.replace(each, number=i) for i, each in enumerate(ordered)])


def chats(
    num: int, *, every_s: float, turns: int = 12, seed: int = 0, system: int = 4
) -> list[Request]:
    """Sessions over one system prompt, whose turns add about a block, and one that drops what it had."""
    rng = np.random.default_rng(seed)
    requests = []
    free = 1000
    for session in range(num):
        tokens, ids = system * SIZE, list(range(system))
        for turn in range(turns):
            if turn == turns // 2:
                keep = system + 2
                tokens, ids = keep * SIZE, ids[:keep]
            tokens += int(rng.integers(5, 30))
            more = tokens // SIZE - len(ids)
            ids = [*ids, *range(free, free + more)]
            free += more
            at_s = session * every_s + 3.0 * turn + rng.random()
            requests.append(Request(0, at_s, list(ids), tokens, 20, f"s{session}"))
    return requests


def made(source: Trace, requests: int, seed: int = 1, **turned: object) -> Trace:
    knobs = Knobs(**turned)  # type: ignore[arg-type]
    return trace_of(fit_session(source).generate(requests=requests, seed=seed, knobs=knobs))


@pytest.mark.parametrize("factor", [2.0, 1.5, 0.5])
def test_own_text_grows_exactly(factor: float) -> None:
    """The begin of a block that the turn before had is not new, though the block is."""
    source = trace_of(workload(chats(60, every_s=5.0)))
    own = [
        np.mean([made(source, 720, seed, **turned).input_tokens.mean() for seed in range(4)])
        - 4 * SIZE
        for turned in ({}, {"prompt_len": factor})
    ]
    assert own[1] == pytest.approx(factor * own[0], rel=0.04)


@pytest.mark.parametrize("factor", [3.0, 0.25])
def test_a_context_that_is_dropped_keeps_the_prompt(factor: float) -> None:
    """Prefixes of sessions stay whole at any length of own text."""
    source = trace_of(workload(chats(60, every_s=5.0)))
    turned = made(source, 720, prompt_len=factor)
    system = turned.path(0)[:4]
    assert all((turned.path(i)[:4] == system).all() for i in range(len(turned)))


def test_one_session_is_followed_by_others() -> None:
    """X9, part: one begin has no rate; sessions then come one after another, not one a second."""
    source = trace_of(workload(chats(1, every_s=1.0, turns=50)))
    length_s = float(source.arrival_s[-1])
    longer = made(source, 500)
    assert float(longer.arrival_s[-1]) == pytest.approx(10 * length_s, rel=0.15)


@pytest.mark.slow
def test_sessions_that_begin_at_once_do_so_again() -> None:
    """X9, part: as many as in the source, and the next when its length has passed."""
    source = trace_of(workload(chats(20, every_s=0.0)))
    source.arrival_s[:20] = 0.0
    longer = made(source, 4 * len(source))
    rate = len(source) / float(source.arrival_s[-1])
    assert len(longer) / float(longer.arrival_s[-1]) == pytest.approx(rate, rel=0.15)
    all_at_once = trace_of(workload([Request(0, 0.0, [i], SIZE, 5) for i in range(3)]))
    many = made(all_at_once, 3000)
    assert np.bincount(np.searchsorted(np.unique(many.arrival_s), many.arrival_s)).tolist() == (
        [3] * 1000
    )


def test_sessions_take_turns_at_one_time() -> None:
    """X9, part: the first calls of all sessions come first, and all after those they wait for."""
    requests = [
        Request(0, 0.0, list(range(100 * s, 100 * s + turn + 1)), SIZE * (turn + 1), 5, f"s{s}")
        for turn in range(4)
        for s in range(10)
    ]
    generated = list(fit_session(trace_of(workload(requests))).generate(requests=40, seed=1))
    assert [r.input_tokens // SIZE for r in generated] == [1] * 10 + [2] * 10 + [3] * 10 + [4] * 10
    assert [len(r.wait_for) for r in generated] == [0] * 10 + [1] * 30


def test_joins_come_after_those_they_wait_for_at_one_time() -> None:
    """X9, part: a caller, two children of two calls each, and the call that joins them, all at once."""
    requests = []
    for s in range(12):
        own = 100 * s
        first = len(requests)
        names = [("main", [own], ()), *(("child", [own + c], (first,)) for c in (10, 20))]
        names += [
            ("child", [own + c, own + c + 1], (first + k + 1,)) for k, c in enumerate((10, 20))
        ]
        names.append(("main", [own, own + 1], (first, first + 3, first + 4)))
        for cls, ids, waits in names:
            tokens = SIZE * len(ids)
            requests.append(
                Request(len(requests), 0.0, ids, tokens, 5, f"s{s}", cls, wait_for=waits)
            )
    source = trace_of(workload(requests))
    generated = list(fit_session(source).generate(requests=len(requests), seed=2))
    joins = [r for r in generated if r.cls == "main" and r.input_tokens == 2 * SIZE]
    assert [len(r.wait_for) for r in joins] == [3] * 12
    assert [r.cls for r in generated[-12:]] == ["main"] * 12
