"""Steps beside a verifier: the times between tokens are those without one."""

import asyncio
import json
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.live_api import served
from support.mock_scene import make_folder, mock_config, mocked
from support.waiting import until

BRANCHES, TOKENS = 8, 80


class SlowVerifier:
    """Answers each question with scores after `delay_s`; counts them."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.num_calls = 0

    async def answer(self, reader: StreamReader, writer: StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().split(b"content-length: ")[1].split()[0])
            question = json.loads(await reader.readexactly(length))
            self.num_calls += 1
            await asyncio.sleep(self.delay_s)
            body = json.dumps({"scores": [1.0] * len(question["branches"])}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))


@asynccontextmanager
async def verifying(verifier: SlowVerifier) -> AsyncIterator[str]:
    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        try:
            await verifier.answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the caller has hung up
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/verify"
    finally:
        server.close()


async def gaps_s(client: httpx.AsyncClient, **more: Any) -> list[float]:
    """Seconds between two tokens of a branch, in order of length; of all branches."""
    body = {"prompt": [1, 2, 3], "n": BRANCHES, "max_tokens": TOKENS, "ignore_eos": True}
    now = asyncio.get_running_loop().time
    last: dict[int, float] = {}
    found = []
    asked = {**body, "stream": True, **more}
    async with client.stream("POST", "/v1/completions", json=asked) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                if choice["index"] in last:
                    found.append(now() - last[choice["index"]])
                last[choice["index"]] = now()
    return sorted(found)


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 60.0])
async def test_a_verifier_delays_no_step(tmp_path: Path, delay_s: float) -> None:
    """D12: in virtual time the p99 of steps is within 10 % of that without, however slow the verifier is."""
    config = mock_config(make_folder(tmp_path), mock__engines_per_worker=1, mock__speedup=1.0)
    verifier = SlowVerifier(delay_s)
    async with (
        mocked(config) as scene,
        verifying(verifier) as url,
        served(scene.gateway, callbacks=(url,)) as (api, _),
        httpx.AsyncClient(base_url=api, timeout=100) as client,
    ):
        await until(lambda: any(view.is_whole for view in scene.router.workers()))
        alone = await gaps_s(client)
        score = {"score": {"url": url, "below": 0.5, "every": 8}}
        beside = await gaps_s(client, mallee={"stop_when": score})
        assert len(alone) == len(beside) > TOKENS
        assert verifier.num_calls >= (1 if delay_s > 1 else 5)
        at = len(alone) * 99 // 100
        assert 0 < beside[at] <= 1.1 * alone[at]
