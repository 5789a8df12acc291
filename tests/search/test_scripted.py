"""Searches whose proposals and values come from a script: properties of all policies, small games by hand."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import combinations_with_replacement
from random import Random
from typing import Any, TypeAlias

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.errors import InternalError, InvalidParameter, MalleeError
from mallee.search.driver import NO_BUDGET, Expand, Score, Search, derived_seed
from mallee.search.policies.depth_first import DepthFirst
from mallee.search.policies.levels import Beam, BreadthFirst, DiverseTrees
from mallee.search.policies.mcts import Mcts
from mallee.search.policies.named import read_policy
from mallee.search.policies.sampling import BestOfN, SelfConsistency
from mallee.search.policy import MAX_WIDTH, Expansion, Policy, SearchBudget
from mallee.search.results import SearchResult
from mallee.search.runner import Drawn, Ends, Runner, proposal_of
from mallee.search.scores import Scoring, Verifier, path_score
from mallee.search.tree import Node, Proposal, Tree
from support.game_of_24 import (
    STEP_TOKENS,
    VALUE_TOKENS,
    Player24,
    is_solution,
    is_solvable,
    numbers,
)

Draw: TypeAlias = Callable[[str, Expand], Sequence[Proposal]]
"""The continuations of a text (a node's key) for an expansion."""
Value: TypeAlias = Callable[[str], float | None]

ORIGIN = Proposal("", 0, key="")


class Play:
    """A search that is played to its end; `expanded` are the texts in the order of their expansions.

    With `shuffle` results come in any order, and as many are out at once as the search gives.
    """

    def __init__(
        self,
        policy: Policy,
        draw: Draw,
        value: Value = lambda text: None,
        *,
        seed: int = 0,
        budget: SearchBudget = NO_BUDGET,
        scoring: Scoring = "outside",
        shuffle: Random | None = None,
    ) -> None:
        self.search = Search(policy, ORIGIN, seed=seed, budget=budget, scoring=scoring)
        self.expanded: list[str] = []
        self.num_valued = 0
        self.most_at_once = 0
        self._draw = draw
        self._value = value
        self._run(shuffle)

    @property
    def result(self) -> SearchResult:
        return self.search.result()

    def _run(self, shuffle: Random | None) -> None:
        todo: list[Expand | Score] = []
        while not self.search.is_over:
            fresh = self.search.work()
            self.expanded += [each.key for each in fresh if isinstance(each, Expand)]
            todo += fresh
            self.most_at_once = max(self.most_at_once, len(todo))
            assert todo, "the search waits for nothing"
            each = todo.pop(shuffle.randrange(len(todo)) if shuffle is not None else 0)
            if isinstance(each, Expand):
                self.search.expanded(each.work, self._draw(each.key, each))
            else:
                self.num_valued += len(each.texts)
                self.search.scored(each.work, [self._value(text) for text in each.texts])
        result = self.result
        for each in todo:  # results after the end are left out
            if isinstance(each, Expand):
                self.search.expanded(each.work, self._draw(each.key, each))
            else:
                self.search.scored(each.work, [self._value(text) for text in each.texts])
        assert self.search.work() == []
        assert self.result == result


class Game:
    """A small game: each text's continuations, of one token each, and the values of texts.

    `moves` maps a text to what may follow it; a text that is not in it ends. Expansions draw the first ones.
    """

    def __init__(
        self,
        moves: Mapping[str, str | Sequence[str]],
        values: Mapping[str, float],
        chances: Mapping[str, float] | None = None,
    ) -> None:
        """`chances`: log-probabilities by text; others are unknown."""
        self._moves = moves
        self._values = values
        self._chances = chances or {}

    def draw(self, text: str, expand: Expand) -> list[Proposal]:
        found = list(self._moves[text])[: expand.num]
        return [
            Proposal(
                move,
                1,
                key=text + move,
                logprob=self._chances.get(text + move),
                is_end=text + move not in self._moves,
            )
            for move in found
        ]

    def value(self, text: str) -> float | None:
        return self._values.get(text)

    def play(self, policy: Policy, **options: object) -> Play:
        return Play(policy, self.draw, self.value, **options)  # type: ignore[arg-type]


# Properties of all policies on random games, and the driver's rules

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


class Failing:
    """Steps of which one question waits for ever, and the other fails."""

    def __init__(self) -> None:
        self.num_ended = 0

    async def draw(self, work: Expand) -> list[Drawn]:
        return [Drawn(text, "length", text, 1) for text in "ab"]

    async def ask(self, verifier: Verifier, key: str) -> Drawn:
        if key == "b":
            raise InternalError("no answer")
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            self.num_ended += 1

    async def value(self, work: Score) -> list[float | None]:
        raise AssertionError("the model itself is asked")


async def test_a_step_that_fails_ends_the_others_and_the_search() -> None:
    steps = Failing()
    asked: dict[str, Any] = {"seed": 1, "budget": NO_BUDGET, "ends": Ends()}
    runner = Runner(steps, Beam(width=2, branch=2), "root", score=YES_NO, **asked)
    with pytest.raises(InternalError, match="no answer"):
        await anext(runner.nodes())
    assert steps.num_ended == 1


# Small games, step by step as computed by hand

uct = partial(Mcts, width=2, depth=3, c=1.0)
bfs = partial(BreadthFirst, branch=2, depth=3)
dfs = partial(DepthFirst, branch=2, depth=3)

# Two moves, a and b, three times; every text of three letters ends.
#
#                  a .6                      b .5
#          aa .2         ab .3        ba .8        bb .4
#       aaa 0 aab .1  aba .5 abb 0  baa .9 bab .1  bba 0 bbb .7
BINARY = Game(
    dict.fromkeys(("", "a", "b", "aa", "ab", "ba", "bb"), "ab"),
    {
        **{"a": 0.6, "b": 0.5, "aa": 0.2, "ab": 0.3, "ba": 0.8, "bb": 0.4},
        **{"aaa": 0.0, "aab": 0.1, "aba": 0.5, "abb": 0.0},
        **{"baa": 0.9, "bab": 0.1, "bba": 0.0, "bbb": 0.7},
    },
    {"a": math.log(0.75), "b": math.log(0.25)}
    | {text + move: math.log(0.5) for text in ("a", "b") for move in "ab"},
)


def figures(play: Play) -> dict[str, tuple[int, float | None]]:
    """Visits and value of every node, by its text."""
    found = {}
    for node in play.search.tree.nodes:
        value = node.value
        rounded = None if value is None else round(value, 4)
        found[play.search.tree.text(node)] = (node.visits, rounded)
    return found


def test_uct_goes_where_the_bounds_are_highest() -> None:
    """D32, part: visits, values and the principal variation of UCT with c = 1 are those computed by hand.

    after   N  a: mean + sqrt(ln N / n)         b                              next
    ""      2  .6    + sqrt(.6931/1) = 1.4326   .5    + .8326        = 1.3326  a
    a       4  .3667 + sqrt(1.3863/3) = 1.0465  .5    + 1.1774       = 1.6774  b
    b       6  .3667 + sqrt(1.7918/3) = 1.1395  .5667 + .7728        = 1.3395  b, in it ba: .8 to .4
    ba      8  .3667 + sqrt(2.0794/3) = 1.1992  .54   + sqrt(2.0794/5) = 1.1849  a, in it ab: .3 to .2
    """
    play = BINARY.play(uct(expansions=5))
    assert play.expanded == ["", "a", "b", "ba", "ab"]
    assert figures(play) == {
        "": (10, 0.43),  # (.6+.5 + .2+.3 + .8+.4 + .9+.1 + .5+0) / 10
        "a": (5, 0.32),
        "b": (5, 0.54),
        "aa": (1, 0.2),
        "ab": (3, 0.2667),
        "ba": (3, 0.6),
        "bb": (1, 0.4),
        "baa": (1, 0.9),
        "bab": (1, 0.1),
        "aba": (1, 0.5),
        "abb": (1, 0.0),
    }
    result = play.result
    assert (result.text, result.score, result.reason) == ("baa", 0.9, "done")
    assert [result.nodes[number].text for number in result.principal] == ["b", "a", "a"]
    assert (result.tokens, result.expansions) == (10, 5)


@pytest.mark.parametrize(
    ("policy", "expanded", "text", "reason"),
    [
        # The most visited path: as above, a and b have five visits each and b's mean is higher; then ba 3 to
        # 1, then baa first. After three expansions a has 3 visits of mean .3667, b 3 of .5667, ba .8, bb .4.
        (uct(expansions=5, answer="visits"), " a b ba ab", "baa", "done"),
        (uct(expansions=3, answer="visits"), " a b", "ba", "done"),
        # PUCT with c = 1 and shares .75 and .25 of a and b, .5 below them:
        # after   N  a: mean + p sqrt(N) / (1 + n)         b                                 next
        # ""      2  .6    + .75 * 1.4142 / 2 = 1.1303     .5    + .25 * 1.4142 / 2 = .6768  a
        # a       4  .3667 + .75 * 2 / 4 = .7417           .5    + .25 * 2 / 2 = .75         b
        # b       6  .3667 + .75 * 2.4495 / 4 = .8260      .5667 + .25 * 2.4495 / 4 = .7198  a, in it ab
        (uct(expansions=4, selector="puct"), " a b ab", "aba", "done"),  # whole are aba .5, abb 0
        # The means: a .6 to .5; then its mean is .3667, so b; then b .5667, in it ba; b .54, in it ba is done
        # with, so bb, whose mean .4 leaves b at (2.7 + .7) / 7 = .4857, but it has nothing left.
        (uct(expansions=6, selector="greedy"), " a b ba bb ab", "baa", "done"),
        # Two of aa .2, ab .3, ba .8, bb .4 go on: ba and bb. Then baa .9 and bbb .7 are the best.
        (Beam(width=2, branch=2, depth=3), " a b ba bb", "baa", "done"),
        # Breadth first: of a .6 and b .5 both go on; of ba .8, bb .4, ab .3, aa .2 those worth at least .35.
        (bfs(width=3, prune_below=0.35), " a b ba bb", "baa", "done"),
        (bfs(width=1), " a ab", "aba", "done"),
        (bfs(width=2, stop_at=0.85), " a b ba bb", "baa", "found"),
        # Depth first: a before b, ab .3 before aa .2; neither leads to .85, so back to b, and there ba. Below
        # .35 are aa and ab: a is left after one look.
        (dfs(stop_at=0.85), " a ab aa b ba", "baa", "found"),
        (dfs(stop_at=0.85, prune_below=0.35), " a b ba", "baa", "found"),
        (dfs(stop_at=2.0, prune_below=0.35), " a b ba bb", "baa", "done"),
        # Of a the best step is ab, then aba .5; of b ba, then baa .9. No tree takes both places.
        (DiverseTrees(trees=2, branch=2, depth=3), " a b ab ba", "baa", "done"),
    ],
)
def test_each_policy_expands_what_it_should_and_stops_there(
    policy: Policy, expanded: str, text: str, reason: str
) -> None:
    """D32, part: the order of expansions from the root on, the answer, and why the search ended."""
    play = BINARY.play(policy)
    assert play.expanded == expanded.split(" ")
    assert (play.result.text, play.result.reason) == (text, reason)


def test_expansions_in_flight_are_visits_worth_nothing() -> None:
    """D32, part: UCT with c = 1 and two expansions at once.

    After "" a is drawn: it has 3 visits of which 2 are worth nothing, .2 + sqrt(ln 4 / 3) = .8798, b has
    .5 + sqrt(ln 4) = 1.6774, so b is drawn too. Once a has come (b still drawn, N = 6): a .3667 + .7728 =
    1.1395, b .1667 + .7728 = .9395: ab. Once b has come (ab still drawn, N = 8): a 1.1/5 + .6449 = .8649,
    b .5667 + .8326 = 1.3993: ba.
    """
    policy = uct(expansions=5, in_flight=2)
    play = BINARY.play(policy)
    assert play.expanded == ["", "a", "b", "ab", "ba"]
    orders = {tuple(BINARY.play(policy, shuffle=Random(seed)).expanded) for seed in range(20)}
    assert orders == {("", "a", "b", "ab", "ba")}
    assert play.most_at_once == 2


def test_a_whole_answer_keeps_its_place_in_the_beam() -> None:
    """x .7 ends at once; y .6 goes on to yy .5 and yz .65, whose beam of two is x and yz; yz goes on alone,
    to yzz .8 and yzy .1; x and yzz are the last beam.
    """
    game = Game(
        {"": "xyw", "y": "yz", "yz": "zy", "w": "x"},
        {"x": 0.7, "y": 0.6, "w": 0.1, "yy": 0.5, "yz": 0.65, "yzz": 0.8, "yzy": 0.1},
    )
    play = game.play(Beam(width=2, branch=3, depth=8))
    assert play.expanded == ["", "y", "yz"]
    assert play.result.text == "yzz"


def test_beams_may_score_by_log_probability() -> None:
    """P(b) = .25, P(ba) = P(bb) = .125, P(aa) = P(ab) = .375: both stay in a's half. Nothing is asked for."""
    policy = Beam(width=2, branch=2, depth=2)
    play = BINARY.play(policy, scoring="sum_logprob")
    assert play.num_valued == 0
    assert play.result.text == "aa"
    assert play.result.score == pytest.approx(math.log(0.375))
    play = BINARY.play(policy, scoring="mean_logprob")
    assert play.result.score == pytest.approx(math.sqrt(0.375))


ANSWERS = ("so it is 7", "it is 9", "it is 7", "no idea", "it is 7 ", "it is 8", "it is 9")


def sampled(policy: BestOfN | SelfConsistency, value: Value = lambda text: None) -> Play:
    """Samples of five tokens, which come in the order of ANSWERS."""
    come = iter(ANSWERS)

    def draw(_: str, expand: Expand) -> list[Proposal]:
        return [Proposal(next(come), 5, is_end=True) for _ in range(expand.num)]

    return Play(policy, draw, value)


def test_the_best_of_n_has_the_highest_score_of_its_waves() -> None:
    """Samples 1 and 7 are worth 9; the first of them is taken. All are drawn at once."""
    play = sampled(BestOfN(n=7), lambda text: float(text[-1]) if text[-1].isdigit() else None)
    assert (play.result.text, play.result.score) == ("it is 9", 9.0)
    assert play.result.principal == (2,)
    assert (play.result.tokens, play.result.expansions) == (35, 1)
    # Waves of two: 7 and 9 already reach 8.
    play = sampled(BestOfN(n=7, wave=2, stop_at=8.0), lambda text: float(text[-1]))
    assert (play.result.text, play.result.reason) == ("it is 9", "found")
    assert (play.result.tokens, play.result.expansions) == (10, 1)


def test_self_consistency_takes_the_answer_of_most_samples() -> None:
    """7 has three votes, 9 two, 8 one; one sample has none."""
    policy = SelfConsistency(n=7, after="it is ")
    play = sampled(policy)
    assert policy.votes(play.search.tree) == {"7": 3.0, "9": 2.0, "8": 1.0}
    assert play.result.text == "so it is 7"
    assert play.num_valued == 0
    # 9 is worth 2 + 2 against 7 with 1 + 1 + 1.
    policy = SelfConsistency(n=7, after="it is ", weighted=True)
    play = sampled(policy, lambda text: 2.0 if "9" in text else 1.0)
    assert policy.votes(play.search.tree) == {"7": 3.0, "9": 4.0, "8": 1.0}
    assert play.result.text == "it is 9"


def test_self_consistency_stops_once_the_rest_changes_nothing() -> None:
    """Of seven: after five samples 7 leads by 3 to 1 with two to come, after six with one to come. Of six:
    after five. Of three: 7, 9, 7, nothing is left out.
    """
    play = sampled(SelfConsistency(n=7, wave=1, after="it is "))
    assert (play.result.text, play.result.reason) == ("so it is 7", "found")
    assert play.result.expansions == 6
    play = sampled(SelfConsistency(n=6, wave=1, after="it is "))
    assert (play.result.reason, play.result.expansions) == ("found", 5)
    play = sampled(SelfConsistency(n=3, wave=1, after="it is "))
    assert (play.result.reason, play.result.expansions) == ("done", 3)


def test_an_answer_ends_where_it_is_said_to() -> None:
    policy = SelfConsistency(after="Answer:", until="\n")
    assert policy.answer("Answer: 1\nNo. Answer:\n 2 \nThat is all.") == "2"
    assert policy.answer("Answer:") == ""
    assert policy.answer("2") == ""
    assert SelfConsistency().answer(" 2\n") == "2"


def test_texts_like_a_siblings_are_not_followed() -> None:
    """One of two equal moves is valued and expanded; both were drawn."""
    game = Game({"": "aab", "a": "xx"}, {"a": 0.5, "b": 0.1, "ax": 1.0})
    play = game.play(Beam(width=3, branch=3, depth=3))
    assert play.expanded == ["", "a"]
    assert [node.state for node in play.result.nodes] == [
        *("open", "open", "duplicate", "ended", "ended", "duplicate")
    ]
    assert (play.result.tokens, play.num_valued) == (5, 3)


def test_a_budget_draws_fewer_branches_and_then_ends_the_search() -> None:
    """Each step may draw two tokens and draws one. Of 7: two steps reserve 4, and leave 7 - 2 = 5 for two
    more (a), which leave 3 for one (b: it takes 1), which leaves 2 for one of ab.
    """
    policy = uct(expansions=9, step_tokens=2)
    play = BINARY.play(policy, budget=SearchBudget(tokens=7))
    assert [n.text for n in play.result.nodes] == ["", "a", "b", "a", "b", "a", "a"]
    assert (play.result.tokens, play.result.reason) == (6, "tokens")
    play = BINARY.play(dfs(stop_at=0.85), budget=SearchBudget(expansions=3))
    assert play.expanded == ["", "a", "ab"]
    assert play.result.reason == "expansions"


def test_a_search_without_any_answer_gives_its_beginning() -> None:
    play = Play(Mcts(expansions=5), lambda text, expand: [])
    assert (play.result.text, play.result.principal, play.result.reason) == ("", (), "done")
    assert play.result.best.number == 0


# D33: the game of 24 by scripted proposers and valuers, over a fixed set of puzzles

EVERY = [" ".join(map(str, each)) for each in combinations_with_replacement(range(1, 14), 4)]
NEED_FRACTIONS = ["3 3 8 8", "1 5 5 5", "1 3 4 6", "3 3 7 7", "4 4 7 7", "1 4 5 6"]
PUZZLES = [*EVERY[::61], *NEED_FRACTIONS, "4 5 6 10", "1 1 4 6", "1 1 1 1"]
EQUAL_BUDGET = SearchBudget(tokens=STEP_TOKENS * 3 * 128)  # what 128 samples take

STEPS = {"step_tokens": STEP_TOKENS, "depth": 3, "stop_at": 1.0}
DFS = DepthFirst(branch=36, prune_below=0.1, **STEPS)  # type: ignore[arg-type]
BFS = BreadthFirst(width=5, branch=36, prune_below=0.1, **STEPS)  # type: ignore[arg-type]
UCT = Mcts(expansions=1000, width=36, c=0.1, **STEPS)  # type: ignore[arg-type]
PLAIN = BestOfN(n=128, wave=1, max_tokens=3 * STEP_TOKENS, stop_at=1.0)


def solved(puzzle: str, policy: Policy, budget: SearchBudget = EQUAL_BUDGET) -> tuple[bool, int]:
    """Whether it was solved, and the tokens that were drawn for steps and for values."""
    player = Player24(puzzle)
    draw = player.samples if isinstance(policy, BestOfN) else player.steps
    play = Play(policy, draw, player.value, seed=24, budget=budget)
    result = play.result
    assert budget.tokens is None or result.tokens <= budget.tokens
    is_right = is_solution(puzzle, result.text)
    assert (result.reason == "found") == is_right
    return is_right, result.tokens + VALUE_TOKENS * play.num_valued


def test_monte_carlo_finds_solutions_wherever_the_values_lead_first() -> None:
    """D33, part: without a bound of tokens, since it comes to every step in the end."""
    for puzzle in PUZZLES[::4]:
        assert solved(puzzle, UCT, SearchBudget())[0] == is_solvable(numbers(puzzle)), puzzle


def test_breadth_first_solves_those_that_its_valuer_knows() -> None:
    """D33, part: five thoughts a level are enough where the values are right: without fractions."""
    for puzzle in PUZZLES:
        if is_solvable(numbers(puzzle), with_fractions=False):
            assert solved(puzzle, BFS)[0], puzzle


def test_every_puzzle_that_has_a_solution_is_solved_by_fewer_tokens_than_samples() -> None:
    """D33, part: tree of thoughts depth first solves all that brute force does, and no other.

    Samples solve less, at an equal budget of tokens, the valuer's words counted.
    """
    searched = {puzzle: solved(puzzle, DFS) for puzzle in PUZZLES}
    for puzzle, (is_right, _) in searched.items():
        assert is_right == is_solvable(numbers(puzzle)), puzzle
    some = [puzzle for puzzle, (is_right, _) in searched.items() if is_right][::4]
    sampled = [solved(puzzle, PLAIN) for puzzle in some]
    assert not all(right for right, _ in sampled)
    assert 2 * sum(searched[puzzle][1] for puzzle in some) < sum(num for _, num in sampled)
