"""Gates: a trace agrees with itself, and what is done to one shows in the gates it should."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.synth.compare.copies import copies
from mallee.synth.compare.fits import Reading, Source, compare_workload, held_out, noises, source_of
from mallee.synth.compare.gates import COPIES, DRIFT, GATES, Gate, Value, outcomes
from mallee.synth.compare.lengths import _of_trace, _streamed, drift
from mallee.synth.compare.report import GateTable, as_data, counts
from mallee.synth.compare.views import Shows, halves, picked, shared_views, shows, view
from mallee.traces.trace import Trace, trace_of
from mallee.traces.workload import Request, Runs, Workload
from support.examples import examples
from support.made_workloads import fan_out_workload, sessions_workload

REQUESTS = 3000


def made(seed: int = 1) -> Workload:
    return sessions_workload(REQUESTS, seed=seed)


@pytest.fixture(scope="module")
def source() -> Source:
    return source_of(Reading(lambda seed: made()))


def changed(change: Callable[[list[Request]], list[Request]]) -> Workload:
    """The made workload after `change`."""
    requests = [
        msgspec.structs.replace(request, number=number)
        for number, request in enumerate(change(list(made())))
    ]
    return replace(made(), read=lambda: iter(requests))


def failed(source: Source, other: Workload) -> set[str]:
    found = outcomes([compare_workload(source, other).values], GATES)
    return {each.gate.name for each in found if each.verdict == "FAIL"}


def test_a_trace_agrees_with_itself(source: Source) -> None:
    """K23: every gate that applies has no distance, and none is left out."""
    found = outcomes([compare_workload(source, made()).values], GATES)
    assert {each.gate.name for each in found} == {gate.name for gate in GATES} - {DRIFT}
    values = {each.gate.name: each.value for each in found if each.value is not None}
    assert values.pop(COPIES) == 1.0
    assert len(values) > 25
    assert set(values.values()) == {0.0}
    assert not any(each.verdict == "FAIL" for each in found)


def test_another_seed_of_the_same_law_passes_lengths(source: Source) -> None:
    bad = failed(source, made(seed=2))
    assert not {"ISL KS", "OSL KS", "new tokens KS", "gaps between arrivals KS"} & bad
    assert copies(source.trace, trace_of(made(seed=2))).value == 0.0


def test_longer_answers_show_in_answers_alone(source: Source) -> None:
    def change(requests: list[Request]) -> list[Request]:
        return [
            msgspec.structs.replace(each, output_tokens=3 * each.output_tokens) for each in requests
        ]

    assert failed(source, changed(change)) == {"OSL KS", "OSL W1"}


def test_shuffled_prompts_show_in_reuse_but_not_in_lengths_or_arrivals(source: Source) -> None:
    """K25: order inside sessions is what infinite caches and marginals can't see."""

    def change(requests: list[Request]) -> list[Request]:
        order = np.random.default_rng(1).permutation(len(requests)).tolist()
        return [
            msgspec.structs.replace(requests[other], arrival_s=each.arrival_s)
            for each, other in zip(requests, order, strict=True)
        ]

    bad = failed(source, changed(change))
    assert {
        "LRU curve, mean",
        "LRU curve, worst",
        "reuse gap, requests KS",
        "reuse gap, requests W1",
        "reuse gap, seconds KS",
        "reuse gap, seconds W1",
    } <= bad
    kept = {"ISL", "OSL", "gaps", "dispersion", "autocorrelation", "branch", "roots"}
    assert not [name for name in bad if name.split()[0] in kept]


def test_bursts_show_in_arrivals_but_not_in_lengths_or_caches(source: Source) -> None:
    """Ten arrive at once where one did: order stays."""

    def change(requests: list[Request]) -> list[Request]:
        return [
            msgspec.structs.replace(each, arrival_s=requests[i - i % 10].arrival_s)
            for i, each in enumerate(requests)
        ]

    bad = failed(source, changed(change))
    assert {"gaps between arrivals KS", "dispersion 1 s"} <= bad
    assert not [name for name in bad if name.split()[0] in {"ISL", "OSL", "new", "LRU", "branch"}]
    assert not [name for name in bad if name.startswith("reuse gap, requests")]


