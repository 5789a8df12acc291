"""Sessions as objects of the SDK, over a real engine."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from mallee.client import AsyncMallee, Mallee, NotFound, Session, UnknownCapsule
from mallee.testing.random_model import random_model
from support.tiny_fleet import tiny_api

MODEL = random_model("llama", 5, max_position_embeddings=2048)
SHORT: Any = {"max_tokens": 3, "ignore_eos": True}


def talk(url: str) -> None:
    with Mallee(url) as client:
        with client.session("bug-7", cache_salt="s") as session:
            with pytest.raises(NotFound):
                session.show()
            (first,) = session.complete("A tree", **SHORT)
            more = first.fork([" of", " and"], **SHORT).wait()
            with session.stream("A tree of", **SHORT) as branches:
                streamed = branches.wait()
            tree = session.show()
            capsules = [each.capsule for each in (first, *more, *streamed)]
            assert {node.capsule for node in tree.nodes} == set(capsules)
            parents = {node.capsule: node.parent for node in tree.nodes}
            assert [parents[each.capsule] for each in more] == [first.capsule] * 2
            with session.fork("bug-7b", capsule=first.capsule) as other:
                assert (other.id, other.root) == ("bug-7b", first.capsule)
                (again,) = other.capsule(first.capsule).fork(1, **SHORT).wait()
                assert {n.capsule for n in other.show().nodes} == {first.capsule, again.capsule}
                assert other.show().parent == "bug-7"
                assert session.show().children == ["bug-7b"]
            with pytest.raises(UnknownCapsule):
                client.capsule(again.capsule, cache_salt="s")
            assert client.capsule(first.capsule, cache_salt="s").id == first.capsule
            assert client.sessions() == []  # of another salt
            assert [each.id for each in client.sessions(cache_salt="s")] == ["bug-7"]
        for capsule in capsules:
            with pytest.raises(UnknownCapsule):
                client.capsule(capsule, cache_salt="s")
        mine = client.session()
        assert mine.id != client.session().id
        (branch,) = mine.complete("abc", mallee={"priority": 2}, **SHORT)
        assert [node.capsule for node in mine.show().nodes] == [branch.capsule]
        assert mine.close().released == 1
        with pytest.raises(NotFound):
            mine.close()
        with client.session("nothing is asked in it"):
            pass
        with suppress(ZeroDivisionError), client.session("left") as left:
            left.complete("abc", **SHORT)
            raise ZeroDivisionError
        assert client.sessions() == []
        assert repr(Session(client, "x", None)) == "Session('x', root=None)"


async def test_a_session_is_an_object_with_verbs() -> None:
    """F29, part: its requests name it, also those of its capsules and branches; its block closes it."""
    async with tiny_api(MODEL, 1) as (http, _):
        await asyncio.to_thread(talk, str(http.base_url))


async def test_an_asynchronous_session_is_the_same() -> None:
    async with tiny_api(MODEL, 1) as (http, _), AsyncMallee(str(http.base_url)) as client:
        async with client.session("bug-7") as session:
            (first,) = await session.complete("A tree", **SHORT)
            async with await session.fork() as other:
                assert other.root == first.capsule
                (again,) = await (await other.capsule(first.capsule)).fork(1, **SHORT).wait()
                assert len((await other.show()).nodes) == 2
            with pytest.raises(UnknownCapsule):
                await client.capsule(again.capsule)
            assert [node.capsule for node in (await session.show()).nodes] == [first.capsule]
        assert await client.sessions() == []
        with suppress(ZeroDivisionError):
            async with client.session("left") as left:
                await left.complete("abc", **SHORT)
                raise ZeroDivisionError
        assert await client.sessions() == []
