"""The SDK beside OpenAI's client."""

import asyncio
from typing import Any

import httpx
import openai
import pytest

from mallee.client import AsyncMallee, ConnectionFailed, InvalidParameter, Mallee, Timeout

TEXTS = [f"hello {i}" for i in range(3)]


async def test_a_client_has_the_settings_of_openai_s(live: Any) -> None:
    """I17, part: its address, key, time limit and retries; answers to either are forked."""
    theirs = openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=7)
    async with theirs, AsyncMallee.from_openai(theirs, model="tiny/bytes") as client:
        assert (client.base_url, client.max_retries, client.timeout) == (live.url, 0, 7)
        assert client._headers["Authorization"] == "Bearer none"
        assert [each.text for each in await client.complete("abc", n=2)] == TEXTS[:2]
        answer = await theirs.completions.create(model="tiny/bytes", prompt="abc")
        name = (answer.choices[0].model_extra or {})["mallee"]["capsule"]
        live.service.capsules[name] = live.service.capsules["req_x.0"]
        forked = await (await client.capsule(name)).fork(2).wait()
        assert [each.text for each in forked] == TEXTS[:2]

    def ask() -> None:
        live.service.holds_after = 2
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", timeout=7) as theirs:
            with (
                Mallee.from_openai(theirs) as client,
                pytest.raises(Timeout, match=r"nothing came from .* after 7 s; raise the client's"),
            ):
                client.stream("abc").wait()
            assert theirs.models.list().data

    await asyncio.to_thread(ask)


async def test_keywords_that_the_service_does_not_know_are_told(live: Any) -> None:
    """A slip of the pen is not passed over in silence: OpenAI's routes ignore such fields."""
    async with AsyncMallee(live.url) as client:
        with pytest.warns(UserWarning, match="'max_token' .the nearest is `max_tokens`"):
            await client.complete("Why?", max_token=2, max_tokens=1)  # type: ignore[call-overload]


def test_what_is_no_client_of_openai_s_is_refused() -> None:
    with pytest.raises(InvalidParameter, match=r"give an openai\.OpenAI"):
        Mallee.from_openai("http://127.0.0.1")  # type: ignore[arg-type]
    other: Any = httpx.AsyncClient()
    with pytest.raises(InvalidParameter, match="http_client='AsyncClient': give httpx's Client"):
        Mallee("http://127.0.0.1", http_client=other)
    nowhere = openai.OpenAI(base_url="http://127.0.0.1:1/v1", api_key="none", max_retries=0)
    with nowhere, Mallee.from_openai(nowhere) as client, pytest.raises(ConnectionFailed):
        client.models()
