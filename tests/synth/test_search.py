"""Search trees: which order a source was searched in, and new trees that keep more than widths by depth."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.errors import ConfigError
from mallee.synth.baseline.model import fit_tree
from mallee.synth.programs.fit import fit_search
from mallee.synth.programs.forest import Forest, forest_of
from mallee.synth.programs.named import Beam, DepthFirst, Swarm, Uct
from mallee.synth.programs.orders import Order, Search, is_depth_first, recognise
from mallee.synth.programs.rule import Texts
from mallee.synth.session.fit import fit_session
from mallee.traces.read import read_workload
from mallee.traces.trace import Trace, trace_of
from mallee.traces.workload import NO_PARENT, Request, Runs, Workload
from support.examples import examples
from support.public_traces import PUBLIC, needs_public

SHORT = Texts(shared=64, task=32, output=8.0)

rules = st.one_of(
    st.builds(Beam, st.integers(1, 4), st.integers(1, 4), st.just(2.5), st.just(SHORT)),
    st.builds(
        DepthFirst,
        st.integers(1, 40),
        st.integers(1, 6),
        st.floats(0, 1),
        st.just(2.0),
        st.just(SHORT),
    ),
    st.builds(Uct, st.integers(1, 40), st.floats(0, 9), st.just(2.0), st.just(SHORT)),
    st.builds(Swarm, st.integers(1, 6), st.just(SHORT)),
)


def shared_trace(name: str) -> Trace:
    return trace_of(read_workload(PUBLIC / name), block_size=16)


def workload(requests: Sequence[Request], id_tokens: int = 16) -> Workload:
    return Workload("drawn", id_tokens, lambda: iter(requests), has_forks=True)


def tree(
    parents: Sequence[int], *, first: int = 0, at_s: float = 0.0, waits: str = "none"
) -> list[Request]:
    """Requests of one tree over a prompt of 4 blocks, the first two of which all trees share."""
    depth = [0] * len(parents)
    for i, parent in enumerate(parents):
        depth[i] = depth[parent] + 1 if parent >= 0 else 0
    found = []
    for i, parent in enumerate(parents):
        named: list[int] = []
        if waits == "level" and depth[i] > 1:
            named = [j for j in range(len(parents)) if depth[j] == depth[i] - 1]
        elif waits == "visit" and i > 1:
            named = [i - 1]
        is_root = parent == NO_PARENT
        found.append(
            Request(
                number=first + i,
                arrival_s=at_s,
                ids=Runs([(0, 2), (100 + first, 2)]) if is_root else (),
                input_tokens=64 if is_root else 0,
                output_tokens=0 if is_root else 3 + i % 5,
                session=f"t{first}",
                wait_for=tuple(first + j for j in named),
                parent=NO_PARENT if is_root else first + parent,
                num_children=parents.count(i),
            )
        )
    return found


def trees(all_parents: Sequence[Sequence[int]], waits: str) -> Trace:
    requests: list[Request] = []
    for at, parents in enumerate(all_parents):
        requests += tree(parents, first=len(requests), at_s=10.0 * at, waits=waits)
    return trace_of(workload(requests))


def check(requests: Sequence[Request], count: int, id_tokens: int) -> None:
    """Properties of every workload of forks."""
    assert [r.number for r in requests] == list(range(count))
    children = Counter(r.parent for r in requests)
    before: dict[int, int] = {}
    arrival_s = 0.0
    for r in requests:
        assert r.arrival_s >= arrival_s
        arrival_s = r.arrival_s
        assert all(0 <= other < r.number for other in r.wait_for)
        assert NO_PARENT <= r.parent < r.number
        assert r.num_children == children[r.number]
        assert (r.parent == NO_PARENT) or not r.ids
        assert len(r.ids) <= -(-r.input_tokens // id_tokens)
        above = -1
        for name in r.ids:
            assert before.setdefault(name, above) == above, "ids are a prefix tree"
            above = name


# Orders


@pytest.mark.parametrize(
    ("parents", "waits", "found"),
    [
        ([-1, 0, 0, 1, 1], [(), (), (), (1, 2), (1, 2)], (Order.BREADTH, True)),
        ([-1, 0, 1, 0], [(), (), (1,), (2,)], (Order.DEPTH, True)),
        ([-1, 0, 0, 1, 2], [(), (), (1,), (2,), (3,)], (Order.BEST, True)),
        ([-1, 0, 0, 1, 1], [(), (0,), (0,), (1,), (1,)], (Order.BREADTH, False)),
        ([-1, 0, 1, 0], [(), (), (), ()], (Order.DEPTH, False)),
        ([-1, 0, 0, 1, 2], [(), (), (), (), ()], (Order.BREADTH, False)),
        ([-1, 0, 0, 1, 0, 2], [(), (), (), (), (), ()], (Order.FREE, False)),
        ([-1, 0, 0, 0], [(), (), (), ()], None),
        ([-1, 0, 0, 1, 1, 2, 2], [(), (), (), (1, 2), (1, 2), (3, 4), (3, 4)],
         (Order.BEST, True, (0, 1, 3, 5))),
        ([-1, 0, 0, 1, 1, 2], [(), (), (), (1, 2), (1, 2), (3, 4)],
         (Order.BEST, True, (0, 1, 3, 5))),
        ([-1, 0, 0, 1], [(), (), (), (2, 0)], (Order.RECORDED, False)),
        ([-1, -1, 0], [(), (0,), (1,)], (Order.RECORDED, False)),
    ],
)  # fmt: skip
def test_the_order_of_a_search_is_told_by_its_waits_or_its_visits(
    parents: list[int], waits: list[tuple[int, ...]], found: tuple[Any, ...] | None
) -> None:
    """K25: breadth, depth and best first, batches of it, and what is none of them."""
    assert recognise(parents, waits) == (None if found is None else Search(*found))


def test_a_tree_that_suits_several_orders_is_taken_for_what_most_are() -> None:
    star, bushy = [-1, 0, 0, 0], [-1, 0, 1, 0, 3]
    assert set(forest_of(trees([bushy, star, bushy], "none")).order) == {Order.DEPTH}
    assert set(forest_of(trees([star, star], "none")).order) == {Order.FREE}


@pytest.mark.parametrize(("waits", "order"), [("level", Order.BREADTH), ("visit", Order.DEPTH)])
def test_trees_of_agents_become_programs(waits: str, order: Order) -> None:
    """K25: each stage on a hand-drawn forest: programs, depths, what is added, prompts."""
    shapes = [[-1, 0, 1, 1, 0], [-1, 0, 1]] if waits == "visit" else [[-1, 0, 0, 1], [-1, 0, 1]]
    forest = forest_of(trees(shapes, waits))
    assert forest.sizes.tolist() == [len(shape) for shape in shapes]
    assert forest.order[0] == order
    assert forest.nodes.parent.tolist()[: len(shapes[0])] == shapes[0]
    assert forest.nodes.depth.tolist()[-3:] == [0, 1, 2]
    assert forest.nodes.added_tokens.tolist()[-3:] == [64, 0, 0]
    assert forest.begin_s.tolist() == [0.0, 10.0]
    assert forest.prompts.num_blocks.tolist() == [2, 0, 2, 2]  # lasting, passing, own
    assert [sum(run.num for run in forest.prompts.runs(i)) for i in (0, 1)] == [4, 4]


# What comes out


@examples(40)
@given(rules, st.integers(1, 150), st.integers(0, 99))
def test_generated_programs_are_sound_and_searched_as_their_source(
    rule: Beam | DepthFirst | Uct | Swarm, count: int, seed: int
) -> None:
    """K25: whatever the source: so many requests, each after whom it waits for, in a prefix tree."""
    source = rule.generate(requests=120, seed=seed)
    check(list(source), 120, source.id_tokens)
    trace = trace_of(source)
    model = fit_search(trace)
    made = model.generate(requests=count, seed=seed)
    requests = list(made)
    check(requests, count, made.id_tokens)
    assert requests == list(made)
    again = forest_of(trace_of(made))
    whole = again.sizes[:-1] > 1
    kinds = {tuple(k) for k in np.stack([model.forest.order, model.forest.has_waits], 1).tolist()}
    found = np.stack([again.order, again.has_waits], 1)[:-1][whole]
    unclear = {(order, False) for order in (Order.FREE, Order.BREADTH, Order.DEPTH)}
    if (Order.BEST, True) in kinds:
        unclear.add((Order.DEPTH, True))  # as the best may be by chance
    assert {tuple(k) for k in found.tolist()} <= kinds | unclear


def test_one_round_uses_each_node_once() -> None:
    """K25: lengths and widths by depth are exactly the source's."""
    trace = trace_of(Beam(texts=SHORT).generate(requests=2000, seed=3))
    source = forest_of(trace)
    made = forest_of(trace_of(fit_search(trace).generate(requests=2000, seed=5)))
    for depth in range(int(source.nodes.depth.max()) + 1):
        sides = []
        for forest in (source, made):
            width = widths(forest)
            at = forest.nodes.depth == depth
            sides.append((sorted(width[at]), sorted(forest.nodes.output_tokens[at])))
        assert sides[0] == sides[1]


