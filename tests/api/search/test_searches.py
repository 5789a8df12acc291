"""`POST /v1/search` and searches that the SDK and an example run: over a real gateway and a tiny model."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from fractions import Fraction
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from anyio.to_thread import run_sync

from bench.doubles.random_model import random_model
from examples.game_of_24 import main, value
from mallee.api.search.policies import installed_policies
from mallee.client import AsyncMallee, InvalidParameter, Mallee
from mallee.protocol.errors import ConfigError, ContextLengthExceeded
from mallee.search.policies.levels import Beam
from mallee.search.policies.mcts import Mcts
from mallee.search.policies.named import POLICIES
from mallee.search.policies.sampling import BestOfN
from mallee.search.policy import Policy, SearchBudget
from mallee.search.results import SearchResult
from mallee.search.scores import Verifier
from support.any_gateway import one_gateway
from support.game_of_24 import Player24, moves, numbers
from support.live_api import keyed, served
from support.tiny_fleet import has_capsules, post, tiny_api, tiny_fleet
from support.verifiers import Raw, verifying
from support.waiting import until, until_asked

MODEL = random_model("llama", 5, max_position_embeddings=2048)
PROMPT = "Once upon a time there was a tree of many trunks"
MCTS = {"type": "mcts", "expansions": 50, "width": 3, "depth": 6, "step_tokens": 4, "in_flight": 4}


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


def result(body: dict[str, Any]) -> SearchResult:
    return msgspec.convert(body, SearchResult)


async def test_a_search_of_50_expansions_is_one_call() -> None:
    """X10, part, D32, part: no token of the tree is drawn or computed twice, and the prompt once."""
    async with tiny_api(MODEL, 1, num_blocks=4096) as (client, fleet):
        engine = next(iter(fleet.engines.values()))
        found = await post(client, "/v1/search", prompt=PROMPT, policy=MCTS, seed=7)
        assert found["expansions"] == 50
        assert found["reason"] == "done"
        stats = engine.stats()
        assert stats.num_output_tokens == found["tokens"] == found["spent"]["completion_tokens"]
        # The last token of a node is drawn, and goes through the model once something follows it.
        assert stats.num_prefill_tokens == len(PROMPT) + 49
        assert found["spent"]["requests"] == 51
        assert sum(node["tokens"] for node in found["nodes"]) == found["tokens"]
        pinned = await client.get("/v1/capsules/count", params={"pinned": True})
        assert pinned.json()["count"] == 0


async def test_a_service_values_texts_beside_decoding() -> None:
    """D12, part: the same tree as where the client's function does; its failure ends the search."""
    async with (
        verifying() as verifier,
        tiny_fleet(MODEL, 1, num_blocks=4096) as fleet,
        served(fleet.gateways[0], callbacks=(verifier.url,)) as (url, _),
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        policy = Mcts(expansions=6, width=3, depth=4, step_tokens=5, in_flight=2)
        asked: dict[str, Any] = {
            **{"prompt": PROMPT, "policy": msgspec.to_builtins(policy), "seed": 3},
            "score": {"url": verifier.url},
        }
        verifier.score = lambda branch: vowels(branch["text"])
        found = await post(client, "/v1/search", **asked)
        async with AsyncMallee(url) as sdk:
            here = await sdk.search(policy, PROMPT, score=vowels, seed=3)
        assert same(result(found), here)
        (name,) = {question["request"] for question in verifier.questions}
        assert name
        branches = [each for question in verifier.questions for each in question["branches"]]
        nodes = found["nodes"]
        whole = [sum(nodes[i]["tokens"] for i in path_to(nodes, node["number"])) for node in nodes]
        valued = {number for number, node in enumerate(nodes) if node["score"] is not None}
        assert sorted(each["tokens"] for each in branches) == sorted(whole[n] for n in valued)
        verifier.reply = lambda question: Raw(500)
        answer = await client.post("/v1/search", json=asked)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "callback_failed")
        other = {**asked, "score": {"url": "http://127.0.0.1:9/else"}}
        refused = await client.post("/v1/search", json=other)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "score.url"
        assert (await client.get("/v1/capsules/count")).json()["count"] > 0
        pinned = await client.get("/v1/capsules/count", params={"pinned": True})
        assert pinned.json()["count"] == 0


