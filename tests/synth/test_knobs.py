"""K24: what a knob does, on every model: turned against not turned, same seed."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mallee.protocol.errors import ConfigError
from mallee.synth.baseline.core import shared_depths
from mallee.synth.core.knobs import Knobs
from mallee.synth.core.model import Model
from mallee.synth.core.prefix_tree import PrefixTree
from mallee.synth.fit import fit
from mallee.traces.numbers import Floats, Ints
from mallee.traces.trace import Trace, trace_of
from mallee.traces.workload import Workload
from support.examples import examples
from support.synth.sources import SIZE, SYSTEM, agents, anything

KINDS = ("tree", "session")


@pytest.fixture(scope="module")
def source() -> Trace:
    return trace_of(agents())


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, source: Trace) -> Model:
    return fit(source, str(request.param))


@pytest.fixture(scope="module")
def tree(source: Trace) -> Model:
    return fit(source, "tree")


@pytest.fixture(scope="module")
def session(source: Trace) -> Model:
    return fit(source, "session")


def made(model: Model, seed: int = 3, requests: int = 800, **turned: object) -> Trace:
    knobs = Knobs(**turned)  # type: ignore[arg-type]
    return trace_of(model.generate(requests=requests, seed=seed, knobs=knobs))


def shared(trace: Trace) -> Ints:
    """Of each request its leading blocks that several sessions have; without sessions: requests."""
    if (trace.session < 0).all():
        return shared_depths(trace, PrefixTree.of(trace))
    low = np.full(trace.num_blocks, trace.session.max() + 1)
    high = np.full(trace.num_blocks, -1)
    owner = np.repeat(trace.session, trace.depth)
    np.minimum.at(low, trace.blocks, owner)
    np.maximum.at(high, trace.blocks, owner)
    is_shared = (low != high)[trace.blocks]
    places = np.repeat(np.arange(len(trace)), trace.depth)
    return np.bincount(places, is_shared, len(trace)).astype(np.int64)


def own(trace: Trace) -> Floats:
    """Tokens of each request that nobody else had before it, and that it doesn't share."""
    return (trace.input_tokens - SIZE * shared(trace)).astype(np.float64)


def root(trace: Trace, request: int) -> int:
    return int(trace.blocks[trace.starts[request]])


def roots(trace: Trace) -> set[int]:
    return {root(trace, i) for i in range(len(trace)) if trace.depth[i]}


# Both models


@pytest.mark.parametrize("factor", [2.0, 1.5, 0.5])
def test_shared_text_grows(model: Model, factor: float) -> None:
    """K24: twice the prefix length doubles shared blocks; fractions are not rounded up.

    What a request has alone is as long as it was.
    """
    plain, turned = made(model), made(model, prefix_len=factor)
    tolerance = 0.0 if factor == 2.0 and model.kind == "tree" else 0.12
    assert shared(turned).mean() == pytest.approx(factor * shared(plain).mean(), rel=tolerance)
    if factor == 2.0:
        assert own(turned).mean() == pytest.approx(own(plain).mean(), rel=0.05)


def test_families_are_disjoint(model: Model) -> None:
    """K24: four times the roots: no block of one family is in another, and each has its share."""
    plain, turned = made(model), made(model, prefix_root=4)
    assert len(roots(turned)) == 4 * len(roots(plain))
    counts = Counter(root(turned, i) for i in range(len(turned)))
    assert max(counts.values()) < 0.5 * max(Counter(root(plain, i) for i in range(800)).values())
    assert np.bincount(shared(turned)).argmax() == np.bincount(shared(plain)).argmax()


def test_faster_arrivals_halve_gaps(model: Model) -> None:
    """K24: speed-up halves gaps."""
    plain, turned = made(model), made(model, speedup=2.0)
    assert np.diff(turned.arrival_s).mean() == pytest.approx(
        np.diff(plain.arrival_s).mean() / 2, rel=0.05
    )


def test_answers_triple(model: Model) -> None:
    """K24: osl x3 triples the mean."""
    plain, turned = made(model), made(model, osl=3.0)
    expected = 3 * plain.output_tokens.mean()
    assert turned.output_tokens.mean() == pytest.approx(expected, rel=0.02)
    halved = made(model, osl=0.5)
    assert halved.output_tokens.mean() == pytest.approx(plain.output_tokens.mean() / 2, rel=0.05)


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_own_text_grows(model: Model, factor: float) -> None:
    """K24: twice the prompt length doubles requests' own text and leaves what they share."""
    plain, turned = made(model), made(model, prompt_len=factor)
    assert own(turned).mean() == pytest.approx(factor * own(plain).mean(), rel=0.1)