def test_more_families_show_in_roots(source: Source) -> None:
    """Every session has a system prompt of its own: no two share anything."""

    def change(requests: list[Request]) -> list[Request]:
        number: dict[str, int] = {}
        changed = []
        for each in requests:
            place = number.setdefault(each.session, len(number))
            (first, count), *rest = each.ids.runs if isinstance(each.ids, Runs) else []
            own = Runs([(10**9 + place * 1000 + first, count), *rest], len(each.ids))
            changed.append(msgspec.structs.replace(each, ids=own))
        return changed

    bad = failed(source, changed(change))
    assert {"roots", "branch count"} <= bad
    assert not [name for name in bad if name.split()[0] in {"ISL", "OSL", "dispersion", "turns"}]


def test_what_only_one_side_has_fails() -> None:
    """A gate never passes because a sample is empty."""
    without = Workload("plain", 512, lambda: _plain_rows(200))
    plain = source_of(Reading(lambda seed: without))
    bad = failed(plain, made())
    assert {"LRU curve, mean", "reuse gap, seconds KS", "branch count", "roots"} <= bad
    other = source_of(Reading(lambda seed: made()))
    found = outcomes([compare_workload(other, without).values], GATES)
    data = as_data(found)
    assert data["LRU curve, worst"]["verdict"] == "FAIL"
    assert data["reuse gap, seconds KS"]["verdict"] == "FAIL"
    assert data["reuse gap, seconds KS"]["value"] is None
    assert data["reuse gap, seconds KS"]["why"] == (
        "only the source has requests that find anything"
    )
    mine = outcomes([compare_workload(plain, without).values], GATES)
    by_name = {each.gate.name: each for each in mine}
    assert by_name["roots"].verdict == "n/a"
    assert by_name["roots"].why == "neither has roots"
    assert counts(mine)["fail"] == 0


def _plain_rows(num: int) -> Iterator[Request]:
    rng = np.random.default_rng(3)
    at_s = 0.0
    for number in range(num):
        at_s += float(rng.exponential(0.3))
        yield Request(number, at_s, (), int(rng.integers(1, 5000)), int(rng.integers(1, 500)))


GATE = Gate("something", "group", "statistic", 0.1)


def test_medians_keep_signs_until_the_end() -> None:
    """Differences that cancel out over seeds are told from those that don't."""
    spread = outcomes([{"something": Value(v)} for v in (-0.3, 0.0, 0.3)], [GATE])[0]
    assert (spread.value, spread.low, spread.high, spread.verdict) == (0.0, -0.3, 0.3, "pass")
    biased = outcomes([{"something": Value(v)} for v in (-0.3, -0.2, 0.3)], [GATE])[0]
    assert (biased.value, biased.verdict) == (-0.2, "FAIL")


def test_numbers_that_are_none_fail_and_seeds_without_anything_agree() -> None:
    nan = outcomes([{"something": Value(math.nan)}], [GATE])[0]
    assert (nan.value, nan.verdict) == (math.inf, "FAIL")
    values = [Value(None, "neither"), Value(None, "neither"), Value(0.3)]
    mixed = outcomes([{"something": value} for value in values], [GATE])[0]
    assert (mixed.value, mixed.verdict) == (0.0, "pass")
    none = outcomes([{"something": Value(None, "neither")}], [GATE])[0]
    assert (none.value, none.verdict, none.why) == (None, "n/a", "neither")
    assert outcomes([{}], [GATE]) == []


def test_a_table_has_all_columns_and_names_what_does_not_apply() -> None:
    other = Gate("other", "group", "statistic", 0.1)
    found = outcomes([{"something": Value(0.3), "other": Value(None, "no such")}], [GATE, other])
    noise = outcomes([{"something": Value(0.4), "other": Value(None, "no such")}], [GATE, other])
    lines = list(GateTable({"a": found, "b": []}, {"halves": noise}).markdown())
    assert lines[0] == "| gate | bar | a | b | noise: halves |"
    assert lines[2] == "| something | 0.1 | 0.300 FAIL ~ | - | 0.400 |"
    assert "Not applicable: other (no such)." in lines
    assert lines[-1] == "~ some noise is as large: the miss says little."
    assert "~" not in "".join(GateTable({"a": found}, {}).markdown())
    one = outcomes([{"something": Value(math.inf, "only one")}], [GATE])
    assert GateTable({"a": one}, {}).rows[0].texts() == ["something", "0.1", "infinite FAIL"]


