"""Traces of many kinds, none of which a model was made for: what holds for each of them."""

import pytest

from mallee.synth.analysis.analysis import analyze
from mallee.synth.compare.gates import GATES, Outcome, compare, outcomes
from mallee.synth.compare.views import shared_views, view
from mallee.synth.fit import fit
from mallee.traces.trace import Trace, trace_of
from support.synth.families import FAMILIES

REQUESTS = 1200
SEEDS = 3
BY_DESIGN = (
    *("OSL KS", "OSL W1", "new tokens KS", "new tokens W1", "turns per session KS"),
    *("LRU curve, mean", "branch count", "roots", "children per spawn KS", "live siblings KS"),
)
"""Gates that recombined sessions pass whatever the source: each step is done once."""
MORE = {"turn_takers": 2000, "retries": 2000}
"""Requests where figures come from few things at a time: long sessions, equal prompts."""


def verdicts(source: Trace, kind: str, seeds: int) -> dict[str, Outcome]:
    """Medians over seeds, as `mallee synth compare` has them."""
    model = fit(source, kind)
    found = []
    for seed in range(seeds):
        made = trace_of(model.generate(requests=len(source), seed=seed), rule=source.rule)
        ours, theirs = shared_views(source, made)
        found.append(compare(analyze(view(source, ours)), analyze(view(made, theirs))))
    return {each.gate.name: each for each in outcomes(found, GATES)}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_what_sessions_keep_by_design_is_kept(name: str) -> None:
    """K25, X9, part: new text, answers, turns, branches, spawns and the cache curve of all kinds."""
    source = trace_of(FAMILIES[name](MORE.get(name, REQUESTS), 1))
    found = verdicts(source, "session", SEEDS)
    failed = {
        gate: (round(found[gate].value or 0.0, 3), found[gate].gate.bar)
        for gate in BY_DESIGN
        if found[gate].verdict == "FAIL"
    }
    assert not failed


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_what_walks_keep_by_design_is_kept(name: str) -> None:
    """K23: answers, gaps and roots of all kinds of traces."""
    source = trace_of(FAMILIES[name](REQUESTS, 1))
    found = verdicts(source, "tree", SEEDS)
    kept = ("OSL KS", "OSL W1", "gaps between arrivals KS", "roots")
    assert not [gate for gate in kept if found[gate].verdict == "FAIL"]
