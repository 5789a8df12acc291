"""Branches that run at other gateways, as a watch of one tells them."""

import asyncio
from typing import Any

import httpx
import pytest

from mallee.actors.http.ui.elsewhere import Elsewhere
from mallee.actors.http.ui.watching import Running
from mallee.protocol.ids import Scope
from mallee.testing.random_model import random_model
from support.tiny_fleet import TwoGateways, post, two_gateways
from support.virtual.loop import virtual_loop
from support.waiting import until_asked
from support.watchers import Watcher, told

MODEL = random_model("llama", 5, max_position_embeddings=2048)
GROVE = {"mallee": {"session": "grove"}}
LONG = {"prompt": "A mallee is", "max_tokens": 1900, "n": 2, "ignore_eos": True, "stream": True}


async def left_a_capsule(two: TwoGateways) -> None:
    """A session is there, and both gateways know it."""
    await post(two.b, "/v1/completions", prompt="A mallee", max_tokens=2, **GROVE)

    async def is_known() -> bool:
        return (await two.a.get("/v1/sessions/grove")).status_code == 200

    await until_asked(is_known)


async def seen(client: httpx.AsyncClient, count: int) -> Watcher:
    """A watcher, once it knows of so many running branches of the session."""
    watcher = Watcher()
    async for event in told(client):
        watcher.take(event)
        session = watcher.sessions.get("grove")
        if session is not None and len(session["running"]) == count:
            return watcher
    raise AssertionError(f"never {count}: {watcher.sessions}")


@pytest.mark.slow
async def test_branches_of_another_gateway_are_seen_and_end_by_a_click_here() -> None:
    """X12, part: with the ends of their texts, by their own scope alone."""
    async with two_gateways(MODEL) as two:
        await left_a_capsule(two)
        async with two.b.stream("POST", "/v1/completions", json={**LONG, **GROVE}) as answer:
            assert answer.status_code == 200
            lines = answer.aiter_lines()
            await anext(lines)
            reading = asyncio.create_task(_drain(lines))
            watcher = await asyncio.wait_for(seen(two.a, 2), 10)
            running = watcher.sessions["grove"]["running"]
            assert {each["branch"] for each in running} == {0, 1}
            assert all(each["state"] == "answering" and each["tokens"] for each in running)
            assert any(each["tail"] for each in running)
            salt = {"x-cache-salt": "other"}
            async with httpx.AsyncClient(base_url=two.a.base_url, headers=salt) as other:
                assert [e["sessions"] async for e in told(other, seconds=1)] == [[]]
            pruned = await two.a.post(f"/v1/requests/{running[0]['request']}/prune", json={})
            assert pruned.status_code == 200, pruned.text
            await reading
        await asyncio.wait_for(seen(two.a, 0), 10)


async def _drain(lines: Any) -> None:
    async for _ in lines:
        pass


async def test_answers_take_a_share_of_the_gateways_time_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that took long is told again for a while; each scope has its own."""
    asked: list[str] = []

    def slow(self: Elsewhere, scope: Scope, tenant: str) -> Running:
        asked.append(scope)
        loop = virtual_loop()
        assert loop is not None
        loop.fall_behind(0.05)
        return {}

    monkeypatch.setattr(Elsewhere, "_running", slow)
    async with two_gateways(MODEL) as two:
        await left_a_capsule(two)
        async for _ in told(two.a, seconds=2):
            pass
        assert 1 <= len(asked) <= 3, "0.05 s of every second, not of every look"
        assert len(set(asked)) == 1
        salt = {"x-cache-salt": "other"}
        async with httpx.AsyncClient(base_url=two.a.base_url, headers=salt) as other:
            async for _ in told(other, seconds=1):
                pass
        assert len(set(asked)) == 2
