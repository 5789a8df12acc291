"""Verbs of branches: at a gateway that doesn't run the request, and what each does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.doubles.random_model import random_model
from mallee.api.branches import verbs
from mallee.client import AsyncMallee
from mallee.gateway.capsules.lineage import Lineage
from mallee.protocol.ids import CapsuleId, RequestId
from support.live_fleet import LiveFleet, lose
from support.tiny_fleet import chunks_of, post, tiny_api, two_gateways
from support.waiting import until

MODEL = random_model("llama", 5, max_position_embeddings=2048)
SAMPLED = {"ignore_eos": True, "seed": 3, "temperature": 1.0}
ASKED: dict[str, Any] = {"prompt": "A critic scores", **SAMPLED, "n": 3, "max_tokens": 1200}


class Run:
    """A streamed request, read to its end."""

    def __init__(self) -> None:
        self.name = ""
        self.texts = [""] * ASKED["n"]
        self.ends: dict[int, str] = {}


@asynccontextmanager
async def streamed(client: httpx.AsyncClient) -> AsyncIterator[tuple[Run, Any]]:
    run = Run()

    async def read(stop_at: int | None = None) -> None:
        """Until branch 0 has `stop_at` characters, or to the end."""
        async for chunk in chunks:
            run.name = chunk["id"]
            for choice in chunk["choices"]:
                run.texts[choice["index"]] += choice["text"]
                if choice["finish_reason"]:
                    run.ends[choice["index"]] = choice["finish_reason"]
            if stop_at is not None and len(run.texts[0]) >= stop_at:
                return

    async with client.stream("POST", "/v1/completions", json={**ASKED, "stream": True}) as response:
        chunks = chunks_of(response)
        yield run, read


async def test_another_gateway_passes_them_on() -> None:
    """F19, part, F20, part, F22, part, F29, part: as if the gateway that runs the request had been asked."""
    async with two_gateways(MODEL) as s, streamed(s.a) as (run, read):
        await read(3)
        path = f"/v1/requests/{run.name}"
        done = await post(s.b, f"{path}/branches/1/inject", suffix="LOOK")
        assert (done["branch"], done["tokens"]) == (1, 4)
        taken = await post(s.b, f"{path}/capsules", branch=1)
        assert taken["tokens"] > done["at"]
        for client in (s.a, s.b):
            await post(client, f"/v1/capsules/{taken['id']}/fork", n=1, max_tokens=2)
        changed = await post(s.b, f"{path}/prioritize", priority=2, branches=[0, 1])
        assert (changed["branches"], changed["priority"]) == ([0, 1], 2)
        assert (await post(s.b, f"{path}/prune", branches=[0, 2, 9]))["branches"] == [0, 2]
        gone = await s.b.post(f"{path}/branches/0/inject", json={"suffix": "x"})
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "branch_not_found")
        full = {"suffix": "x" * 1999}
        refused = await s.b.post(f"{path}/branches/1/inject", json=full)
        same = await s.a.post(f"{path}/branches/1/inject", json=full)
        assert refused.status_code == 400
        told, there = (each.json()["error"] for each in (refused, same))
        assert told["message"].startswith("tokens=1999: give 1 to ")
        assert told | {"message": ""} == there | {"message": ""}
        assert (await post(s.b, f"{path}/prune"))["branches"] == [1]
        await read()
        lives = [(await each.get(path)).json() for each in (s.a, s.b)]
        for life in lives:
            assert [branch["states"][-1]["state"] for branch in life["branches"]] == [
                "cancelled"
            ] * 3
        assert run.ends == dict.fromkeys(range(3), "cancelled")
        at = done["at"]
        assert run.texts[1][at : at + 4] == "LOOK"
        for verb in ("prune", "capsules"):
            over = await s.b.post(f"{path}/{verb}", json={})
            assert over.status_code == 404


async def test_a_gateway_that_takes_too_long_is_told_apart_from_an_unknown_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verbs, "WAIT_S", 0.1)
    async with two_gateways(MODEL) as s, streamed(s.a) as (run, read):
        await read(3)
        answers = s.fleet.gateways[0].peers._answers
        tell = answers[verbs._VERB]

        async def never(key: str, scope: Any, given: bytes) -> bytes | None:
            await until(lambda: False, timeout_s=0.5)
            return None

        answers[verbs._VERB] = never
        answer = await s.b.post(f"/v1/requests/{run.name}/prune", json={})
        assert answer.status_code == 503
        assert run.name in answer.json()["error"]["message"]
        answers[verbs._VERB] = tell
        await post(s.b, f"/v1/requests/{run.name}/prune")
        await read()


# Tokens into running branches

PROMPT = "".join(chr(33 + 7 * i % 90) for i in range(50))
WORDS = "THE TOOL SAYS: 42."


async def _injected(
    client: httpx.AsyncClient, n: int, lost: LiveFleet | None = None, **more: Any
) -> tuple[list[str], int, Any]:
    """The texts of n streamed branches, where `WORDS` came into the last, and how its stream told that.

    Of a fleet that is `lost` their worker dies some tokens later.
    """
    asked = {"prompt": PROMPT, **SAMPLED, "max_tokens": 160, "n": n, "stream": True, **more}
    texts, place, told = [""] * n, -1, []
    async with client.stream("POST", "/v1/completions", json=asked) as response:
        async for chunk in chunks_of(response):
            choice = chunk["choices"][0]
            texts[choice["index"]] += choice["text"]
            told += choice.get("mallee", {}).get("injected", [])
            if place < 0 and len(texts[n - 1]) > 20:
                path = f"/v1/requests/{chunk['id']}/branches/{n - 1}/inject"
                place = (await post(client, path, suffix=WORDS))["at"]
            elif lost is not None and len(texts[n - 1]) > place + len(WORDS) + 5:
                await lose(lost, response.headers["x-mallee-worker"])
                lost = None
    assert lost is None
    return texts, place, told


async def test_the_answer_is_that_of_a_linear_run_with_these_tokens() -> None:
    """F22: the tool's words are in the stream where the answer says; what follows is a linear run's."""
    async with tiny_api(MODEL, 1) as (client, _):
        alone = await post(client, "/v1/completions", prompt=PROMPT, **SAMPLED, max_tokens=160, n=2)
        texts, place, told = await _injected(client, 2)
        assert told == [{"at": place, "tokens": len(WORDS)}]
        assert texts[0] == alone["choices"][0]["text"]  # the other branch is as it was
        before, after = texts[1][:place], texts[1][place + len(WORDS) :]
        assert before == alone["choices"][1]["text"][:place]
        assert texts[1][place:].startswith(WORDS)
        assert len(texts[1]) == 160  # which the limit counts
        one, at, _ = await _injected(client, 1, temperature=0.0)
        linear = await post(
            *(client, "/v1/completions"),
            **{**SAMPLED, "temperature": 0.0},
            prompt=PROMPT + one[0][:at] + WORDS,
            max_tokens=160 - at - len(WORDS),
        )
        assert linear["choices"][0]["text"] == one[0][at + len(WORDS) :]
        assert after


async def test_a_branch_that_lost_its_worker_keeps_what_was_injected() -> None:
    """F22, part: failover goes on after the injected tokens, token-exact."""
    async with tiny_api(MODEL, 2) as (client, fleet):
        greedy = {**SAMPLED, "temperature": 0.0, "max_tokens": 300}
        (text,), place, _ = await _injected(client, 1, fleet, **greedy)
        linear = await post(
            *(client, "/v1/completions"),
            **{**SAMPLED, "temperature": 0.0},
            prompt=PROMPT + text[:place] + WORDS,
            max_tokens=300 - place - len(WORDS),
        )
        assert text[place:] == WORDS + linear["choices"][0]["text"]


async def test_what_cannot_be_injected_or_prioritized_is_refused_by_name() -> None:
    """F22, part, F30, part: no such branch, no tokens, too many, an unknown mode; wrong priorities."""
    async with tiny_api(MODEL, 1) as (client, fleet):
        body = {"prompt": PROMPT, **SAMPLED, "max_tokens": 1900, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            chunks = chunks_of(response)
            chunk = await anext(chunks)
            path = f"/v1/requests/{chunk['id']}/branches"
            for branch, asked, status, named in (
                (1, {"suffix": "x"}, 404, "branch"),
                ("x", {"suffix": "x"}, 404, "branch"),
                (0, {"suffix": ""}, 400, "suffix"),
                (0, {}, 400, "suffix"),
                (0, {"suffix": "x", "mode": "often"}, 400, "mode"),
                (0, {"suffix": "x" * 1900}, 400, "tokens"),
            ):
                answer = await client.post(f"{path}/{branch}/inject", json=asked)
                assert answer.status_code == status, answer.text
                assert named in answer.json()["error"]["message"]
        for body in ({}, {"priority": 1001}, {"priority": "high"}):
            answer = await client.post("/v1/requests/cmpl-1/prioritize", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")
        for verb, body in (
            ("prune", {"branches": [1 << 64]}),
            ("prioritize", {"branches": [1 << 64], "priority": 1}),
            ("capsules", {"branch": 1 << 64}),
        ):
            request = chunk["id"]
            answer = await client.post(f"/v1/requests/{request}/{verb}", json=body)
            assert answer.status_code == 400, answer.text
        await until(lambda: not fleet.gateways[0].requests.num_in_flight)  # it has hung up
        gone = await client.post(f"{path}/0/inject", json={"suffix": "x"})
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "branch_not_found")
        fleet.gateways[0].check()


# Their priority


def _priorities(fleet: LiveFleet) -> list[float]:
    """Of all branches that run, lowest first."""
    engines: Any = fleet.engines.values()
    return sorted(branch.priority for engine in engines for branch in engine.branches)


@pytest.mark.slow
async def test_branches_have_their_new_priority_also_after_their_worker_was_lost() -> None:
    """D15, part: at the worker's next step, and on the next worker; the texts are as they were."""
    async with tiny_api(MODEL, 2) as (client, fleet):
        body = {**ASKED, "max_tokens": 600}
        alone = await post(client, "/v1/completions", **body)
        texts, done = [""] * 3, False
        body["stream"] = True
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for chunk in chunks_of(response):
                for choice in chunk["choices"]:
                    texts[choice["index"]] += choice["text"]
                if not done and all(texts):
                    done = True
                    path = f"/v1/requests/{chunk['id']}/prioritize"
                    some = await post(client, path, priority=5, branches=[2, 1, 7])
                    assert (some["branches"], some["priority"]) == ([1, 2], 5)
                    await until(lambda: _priorities(fleet) == [0, 5, 5])
                    one = await post(client, path, priority=-7, branches=[1])
                    assert one["branches"] == [1]
                    await until(lambda: _priorities(fleet) == [-7, 0, 5])
                    await lose(fleet, response.headers["x-mallee-worker"])
                    await until(lambda: _priorities(fleet) == [-7, 0, 5])
        assert texts == [choice["text"] for choice in alone["choices"]]
        gone = await client.post(path, json={"priority": 1})
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "request_not_found")