def path_to(nodes: list[dict[str, Any]], number: int) -> list[int]:
    found = [number]
    while (parent := nodes[found[-1]]["parent"]) is not None:
        found.append(parent)
    return found


async def counted(client: httpx.AsyncClient) -> dict[str, tuple[int, float]]:
    """By reason the number of searches, and their seconds in all; reasons without any are left out."""
    text = (await client.get("/metrics")).text
    found = dict(re.findall(r'mallee_search_duration_seconds_(\w+\{reason="\w+"\}) (\S+)', text))
    pairs = {
        reason: (int(float(found[f'count{{reason="{reason}"}}'])), float(value))
        for key, value in found.items()
        if key.startswith("sum") and (reason := key.split('"')[1])
    }
    return {reason: pair for reason, pair in pairs.items() if pair[0]}


@one_gateway
async def test_a_search_streams_its_nodes_as_they_join_and_its_time_is_counted() -> None:
    """D22: time to solution is in /metrics, of searches whole or streamed, by the reason of their end."""
    now = asyncio.get_running_loop().time
    async with tiny_api(MODEL, 1) as (client, _):
        policy = {"type": "beam", "width": 2, "branch": 2, "depth": 3, "step_tokens": 4}
        asked = {"prompt": PROMPT, "policy": policy, "seed": 3}
        assert await counted(client) == {}
        begun = now()
        whole = await post(client, "/v1/search", **asked)
        answer = await client.post("/v1/search", json={**asked, "stream": True})
        took = now() - begun
        cut = await post(client, "/v1/search", **asked, budget={"tokens": 10})
        assert (whole["reason"], cut["reason"]) == ("done", "tokens")
        found = await counted(client)
        assert {reason: num for reason, (num, _) in found.items()} == {"done": 2, "tokens": 1}
        assert 0.5 * took < found["done"][1] <= took
        *events, last = answer.text.strip().split("\n\n")
        assert last == "data: [DONE]"
        *grown, end = (json.loads(each.removeprefix("data: ")) for each in events)
        assert {each["object"] for each in grown} == {"search.nodes"}
        assert same(result(end), result(whole))
        numbers = [node["number"] for each in grown for node in each["nodes"]]
        assert numbers == list(range(1, len(whole["nodes"])))
        assert len(grown) > 1
        assert result(end).text == whole["text"]


async def test_a_search_that_is_left_ends_and_leaves_nothing() -> None:
    """Whole or streamed: its branches end, its capsules are gone, and as no solution it has no time."""
    async with tiny_api(MODEL, 1, num_blocks=4096) as (client, fleet):
        engine: Any = next(iter(fleet.engines.values()))
        policy = {**MCTS, "expansions": 2000, "depth": 50, "step_tokens": 20}
        asked = {"prompt": PROMPT, "policy": policy, "temperature": 1.0}

        for stream in (False, True):
            num = engine.stats().num_output_tokens
            running = asyncio.create_task(
                client.post("/v1/search", json={**asked, "stream": stream})
            )
            await until(lambda num=num: engine.stats().num_output_tokens > num + 500)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            await until(lambda: not engine.branches)
            await until_asked(lambda: has_capsules(client, 0))
        assert await counted(client) == {}


async def test_the_steps_of_a_search_are_requests_of_its_key(tmp_path: Path) -> None:
    """F30, part: the search itself is none; each of its steps counts, and one that may not run ends it."""
    access, headers = keyed(tmp_path, requests_per_minute=4, max_branches=3)
    async with tiny_api(MODEL, 1, settings={"access": access}) as (client, fleet):
        client.headers.update(headers)
        beam = {"type": "beam", "width": 1, "branch": 2, "depth": 2, "step_tokens": 2}
        bias = {"97": 100.0}  # no answer ends by itself
        found = await post(client, "/v1/search", prompt=PROMPT, policy=beam, logit_bias=bias)
        assert found["spent"]["requests"] == 3
        wide = {**beam, "branch": 4}
        for policy, code in ((wide, "quota_too_small"), (beam, "quota_exceeded")):
            body = {"capsule": found["nodes"][1]["capsule"], "policy": policy}
            answer = await client.post("/v1/search", json=body)
            assert answer.json()["error"]["code"] == code
        engine: Any = next(iter(fleet.engines.values()))
        assert not engine.branches


