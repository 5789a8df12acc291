"""The tree model, stage by stage, on a trace drawn by hand.

Blocks of 4 tokens; numbers are those of the trace:

    (empty) -+- 0 - 1 -+- 2 -+- 3 -+- 9
             |         |     |     `- (end)
             |         |     `- 4
             |         +- 5
             |         `- (end)
             +- 6
             `- 7 - 8 - (end), twice
"""

from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.errors import ConfigError
from mallee.synth.baseline.arrivals import Bursts, arrivals, fit_bursts
from mallee.synth.baseline.core import Core, core_of, owners, shared_depths
from mallee.synth.baseline.layout import Layout, lay_out
from mallee.synth.baseline.model import TreeModel, fit_tree
from mallee.synth.baseline.stops import FIXED, PROMPT, REST, TAIL, fit_stops
from mallee.synth.core.knobs import Knobs
from mallee.synth.core.prefix_tree import PrefixTree
from mallee.synth.core.streams import places, scaled, stream
from mallee.traces.trace import Rule, Trace, trace_of
from mallee.traces.workload import Request, Workload
from support.examples import examples

SIZE = 4
PATHS = ([0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 5], [0, 1], [6], [7, 8], [7, 8], [0, 1, 2, 3, 9])


def trace(
    paths: "tuple[list[int], ...]" = PATHS,
    tokens: "list[int] | None" = None,
    *,
    arrivals: "list[float] | None" = None,
    sessions: "list[str] | None" = None,
    rule: Rule = "auto",
) -> Trace:
    """Requests with these blocks, whole ones unless `tokens` says otherwise, a second apart."""
    sizes = [SIZE * len(path) for path in paths] if tokens is None else tokens
    times = [float(i) for i in range(len(paths))] if arrivals is None else arrivals
    names = [""] * len(paths) if sessions is None else sessions
    requests = [
        Request(i, at, ids, size, 10 + i, session=name)
        for i, (at, ids, size, name) in enumerate(zip(times, paths, sizes, names, strict=True))
    ]
    return trace_of(Workload("drawn", SIZE, lambda: iter(requests)), rule=rule)


def learned(source: Trace) -> tuple[Core, "np.ndarray[tuple[int], np.dtype[np.int32]]"]:
    tree = PrefixTree.of(source)
    return core_of(source, tree, shared_depths(source, tree))


# Stages


def test_blocks_of_one_request_alone_are_stripped() -> None:
    """K22: leaves that were visited once are not shared."""
    source = trace()
    tree = PrefixTree.of(source)
    assert tree.visits.tolist() == [5, 5, 3, 2, 1, 1, 1, 2, 2, 1]
    assert shared_depths(source, tree).tolist() == [4, 3, 2, 2, 0, 2, 2, 4]


def test_chains_become_one_node() -> None:
    """K22: unary chains are merged; where a request ends or leaves, a node ends."""
    core, nodes = learned(trace())
    assert core.parents.tolist() == [-1, 0, 1, 2, 0]  # (empty), 0-1, 2, 3, 7-8
    assert core.lengths.tolist() == [0, 2, 1, 1, 2]
    assert core.visits.tolist() == [8, 5, 3, 2, 2]
    assert nodes.tolist() == [3, 2, 1, 1, 0, 4, 4, 3]


def test_stops_are_ends_and_cache_ends() -> None:
    """K22, K23: rule "floor"; of each stop its node and kind, of its own text the tokens."""
    tokens = [18, 17, 15, 8, 7, 9, 10, 22]
    source = trace(PATHS, tokens)
    _, nodes = learned(source)
    stops, own = fit_stops(source, nodes, shared_depths(source, PrefixTree.of(source)))
    rows = list(zip(stops.nodes.tolist(), stops.kinds.tolist(), strict=True))
    once = [(0, PROMPT), (1, TAIL), (1, REST), (2, TAIL), (3, TAIL), (3, REST)]
    assert rows == [*once, (4, REST), (4, REST)]
    first, tails, rests, end = own.starts
    assert own.tokens[first:tails].tolist() == [7]
    assert own.tokens[tails:rests].tolist() == [17 - 12, 15 - 8, 22 - 16]
    assert own.tokens[rests:end].tolist() == [18 - 16, 8 - 8, 9 - 8, 10 - 8]
    assert own.has_ids.all()


