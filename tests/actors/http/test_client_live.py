"""The SDK, and OpenAI's client, over one WebSocket."""

import asyncio
from typing import Any

import httpx
import openai
import pytest

from mallee.client import AsyncMallee, InvalidParameter, MalleeError, UnknownCapsule
from mallee.client.errors import ConnectionFailed, StreamBroken
from mallee.client.transports.live import AsyncLiveTransport
from mallee.protocol.errors import TenantQueueFull
from support.waiting import until

TEXTS = [f"hello {i}" for i in range(3)]


async def test_many_requests_of_both_ways_share_one_socket(live: Any) -> None:
    """I17, part: streams, whole answers, errors and questions at once; each goes to its own."""
    transport = AsyncLiveTransport(live.url)
    async with AsyncMallee(live.url, transport=transport) as client:
        asked = [client.complete(f"prompt {i}", n=3) for i in range(20)]
        *answers, capsule, models = await asyncio.gather(
            *asked, client.prefill("abc"), client.models()
        )
        assert all([each.text for each in answer] == TEXTS for answer in answers)
        assert models
        assert len(live.server._connections._open) == 1
        forked = await capsule.fork(3).wait()
        assert [each.text for each in forked] == TEXTS
        with pytest.raises(UnknownCapsule):
            await client.capsule("never")
        await capsule.delete()
        assert transport._waiting == {}


async def test_a_stream_that_is_left_is_cancelled_and_the_socket_stays(live: Any) -> None:
    live.service.holds_after = 2
    async with AsyncMallee(live.url, transport=AsyncLiveTransport(live.url)) as client:
        async with client.stream("abc", n=2) as branches:
            async for _ in branches:
                if len(branches.branches) == 2:
                    break
        await until(live.service.closed.is_set)
        assert await client.models()


async def test_refusals_say_when_to_ask_again(live: Any) -> None:
    live.service.refuses = TenantQueueFull(3, 3, 7.2)
    transport = AsyncLiveTransport(live.url)
    async with AsyncMallee(live.url, transport=transport, max_retries=0) as client:
        with pytest.raises(TenantQueueFull) as told:
            await client.complete("abc")
        assert told.value.retry_after_s == 8.0


async def test_a_lost_socket_ends_what_ran_on_it_and_another_is_opened(live: Any) -> None:
    live.service.holds_after = 2
    transport = AsyncLiveTransport(live.url)
    async with AsyncMallee(live.url, transport=transport, max_retries=0) as client:
        async with client.stream("abc") as branches:
            async for _ in branches:
                break
            assert transport._socket is not None
            transport._socket.transport.abort()
            with pytest.raises(StreamBroken):
                await branches.wait()
        assert await client.models()


async def test_what_a_frame_cannot_say_is_refused(live: Any, tmp_path: Any) -> None:
    async with AsyncMallee(live.url, transport=AsyncLiveTransport(live.url)) as client:
        with pytest.raises(InvalidParameter, match="transport's headers"):
            await client.capsule("req_x.0", cache_salt="s")
        (tmp_path / "file").write_bytes(b"123")
        with pytest.raises(InvalidParameter, match="without its transport"):
            await client.import_capsule(tmp_path / "file")
    headers = {"x-cache-salt": "s"}
    transport = AsyncLiveTransport(live.url, headers=headers)
    async with AsyncMallee(live.url, transport=transport) as client:
        assert (await client.capsule("req_x.0", cache_salt="s")).id == "req_x.0"
    with pytest.raises(ConnectionFailed):
        async with AsyncMallee(transport=AsyncLiveTransport("http://127.0.0.1:1")) as nobody:
            await nobody.models()


async def test_openais_client_goes_over_the_socket(live: Any) -> None:
    http = httpx.AsyncClient(transport=AsyncLiveTransport(live.url))
    async with openai.AsyncOpenAI(
        base_url=f"{live.url}/v1", api_key="none", http_client=http
    ) as client:
        whole = await client.completions.create(model="tiny/bytes", prompt="abc", n=3)
        assert [choice.text for choice in whole.choices] == TEXTS
        stream = await client.completions.create(model="tiny/bytes", prompt="abc", stream=True)
        assert (
            "".join([chunk.choices[0].text async for chunk in stream if chunk.choices]) == TEXTS[0]
        )
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model="tiny/bytes", prompt="abc", max_tokens=10**6)


async def test_a_silent_server_is_not_waited_for(live: Any) -> None:
    live.service.holds_after = 2
    transport = AsyncLiveTransport(live.url)
    async with AsyncMallee(live.url, transport=transport, timeout_s=30.0) as client:
        with pytest.raises(StreamBroken, match="in time"):
            await client.stream("abc").wait()
        assert await client.models()


def test_an_address_without_http_is_refused_with_the_remedy() -> None:
    with pytest.raises(MalleeError, match="http://localhost:1"):
        AsyncLiveTransport("localhost:1")


async def test_an_answer_of_openais_client_is_forked(live: Any) -> None:
    """I17, part: by its address and key, and the capsule that the answer names."""
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none") as client:
        answer = await client.completions.create(model="tiny/bytes", prompt="abc")
        name = (answer.choices[0].model_extra or {})["mallee"]["capsule"]
        live.service.capsules[name] = live.service.capsules["req_x.0"]
        async with AsyncMallee(str(client.base_url), api_key=client.api_key) as mallee:
            capsule = await mallee.capsule(name)
            assert [each.text for each in await capsule.fork(3).wait()] == TEXTS