@pytest.mark.slow
async def test_what_is_no_search_is_refused_before_anything_is_computed() -> None:
    mcts = {"prompt": "a", "policy": MCTS}
    cases: list[tuple[dict[str, Any], str | None]] = [
        ({}, "prompt"),
        ({"prompt": "a", "capsule": "b"}, "prompt"),
        ({"prompt": "a"}, "policy"),
        ({"prompt": "a", "policy": {"type": "code", "source": "import os"}}, "policy.type"),
        ({"prompt": "a", "policy": {"type": "mcts", "width": 999}}, "policy.width"),
        ({**mcts, "score": "best"}, "score"),
        ({**mcts, "score": {"prompt": "?"}}, "score"),
        (
            {**mcts, "score": {"prompt": "", "answers": {"y": 1}}},
            "score.prompt",
        ),
        ({**mcts, "score": {"url": "http://x"}}, "score.url"),
        ({**mcts, "score": {"url": 1}}, "score"),
        ({**mcts, "temperature": 3}, "temperature"),
        ({**mcts, "stop": ["x"] * 17}, "stop"),
        ({**mcts, "ends": [""]}, "ends[0]"),
        ({**mcts, "budget": {"tokens": 0}}, "budget.tokens"),
        ({**mcts, "mallee": {"keep": True}}, "mallee.keep"),
        ({**mcts, "mallee": {"budget": {"tokens": 9}}}, "mallee.budget"),
        ({**mcts, "model": "other"}, None),
    ]
    async with tiny_api(MODEL, 1) as (client, fleet):
        for body, param in cases:
            answer = await client.post("/v1/search", json=body)
            error = answer.json()["error"]
            assert answer.status_code == (404 if param is None else 400), error
            assert param is None or error["param"] == param
        engine = next(iter(fleet.engines.values()))
        assert engine.stats().num_prefill_tokens == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        {"type": "mcts", "expansions": 8, "width": 3, "depth": 6},
        {"type": "mcts", "expansions": 9, "width": 1, "depth": 9},
        {"type": "beam", "width": 3, "branch": 2, "depth": 4},
    ],
    ids=["mcts", "chain", "beam"],
)
async def test_blocks_are_those_that_the_tree_takes(policy: dict[str, Any]) -> None:
    """D32, part: as many as the engine holds, whatever the steps' lengths; answers that end early too."""
    async with tiny_api(MODEL, 1, num_blocks=4096) as (client, fleet):
        engine = next(iter(fleet.engines.values()))
        for step_tokens in (1, 2, 3, 4, 5, 8):
            for num_prompt in (37, 39, 48):
                prompt = f"{step_tokens}x{num_prompt}".ljust(num_prompt, "a")
                made = await post(client, "/v1/capsules", prompt=prompt)
                asked = {"policy": {**policy, "step_tokens": step_tokens}, "temperature": 1.0}
                found = await post(client, "/v1/search", capsule=made["id"], seed=5, **asked)
                await until(lambda n=found["blocks"]: n == engine.stats().memory.live_blocks)
                assert (await client.delete("/v1/capsules?all=true")).status_code == 200
        whole = await post(client, "/v1/search", prompt=PROMPT, policy=policy, seed=5)
        assert whole["blocks"] > -(-len(PROMPT) // 4)


async def test_a_text_that_fills_the_window_is_not_gone_on() -> None:
    async with tiny_api(MODEL, 1, num_blocks=4096) as (client, _):
        prompt = PROMPT * 38  # of 2,048 tokens 224 are left
        policy = {"type": "beam", "width": 1, "branch": 1, "depth": 9, "step_tokens": 60}
        steps = {"logit_bias": {"97": 100.0}, "temperature": 1.0}
        found = await post(client, "/v1/search", prompt=prompt, policy=policy, **steps)
        assert [node["tokens"] for node in found["nodes"]] == [0, 60, 60, 60]
        assert found["text"] == "a" * 180


class Widest(BestOfN, frozen=True, kw_only=True, tag="widest"):
    """An operator's policy: best of n, n fixed."""

    n: int = 3
    max_tokens: int = 2


def point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, "mallee.search_policies")