def test_noise_of_halves_and_of_other_starts(source: Source) -> None:
    found = noises(source)
    assert set(found) == {"halves"}
    assert len(found["halves"]) == 3
    assert 0 < (found["halves"][0]["ISL KS"].value or 0) < 0.2
    moving = source_of(Reading(lambda seed: sessions_workload(500, seed=seed)))
    assert set(noises(moving)) == {"starts", "halves"}


def test_views_drop_what_the_source_cannot_show() -> None:
    named = trace_of(made())
    nameless = view(named, Shows(sessions=False, waits=False, forks=False))
    assert shows(nameless) == (False, False, False)
    ours, theirs = shared_views(nameless, named)
    assert theirs == ours == (False, False, False)
    ours, theirs = shared_views(named, nameless)
    assert ours.sessions
    assert not theirs.sessions
    forked = trace_of(_forks())
    ours, theirs = shared_views(forked, named)
    assert not ours.forks
    assert not view(forked, ours).has_forks


def _forks() -> Workload:
    return fan_out_workload(
        4, prefix_tokens=64, suffix_tokens=8, output_tokens=8, as_forks=True, is_warm=True
    )


@given(st.integers(0, 2**32 - 1), st.integers(1, 60))
@examples(25)
def test_halves_share_out_all_requests(seed: int, num: int) -> None:
    trace = trace_of(sessions_workload(num, seed=seed))
    one, other = halves(trace, trace.session.astype(np.int64), seed)
    assert len(one) + len(other) == len(trace)
    assert not set(one.session) & set(other.session)
    for half in (one, other):
        assert half.num_blocks == len(np.unique(half.blocks))
        first = np.unique(half.blocks, return_index=True)[1]
        assert (np.diff(first) > 0).all()  # numbered by first appearance


def test_picked_requests_keep_their_waits_and_forks() -> None:
    trace = trace_of(_forks())
    part = picked(trace, np.array([True, True]))
    assert part.parent.tolist() == [-1, 0]
    assert part.blocks.tolist() == trace.blocks.tolist()
    alone = picked(trace, np.array([True, False]))
    assert len(alone) == 1
    assert alone.path(0).tolist() == [0, 1, 2, 3]


@given(st.integers(0, 2**32 - 1), st.integers(1, 80), st.integers(0, 30))
@examples(40)
def test_streamed_hit_rates_are_those_of_arrays(seed: int, num: int, skip: int) -> None:
    workload = sessions_workload(num, seed=seed)
    for rule in ("floor", "ceil"):
        streamed = _streamed(workload, skip, rule == "ceil")
        trace = trace_of(workload, rule=rule)  # type: ignore[arg-type]
        assert streamed == pytest.approx(_of_trace(trace, skip))
        assert streamed == pytest.approx(_by_hand(trace, skip))


def _by_hand(trace: Trace, skip: int) -> float:
    seen: set[int] = set()
    found = prompt = 0
    for i in range(len(trace)):
        path = trace.path(i).tolist()
        known = sum(block in seen for block in path)
        seen.update(path)
        if i >= skip:
            found += min(known * trace.block_size, int(trace.input_tokens[i]))
            prompt += int(trace.input_tokens[i])
    return found / prompt if prompt else 0.0


def test_drift_has_the_sign_of_growth() -> None:
    assert drift([0.3, 0.4, 0.5]).value == pytest.approx(0.2)
    assert drift([0.5, 0.4, 0.3]).value == pytest.approx(-0.2)
    assert drift([0.4, 0.4, 0.4]).value == 0.0
    assert "0.300 -> 0.400" in drift([0.3, 0.4, 0.5]).why


def test_held_out_models_are_judged_by_what_they_have_not_seen(source: Source) -> None:
    """K25, part: one that only remembers has nothing of the half it is judged by."""

    class Remembers:
        def __init__(self, seen: Trace) -> None:
            self.seen = seen

        def generate(self, *, requests: int, seed: int) -> Workload:
            names = {self.seen.sessions[i] for i in set(self.seen.session.tolist())}
            kept = [each for each in made() if each.session in names][:requests]
            numbered = [
                msgspec.structs.replace(each, number=number) for number, each in enumerate(kept)
            ]
            return replace(made(), read=lambda: iter(numbered))

    values = held_out(source, Remembers, 1)
    assert values is not None
    assert values[COPIES].value == 0.0
    assert 0.0 < (values["ISL KS"].value or 0.0) < 0.1
    alone = source_of(Reading(lambda seed: sessions_workload(1, seed=1)))
    assert held_out(alone, Remembers, 1) is None
