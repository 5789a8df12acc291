"""Workers on an engine that is not ours, over the whole stack: its stand-in draws by a rule, so do we."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from mallee.protocol.errors import NotSupported, WorkerLost
from mallee.protocol.hashing import as_tokens
from mallee.protocol.ids import COMMON, WorkerId
from mallee.protocol.messages import Grammar, Limits, Sampling
from mallee.router.dispatch.jobs import GenerateJob
from support.foreign_fleet import BLOCK, ForeignFleet, foreign_fleet, plain
from support.live_api import served
from support.live_fleet import lose, running
from support.waiting import elapse, until

RETAINED = {
    "protocol_version": "0.1",
    "actions": [{"action_type": "kv.retain", "payload": {"directives": [{"priority": 9}]}}],
}
PROMPT = [65 + 3 * i % 26 for i in range(34)]


@asynccontextmanager
async def api(
    workers: int = 1, **options: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, ForeignFleet]]:
    made = foreign_fleet(**options)
    async with (
        running(made, workers) as fleet,
        served(fleet.gateways[0]) as (url, _),
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        yield client, made
        for runner in fleet.engines.values():
            runner.check()
        fleet.gateways[0].check()


async def complete(client: httpx.AsyncClient, path: str = "/v1/completions", **body: Any) -> Any:
    asked = {"model": "m", "max_tokens": 9, "temperature": 0, **body}
    answer = await client.post(path, json=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


async def test_an_answer_is_the_engines_and_says_what_was_cached() -> None:
    async with api() as (client, _):
        first = await complete(client, prompt=PROMPT)
        assert first["choices"][0]["text"] == text_of(plain(PROMPT, 9))
        assert first["choices"][0]["finish_reason"] == "length"
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        again = await complete(client, prompt=PROMPT)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
        assert again["choices"][0]["mallee"]["prefill_tokens"] == 2


async def test_a_stop_token_ends_an_answer_and_is_no_part_of_it() -> None:
    want = plain(PROMPT, 9)
    at = next(i for i in range(1, 9) if want[i] not in want[:i])
    async with api() as (client, _):
        body = await complete(client, prompt=PROMPT, stop_token_ids=[want[at]])
        assert body["choices"][0]["text"] == text_of(want[:at])
        assert body["choices"][0]["finish_reason"] == "stop"
        # As of our own engine it counts, and has a log-probability.
        told = {"stop_token_ids": [want[at]], "return_token_ids": True, "logprobs": 0}
        body = await complete(client, prompt=PROMPT, **told)
        (choice,) = body["choices"]
        assert choice["token_ids"] == want[: at + 1]
        assert body["usage"]["completion_tokens"] == at + 1
        assert len(choice["logprobs"]["tokens"]) == at + 1
        assert body["choices"][0]["mallee"]["boundary"] == len(PROMPT) + at


async def test_a_chat_streams_the_same_text() -> None:
    async with api() as (client, _):
        asked = {"model": "m", "max_tokens": 12, "temperature": 0, "prompt": PROMPT, "stream": True}
        parts = []
        async with client.stream("POST", "/v1/completions", json=asked) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    parts += [each["text"] for each in json.loads(line[6:])["choices"]]
        assert "".join(parts) == text_of(plain(PROMPT, 12))


async def test_choices_draw_streams_of_their_own_and_the_same_again() -> None:
    async with api() as (client, fleet):
        asked = {"prompt": PROMPT, "n": 4, "temperature": 1.0, "seed": 5}
        first, again = [await complete(client, **asked) for _ in range(2)]
        texts = [choice["text"] for choice in first["choices"]]
        assert len(set(texts)) == 4
        assert texts == [choice["text"] for choice in again["choices"]]
        # The first alone computed the prompt; the others the tokens after its last full block.
        (engine,) = fleet.forwards.values()
        assert engine.num_computed == len(PROMPT) + 7 * (len(PROMPT) - 32)


async def test_cold_prompts_that_begin_alike_are_computed_once() -> None:
    """X20, part: ten at once, of five texts behind 32 tokens that they share."""
    async with api() as (client, fleet):
        prompts = [PROMPT[:32] + [80 + i % 5] * 8 for i in range(10)]
        answers = await asyncio.gather(*(complete(client, prompt=each) for each in prompts))
        for prompt, body in zip(prompts, answers, strict=True):
            assert body["choices"][0]["text"] == text_of(plain(prompt, 9))
        (engine,) = fleet.forwards.values()
        whole, own, again = 40, 4 * 8, 5 * BLOCK  # of a prompt that is cached its last block
        assert engine.num_computed <= whole + own + again


async def test_a_capsule_is_forked_by_its_text() -> None:
    async with api() as (client, _):
        made = (await client.post("/v1/capsules", json={"prompt": PROMPT})).json()
        asked = {"suffixes": [[66, 67], [68], []], "max_tokens": 5, "temperature": 0}
        body = await complete(client, f"/v1/capsules/{made['id']}/fork", **asked)
        for choice, suffix in zip(body["choices"], asked["suffixes"], strict=True):
            assert choice["text"] == text_of(plain(PROMPT + suffix, 5))
            assert choice["mallee"]["cached_tokens"] >= 32
        left = body["choices"][0]["mallee"]["capsule"]
        more = await complete(client, f"/v1/capsules/{left}/fork", n=1, max_tokens=3)
        before = [*PROMPT, 66, 67, *plain([*PROMPT, 66, 67], 5)]
        assert more["choices"][0]["text"] == text_of(plain(before, 3))
        shorter = await client.post(f"/v1/capsules/{made['id']}/rewind", json={"to": 21})
        body = await complete(
            client, f"/v1/capsules/{shorter.json()['id']}/fork", n=1, max_tokens=4
        )
        assert body["choices"][0]["text"] == text_of(plain(PROMPT[:21], 4))
        assert (await client.delete(f"/v1/capsules/{made['id']}")).status_code == 200
        gone = await client.post(f"/v1/capsules/{made['id']}/fork", json={"max_tokens": 1})
        assert gone.status_code == 404


async def test_a_request_that_is_given_up_is_aborted() -> None:
    async with api(step_s=0.05) as (client, fleet):
        asked = {"model": "m", "prompt": PROMPT, "max_tokens": 400, "stream": True}
        async with client.stream("POST", "/v1/completions", json=asked) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    break
        (engine,) = fleet.forwards.values()
        await until(lambda: not engine.running and engine.num_aborted == 1)


@pytest.mark.parametrize("how", ["dies", "is lost", "hangs", "drains"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_an_answer_goes_on_elsewhere_when_its_engine(how: str, temperature: float) -> None:
    """X20, part: an undisturbed run's if greedy; sampled, it goes on from what was told, and says so."""
    async with api(2, step_s=0.02) as (client, fleet):
        asked = {"prompt": PROMPT, "max_tokens": 60, "temperature": temperature, "seed": 3}
        whole = (await complete(client, **asked))["choices"][0]["text"]
        answer = asyncio.create_task(complete(client, **asked))
        await elapse(0.3)
        name = next(name for name, engine in fleet.forwards.items() if engine.running)
        if how == "dies":
            fleet.forwards[name].die()
        elif how == "hangs":
            fleet.forwards[name].is_stuck = True
        elif how == "drains":
            host = next(each for each in fleet.hosts.values() if each.name == name)
            await host.drain(WorkerId(name), 0.1)
            assert fleet.forwards[name].is_shut_down
        else:
            await lose(fleet, name)
        choice = (await answer)["choices"][0]
        assert choice["mallee"]["worker"] != name
        assert choice["mallee"]["completion_tokens"] == 60
        if temperature:
            assert choice["mallee"]["resampled"] is True
            assert 0 < len(common(choice["text"], whole)) < 60
        else:
            assert choice["text"] == whole
            assert "resampled" not in choice["mallee"]