# All below a capsule


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2), st.integers(0, 1)), max_size=30),
    st.integers(4, 40),
)
def test_all_below_a_capsule_is_found(forks: list[tuple[int, int, int]], kept: int) -> None:
    """D29, part: also of shards; of the newest requests, where more were made than are remembered."""
    lineage, origins = Lineage(max_kept=kept), {}
    for i, (of, branch, shard) in enumerate(forks, 1):
        name = f"r{of % i}-{shard}" if shard else f"r{of % i}"
        origins[f"r{i}"] = f"{name}.{branch}"
        lineage.add(RequestId(f"r{i}"), CapsuleId(origins[f"r{i}"]))
    known = dict(list(origins.items())[-kept:])
    for capsule in {*origins.values(), "r0.0"}:
        below = {request for request, origin in known.items() if origin == capsule}
        while more := {
            r
            for r, origin in known.items()
            if origin.partition(".")[0].partition("-")[0] in below and r not in below
        }:
            below |= more
        assert sorted(lineage.below([CapsuleId(capsule)])) == sorted(below)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [0, 1])
async def test_a_subtree_ends_at_every_gateway(asked: int) -> None:
    """F20, part, D29, part: its requests came to two gateways by turns; what is beside it goes on."""
    async with two_gateways(MODEL) as s:
        root = (await post(s.a, "/v1/capsules", prompt="A tree", ttl_s=600))["id"]
        first = await post(s.a, f"/v1/capsules/{root}/fork", **SAMPLED, n=2, max_tokens=5)
        left, right = (choice["mallee"]["capsule"] for choice in first["choices"])
        back = (await post(s.a, f"/v1/capsules/{left}/rewind", to=7))["id"]
        short, long, beside = ({**SAMPLED, "n": 1, "max_tokens": num} for num in (3, 1900, 300))
        alone = await post(s.a, f"/v1/capsules/{right}/fork", **beside)
        names, capsule = [back], left
        for client in (s.b, s.a, s.b):
            made = await post(client, f"/v1/capsules/{capsule}/fork", **short)
            capsule = made["choices"][0]["mallee"]["capsule"]
            names.append(capsule)
        forks = (
            (s.a, capsule, long),
            (s.b, capsule, long),
            (s.b, back, long),
            (s.a, right, beside),
        )
        running = [
            asyncio.create_task(post(client, f"/v1/capsules/{of}/fork", **more))
            for client, of, more in forks
        ]
        engine: Any = next(iter(s.fleet.engines.values()))
        await until(lambda: len(engine.branches) == 4)
        pruned = await post((s.a, s.b)[asked], f"/v1/capsules/{left}/prune")
        assert len(pruned["requests"]) == 3
        assert (pruned["released"], pruned["left"]) == (4, 0)
        *ended, undisturbed = await asyncio.gather(*running)
        assert {answer["choices"][0]["finish_reason"] for answer in ended} == {"cancelled"}
        assert undisturbed["choices"][0]["text"] == alone["choices"][0]["text"]
        assert (await s.a.get(f"/v1/capsules/{left}")).status_code == 200
        again = await post(s.a, f"/v1/capsules/{root}/prune")
        assert (again["requests"], again["left"]) == ([], 0)
        await until(lambda: not engine.branches)
        for client in (s.a, s.b):
            for gone in (left, right, *names):
                assert (await client.get(f"/v1/capsules/{gone}")).status_code == 404
            assert (await client.get(f"/v1/capsules/{root}")).status_code == 200
        strange = await s.a.post("/v1/capsules/nobodys.0/prune", json={})
        assert (strange.status_code, strange.json()["error"]["code"]) == (404, "capsule_not_found")


async def test_the_sdk_has_the_verbs() -> None:
    """D15, part, F20, part, F22, part: `Branch.inject`, `Branch.prioritize`, `Capsule.prune`."""
    async with tiny_api(MODEL, 1) as (client, fleet), AsyncMallee(str(client.base_url)) as sdk:
        asked: Any = None
        async with sdk.stream(PROMPT, max_tokens=200, ignore_eos=True, seed=3) as branches:
            async for event in branches.events():
                if asked is None and event.text:
                    branch = branches.branches[0]
                    assert await branch.prioritize(9)
                    await until(lambda: _priorities(fleet) == [9])
                    asked = asyncio.create_task(branch.inject(WORDS))
        at = await asked
        assert branch.text[at : at + len(WORDS)] == WORDS
        assert branch.injected == [{"at": at, "tokens": len(WORDS)}]

        capsule = await sdk.prefill("A tree")
        await capsule.fork(2, max_tokens=3).wait()
        assert await capsule.prune() == []
