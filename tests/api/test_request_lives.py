"""`GET /v1/requests/{request}`: the course of a request, and all ways in which one ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from mallee.mocker.passes import mock_spec
from mallee.protocol.errors import WorkerLost
from mallee.router.config import RouterConfig
from support.live_api import api_over
from support.live_fleet import LiveFleet, running
from support.waiting import until

SPEC = mock_spec(max_model_len=4096, vocab_size=128)
PATH = "/v1/completions"
ORDER = ["tokenizing", "waiting", "computing", "answering"]


@asynccontextmanager
async def served(workers: int = 1) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    """A client of a gateway, and the gateway."""
    async with running(LiveFleet(SPEC, RouterConfig(block_size=16)), workers) as fleet:
        gateway = fleet.gateways[0]
        transport = httpx.ASGITransport(app=api_over(gateway))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client, gateway


async def life(client: httpx.AsyncClient, request: str, **headers: str) -> Any:
    answer = await client.get(f"/v1/requests/{request}", headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_the_course_of_an_answer_is_told() -> None:
    """F29, part: states with their times, rates, the use of the cache, the worker and the capsule."""
    async with served() as (client, _):
        body = {"prompt": "x" * 40, "max_tokens": 8, "ignore_eos": True, "n": 2}
        made = (await client.post(PATH, json=body)).json()
        told = await life(client, made["id"])
        assert (told["object"], told["state"]) == ("request", "ended")
        assert told["cache"]["status"] == "cache_miss"
        assert abs(told["created"] - made["created"]) < 60
        for choice, branch in zip(made["choices"], told["branches"], strict=True):
            names = [each["state"] for each in branch["states"]]
            times = [each["at_s"] for each in branch["states"]]
            assert names == [*ORDER, "length"]
            assert times == sorted(times)
            assert times[0] == 0
            assert times[-1] <= told["age_s"]
            assert (branch["state"], branch["is_over"], branch["error"]) == (
                "length",
                True,
                None,
            )
            assert branch["output_tokens"] == 8
            assert branch["prefill_tokens"] == choice["mallee"]["prefill_tokens"]
            assert branch["cached_tokens"] == choice["mallee"]["cached_tokens"]
            assert branch["capsule"] == choice["mallee"]["capsule"]
            assert [each["worker"] for each in branch["workers"]] == ["w0"]
        # A stop string ends as its client saw it, though the worker was told to cut the branch.
        body = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True, "seed": 3}
        text = (await client.post(PATH, json=body)).json()["choices"][0]["text"]
        made = (await client.post(PATH, json={**body, "stop": text[5:8]})).json()
        assert made["choices"][0]["finish_reason"] == "stop"
        stopped = (await life(client, made["id"]))["branches"][0]
        assert (stopped["state"], stopped["error"]) == ("stop", None)
        assert stopped["capsule"] == made["choices"][0]["mallee"]["capsule"]


async def begun(client: httpx.AsyncClient, gateway: Any) -> tuple[asyncio.Task[Any], str]:
    """An answer whose branches have tokens, and its id."""
    known = len(gateway.requests._lives._lives)
    body = {"prompt": "abc", "max_tokens": 4000, "ignore_eos": True, "n": 2}
    asked = asyncio.create_task(client.post(PATH, json=body))
    await until(lambda: len(gateway.requests._lives._lives) > known)
    request = next(reversed(gateway.requests._lives._lives))
    branches = gateway.requests._lives.get(request).branches
    await until(lambda: {branch.state for branch in branches} == {"answering"})
    return asked, request


async def test_a_running_answer_its_hang_up_and_its_error_are_told() -> None:
    """F29, part: cancelled; and error, of a worker that is lost for good."""
    async with served() as (client, gateway):
        asked, request = await begun(client, gateway)
        told = await life(client, request)
        assert (told["state"], told["branches"][0]["is_over"]) == ("running", False)
        assert told["branches"][1]["output_tokens"] > 0
        asked.cancel()
        await asyncio.wait([asked])
        told = await life(client, request)
        assert told["state"] == "ended"
        assert [branch["state"] for branch in told["branches"]] == ["cancelled", "cancelled"]
        assert [each["state"] for each in told["branches"][0]["states"]] == [*ORDER, "cancelled"]
        asked, request = await begun(client, gateway)
        lost = WorkerLost("w0", "test")
        for branch in range(2):
            gateway.shell.running[request].fail(branch, lost, gateway.context.clock(), "base")
        await asyncio.wait([asked])
        ends = (await life(client, request))["branches"]
        assert {(each["state"], each["error"]) for each in ends} == {("error", "worker_lost")}


async def test_a_refusal_is_told_by_its_code() -> None:
    """F29, part: refused, before anything was sent to a worker."""
    async with served(workers=0) as (client, gateway):
        refused = await client.post(PATH, json={"prompt": "abc"})
        assert refused.status_code == 503, refused.text
        told = await life(client, next(reversed(gateway.requests._lives._lives)))
        branch = told["branches"][0]
        assert (told["state"], branch["state"]) == ("ended", "refused")
        assert branch["error"] == refused.json()["error"]["code"]
        assert [each["state"] for each in branch["states"]] == ["tokenizing", "waiting", "refused"]
        assert branch["prompt"] is None