def common(a: str, b: str) -> str:
    """The text that both begin with."""
    num = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
    return a[:num]


async def test_what_no_engine_here_can_do_is_refused_by_name() -> None:
    async with api(step_s=0.05) as (client, _):
        made = (await client.post("/v1/capsules", json={"prompt": PROMPT})).json()
        left = (await complete(client, prompt=PROMPT))["choices"][0]["mallee"]["capsule"]
        refused = {
            "restore": (f"/v1/capsules/{left}/restore", {"max_tokens": 3}),
            "tiers": (f"/v1/capsules/{made['id']}/demote", {"tier": "host"}),
            "retain": (
                "/v1/completions",
                {"model": "m", "prompt": PROMPT, "kv_hints": RETAINED},
            ),
        }
        for lacking, (path, body) in refused.items():
            answer = await client.post(path, json=body)
            assert answer.status_code == 400, (lacking, answer.text)
            error = answer.json()["error"]
            assert error["code"] == "not_supported", error
            assert lacking in error["message"]


async def test_verbs_on_a_branch_that_runs() -> None:
    """It is captured and pruned; its priority stays, and nothing is put into it."""
    async with api(step_s=0.05) as (client, fleet):
        gateway = fleet.gateways[0]
        name = gateway.requests.new_name(COMMON)
        job = GenerateJob(as_tokens(PROMPT), Limits(100), Sampling(), 2)
        stream = await gateway.requests.start(job, name=name)
        await until(lambda: elapsed(fleet))
        taken = await gateway.requests.capture(stream.request, 1, 0.0, COMMON)
        assert taken.boundary >= len(PROMPT)
        body = await complete(client, f"/v1/capsules/{taken.capsule}/fork", n=1, max_tokens=3)
        whole = plain(PROMPT, 100)
        num_drawn = taken.boundary - len(PROMPT)
        assert body["choices"][0]["text"] == text_of(whole[num_drawn : num_drawn + 3])
        with pytest.raises(NotSupported, match="'priorities'"):
            gateway.requests.prioritize(stream.request, None, 3.0, COMMON)
        with pytest.raises(NotSupported, match="'inject'"):
            await gateway.requests.inject(
                stream.request, 0, as_tokens([70]), COMMON, replaces=False
            )
        gateway.requests.prune(stream.request, [1], COMMON)
        drawn = {delta.branch: delta async for delta in stream}
        assert drawn[0].finish == "length"
        assert drawn[1].finish == "cancelled"


