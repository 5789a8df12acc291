"""K24: knobs on sources whose requests fork others, or have several answers."""

from collections import Counter

import numpy as np
import pytest

from mallee.synth.core.knobs import Knobs
from mallee.synth.core.model import Model
from mallee.synth.core.prefix_tree import PrefixTree
from mallee.synth.fit import fit
from mallee.traces.trace import Trace, trace_of
from mallee.traces.workload import NO_PARENT
from support.synth.sources import INSTRUCTIONS, SIZE, searches


@pytest.fixture(scope="module")
def model() -> Model:
    return fit(trace_of(searches()), "session")


def made(model: Model, seed: int = 3, requests: int = 600, **turned: object) -> Trace:
    knobs = Knobs(**turned)  # type: ignore[arg-type]
    return trace_of(model.generate(requests=requests, seed=seed, knobs=knobs))


def widths(trace: Trace) -> list[int]:
    """Numbers of forks of each forked request, in whole trees."""
    last = trace.session[-1]
    parents = trace.parent[(trace.parent != NO_PARENT) & (trace.session != last)]
    return list(Counter(parents.tolist()).values())


def heads(trace: Trace) -> set[int]:
    return {int(trace.path(i)[0]) for i in range(len(trace))}


def test_the_source_is_what_it_says() -> None:
    source = trace_of(searches())
    assert source.has_forks
    assert set(widths(source)) == {2, 3, 4}
    assert heads(source) == {0}


def test_searches_are_generated_as_searches(model: Model) -> None:
    """K24, K25: forks stay forks, level by level."""
    plain = made(model)
    assert plain.has_forks
    assert set(widths(plain)) <= {2, 3, 4}
    PrefixTree.of(plain)


def test_instructions_grow(model: Model) -> None:
    """K24: twice the prefix length doubles what all searches share."""
    plain, turned = made(model), made(model, prefix_len=2.0)
    grown = (turned.input_tokens - plain.input_tokens) / SIZE
    assert grown.mean() == pytest.approx(INSTRUCTIONS, rel=0.05)


def test_families_of_searches_are_disjoint(model: Model) -> None:
    """K24: four times the roots, each search wholly in one."""
    turned = made(model, prefix_root=4)
    assert len(heads(turned)) == 4
    for session in range(turned.session.max() + 1):
        mine = np.flatnonzero(turned.session == session)
        assert len({int(turned.path(i)[0]) for i in mine}) == 1


def test_answers_triple(model: Model) -> None:
    """K24."""
    plain, turned = made(model), made(model, osl=3.0)
    spoken = plain.output_tokens > 0
    assert turned.output_tokens[turned.output_tokens > 0].mean() == pytest.approx(
        3 * plain.output_tokens[spoken].mean(), rel=0.02
    )


def test_faster_arrivals_halve_gaps(model: Model) -> None:
    """K24."""
    plain, turned = made(model), made(model, speedup=2.0)
    assert turned.arrival_s[-1] == pytest.approx(plain.arrival_s[-1] / 2, rel=0.05)
