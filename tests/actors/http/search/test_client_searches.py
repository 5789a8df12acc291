"""Searches that the SDK and an example run: over a real gateway and an engine with a tiny model."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from fractions import Fraction
from typing import Any

import pytest
from anyio.to_thread import run_sync

from examples.game_of_24 import main, value
from mallee.client import AsyncMallee, InvalidParameter, Mallee
from mallee.protocol.errors import ContextLengthExceeded
from mallee.search.policies.levels import Beam
from mallee.search.policies.mcts import Mcts
from mallee.search.policies.named import POLICIES
from mallee.search.policies.sampling import BestOfN
from mallee.search.policy import Policy, SearchBudget
from mallee.search.results import SearchResult
from mallee.search.scores import Verifier
from mallee.testing.random_model import random_model
from support.game_of_24 import Player24, moves, numbers
from support.tiny_fleet import tiny_api
from support.waiting import until

MODEL = random_model("llama", 5, max_position_embeddings=2048)
PROMPT = "Once upon a time there was a tree of many trunks"
VERIFIER = Verifier(
    prompt=" Good? ", answers={chr(code): (code % 16) / 15 for code in range(48, 64)}
)


def vowels(text: str) -> float:
    """A value that hangs on the text alone."""
    return sum(ord(each) % 7 for each in text) / (7 * max(len(text), 1))


def same(one: SearchResult, other: SearchResult) -> bool:
    """Whether trees are equal: but for capsules' names, and for the last digits of log-probabilities,
    which hang on the batch.
    """
    assert len(one.nodes) == len(other.nodes)
    for this, that in zip(one.nodes, other.nodes, strict=True):
        for name in ("parent", "text", "tokens", "state", "visits"):
            assert getattr(this, name) == getattr(that, name)
        for name in ("logprob", "score", "value"):
            mine, theirs = getattr(this, name), getattr(that, name)
            assert mine == (None if theirs is None else pytest.approx(theirs, rel=1e-5))
    return (one.principal, one.reason) == (other.principal, other.reason)


@asynccontextmanager
async def clients() -> AsyncIterator[tuple[AsyncMallee, Mallee, Any]]:
    """An asynchronous and a synchronous client, and the engine."""
    async with tiny_api(MODEL, 1, num_blocks=2048) as (http, fleet):
        url = str(http.base_url)
        async with AsyncMallee(url) as client:
            with Mallee(url) as plain:
                yield client, plain, next(iter(fleet.engines.values()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        Mcts(expansions=8, width=3, depth=4, step_tokens=5, in_flight=3),
        Beam(width=2, branch=3, depth=3, step_tokens=5),
        BestOfN(n=6, wave=2, max_tokens=9),
    ],
    ids=["mcts", "beam", "best_of_n"],
)
async def test_a_search_draws_the_same_tree_by_tasks_and_by_threads(policy: Policy) -> None:
    """D32, part: one seed, one tree, by either client; and no token of it is computed twice."""
    async with clients() as (client, plain, engine):
        first = await client.search(policy, PROMPT, score=vowels, seed=7, temperature=1.0)
        stats = engine.stats()
        # The last token of a node is drawn, and goes through the model once something follows it.
        followed = {node.parent for node in first.nodes if node.parent}
        assert stats.num_prefill_tokens == len(PROMPT) + len(followed)
        assert stats.num_output_tokens == first.tokens == sum(n.tokens for n in first.nodes)
        again = await run_sync(
            lambda: plain.search(policy, PROMPT, score=vowels, seed=7, temperature=1.0)
        )
        assert same(again, first)
        other = await client.search(policy, PROMPT, score=vowels, seed=8, temperature=1.0)
        assert [node.text for node in other.nodes] != [node.text for node in first.nodes]
        assert first.score is not None
        assert first.score == pytest.approx(vowels(first.text))
        for node in first.nodes[1:]:
            assert node.tokens == len(node.text)
        await until(lambda: not engine.branches)


@pytest.mark.slow
@pytest.mark.parametrize("score", ["mean_logprob", VERIFIER], ids=["logprobs", "verifier"])
async def test_the_gateway_runs_the_same_search_by_one_call(score: Any) -> None:
    """X10, part: one call for a whole tree, that of forks; from a prompt and a capsule, by both clients."""
    policies: list[Any] = [
        Beam(width=2, branch=2, depth=3, step_tokens=5),
        BestOfN(n=4, wave=2, max_tokens=9),
        policy := Mcts(expansions=8, width=3, depth=4, step_tokens=5),
    ]
    async with clients() as (client, plain, engine):
        options: dict[str, Any] = {"score": score, "seed": 7, "temperature": 1.0}
        stops, ends = ([chr(first + i) for i in range(16)] for first in (32, 64))
        for each in policies:
            more: dict[str, Any] = {**options, "stop": stops, "ends": ends}
            here = await client.search(each, PROMPT, **more)
            for node in here.nodes[1:]:
                assert not any(stop in node.text[:-1] for stop in stops)
                assert node.state == "ended" or not any(end in node.text for end in ends)
                is_step = not isinstance(each, BestOfN) and node.text[-1:] in stops
                assert not is_step or node.state != "ended"
            there = await client.search(each, PROMPT, **more, where="gateway")
            assert same(there, here)
            assert there.text == here.text
        here = await client.search(policy, PROMPT, **options)

        def work() -> SearchResult:
            with plain.prefill(PROMPT) as capsule:
                budget = SearchBudget(expansions=3)
                return capsule.search(policy, **options, budget=budget, where="gateway")

        short = await run_sync(work)
        assert (short.reason, short.expansions) == ("expansions", 3)
        assert [n.text for n in short.nodes] == [n.text for n in here.nodes[: len(short.nodes)]]
        asked = await run_sync(lambda: plain.search(policy, PROMPT, **options, where="gateway"))
        assert same(asked, here)
        await until(lambda: not engine.branches)


async def test_what_the_gateway_can_not_run_is_refused_with_the_remedy() -> None:
    class Own:
        depth = 1

    policy = BestOfN(n=2, max_tokens=4)
    async with clients() as (client, _, engine):
        cases: tuple[tuple[Any, Any, str], ...] = (
            (policy, vowels, "score='vowels': it runs here: leave where=\"gateway\" away"),
            (Own(), "mean_logprob", "policy='Own': the gateway runs the policies of"),
            (policy, {"url": "http://127.0.0.1:1"}, "score.url="),
        )
        for given, score, told in cases:
            with pytest.raises(InvalidParameter, match=re.escape(told)):
                await client.search(given, PROMPT, score=score, where="gateway")
        with pytest.raises(InvalidParameter, match="where='worker'"):
            await client.search(policy, PROMPT, where="worker")  # type: ignore[arg-type]
        async with client.prefill(PROMPT) as capsule:
            capsule.is_open = True
            with pytest.raises(InvalidParameter, match="left open"):
                await capsule.search(policy)
        long = BestOfN(n=2, max_tokens=4000)
        with pytest.raises(ContextLengthExceeded):  # told by the stream
            await client.search(long, PROMPT, where="gateway")
        assert not engine.branches


async def test_a_verifier_is_a_fork_of_the_same_capsule() -> None:
    """Its question is all that is computed; its values come again, and are those of the answers."""
    async with clients() as (client, plain, engine):
        policy = Mcts(expansions=3, width=3, depth=3, step_tokens=5)
        result = await client.search(policy, PROMPT, score=VERIFIER, seed=7, temperature=1.0)
        valued = [node for node in result.nodes if node.score is not None]
        assert len(valued) > 3
        assert len({node.score for node in valued}) > 1
        assert all(0 <= (node.score or 0) <= 1 for node in valued)
        asked = len([n for n in result.nodes[1:] if n.state != "duplicate"])
        questions = len(VERIFIER.prompt) * asked
        more = engine.stats().num_prefill_tokens - len(PROMPT) - questions
        assert 0 <= more <= asked + result.expansions  # last tokens of nodes
        again = await run_sync(
            lambda: plain.search(policy, PROMPT, score=VERIFIER, seed=7, temperature=1.0)
        )
        assert same(again, result)


async def test_an_error_of_the_score_ends_the_search() -> None:
    async with clients() as (client, plain, engine):

        def broken(text: str) -> float:
            raise ZeroDivisionError(text)

        policy = Mcts(expansions=50, width=4, step_tokens=400, in_flight=4)
        with pytest.raises(ZeroDivisionError):
            await client.search(policy, PROMPT, score=broken)
        with pytest.raises(ZeroDivisionError):
            await run_sync(lambda: plain.search(policy, PROMPT, score=broken))
        with pytest.raises(InvalidParameter, match="finite"):
            await client.search(policy, PROMPT, score=lambda text: float("nan"))
        with pytest.raises(InvalidParameter, match="Verifier"):
            await client.search(policy, PROMPT, score=3)  # type: ignore[arg-type]
        await until(lambda: not engine.branches)
        assert (await client.count_capsules(pinned=True)).count == 0


async def test_a_search_that_has_found_its_answer_ends_what_it_still_draws() -> None:
    """The first to be valued in the tree's order ends it; the others' branches are cancelled."""
    async with clients() as (client, plain, engine):

        def value(text: str) -> float:
            return 1.0 if len(text) > 60 else vowels(text) / 2

        policy = Mcts(expansions=50, width=3, depth=3, step_tokens=40, in_flight=4, stop_at=0.9)
        options: dict[str, Any] = {"score": value, "temperature": 1.0}
        async with client.prefill(PROMPT, cache_salt="mine") as capsule:  # a search may begin there
            first = await capsule.search(policy, **options)
            later = await client.capsule(first.best.capsule, cache_salt="mine")
            more = await later.search(BestOfN(n=2, max_tokens=3), score=vowels)
            assert len(more.nodes) == 3
        assert first.reason == "found"
        await until(lambda: not engine.branches)
        again = await run_sync(lambda: plain.search(policy, PROMPT, **options))
        assert same(again, first)
        await until(lambda: not engine.branches)


# `examples/game_of_24.py`


def test_values_are_those_of_steps_that_may_follow() -> None:
    """Every move of the rules is a step worth more than none; one that is altered is worth nothing."""
    given = [4, 5, 6, 10]
    assert value("", given) == 0.125
    for line, after in moves(numbers("4 5 6 10")):
        if any(each < 0 or Fraction(each).denominator > 1 for each in after):
            continue
        assert value(line, given) == 0.25
        assert value(line.replace("left: ", "left: 1 "), given) == 0.0
    solved = "4 * 5 = 20 (left: 6 10 20)\n10 - 6 = 4 (left: 4 20)\n4 + 20 = 24 (left: 24)\n"
    assert value(solved, given) == 1.0
    assert value(solved.replace("24", "25"), given) == 0.0
    assert value("4 / 0 = 1 (left: 1)", given) == 0.0
    assert Player24("4 5 6 10").value(solved) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted(POLICIES))
async def test_the_example_runs_with_every_policy(
    policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """D33, part: against a service; a tiny model of random weights solves nothing."""
    async with tiny_api(MODEL, 1, num_blocks=2048) as (client, _):
        given = ["4", "5", "6", "10", "--policy", policy, "--url", str(client.base_url)]
        await run_sync(main, [*given, "--tokens", "600"])
    assert "not solved: " in capsys.readouterr().out
