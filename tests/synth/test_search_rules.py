"""Programs by rules (beams, depth first, UCT, swarms), and knobs on models of them."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import pytest

from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.replay.run import replay
from mallee.synth.core.knobs import Knobs
from mallee.synth.core.pace import service_s
from mallee.synth.programs.fit import fit_search
from mallee.synth.programs.named import PROGRAMS, Beam, DepthFirst, Swarm, Uct, uct_tree
from mallee.synth.programs.orders import Order, depths_of
from mallee.synth.programs.rule import Texts
from mallee.traces.trace import trace_of
from mallee.traces.workload import NO_PARENT, Request, Workload

SHORT = Texts(shared=64, task=32, output=20.0)


def by_program(requests: Sequence[Request]) -> list[list[Request]]:
    found: dict[str, list[Request]] = defaultdict(list)
    for request in requests:
        found[request.session].append(request)
    return list(found.values())


def widths(requests: Sequence[Request], cls: str = "node") -> list[int]:
    """Children of each class, of requests that have any."""
    counts = Counter(r.parent for r in requests if r.cls == cls and r.parent != NO_PARENT)
    return list(counts.values())


# Rules


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_programs_are_made_as_often_as_asked_and_replay(name: str) -> None:
    """K25, part, K26, part: any number of requests, the same each time; the mocker answers them all."""
    made = PROGRAMS[name].generate(requests=230, seed=4)
    requests = list(made)
    assert len(requests) == 230
    assert requests == list(made)
    assert requests != list(PROGRAMS[name].generate(requests=230, seed=5))
    assert all(r.num_children == sum(o.parent == r.number for o in requests) for r in requests)
    result = replay(made, ReplayConfig(engines=2, kv_tokens=65_536, keeps_order=True))
    assert result.summary["requests"] == 230


def test_a_beam_expands_so_many_nodes_of_each_level() -> None:
    """K25."""
    rule = Beam(beam=3, levels=4, texts=SHORT)
    for tree in by_program(list(rule.generate(requests=900, seed=2)))[:-1]:
        depth = dict(zip([r.number for r in tree], depths_of(parents(tree)), strict=True))
        assert max(depth.values()) == 4
        expanded = Counter(depth[p] for p in {r.parent for r in tree if r.parent >= 0})
        assert all(expanded[level] == 3 or level == 0 for level in range(2, 4))
        level = {d: {n for n in depth if depth[n] == d} for d in range(5)}
        assert all(set(r.wait_for) == level[depth[r.number] - 1] for r in tree if r.number in
                   level[2] | level[3] | level[4])  # fmt: skip


def parents(tree: Sequence[Request]) -> list[int]:
    place = {r.number: i for i, r in enumerate(tree)}
    return [place[r.parent] if r.parent >= 0 else -1 for r in tree]


def test_a_depth_first_search_stops_at_its_budget() -> None:
    """K25."""
    rule = DepthFirst(budget=30, levels=6, follow=0.8, texts=SHORT)
    trees = by_program(list(rule.generate(requests=600, seed=2)))[:-1]
    assert Counter(len(tree) for tree in trees).most_common(1)[0][0] == 31
    assert max(len(tree) for tree in trees) == 31
    assert max(max(depths_of(parents(tree))) for tree in trees) <= 6


# UCT


def oracle(widths: Sequence[int], steps: Sequence[float], c: float) -> list[int]:
    """UCT written down plainly: all sums anew at each visit."""
    parents, values = [-1], [0.0]

    def below(node: int) -> list[int]:
        """The node and all nodes below it."""
        own = [i for i, parent in enumerate(parents) if parent == node]
        return [node, *(i for child in own for i in below(child))]

    def bound(node: int) -> float:
        visits = len(below(node))
        mean = sum(values[i] for i in below(node)) / visits
        return mean + c * math.sqrt(math.log(len(below(parents[node]))) / visits)

    for new in range(1, len(widths)):
        at = 0
        while parents.count(at) >= widths[at]:
            at = max((i for i, parent in enumerate(parents) if parent == at), key=bound)
        parents.append(at)
        values.append(values[at] + steps[new])
    return parents


@pytest.mark.parametrize("exploration", [0.0, 0.5, 2.0, 30.0])
def test_uct_is_what_it_says(exploration: float) -> None:
    """K25: the search against a plain one."""
    rng = np.random.default_rng(3)
    for _ in range(3):
        widths = (1 + rng.poisson(1.5, 60)).tolist()
        steps = rng.standard_normal(60).tolist()
        found = uct_tree(np.array(widths), np.array(steps), exploration).tolist()
        assert found == oracle(widths, steps, exploration)


def search_shape(requests: Sequence[Request]) -> dict[str, float]:
    """Figures of a best-first search: depth, skew, distance of visits, width given the parent's."""
    trees = [parents(tree) for tree in by_program(requests)]
    jumps, mine, above, depths, shares = [], [], [], [], []
    for tree in trees:
        depth = depths_of(tree)
        depths += depth
        width = np.bincount([p for p in tree if p >= 0], minlength=len(tree))
        jumps += [abs(depth[i] - depth[i - 1]) for i in range(2, len(tree))]
        for i, p in enumerate(tree):
            if p >= 0 and width[i]:
                mine.append(width[i])
                above.append(width[p])
        below = [1] * len(tree)
        for i in range(len(tree) - 1, 0, -1):
            below[tree[i]] += below[i]
        shares.append(max(below[i] for i, p in enumerate(tree) if p == 0) / len(tree))
    return {
        "depth": float(np.mean(depths)),
        "deepest tenth": float(np.percentile(depths, 90)),
        "jump": float(np.mean(jumps)),
        "width given parent's": float(np.corrcoef(mine, above)[0, 1]),
        "share of the best branch": float(np.mean(shares)),
    }


