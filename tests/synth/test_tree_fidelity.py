"""K23: what a tree model makes of a trace is like it in all that the method keeps, and only there."""

import numpy as np
import pytest

from mallee.synth.analysis.analysis import Analysis, analyze
from mallee.synth.analysis.reuse import reuse_of
from mallee.synth.baseline.model import TreeModel, fit_tree
from mallee.synth.compare.distances import ks
from mallee.traces.read import read_workload
from mallee.traces.trace import Trace, trace_of
from support.public_traces import PUBLIC, needs_public

pytestmark = needs_public


def source(name: str) -> Trace:
    return trace_of(read_workload(PUBLIC / name, seed=1))


@pytest.fixture(scope="module")
def mooncake() -> Trace:
    return source("mooncake_conversation.jsonl.gz")


@pytest.fixture(scope="module")
def model(mooncake: Trace) -> TreeModel:
    return fit_tree(mooncake)


@pytest.fixture(scope="module")
def made(model: TreeModel, mooncake: Trace) -> Trace:
    return trace_of(model.generate(requests=len(mooncake), seed=1))


def distance(name: str, one: Analysis, other: Analysis) -> float:
    return ks(getattr(one, name), getattr(other, name))


def test_mooncake_regenerated(mooncake: Trace, made: Trace) -> None:
    """K23: within what the published implementation reached, beside it in each line.

    Its one sampler for tails and rests is why its prompts were farther off. New blocks, widths and the cache
    curve are the method's own loss: a walk does not know which session is alive.
    """
    a, b = analyze(mooncake), analyze(made)
    assert distance("isl", a, b) < 0.13  # .196
    assert distance("osl", a, b) < 0.02  # .0045
    assert distance("gaps_s", a, b) < 0.02  # .0075
    assert distance("hit_depth", a, b) < 0.03  # .020
    assert distance("branch_depths", a, b) < 0.02  # .008
    assert distance("new_blocks", a, b) < 0.20  # .178
    assert b.curve.ideal == pytest.approx(a.curve.ideal, abs=0.02)  # .014
    assert b.roots == a.roots
    assert len(b.branch_widths) == pytest.approx(len(a.branch_widths), rel=0.4)  # -37 %
    error = np.abs(a.mrc_hits - b.hits_at(a.mrc_sizes))
    assert error.mean() < 0.05  # .046


def test_no_two_samplers_are_one(made: Trace) -> None:
    """K23: what is drawn for a request is not tied: prompts, answers, gaps in ranks."""
    drawn = (made.input_tokens[1:], made.output_tokens[1:], np.diff(made.arrival_s))
    ranks = np.array([np.argsort(np.argsort(each)) for each in drawn])
    assert np.abs(np.corrcoef(ranks) - np.eye(3)).max() < 0.03


def test_prompts_are_not_cut_to_blocks(mooncake: Trace, made: Trace) -> None:
    """K23: a prompt that ends in a shared block keeps its length."""
    of_source, of_made = (np.mean(t.input_tokens % 512 == 0) for t in (mooncake, made))
    assert of_made == pytest.approx(of_source, abs=0.002)


@pytest.mark.slow
def test_the_shared_tree_is_a_closed_set(model: TreeModel, mooncake: Trace) -> None:
    """K23: as the model's docstring says, its hit rate drifts upward with length."""
    num = len(mooncake)
    longer = trace_of(model.generate(requests=4 * num, seed=1))
    hits = reuse_of(longer).hit_blocks
    once, whole = (hits[:end].sum() / longer.depth[:end].sum() for end in (num, 4 * num))
    assert once + 0.05 < whole < 0.55
