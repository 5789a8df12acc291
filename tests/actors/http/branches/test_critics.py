"""The SDK's critics: branches are scored while they are written, and poor ones end."""

import asyncio
from typing import Any

import pytest

from mallee.client import AsyncMallee, InvalidParameter, Mallee
from mallee.testing.random_model import random_model
from support.tiny_fleet import tiny_api
from support.virtual.threads import wait_for
from support.waiting import elapse, until

MODEL = random_model("llama", 5, max_position_embeddings=2048)
LONG: Any = {"max_tokens": 500, "ignore_eos": True, "seed": 3, "temperature": 1.0}


def plays(branch: Any) -> float | None:
    """The favourite is the second; nobody is known before five characters."""
    return None if len(branch.text) < 5 else float(branch.index == 1)


def check(branches: list[Any], alone: list[Any]) -> None:
    assert [b.finish_reason for b in branches] == ["cancelled", "length", "cancelled"]
    assert branches[1].text == alone[1].text
    assert branches[1].score == 1.0
    for i in (0, 2):
        assert branches[i].score == 0.0
        assert alone[i].text.startswith(branches[i].text)
        assert 5 <= len(branches[i].text) < len(alone[i].text) / 2


@pytest.mark.slow
async def test_a_critic_ends_what_it_finds_poor() -> None:
    """F19, part: while they decode; the others' texts are those of an undisturbed answer."""
    async with tiny_api(MODEL, 1) as (http, fleet):
        url = str(http.base_url)

        def ask(**more: Any) -> list[Any]:
            with Mallee(url) as client:
                return client.stream("A critic scores", n=3, **LONG).wait(**more)

        alone = await asyncio.to_thread(ask)
        check(await asyncio.to_thread(ask, score=plays, below=0.5), alone)
        async with AsyncMallee(url) as client:

            async def thinks(branch: Any) -> float | None:
                await asyncio.sleep(0)
                return plays(branch)

            for score in (plays, thinks):
                branches = client.stream("A critic scores", n=3, **LONG)
                check(await branches.wait(score=score, below=0.5), alone)
        engine: Any = next(iter(fleet.engines.values()))
        await until(lambda: not engine.branches)


async def test_an_error_of_a_critic_ends_all_of_it() -> None:
    """F19, part: it is raised where the branches are waited for, and nothing runs on."""
    async with tiny_api(MODEL, 1) as (http, fleet):
        url, engine = str(http.base_url), next(iter(fleet.engines.values()))

        def fails(branch: Any) -> float:
            raise ZeroDivisionError(branch.index)

        def ask() -> None:
            with Mallee(url) as client, pytest.raises(ZeroDivisionError):
                client.stream("A critic scores", n=3, **LONG).wait(score=fails)

        await asyncio.to_thread(ask)
        async with AsyncMallee(url) as client:
            with pytest.raises(ZeroDivisionError):
                await client.stream("A critic scores", n=3, **LONG).wait(score=fails)
            with pytest.raises(InvalidParameter, match="score"):
                await client.stream("A critic scores", **LONG).wait(score="good")  # type: ignore[arg-type]
        await until(lambda: not engine.branches)


async def test_a_slow_critic_looks_less_often() -> None:
    """F19, part: reading doesn't wait for it, and it sees the newest text of each branch in turn."""
    seen: list[tuple[int, str]] = []

    def looks(branch: Any) -> float:
        seen.append((branch.index, branch.text))
        wait_for(elapse(0.05))
        return 1.0

    async with tiny_api(MODEL, 1) as (http, _):

        def ask() -> list[Any]:
            with Mallee(str(http.base_url)) as client:
                return client.stream("A critic scores", n=3, **LONG).wait(score=looks, below=0.5)

        found = await asyncio.to_thread(ask)
    assert {branch.finish_reason for branch in found} == {"length"}
    assert 3 <= len(seen) < 200
    for index in range(3):
        texts = [text for i, text in seen if i == index]
        assert texts == sorted(texts, key=len)
        assert found[index].text.startswith(texts[-1])
    assert {index for index, _ in seen[:3]} == {0, 1, 2}