async def test_an_installed_policy_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never code of a request: entry points of installed packages alone."""
    monkeypatch.setattr("mallee.api.api.installed_policies", lambda: {**POLICIES, "widest": Widest})
    async with tiny_api(MODEL, 1) as (client, _):
        found = await post(client, "/v1/search", prompt=PROMPT, policy={"type": "widest"})
        assert len(found["nodes"]) == 4


def test_entry_points_are_checked_when_the_gateway_starts() -> None:
    assert installed_policies([]) == POLICIES
    good = point("widest", f"{__name__}:Widest")
    kinds = installed_policies([good]) if __name__ in __import__("sys").modules else None
    assert kinds is None or kinds["widest"] is Widest
    for bad, reason in (
        (point("mcts", "x:y"), "there already"),
        (point("a", "nowhere_to_be_found:x"), "can't be loaded"),
        (point("a", "json:nothing"), "can't be loaded"),
        (point("a", "json:JSONDecoder"), "no msgspec.Struct"),
        (point("a", "mallee.search.policy:SearchBudget"), "without depth"),
        (point("a", "mallee.search.policies.mcts:Mcts"), "needs tag='a'"),
    ):
        with pytest.raises(ConfigError, match=reason):
            installed_policies([bad])


# Searches that the SDK runs


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
async def test_one_seed_makes_one_tree_wherever_it_grows(policy: Policy) -> None:
    """X10, part, D32, part: by forks of either client and by one call; no token of it is computed twice."""
    async with clients() as (client, plain, engine):
        for score in (vowels, "mean_logprob", VERIFIER):
            more: dict[str, Any] = {"score": score, "seed": 7, "temperature": 1.0}
            here = await client.search(policy, PROMPT, **more)
            if score is vowels:
                stats = engine.stats()
                # The last token of a node is drawn, and goes through the model once something follows it.
                followed = {node.parent for node in here.nodes if node.parent}
                assert stats.num_prefill_tokens == len(PROMPT) + len(followed)
                assert stats.num_output_tokens == here.tokens == sum(n.tokens for n in here.nodes)
            again = await run_sync(lambda more=more: plain.search(policy, PROMPT, **more))
            assert same(again, here)
            if score is not vowels:
                there = await client.search(policy, PROMPT, **more, where="gateway")
                assert same(there, here)
                assert there.text == here.text
        other = await client.search(policy, PROMPT, seed=8, temperature=1.0)
        assert [node.text for node in other.nodes] != [node.text for node in here.nodes]
        await until(lambda: not engine.branches)


async def test_steps_end_where_they_are_said_to() -> None:
    """At the client and at the gateway, from a prompt and from a capsule."""
    policy = Mcts(expansions=8, width=3, depth=4, step_tokens=5)
    stops, ends = ([chr(first + i) for i in range(16)] for first in (32, 64))
    more: dict[str, Any] = {"seed": 7, "temperature": 1.0, "stop": stops, "ends": ends}
    async with clients() as (client, plain, engine):
        here = await client.search(policy, PROMPT, **more)
        for node in here.nodes[1:]:
            assert not any(stop in node.text[:-1] for stop in stops)
            assert node.state == "ended" or not any(end in node.text for end in ends)
            assert node.text[-1:] not in stops or node.state != "ended"

        def work() -> SearchResult:
            with plain.prefill(PROMPT) as capsule:
                budget = SearchBudget(expansions=3)
                return capsule.search(policy, **more, budget=budget, where="gateway")

        there = await run_sync(work)
        assert [n.text for n in there.nodes] == [n.text for n in here.nodes[: len(there.nodes)]]
        more = {"seed": 7, "temperature": 1.0}
        assert (await run_sync(work)).reason == "expansions"
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
    """Its question is all that is computed, and its values are those of the answers."""
    async with clients() as (client, _, engine):
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
