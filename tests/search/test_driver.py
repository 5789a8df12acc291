"""Properties of all policies on random games, the driver's rules, and what values texts."""

import math
from hashlib import blake2b
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.errors import InternalError, InvalidParameter, MalleeError
from mallee.search.drawn import Drawn, Ends, proposal_of
from mallee.search.driver import Expand, Score, Search, derived_seed
from mallee.search.policies.depth_first import DepthFirst
from mallee.search.policies.levels import Beam, BreadthFirst, DiverseTrees
from mallee.search.policies.mcts import Mcts
from mallee.search.policies.named import read_policy
from mallee.search.policies.sampling import BestOfN, SelfConsistency
from mallee.search.policy import MAX_WIDTH, Expansion, Policy, SearchBudget
from mallee.search.results import SearchResult
from mallee.search.scores import Verifier, path_score
from mallee.search.tree import Node, Proposal, Tree
from support.scripted_search import ORIGIN, Play

WIDTHS = st.integers(1, 4)
DEPTHS = st.integers(1, 5)
TOKENS = st.integers(1, 6)
LEAST = st.none() | st.floats(0, 1)

POLICY = st.one_of(
    st.builds(BestOfN, n=st.just(4), wave=st.none() | WIDTHS, max_tokens=TOKENS, stop_at=LEAST),
    st.builds(SelfConsistency, n=st.just(4), wave=st.none() | WIDTHS, weighted=st.booleans()),
    st.builds(Beam, width=WIDTHS, branch=WIDTHS, depth=DEPTHS, step_tokens=TOKENS),
    st.builds(
        *(BreadthFirst,),
        **{"width": WIDTHS, "branch": WIDTHS, "depth": DEPTHS, "step_tokens": TOKENS},
        **{"prune_below": LEAST, "stop_at": LEAST},
    ),
    st.builds(
        DepthFirst,
        branch=WIDTHS,
        depth=DEPTHS,
        step_tokens=TOKENS,
        prune_below=LEAST,
        stop_at=LEAST,
    ),
    st.builds(
        DiverseTrees, trees=WIDTHS, branch=WIDTHS, depth=DEPTHS, step_tokens=TOKENS, stop_at=LEAST
    ),
    st.builds(
        *(Mcts,),
        **{"expansions": st.integers(1, 12), "width": WIDTHS, "depth": DEPTHS},
        **{"step_tokens": TOKENS, "selector": st.sampled_from(("uct", "puct", "greedy"))},
        **{"in_flight": WIDTHS, "answer": st.sampled_from(("value", "visits")), "stop_at": LEAST},
    ),
)
BUDGET = st.builds(
    SearchBudget,
    tokens=st.none() | st.integers(1, 60),
    nodes=st.none() | st.integers(1, 20),
    expansions=st.none() | st.integers(1, 20),
)


def share(*of: object) -> float:
    """A number in [0, 1) that hangs on `of` alone."""
    return int.from_bytes(blake2b(repr(of).encode(), digest_size=4).digest(), "little") / (1 << 32)


def draw(text: str, expand: Expand) -> list[Proposal]:
    """Continuations by the seed, some of them equal, ended or missing."""
    seed = expand.seed
    num = expand.num - (share(seed, "missing") < 0.2)
    return [
        Proposal(
            text=(move := "abc"[int(3 * share(seed, i))]),
            num_tokens=1 + int(expand.max_tokens * share(seed, i, "tokens")),
            key=text + move,
            logprob=-share(seed, i, "logprob"),
            is_end=share(seed, i, "end") < 0.2,
        )
        for i in range(num)
    ]


def value(text: str) -> float | None:
    return None if share(text, "unknown") < 0.1 else share(text)


def checked(play: Play, budget: SearchBudget) -> SearchResult:
    """The result of a search whose figures add up."""
    tree, result = play.search.tree, play.result
    for node in tree.nodes:
        below = [node, *(tree.nodes[number] for number in node.children)]
        assert node.visits == (node.score is not None) + sum(each.visits for each in below[1:])
        scores = [each.score for each in tree.nodes if node in tree.path(each)]
        known = [each for each in scores if each is not None]
        assert node.visits == len(known)
        assert (node.value is None) == (not known)
        if node.value is not None:
            assert node.value == pytest.approx(math.fsum(known) / len(known))
        assert node.num_pending == 0
        assert not node.is_expanding
        assert not (node.children and node.state != "open")
    assert result.tokens == sum(node.tokens for node in result.nodes)
    assert result.tokens <= (budget.tokens or math.inf)
    assert len(result.nodes) - 1 <= (budget.nodes or math.inf)
    assert result.expansions <= (budget.expansions or math.inf)
    assert result.text == "".join(result.nodes[number].text for number in result.principal)
    assert result.reason in ("done", "found", "tokens", "nodes", "expansions")
    return result