def test_other_seeds_make_other_trees_and_none_is_a_copy() -> None:
    trace = trace_of(DepthFirst(texts=SHORT).generate(requests=3000, seed=3))
    model = fit_search(trace)

    def shapes(forest: Forest) -> set[tuple[int, ...]]:
        parts = np.split(forest.nodes.parent, forest.starts[1:-1])
        return {tuple((p - p[0]).tolist()) for p in parts if len(p) > 20}

    one, other = (
        shapes(forest_of(trace_of(model.generate(requests=3000, seed=s)))) for s in (1, 2)
    )
    assert not one & shapes(model.forest)
    assert len(one & other) < 0.1 * len(one)


def test_a_recorded_program_keeps_its_shape() -> None:
    """Requests of a session, a join of two forks and a second root: kept as they are."""
    first, second = Runs([(0, 3)]), Runs([(0, 3), (9, 2)])
    source = [
        Request(0, 0.0, first, 48, 5, "s", num_children=2),
        Request(1, 1.0, (), 4, 5, "s", parent=0),
        Request(2, 1.5, (), 6, 7, "s", parent=0),
        Request(3, 4.0, second, 80, 9, "s", wait_for=(1, 2), tool_wait_s=2.5),
    ]
    made = list(fit_search(trace_of(workload(source))).generate(requests=8, seed=1))
    check(made, 8, 16)
    runs = [[r for r in made if r.session == name] for name in ("p0", "p1")]
    for run in runs:
        numbers = [r.number for r in run]
        assert [numbers.index(r.parent) for r in run if r.parent >= 0] == [0, 0]
        assert [numbers.index(w) for w in run[3].wait_for] == [1, 2]
        assert run[3].tool_wait_s == 2.5
        assert [round(r.arrival_s - run[0].arrival_s, 6) for r in run] == [0.0, 1.0, 1.5, 4.0]
        assert list(run[3].ids)[:3] == list(run[0].ids)
        assert [r.input_tokens for r in run] == [48, 4, 6, 80]
    assert not set(runs[0][3].ids) & set(runs[1][3].ids)


