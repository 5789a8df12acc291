"""The SDK over the connections of OpenAI's client."""

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest

from mallee.client import (
    AsyncMallee,
    ConnectionFailed,
    InvalidParameter,
    Mallee,
    StreamBroken,
    UnknownCapsule,
)
from support.waiting import until

TEXTS = [f"hello {i}" for i in range(3)]


async def test_openai_s_client_is_the_transport(live: Any) -> None:
    """I17, part: one connection for both, whose client stays open; whole answers, streams, errors."""

    def ask(theirs: openai.OpenAI) -> None:
        with Mallee.from_openai(theirs, model="tiny/bytes") as client:
            assert (client.base_url, client.max_retries) == (live.url, 0)
            assert client._http.timeout.read == 7
            assert client._headers["Authorization"] == "Bearer none"
            assert [each.text for each in client.complete("abc", n=2)] == TEXTS[:2]
            capsule = client.prefill("abc")
            with capsule.fork(2) as branches:
                assert "".join(e.text for e in branches if not e.index) == TEXTS[0]
            with pytest.raises(UnknownCapsule):
                client.capsule("never")
        assert theirs.models.list().data
        assert len(live.server.server_state.connections) == 1

    await with_theirs(live, ask, max_retries=0, timeout=7)


async def with_theirs(live: Any, work: Callable[[openai.OpenAI], None], **more: Any) -> None:
    """Do `work` with a synchronous client of theirs, in a thread."""

    def begin() -> None:
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", **more) as theirs:
            work(theirs)

    await asyncio.to_thread(begin)


async def test_openai_s_asynchronous_client_too(live: Any) -> None:
    """I17, part: and its answers are forked."""
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none") as theirs:
        async with AsyncMallee.from_openai(theirs) as client:
            assert [each.text for each in await client.complete("abc", n=2)] == TEXTS[:2]
            live.service.holds_after = 2
            async with client.stream("abc", n=2) as branches:
                async for _ in branches:
                    break
            await until(live.service.closed.is_set)
            live.service.reset()
            with pytest.raises(UnknownCapsule):
                await client.capsule("never")
        assert (await theirs.models.list()).data
        # By its address and key, and the capsule that an answer names, as well.
        answer = await theirs.completions.create(model="tiny/bytes", prompt="abc")
        name = (answer.choices[0].model_extra or {})["mallee"]["capsule"]
        live.service.capsules[name] = live.service.capsules["req_x.0"]
        async with AsyncMallee(str(theirs.base_url), api_key=theirs.api_key) as mallee:
            forked = await (await mallee.capsule(name)).fork(2).wait()
            assert [each.text for each in forked] == TEXTS[:2]


async def test_its_errors_are_ours(live: Any) -> None:
    nowhere = openai.OpenAI(base_url="http://127.0.0.1:1/v1", api_key="none", max_retries=0)
    with nowhere, Mallee.from_openai(nowhere) as client, pytest.raises(ConnectionFailed):
        client.models()

    def ask(theirs: openai.OpenAI) -> None:
        live.service.holds_after = 2
        with Mallee.from_openai(theirs) as client, pytest.raises(StreamBroken, match="ReadTimeout"):
            client.stream("abc").wait()
        with pytest.raises(InvalidParameter, match="AsyncOpenAI"):
            AsyncMallee.from_openai(theirs)  # type: ignore[arg-type]
        with pytest.raises(InvalidParameter, match=r"give an openai\.OpenAI"):
            Mallee.from_openai("http://127.0.0.1")  # type: ignore[arg-type]

    await with_theirs(live, ask, timeout=7)
