"""The SDK over the connections of OpenAI's own client."""

import asyncio
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
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

TEXTS = ["hello 0", "hello 1"]
CAPSULE = {"id": "req_1.0", "object": "capsule", "created": 1, "model": "m", "tokens": 7}


async def test_openai_s_client_is_the_transport(live: Any) -> None:
    """I17, part: one connection for both, whose client stays open; whole answers, streams, errors."""

    def ask(theirs: openai.OpenAI) -> None:
        with Mallee.from_openai(theirs, model="tiny/bytes") as client:
            assert (client.base_url, client.max_retries) == (live.url, 0)
            assert client._http.timeout.read == 7
            assert client._headers["Authorization"] == "Bearer none"
            assert [each.text for each in client.complete("abc", n=2)] == TEXTS
            capsule = client.prefill("abc")
            with capsule.fork(2) as branches:
                assert "".join(e.text for e in branches if not e.index) == TEXTS[0]
            with pytest.raises(UnknownCapsule):
                client.capsule("never")
        assert theirs.models.list().data
        assert len(live.server._connections._open) == 1

    await with_theirs(live, ask, max_retries=0, timeout=7)


async def with_theirs(live: Any, work: Callable[[openai.OpenAI], None], **more: Any) -> None:
    """Do `work` with a synchronous client of theirs, in a thread."""

    def begin() -> None:
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", **more) as theirs:
            work(theirs)

    await asyncio.to_thread(begin)


async def test_openai_s_asynchronous_client_too(live: Any) -> None:
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none") as theirs:
        async with AsyncMallee.from_openai(theirs) as client:
            assert [each.text for each in await client.complete("abc", n=2)] == TEXTS
            live.service.holds_after = 2
            async with client.stream("abc", n=2) as branches:
                async for _ in branches:
                    break
            await until(live.service.closed.is_set)
            live.service.reset()
            with pytest.raises(UnknownCapsule):
                await client.capsule("never")
        assert (await theirs.models.list()).data


class Halves(httpx2.SyncByteStream):
    """A body that comes in two pieces."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def __iter__(self) -> Iterator[bytes]:
        half = len(self._raw) // 2
        yield self._raw[:half]
        yield self._raw[half:]


def test_files_go_over_it_too(tmp_path: Path) -> None:
    """A body that is sent in pieces, and one that is read so."""
    file = b"a capsule" * 200_000

    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":
            return httpx2.Response(200, stream=Halves(file))
        assert request.headers.get_list("content-length") == [str(len(file))]
        assert request.read() == file
        return httpx2.Response(200, stream=Halves(json.dumps(CAPSULE).encode()))

    http = httpx2.Client(transport=httpx2.MockTransport(answer))
    with openai.OpenAI(base_url="http://test/v1", api_key="none", http_client=http) as theirs:
        client, taken = Mallee.from_openai(theirs), io.BytesIO()
        (tmp_path / "a.file").write_bytes(file)
        capsule = client.import_capsule(tmp_path / "a.file")
        assert capsule.id == CAPSULE["id"]
        assert capsule.export(taken) == len(file)
        assert taken.getvalue() == file


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