def test_text_that_programs_share_lasts_or_passes() -> None:
    """K22, part: instructions stay for ever, a project's text for a round; hit rates don't drift."""
    requests: list[Request] = []
    for group in range(10):
        for _ in range(4):
            first = len(requests)
            ids = Runs([(0, 4), (1000 + 100 * group, 3), (5000 + 10 * first, 2)])
            at_s = 10.0 * first
            requests.append(Request(first, at_s, ids, 9 * 16 + 5, 0, num_children=1))
            requests.append(Request(first + 1, at_s, (), 0, 8, parent=first))
    trace = trace_of(workload(requests))
    model = fit_search(trace)
    assert model.forest.prompts.num_blocks[:2].tolist() == [4, 30]
    made = list(model.generate(requests=160, seed=1))
    roots = [list(r.ids) for r in made if r.ids]
    assert {tuple(r[:4]) for r in roots} == {(0, 1, 2, 3)}
    projects = Counter(tuple(r[4:7]) for r in roots)
    assert sorted(projects.values()) == [4] * 20
    rates = []
    for times in (1, 4, 16):
        flat = trace_of(model.generate(requests=80 * times, seed=2)).blocks
        rates.append(1 - len(set(flat.tolist())) / len(flat))
    assert max(rates) - min(rates) < 0.02


def test_nothing_to_learn_from_is_refused() -> None:
    for fit in (fit_search, fit_session, fit_tree):
        with pytest.raises(ConfigError, match="no requests to learn from"):
            fit(trace_of(workload([])))
    model = fit_search(trees([[-1, 0, 0]], "none"))
    with pytest.raises(ConfigError, match="requests=0: give at least one"):
        model.generate(requests=0, seed=0)


# Second order


def widths(forest: Forest) -> npt.NDArray[np.int64]:
    """Children of each node."""
    parent = forest.nodes.parent
    return np.bincount(parent[parent >= 0], minlength=len(parent))