def test_a_search_by_bounds_is_generated_in_kind() -> None:
    """K25: visits stay best first, one after the other; depth, skew and jumps are kept."""
    source = Uct(visits=80, exploration=8.0, width=3.0, texts=SHORT).generate(
        requests=30 * 81, seed=11
    )
    trace = trace_of(source)
    model = fit_search(trace)
    assert set(model.forest.order) == {Order.BEST}
    assert model.forest.has_waits.all()
    assert len(set(model.forest.nodes.batch)) == len(trace)
    before = search_shape(list(source))
    found = defaultdict(list)
    for seed in range(4):
        made = list(model.generate(requests=len(trace), seed=seed))
        for tree in by_program(made):
            before_it = zip(tree[2:], tree[1:], strict=False)
            assert all(r.wait_for == (other.number,) for r, other in before_it)
        for what, value in search_shape(made).items():
            found[what].append(value)
    for what, values in found.items():
        bars = {"jump": 0.25 * before[what], "width given parent's": 0.1}
        bar = bars.get(what, 0.05 * before[what])
        assert abs(np.median(values) - before[what]) <= bar, (what, before[what], values)


# Swarms


def test_a_join_waits_for_all_and_goes_on_from_the_first() -> None:
    """K25."""
    rule = Swarm(width=6, texts=SHORT)
    for swarm in by_program(list(rule.generate(requests=400, seed=1)))[:-1]:
        branches = [r for r in swarm if r.cls == "branch"]
        (join,) = (r for r in swarm if r.cls == "join")
        answers = {r.number: r.output_tokens for r in branches}
        assert len(branches) == 6
        assert {r.parent for r in branches} == {swarm[0].number}
        assert set(join.wait_for) == set(answers)
        assert answers[join.parent] == min(answers.values())
        ends_s = [r.arrival_s + service_s(0, r.output_tokens) for r in branches]
        assert join.arrival_s >= max(ends_s)


# Knobs


def turned(workload: Workload, **knobs: float) -> tuple[list[Request], list[Request]]:
    """Workloads of its model without and with the knobs."""
    model = fit_search(trace_of(workload))
    count = sum(1 for _ in workload)
    made = [
        list(model.generate(requests=count, seed=3, knobs=Knobs(**each)))  # type: ignore[arg-type]
        for each in ({}, knobs)
    ]
    return made[0], made[1]


BEAMS = Beam(beam=2, levels=3, texts=Texts(shared=64, task=32, step=6, output=20.0))


def test_answers_texts_of_forks_and_gaps_are_turned_alone() -> None:
    """K24: osl x3 triples means, prompt_len is of what a request has for itself, and speed halves gaps."""
    source = BEAMS.generate(requests=600, seed=1)
    plain, longer = turned(source, osl=3.0)
    assert sum(r.output_tokens for r in longer) == 3 * sum(r.output_tokens for r in plain)
    plain, longer = turned(source, prompt_len=2.0)
    assert [r.input_tokens for r in plain if r.ids] == [r.input_tokens for r in longer if r.ids]
    assert {r.input_tokens for r in longer if not r.ids} == {12}
    plain, faster = turned(BEAMS.generate(requests=3000, seed=1), speedup=2.0)
    assert [r.arrival_s / 2 for r in plain] == pytest.approx([r.arrival_s for r in faster])


def test_a_prefix_twice_as_long_doubles_shared_blocks() -> None:
    """K24."""
    for by, blocks in ((2.0, 12), (0.5, 3), (1.5, 9)):
        plain, longer = turned(BEAMS.generate(requests=600, seed=1), prefix_len=by)
        assert {len(r.ids) for r in plain if r.ids} == {6}
        assert {len(r.ids) for r in longer if r.ids} == {blocks}
        assert {r.input_tokens for r in longer if r.ids} == {16 * blocks}
        common = set.intersection(*(set(r.ids) for r in longer if r.ids))
        assert len(common) == round(4 * by)
        rest = [[r.input_tokens for r in side if not r.ids] for side in (plain, longer)]
        assert sum(rest[0]) == sum(rest[1])


def test_four_times_the_roots_are_four_families_and_split_no_program() -> None:
    """K24."""
    plain, families = turned(BEAMS.generate(requests=600, seed=1), prefix_root=4)
    assert len({r.ids[0] for r in plain if r.ids}) == 1
    assert len({r.ids[0] for r in families if r.ids}) == 4
    seen: dict[int, int] = {}
    for r in families:
        for name in r.ids:
            assert seen.setdefault(name, r.ids[0]) == r.ids[0]
    assert [len(p) for p in by_program(plain)] == [len(p) for p in by_program(families)]