@given(POLICY, BUDGET, st.integers(0, 1 << 40), st.randoms(use_true_random=False))
def test_figures_add_up_and_one_seed_makes_one_tree_in_any_order(
    policy: Policy, budget: SearchBudget, seed: int, shuffle: Random
) -> None:
    """D32: visits are the valued nodes below, values their means, budgets hold; results in any order
    make the very tree that results in order make.
    """
    options = {"seed": seed, "budget": budget}
    first = checked(Play(policy, draw, value, **options), budget)  # type: ignore[arg-type]
    again = Play(policy, draw, value, **options, shuffle=shuffle)  # type: ignore[arg-type]
    assert checked(again, budget) == first


@given(POLICY, st.integers(0, 1 << 40))
def test_a_result_goes_through_json(policy: Policy, seed: int) -> None:
    result = Play(policy, draw, value, seed=seed).result
    assert msgspec.json.decode(msgspec.json.encode(result), type=SearchResult) == result
    given_body = msgspec.json.decode(msgspec.json.encode(policy))
    name, read = read_policy(given_body)
    assert (name, read) == (given_body["type"], policy)


def test_seeds_of_work_differ_and_stay_what_they_are() -> None:
    """A change would break the replay of searches that were recorded."""
    seeds = [derived_seed(7, number) for number in range(1000)]
    assert len({*seeds}) == 1000
    assert max(seeds) < 1 << 63
    assert derived_seed(7, 0) == 7127318741406446


def test_a_later_expansion_is_valued_before_an_earlier_one_has_come() -> None:
    """It waits only for its place in the tree."""
    search = Search(Mcts(width=2, in_flight=2), ORIGIN, seed=1)
    (root,) = search.work()
    assert isinstance(root, Expand)
    search.expanded(root.work, [Proposal("a", 1), Proposal("b", 1)])
    (values,) = search.work()
    assert isinstance(values, Score)
    assert values.texts == ("a", "b")
    search.scored(values.work, [0.6, 0.5])
    first, second = search.work()
    assert isinstance(second, Expand)
    search.expanded(second.work, [Proposal("c", 1), Proposal("d", 1)])
    (values,) = search.work()
    assert isinstance(values, Score)
    assert values.texts == ("bc", "bd")
    search.scored(values.work, [0.1, 0.2])
    assert search.work() == []
    assert len(search.tree.nodes) == 3
    search.expanded(first.work, [])
    assert len(search.tree.nodes) == 5


def test_results_after_the_end_are_left_out() -> None:
    search = Search(Mcts(width=2, in_flight=2, depth=2, stop_at=0.9), ORIGIN, seed=1)
    (root,) = search.work()
    search.expanded(root.work, [Proposal("a", 1), Proposal("b", 1)])
    (values,) = search.work()
    search.scored(values.work, [0.6, 0.5])
    first, second = search.work()
    search.expanded(first.work, [Proposal("x", 1, is_end=True)])
    (values,) = search.work()
    search.scored(values.work, [1.0])
    assert search.is_over
    before = search.result()
    search.expanded(second.work, [Proposal("y", 1, is_end=True)])
    assert search.work() == []
    assert search.result() == before
    assert (before.text, before.reason, before.tokens) == ("ax", "found", 3)


class Stubborn:
    """An operator's policy that expands what has ended."""

    depth = 3
    merges = False

    def propose(self, tree: Tree) -> list[Expansion]:
        return [] if tree.num_expanding else [Expansion(tree.nodes[-1], 1, 1)]

    def score(self, proposal: Proposal) -> bool:
        return False

    def select(self, tree: Tree) -> Node:
        return tree.root

    def stop(self, tree: Tree) -> bool:
        return False