def markov(forest: Forest, seed: int) -> list[list[int]]:
    """Parents of as many trees by the baseline: each node's width drawn from those at its depth."""
    rng = np.random.default_rng(seed)
    width = widths(forest)
    by_depth = [width[forest.nodes.depth == d] for d in range(int(forest.nodes.depth.max()) + 1)]
    made = []
    most = 3 * int(forest.sizes.max())
    for _ in range(forest.num_programs):
        parents, level = [-1], [0]
        for choices in by_depth:
            following = []
            for node in level:
                for _ in range(int(rng.choice(choices))):
                    following.append(len(parents))
                    parents.append(node)
            level = following[:most]
        made.append(parents)
    return made


def of(forest: Forest) -> list[list[int]]:
    parts = np.split(forest.nodes.parent, forest.starts[1:-1])
    return [np.where(p < 0, -1, p - begin).tolist() for p, begin in zip(
        parts, forest.starts[:-1], strict=True)]  # fmt: skip


def second_order(all_parents: Sequence[Sequence[int]]) -> dict[str, float]:
    """Correlation of widths with their parents' outcome, and variation of whole trees."""
    mine: list[int] = []
    above: list[int] = []
    tried: list[int] = []
    sizes: list[int] = []
    levels: list[int] = []
    for parents in all_parents:
        width = np.bincount([p for p in parents if p >= 0], minlength=len(parents))
        depth = [0] * len(parents)
        for i, p in enumerate(parents[1:], 1):
            depth[i] = depth[p] + 1
        expanded = Counter(p for i, p in enumerate(parents) if p >= 0 and width[i])
        for i, p in enumerate(parents):
            if p >= 0 and width[i]:
                mine.append(int(width[i]))
                above.append(int(width[p]))
                tried.append(expanded[p])
        sizes.append(len(parents))
        levels += np.bincount([d for i, d in enumerate(depth) if width[i] and d]).tolist()[1:]
    return {
        "width, parent's width": float(np.corrcoef(mine, above)[0, 1]),
        "width, siblings expanded": float(np.corrcoef(mine, tried)[0, 1]),
        "expanded per level": float(np.std(levels) / np.mean(levels)),
        "size of trees": float(np.std(sizes) / np.mean(sizes)),
    }


@pytest.mark.slow
@needs_public
@pytest.mark.parametrize("name", ["tot_game24_trees.jsonl.gz", "tot_crosswords_dfs.jsonl.gz"])
def test_second_order_statistics_are_kept_better_than_by_a_markov_baseline(name: str) -> None:
    """K25, X9, part: child width given what became of the parent and its siblings; beams and budgets."""
    trace = shared_trace(name)
    model = fit_search(trace)
    source = second_order(of(model.forest))
    errors: dict[str, list[npt.NDArray[np.float64]]] = {}
    for seed in range(8):
        made = forest_of(trace_of(model.generate(requests=len(trace), seed=seed)))
        ours, theirs = second_order(of(made)), second_order(markov(model.forest, seed))
        for what, value in source.items():
            pair = np.abs(np.array([ours[what], theirs[what]]) - value)
            errors.setdefault(what, []).append(pair)
    medians = {what: np.median(pairs, axis=0) for what, pairs in errors.items()}
    for what, (ours_is, theirs_is) in medians.items():
        assert ours_is <= max(0.06, 0.1 * source[what]), (what, source[what], ours_is, theirs_is)
        assert ours_is < theirs_is, (what, source[what], ours_is, theirs_is)


@needs_public
@pytest.mark.parametrize("name", ["tot_game24_trees.jsonl.gz", "tot_crosswords_dfs.jsonl.gz"])
def test_beams_and_budgets_of_real_searches_hold(name: str) -> None:
    """K25: five nodes of each level are expanded, and searches stop at a hundred visits."""
    model = fit_search(shared_trace(name))
    made = forest_of(trace_of(model.generate(requests=3000, seed=1)))
    whole = made.sizes[:-1]
    if model.forest.order[0] == Order.DEPTH:
        assert made.sizes.max() == model.forest.sizes.max() == 101
        assert np.mean(whole == 101) >= 0.85
        assert all(is_depth_first(parents) for parents in of(made))
    else:
        width = widths(made)
        for depth in (1, 2, 3):
            at = (made.nodes.depth == depth) & (width > 0)
            per_tree = np.bincount(made.program[at], minlength=made.num_programs)[:-1]
            assert np.mean(per_tree == 5) >= 0.95
