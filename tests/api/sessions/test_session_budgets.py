"""Budgets of sessions and of those below them, at one gateway and at two."""

import asyncio
from typing import Any

import httpx
import pytest

from bench.doubles.random_model import random_model
from mallee.client import AsyncMallee, BudgetSpent
from mallee.protocol.ids import account_of
from support.live_api import served
from support.tiny_fleet import post, tiny_api, tiny_fleet, two_gateways
from support.waiting import until, until_asked

MODEL = random_model("llama", 5, max_position_embeddings=2048)
LONG: dict[str, Any] = {"ignore_eos": True, "seed": 3, "temperature": 1.0, "max_tokens": 1500}


async def put(client: httpx.AsyncClient, session: str, **body: Any) -> dict[str, Any]:
    answer = await client.put(f"/v1/sessions/{session}", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def budget_of(client: httpx.AsyncClient, session: str) -> Any:
    answer = await client.get(f"/v1/sessions/{session}")
    assert answer.status_code == 200, answer.text
    return answer.json()["budget"]


async def tokens_of(client: httpx.AsyncClient, session: str) -> tuple[float, float, float]:
    found = (await budget_of(client, session))["tokens"]
    return found["used"], found["reserved"], found["left"]


async def ask(client: httpx.AsyncClient, session: str, tokens: int = 1500, **more: Any) -> Any:
    own = {"session": session, **more.pop("mallee", {})}
    body = {"prompt": "A tree", **LONG, "max_tokens": tokens, "mallee": own, **more}
    return await client.post("/v1/completions", json=body)


def num(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["completion_tokens"])


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_a_session_s_requests_and_those_of_its_children_share_its_budget() -> None:
    """X19, part: by body and by header, forks of its capsules also without naming it; shown, then spent."""
    async with tiny_api(MODEL, 1) as (client, _):
        made = await put(client, "s", budget={"tokens": 100, "branches": 9})
        assert made["budget"] == {
            "kept": True,
            "tokens": {"limit": 100, "used": 0, "reserved": 0, "left": 100},
            "branches": {"limit": 9, "used": 0, "reserved": 0, "left": 9},
            "wall_s": None,
        }
        first = await ask(client, "s", 10)
        assert await tokens_of(client, "s") == (10, 0, 90)
        assert num(await ask(client, "child", 20, mallee={"parent_session": "s"})) == 20
        header = {"x-dynamo-session-id": "agent", "x-dynamo-parent-session-id": "child"}
        body = {"prompt": "A tree", **LONG, "max_tokens": 5}
        assert num(await client.post("/v1/completions", json=body, headers=header)) == 5
        assert (await budget_of(client, "child")) is None
        capsule = first.json()["choices"][0]["mallee"]["capsule"]
        path = f"/v1/capsules/{capsule}/fork"
        assert num(await client.post(path, json={**LONG, "max_tokens": 5, "n": 1})) == 5
        held = (await client.post("/v1/capsules", json={"prompt": "x", "session_id": "s"})).json()
        assert account_of(held["id"]) == account_of(capsule) != ""
        last = await ask(client, "agent")
        assert num(last) == 60
        assert last.json()["choices"][0]["mallee"]["ended_by"] == "tokens"
        for session in ("s", "child", "agent"):
            assert code(await ask(client, session)) == (409, "budget_spent")
        assert code(await client.post(path, json={"n": 1})) == (409, "budget_spent")
        assert num(await ask(client, "beside", 7)) == 7
        # New limits: what was used stays used.
        await put(client, "s", budget={"tokens": 120, "branches": 6})
        assert (await budget_of(client, "s"))["branches"]["left"] == 1
        assert num(await ask(client, "s", 8)) == 8
        assert code(await ask(client, "s")) == (409, "budget_spent")
        # A name that is closed begins anew; those below it are bounded still.
        await client.delete("/v1/sessions/s")
        assert code(await ask(client, "child")) == (409, "budget_spent")
        assert num(await ask(client, "s", 3)) == 3


async def test_a_child_s_own_budget_is_reserved_of_its_session_s() -> None:
    """X19, part: by PUT and by fork; while it runs; and a request's own is reserved of its session's."""
    async with tiny_api(MODEL, 1) as (client, fleet):
        await put(client, "s", budget={"tokens": 100})
        over = await client.put("/v1/sessions/c", json={"parent": "s", "budget": {"tokens": 101}})
        assert (over.status_code, over.json()["error"]["param"]) == (400, "mallee.budget.tokens")
        assert "has 100 left" in over.json()["error"]["message"]
        made = await put(client, "c", parent="s", budget={"tokens": 30})
        assert (made["parent"], made["budget"]["tokens"]["left"]) == ("s", 30)
        assert await tokens_of(client, "s") == (0, 0, 100)
        first = await ask(client, "s", 10, mallee={"budget": {"tokens": 20}})
        assert await tokens_of(client, "s") == (10, 0, 90)
        capsule = first.json()["choices"][0]["mallee"]["capsule"]
        # A fork goes on from the request's capsule, which has 10 left.
        fork = {"session": "f", "capsule": capsule}
        refused = await client.post("/v1/sessions/s/fork", json={**fork, "budget": {"tokens": 11}})
        assert refused.status_code == 400
        assert (await client.get("/v1/sessions/f")).status_code == 404
        forked = await post(client, "/v1/sessions/s/fork", **fork, budget={"tokens": 8})
        assert forked["budget"]["tokens"]["limit"] == 8
        path = f"/v1/capsules/{forked['capsule']}/fork"
        named = {**LONG, "n": 1, "mallee": {"session": "f"}}
        assert num(await client.post(path, json=named)) == 8
        assert code(await client.post(path, json=named)) == (409, "budget_spent")
        # Two budgets of which neither is below the other.
        stranger = await client.post(path, json={"n": 1, "mallee": {"session": "c"}})
        assert (stranger.status_code, stranger.json()["error"]["param"]) == (400, "mallee.session")
        await until(lambda: not fleet.engines["w0"].stats().jobs)  # of the fork that ran out
        asking = asyncio.create_task(ask(client, "c"))
        await until(lambda: bool(fleet.engines["w0"].stats().jobs))
        used, reserved, left = await tokens_of(client, "s")
        assert (used + reserved, left) == (48, 52)
        assert num(await asking) == 30
        assert await tokens_of(client, "s") == (48, 0, 52)


async def test_what_can_be_no_session_s_budget_is_refused_by_name() -> None:
    """X19, part: and no session is there then."""
    cases: list[tuple[Any, str]] = [
        ({}, "budget"),
        ({"budget": {}}, "budget"),
        ({"budget": {"tokens": 0}}, "budget.tokens"),
        ({"budget": {"wall_s": 1e9}}, "budget.wall_s"),
        ({"budget": {"tokens": 1}, "parent": "x/y"}, "parent"),
        ({"budget": {"tokens": 1}, "mallee": {"budget": {"tokens": 1}}}, "mallee.budget"),
    ]
    async with tiny_api(MODEL, 1) as (client, _):
        for body, param in cases:
            answer = await client.put("/v1/sessions/s", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        long = await client.put(f"/v1/sessions/{'x' * 129}", json={"budget": {"tokens": 1}})
        assert long.status_code == 400
        assert (await client.get("/v1/sessions")).json()["data"] == []
        await put(client, "s", budget={"tokens": 5})
        eve = await client.get("/v1/sessions/s", headers={"x-cache-salt": "eve"})
        assert eve.status_code == 404
        assert num(await ask(client, "s", 9, cache_salt="eve")) == 9


async def test_a_session_is_bounded_at_every_gateway_once_it_is_answered() -> None:
    """X19, part: no request slips through; given, shown and changed at either; in sum to the token."""
    async with two_gateways(MODEL) as s:
        await put(s.b, "s", budget={"tokens": 400, "branches": 12})
        drawn = await asyncio.gather(*(ask(client, "s", 90) for client in (s.a, s.b, s.a)))
        total = sum(map(num, drawn))
        assert total == 270
        await put(s.a, "c", parent="s", budget={"tokens": 100})
        below = await asyncio.gather(
            ask(s.a, "c"), ask(s.b, "d", 20, mallee={"parent_session": "c"})
        )
        assert 100 - 64 <= sum(map(num, below)) <= 100

        async def left() -> tuple[Any, Any]:
            return await tokens_of(s.a, "s"), await tokens_of(s.b, "s")

        spent = 270 + sum(map(num, below))

        async def is_back() -> bool:
            return await left() == ((spent, 0, 400 - spent),) * 2

        await until_asked(is_back)  # what was taken ahead comes a moment later
        many = await asyncio.gather(*(ask(c, "s", n=2) for c in (s.a, s.b, s.a, s.b)))
        going = [answer for answer in many if answer.status_code == 200]
        assert {code(answer) for answer in many if answer not in going} <= {(409, "budget_spent")}
        assert spent + sum(map(num, going)) <= 400
        await put(s.a, "s", budget={"tokens": 1000})
        assert (await budget_of(s.b, "s"))["tokens"]["limit"] == 1000
        assert num(await ask(s.b, "s", 50)) == 50


async def test_a_budget_is_refused_while_the_store_is_away() -> None:
    """X19, part: 503; and a gateway that was cut off when it was given knows of it when it is back."""
    async with two_gateways(MODEL) as s:
        await ask(s.b, "s", 4)
        s.bus_of(0).signals.set_up(False)
        away = await s.a.put("/v1/sessions/s", json={"budget": {"tokens": 9}})
        assert code(away) == (503, "store_away")
        fork = {"session": "f", "budget": {"tokens": 9}}
        assert code(await s.a.post("/v1/sessions/s/fork", json=fork)) == (503, "store_away")
        s.bus_of(0).signals.set_up(True)
        s.bus_of(1).signals.set_up(False)
        await put(s.a, "s", budget={"tokens": 9})
        assert num(await ask(s.b, "s", 3)) == 3, "it is not known there"
        s.bus_of(1).signals.set_up(True)
        assert num(await ask(s.b, "s")) == 9
        await put(s.b, "s", budget={"tokens": 19})
        assert num(await ask(s.a, "s")) == 10


async def test_a_session_s_budget_outlives_its_gateway() -> None:
    """X24, part: what was spent stays spent at the others, until the store has forgotten it."""
    async with two_gateways(MODEL) as s:
        await put(s.a, "s", budget={"tokens": 50})
        assert num(await ask(s.a, "s", 5)) == 5
        s.bus_of(0).signals.set_up(False)
        await until_asked(lambda: _shows(s.b, (5, 0, 45)))
        assert num(await ask(s.b, "s", 20)) == 20
        kept = s.fleet.hub.kept.buckets["mallee_test_budgets"]
        kept.clear()
        assert code(await ask(s.b, "s")) == (409, "budget_spent")
        shown = await budget_of(s.b, "s")
        assert shown == {"kept": False, "tokens": None, "branches": None, "wall_s": None}
        s.bus_of(0).signals.set_up(True)
        await put(s.b, "s", budget={"tokens": 20})
        assert num(await ask(s.b, "s")) == 20


async def _shows(client: httpx.AsyncClient, expected: tuple[int, int, int]) -> bool:
    return await tokens_of(client, "s") == expected


async def test_the_sdk_gives_sessions_budgets() -> None:
    """X19, part: typed."""
    async with (
        tiny_fleet(MODEL, 1) as fleet,
        served(fleet.gateways[0]) as (url, _),
        AsyncMallee(url) as client,
    ):
        session = client.session("s")
        given = await session.give_budget({"tokens": 40})
        assert given.budget is not None
        assert given.budget.tokens is not None
        assert given.budget.tokens.limit == 40
        await session.complete("A tree", max_tokens=10, ignore_eos=True)
        fork = await session.fork(budget={"tokens": 5})
        tree = await fork.show()
        assert tree.budget is not None
        assert tree.budget.kept
        assert tree.budget.branches is None
        assert tree.budget.tokens is not None
        assert tree.budget.tokens.left == 5
        child = client.session("child")
        await child.give_budget({"tokens": 30}, parent="s")
        branch = await child.complete("A tree", max_tokens=99, ignore_eos=True)
        assert branch.finish_reason == "budget"
        with pytest.raises(BudgetSpent, match="none is left"):
            await child.complete("A tree")
        shown = (await (await session.fork("t", budget={"branches": 1})).show()).budget
        assert shown is not None
        assert shown.tokens is None