def test_a_shared_partial_block_keeps_its_tokens() -> None:
    """K22: rule "ceil": two requests with the same whole prompt share its last, partial block."""
    source = trace(([0, 1], [0, 1], [0, 2, 3], [4]), [6, 6, 11, 3])
    assert source.rule == "ceil"
    _, nodes = learned(source)
    stops, own = fit_stops(source, nodes, shared_depths(source, PrefixTree.of(source)))
    rows = list(
        zip(*(x.tolist() for x in (stops.nodes, stops.kinds, stops.last_tokens)), strict=True)
    )
    assert rows == [(0, PROMPT, 0), (1, TAIL, 0), (2, FIXED, 2), (2, FIXED, 2)]
    assert own.tokens.tolist() == [3, 7]
    made = list(fit_tree(source).generate(requests=400, seed=1))
    ends = {tuple(r.ids): r.input_tokens for r in made if r.input_tokens == 6}
    assert list(ends.values()) == [6]  # one prompt, two blocks
    assert {len(r.ids) for r in made} == {1, 2, 3}
    assert all(len(r.ids) == -(-r.input_tokens // SIZE) for r in made)


def test_text_without_ids_stays_without() -> None:
    source = trace(([], [], []), [9, 300, 2])
    made = list(fit_tree(source).generate(requests=50, seed=1))
    assert {r.input_tokens for r in made} == {9, 300, 2}
    assert all(not r.ids for r in made)


def test_sessions_own_what_nobody_else_has() -> None:
    names = ["a", "a", "b", "b", "c", "d", "d", "a"]
    core, nodes = learned(trace())
    source = trace(sessions=names)
    assert owners(core, nodes, source.session).tolist() == [-1, -1, 0, 0, 3]


def test_bursts_and_gaps() -> None:
    bursts = fit_bursts(np.array([0.0, 0.0, 1.0, 4.0, 4.0, 4.0]))
    assert bursts.sizes.tolist() == [2, 1, 3]
    assert bursts.gaps_s.tolist() == [1.0, 3.0]


# Walks


def test_walks_stop_as_often_as_the_source_did() -> None:
    """K23: drawn frequencies against exact chances, to five standard deviations."""
    model = fit_tree(trace())
    num_shared = int(model.core.lengths.sum())
    paths = Counter(
        tuple(i for i in r.ids if i < num_shared) for r in model.generate(requests=80_000, seed=3)
    )
    expected = 80_000 * np.array([1, 1, 2, 2, 2]) / 8  # by node in which requests stopped
    assert (np.abs(sorted(paths.values()) - expected) < 5 * np.sqrt(expected)).all()


# Streams


def test_streams_are_independent() -> None:
    """K23: the same seed under two names ties nothing (datagen's tails and rests were one)."""
    one, other = stream(0, "own text").random(20_000), stream(0, "answers").random(20_000)
    ranks = [np.argsort(np.argsort(each)) for each in (one, other)]
    assert abs(np.corrcoef(*ranks)[0, 1]) < 0.03
    assert stream(0, "a").random(3).tolist() == stream(0, "a").random(3).tolist()
    assert stream(0, "a").random(3).tolist() != stream(1, "a").random(3).tolist()


@pytest.mark.parametrize("seed", [-1, 1 << 64])
def test_a_seed_out_of_range_is_named(seed: int) -> None:
    with pytest.raises(ConfigError, match=f"seed {seed}"):
        fit_tree(trace()).generate(requests=1, seed=seed)


@given(st.integers(1, 1 << 40), st.integers(0, 50))
def test_places_are_in_range(among: int, seed: int) -> None:
    drawn = places(stream(seed, "x"), 100, among)
    assert drawn.min() >= 0
    assert drawn.max() < among


@given(st.lists(st.integers(0, 10_000), max_size=50), st.floats(0.01, 20.0))
def test_rounding_is_up_or_down(values: list[int], factor: float) -> None:
    drawn = scaled(np.array(values, np.int64), factor, stream(1, "x"))
    assert all(abs(d - v * factor) < 1 for d, v in zip(drawn.tolist(), values, strict=True))


def test_rounding_keeps_the_mean() -> None:
    drawn = scaled(np.full(100_000, 3), 1.1, stream(1, "x"))
    assert drawn.mean() == pytest.approx(3.3, abs=0.01)


# Layout


def paths(core: Core, layout: Layout) -> list[list[int]]:
    """Ids of each node's path in family 0, by adding up segments one by one."""
    found: list[list[int]] = []
    for node, parent in enumerate(core.parents.tolist()):
        first = int(layout.firsts[node])
        own = list(range(first, first + int(layout.lengths[node])))
        found.append((found[parent] if parent >= 0 else []) + own)
    return found


@st.composite
def cores(draw: st.DrawFn) -> Core:
    num = draw(st.integers(1, 12))
    parents = [-1] + [draw(st.integers(0, i)) for i in range(num - 1)]
    lengths = [0] + [draw(st.integers(1, 4)) for _ in range(num - 1)]
    stops = np.array([draw(st.integers(1, 3)) for _ in range(num)])
    for i in range(num - 1, 0, -1):
        stops[parents[i]] += stops[i]
    return Core(np.array(parents, np.int32), np.array(lengths, np.int32), stops.astype(np.int64))


@given(cores(), st.sampled_from([0.3, 1.0, 1.5, 2.0]), st.integers(1, 3), st.integers(0, 9))
def test_runs_are_the_path(core: Core, stretch: float, families: int, seed: int) -> None:
    owner = np.full(len(core), -1, np.int32)
    layout = lay_out(core, owner, stretch=stretch, families=families, seed=seed)
    whole = paths(core, layout)
    assert sorted({i for path in whole for i in path}) == list(range(layout.num_blocks))
    for node, path in enumerate(whole):
        assert layout.depths[node] == len(path)
        for family in range(families):
            runs = layout.runs(node, family)
            ids = [first + i for first, count in runs for i in range(count)]
            assert ids == [family * layout.num_blocks + i for i in path]


# Arrivals


def test_arrivals_are_bursts_and_gaps_of_the_source() -> None:
    bursts = Bursts(np.array([1, 1, 5, 2]), np.array([0.1, 3.0, 0.7]))
    times, sizes = np.unique(
        list(islice(arrivals(bursts, seed=3, speedup=1.0), 5000)), return_counts=True
    )
    assert times[0] == 0.0
    assert set(sizes[:-1].tolist()) == {1, 2, 5}
    assert set(np.round(np.diff(times), 6).tolist()) == {0.1, 3.0, 0.7}
    assert np.mean(np.diff(times)) == pytest.approx(3.8 / 3, rel=0.1)


def test_all_at_one_time_stay_at_one_time() -> None:
    source = trace(arrivals=[0.0] * 8)
    made = fit_tree(source).generate(requests=50, seed=0)
    assert {r.arrival_s for r in made} == {0.0}


# The whole model


def rows(workload: Workload) -> list[tuple[object, ...]]:
    return [
        (r.number, r.arrival_s, tuple(r.ids), r.input_tokens, r.output_tokens) for r in workload
    ]


def test_a_longer_workload_begins_like_a_shorter_one() -> None:
    """K23: draws don't depend on how many requests are asked for."""
    model = fit_tree(trace(tokens=[18, 17, 15, 8, 7, 9, 10, 22]))
    knobs = Knobs(prefix_len=1.5, prefix_root=2, prompt_len=1.3, osl=0.7)
    long = rows(model.generate(requests=9000, seed=5, knobs=knobs))
    assert rows(model.generate(requests=700, seed=5, knobs=knobs)) == long[:700]
    again = model.generate(requests=9000, seed=5, knobs=knobs)
    assert rows(again) == rows(again) == long
    assert rows(model.generate(requests=700, seed=6, knobs=knobs)) != long[:700]


prompts = st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=12)


def chained(texts: list[list[int]]) -> "tuple[list[int], ...]":
    """Ids of blocks with such contents, prefix-chained."""
    names: dict[tuple[int, ...], int] = {}
    return tuple(
        [names.setdefault(tuple(text[: i + 1]), len(names)) for i in range(len(text))]
        for text in texts
    )


@examples(60)
@given(prompts, st.lists(st.integers(1, 3), min_size=12, max_size=12), st.booleans())
def test_one_by_one_the_source_comes_out(
    texts: list[list[int]], extra: list[int], is_ceil: bool
) -> None:
    """K22, K23: each request of any source is among those that its model makes, by its shape.

    What a shape is: shared blocks, tokens of the shared part's last block, own blocks and tokens.
    """
    ids = chained(texts)
    if is_ceil:  # the last block of each is partial; alike prompts are alike there
        tokens = [SIZE * len(path) - 3 + sum(path) % 3 for path in ids]
        tokens = [max(1, each) for each in tokens]
    else:
        tokens = [SIZE * len(path) + more for path, more in zip(ids, extra, strict=False)]
    source = trace(ids, tokens)
    model = fit_tree(source)
    made = trace_of(model.generate(requests=600, seed=2), rule=source.rule)
    PrefixTree.of(made)
    assert set(made.input_tokens.tolist()) >= shapes_of_ends(source, model)
    floor = made.input_tokens // SIZE
    expected = floor if source.rule == "floor" else -(-made.input_tokens // SIZE)
    assert (made.depth == expected).all()


def shapes_of_ends(source: Trace, model: TreeModel) -> set[int]:
    """Lengths of prompts that have nothing of their own with "ceil": those must come out exactly."""
    fixed = model.stops.kinds == FIXED
    depths = lay_out(model.core, model.owners, stretch=1.0, families=1, seed=0).depths
    last = depths[model.stops.nodes[fixed]] - 1
    return set((last * source.block_size + model.stops.last_tokens[fixed]).tolist())


def test_nothing_but_shared_prompts() -> None:
    """K22: with "ceil", prompts that are all shared to their last block leave no tails to learn."""
    made = list(fit_tree(trace(([0, 1], [0, 1]), [6, 6])).generate(requests=9, seed=0))
    assert {(tuple(r.ids), r.input_tokens) for r in made} == {((0, 1), 6)}


def test_a_partial_block_that_shrinks_away_is_shared_no_more() -> None:
    """K24: its tokens stay, but as text of the request's own."""
    model = fit_tree(trace(([0], [0]), [3, 3]))
    made = list(model.generate(requests=9, seed=0, knobs=Knobs(prefix_len=1e-9)))
    assert [(len(r.ids), r.input_tokens) for r in made] == [(1, 3)] * 9
    assert len({r.ids[0] for r in made}) == 9


def test_prompts_without_ids_get_none_by_growing() -> None:
    """K24."""
    model = fit_tree(trace(([], []), [3, 3]))
    made = list(model.generate(requests=9, seed=0, knobs=Knobs(prompt_len=4.0)))
    assert [(len(r.ids), r.input_tokens) for r in made] == [(0, 12)] * 9