def test_a_policy_that_asks_for_the_impossible_is_named() -> None:
    with pytest.raises(InternalError, match=r"Stubborn asks for 1 .* node 3, which is cut"):
        Play(Stubborn(), lambda text, expand: [Proposal("a", 1)])


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (None, "policy"),
        ({}, "policy"),
        ({"type": "astar"}, "policy.type"),
        ({"type": "mcts", "width": 0}, "policy.width"),
        ({"type": "mcts", "width": MAX_WIDTH + 1}, "policy.width"),
        ({"type": "mcts", "width": "4"}, "policy.width"),
        ({"type": "mcts", "c": -1.0}, "policy.c"),
        ({"type": "mcts", "expansions": 0}, "policy.expansions"),
        ({"type": "mcts", "in_flight": 65}, "policy.in_flight"),
        ({"type": "mcts", "selector": "ucb"}, "policy.selector"),
        ({"type": "mcts", "stop_at": float("inf")}, "policy.stop_at"),
        ({"type": "mcts", "breadth": 1}, "policy.breadth"),
        ({"type": "beam", "depth": 0}, "policy.depth"),
        ({"type": "tot_bfs", "prune_below": float("nan")}, "policy.prune_below"),
        ({"type": "tot_dfs", "branch": 0}, "policy.branch"),
        ({"type": "dvts", "trees": 0}, "policy.trees"),
        ({"type": "best_of_n", "n": 4, "wave": 5}, "policy.wave"),
        ({"type": "self_consistency", "after": "x" * 300}, "policy.after"),
        ({"type": "self_consistency", "max_tokens": 0}, "policy.max_tokens"),
    ],
)
def test_what_is_no_policy_is_refused_with_its_field(given: object, param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        read_policy(given)
    assert caught.value.fields["param"] == param


def test_what_is_no_budget_is_refused() -> None:
    for body in ({"tokens": 0}, {"nodes": 0}, {"expansions": 0}):
        with pytest.raises(MalleeError, match="budget"):
            SearchBudget(**body)


# Values of verifiers' answers and of paths, and answers of an API as proposals

YES_NO = Verifier(prompt="Right?", answers={"yes": 1.0, "no": 0.0})


def test_a_verifier_s_value_is_the_mean_by_the_answers_chances() -> None:
    """.6 yes, .1 Yes, .2 no and .1 of something else: .7 / .9."""
    top = {" yes": math.log(0.6), "Yes": math.log(0.1), "no": math.log(0.2), "?": math.log(0.1)}
    assert YES_NO.value(" yes", [top]) == pytest.approx(0.7 / 0.9)
    assert YES_NO.value("?", [{"?": -0.1}]) is None
    assert YES_NO.value("", []) is None
    assert (YES_NO.tokens, YES_NO.num_logprobs) == (1, 20)


def test_a_verifier_may_read_the_text() -> None:
    """The longest answer with which it begins counts."""
    answers = {"sure": 1.0, "likely": 0.5, "likely not": 0.1}
    reads = Verifier(prompt="?", answers=answers, read="text", max_tokens=3)
    assert reads.value(" Likely not, I think", []) == 0.1
    assert reads.value("likely\n", []) == 0.5
    assert reads.value("hardly", []) is None
    assert (reads.tokens, reads.num_logprobs) == (3, None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "score.prompt"),
        ({"answers": {}}, "score.answers"),
        ({"answers": {" ": 1.0}}, "score.answers"),
        ({"answers": {"yes": math.inf}}, "score.answers.yes"),
        ({"max_tokens": 0}, "score.max_tokens"),
    ],
)
def test_what_is_no_verifier_is_refused(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        Verifier(**{"prompt": "?", "answers": {"yes": 1.0}, **fields})  # type: ignore[arg-type]
    assert caught.value.fields["param"] == param


def test_a_path_is_valued_by_all_of_its_tokens() -> None:
    """Two steps of 2 and 1 tokens, of log-probability -1 and -.5: the mean over three tokens."""
    path = [Proposal("a", 2, logprob=-1.0), Proposal("b", 1, logprob=-0.5)]
    assert path_score("sum_logprob", path) == -1.5
    assert path_score("mean_logprob", path) == pytest.approx(math.exp(-0.5))
    assert path_score("sum_logprob", [*path, Proposal("c", 1)]) is None


@pytest.mark.parametrize(
    ("text", "finish", "capsule", "is_end"),
    [
        ("a step\n", "stop", "c", False),
        ("cut by its length", "length", "c", False),
        ("ended by itself", "stop", "c", True),
        ("so it is = 24\n", "stop", "c", True),
        ("nothing was left", "budget", "c", True),
        ("as its condition says", "condition", "c", True),
        ("a step\n", "stop", None, True),
    ],
)
def test_a_branch_that_ended_by_itself_is_a_whole_answer(
    text: str, finish: str, capsule: str | None, is_end: bool
) -> None:
    found = proposal_of(Drawn(text, finish, capsule, 3, [-1.0, -2.0]), Ends(("\n",), ("= 24",)))
    assert found == Proposal(text, 3, capsule or "", -3.0, is_end)


def test_a_branch_that_failed_is_no_proposal() -> None:
    for finish in ("error", "cancelled"):
        assert proposal_of(Drawn("a", finish, None, 1, []), Ends()) is None