def elapsed(fleet: ForeignFleet) -> bool:
    """Whether something was drawn."""
    return any(engine.num_computed for engine in fleet.forwards.values())


async def test_what_the_engine_does_not_take_is_the_callers() -> None:
    async with api(refuses=["logit_bias"]) as (client, _):
        asked = {"model": "m", "prompt": PROMPT, "logit_bias": {"70": 5}}
        answer = await client.post("/v1/completions", json=asked)
        assert answer.status_code == 400
        assert "logit_bias is not supported" in answer.json()["error"]["message"]


async def test_a_full_engine_is_a_later_moment_s() -> None:
    """503, which clients retry: the queue is full, not the request wrong."""
    async with api() as (client, fleet):
        (engine,) = fleet.forwards.values()
        engine.is_full = True
        asked = {"model": "m", "prompt": PROMPT}
        answer = await client.post("/v1/completions", json=asked)
        assert answer.status_code == 503, answer.text
        assert answer.json()["error"]["code"] == "unavailable"
        engine.is_full = False
        await complete(client, prompt=PROMPT)


async def test_a_constrained_answer_is_lost_with_its_worker() -> None:
    """No engine goes on inside its text: 503, as asking anew helps, and not that it is not supported."""
    async with api(2, step_s=0.02) as (_, fleet):
        gateway = fleet.gateways[0]
        job = GenerateJob(
            as_tokens(PROMPT), Limits(60), Sampling(), grammar=Grammar("regex", "[a-z]+")
        )
        stream = await gateway.requests.start(job, name=gateway.requests.new_name(COMMON))
        await until(lambda: elapsed(fleet))
        await elapse(0.1)
        next(engine for engine in fleet.forwards.values() if engine.running).die()
        error = [delta async for delta in stream][-1].error
        assert isinstance(error, WorkerLost)
        assert "lack 'grammar_state'" in str(error)


async def test_leases_and_loads_say_what_an_engine_does() -> None:
    async with api() as (client, fleet):
        for _ in range(2):
            body = await complete(client, prompt=PROMPT)
        (runner,) = fleet.engines.values()
        use = (await runner.load()).use
        assert use is not None
        assert (use.num_prefill_tokens, use.num_cached_tokens) == (len(PROMPT) + 2, 32)
        assert use.num_output_tokens == 2 * body["usage"]["completion_tokens"]
        (worker,) = (await client.get("/v1/router/workers")).json()["data"]
        assert "inject" in worker["lacks"]
        assert worker["use"]["prefill_tokens"] == use.num_prefill_tokens


async def test_the_router_knows_the_engines_blocks() -> None:
    """Conversations go where their text is, by the engine's own events."""
    async with api(3) as (client, fleet):
        told, workers = 0, set()
        for i in range(6):
            prompt = [66 + i, *PROMPT[1:]]
            for _ in range(3):
                body = await complete(client, prompt=prompt)
                workers.add(body["choices"][0]["mallee"]["worker"])
                told += body["usage"]["prompt_tokens_details"]["cached_tokens"]
                prompt = prompt + plain(prompt, 9) + [90]
        assert len(workers) == 3
        assert told == 6 * (40 + 52)  # all full blocks of the turns before
        for name, runner in fleet.engines.items():
            snapshot = await runner.snapshot()
            assert len(snapshot.hashes) // 8 == len(fleet.forwards[name].cache)