knobs = st.builds(
    Knobs,
    prefix_len=st.floats(0.2, 3.0),
    prefix_root=st.integers(1, 4),
    prompt_len=st.floats(0.2, 3.0),
    osl=st.floats(0.2, 3.0),
    speedup=st.floats(0.2, 3.0),
)


@examples(15)
@given(st.sampled_from(KINDS), st.integers(0, 2**64 - 1), knobs)
def test_ids_are_a_tree_whatever_is_turned(kind: str, seed: int, turned: Knobs) -> None:
    """K22, K24: any seed, any knobs: prefix-closed ids that cover each prompt, no more."""
    workload = MODELS[kind].generate(requests=150, seed=seed, knobs=turned)
    requests = list(workload)
    assert [r.number for r in requests] == list(range(150))
    assert all(len(r.ids) <= -(-r.input_tokens // SIZE) for r in requests)
    assert all(r.input_tokens >= 1 and r.output_tokens >= 1 for r in requests)
    times = [r.arrival_s for r in requests]
    assert times[0] >= 0.0
    assert times == sorted(times)
    PrefixTree.of(trace_of(workload))


@examples(80)
@given(st.sampled_from(KINDS), st.integers(0, 2**32), knobs)
@example("session", 609, Knobs())  # a partial block is shared inside the forest's text
def test_any_source_can_be_learned(kind: str, seed: int, turned: Knobs) -> None:
    """K22, K24: whatever a trace lacks: ids, names, partial blocks, times apart, more than one row."""
    source = trace_of(anything(seed))
    made = list(fit(source, kind).generate(requests=100, seed=seed, knobs=turned))
    assert [r.number for r in made] == list(range(100))
    assert all(len(r.ids) <= -(-r.input_tokens // source.block_size) for r in made)
    assert all(r.input_tokens >= 1 and r.output_tokens >= 1 for r in made)
    assert all(other < r.number for r in made for other in r.wait_for)
    times = [r.arrival_s for r in made]
    assert times == sorted(times)
    PrefixTree.of(trace_of(Workload("made", source.block_size, lambda: iter(made))))


class _Models(dict[str, Model]):
    """Fitted when first asked for: hypothesis takes no fixtures of a module's scope."""

    def __missing__(self, kind: str) -> Model:
        self[kind] = fit(trace_of(agents()), kind)
        return self[kind]


MODELS = _Models()


def wrong() -> Iterator[tuple[str, object]]:
    for name in ("prefix_len", "prompt_len", "osl", "speedup"):
        yield from (
            (name, value) for value in (0.0, -1.0, float("inf"), float("nan"), 1e-320, 1e30)
        )
    yield from (("prefix_root", value) for value in (0, -2, 1.5, 10**9))  # of memory


@pytest.mark.parametrize(("name", "value"), list(wrong()))
def test_a_knob_out_of_range_is_named(model: Model, name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        made(model, **{name: value})


# The tree model


def test_families_never_split_what_a_session_shares(tree: Model, source: Trace) -> None:
    """K24: more families copy what sessions have in common, and no block of one session alone."""
    plain, turned = made(tree), made(tree, prefix_root=4)
    assert (turned.input_tokens == plain.input_tokens).all()
    common = sum(SYSTEM) + 4  # the agents' prompt
    copied = turned.num_blocks - plain.num_blocks
    assert 0 < copied <= 3 * common
    assert (turned.depth == plain.depth).all()


# The session model


def test_each_session_is_in_one_family(session: Model) -> None:
    """K24: four times the roots never split a session."""
    turned = made(session, prefix_root=4)
    families = family(turned)
    for number in range(turned.session.max() + 1):
        mine = np.flatnonzero(turned.session == number)
        assert len({families[root(turned, i)] for i in mine if turned.depth[i]}) == 1


def family(trace: Trace) -> dict[int, int]:
    """Roots that a session has in common with another are joined: numbers of what holds together."""
    joined = {each: each for each in roots(trace)}

    def top(each: int) -> int:
        while joined[each] != each:
            each = joined[each]
        return each

    first: dict[int, int] = {}
    for i in range(len(trace)):
        if trace.depth[i]:
            other = first.setdefault(int(trace.session[i]), root(trace, i))
            joined[top(root(trace, i))] = top(other)
    return {each: top(each) for each in joined}
