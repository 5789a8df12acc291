"""Capsules over HTTP, on a tiny real model: taken in mid-stream, restored, rewound, pinned, listed."""

from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest

from bench.doubles.random_model import RandomModel, random_model
from mallee.client import AsyncMallee
from mallee.protocol.errors import UnknownBranch, UnknownCapsule
from support.any_gateway import one_gateway
from support.live_fleet import LiveFleet, lose
from support.tiny_fleet import chunks_of, post, tiny_api
from support.waiting import until

MODEL, HYBRID = (
    random_model(family, 5, max_position_embeddings=2048) for family in ("llama", "qwen3_5_text")
)
PROMPT = "".join(chr(33 + 7 * i % 90) for i in range(50))
SAMPLED = {"ignore_eos": True, "seed": 3, "temperature": 1.0, "frequency_penalty": 0.5}


def api(
    model: RandomModel = MODEL,
) -> AbstractAsyncContextManager[tuple[httpx.AsyncClient, LiveFleet]]:
    """One gateway and two workers, behind a real server."""
    return tiny_api(model, 2)


async def complete(client: httpx.AsyncClient, prompt: str, **options: Any) -> dict[str, Any]:
    answer = await post(client, "/v1/completions", prompt=prompt, **{**SAMPLED, **options})
    choice: dict[str, Any] = answer["choices"][0]
    return choice


@pytest.mark.slow
async def test_a_capsule_of_a_running_stream_goes_on_as_its_branch() -> None:
    """F1, part, F2, part: two branches stream; one is captured; the stream and the restored branch agree."""
    async with api() as (client, _):
        asked = {"prompt": PROMPT, **SAMPLED, "max_tokens": 400, "n": 2, "stream": True}
        texts, taken = ["", ""], {}
        async with client.stream("POST", "/v1/completions", json=asked) as response:
            async for chunk in chunks_of(response):
                choice = chunk["choices"][0]
                texts[choice["index"]] += choice["text"]
                if not taken and len(texts[1]) > 20:
                    path = f"/v1/requests/{chunk['id']}/capsules"
                    taken = await post(client, path, branch=1, ttl_s=60)
        alone = await post(client, "/v1/completions", **{**asked, "stream": False})
        assert texts == [choice["text"] for choice in alone["choices"]]
        drawn = taken["drawn"]
        assert 20 < drawn < 400
        assert taken["tokens"] == len(PROMPT) + drawn
        assert taken["pinned"]
        again = await post(client, f"/v1/capsules/{taken['id']}/restore")
        assert again["object"] == "capsule.restore"
        assert again["choices"][0]["text"] == texts[1][drawn:]
        some = await post(client, f"/v1/capsules/{taken['id']}/restore", max_tokens=5)
        assert some["choices"][0]["text"] == texts[1][drawn : drawn + 5]
        assert some["usage"]["prompt_tokens"] == len(PROMPT) + drawn
        gone = await client.post(f"/v1/requests/{alone['id']}/capsules", json={})
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "branch_not_found")


async def test_a_tool_call_is_undone_and_retried_over_http() -> None:
    """F5: the retry is as if the call had never run; the capsules after the call stay valid."""
    async with api() as (client, _):

        async def turn(capsule: str, text: str) -> dict[str, Any]:
            options = {**SAMPLED, "suffixes": [text], "max_tokens": 12}
            answer = await post(client, f"/v1/capsules/{capsule}/fork", **options)
            choice: dict[str, Any] = answer["choices"][0]
            return choice

        asked = await complete(client, PROMPT, max_tokens=12)
        called = await turn(asked["mallee"]["capsule"], "tool says: no")
        after = await turn(called["mallee"]["capsule"], "go on")
        boundary = asked["mallee"]["boundary"]
        assert boundary == len(PROMPT) + 12
        path = f"/v1/capsules/{after['mallee']['capsule']}/rewind"
        undone = await post(client, path, to=boundary)
        assert undone["tokens"] == boundary
        retried = await turn(undone["id"], "tool says: yes")
        never = await complete(client, f"{PROMPT}{asked['text']}tool says: yes", max_tokens=12)
        assert retried["text"] == never["text"]
        assert (await turn(undone["id"], "tool says: no"))["text"] == called["text"]
        again = await turn(called["mallee"]["capsule"], "go on")
        assert again["text"] == after["text"]
        wrong = await client.post(path, json={"to": 10_000})
        assert wrong.json()["error"]["param"] == "to"


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_cut_at_a_stop_string_leaves_a_capsule_at_the_cut(stream: bool) -> None:
    """F28, part, F20, part: of each of three choices; a fork right behind it is the text's own."""
    async with api() as (client, _):
        for number in range(4):
            options = {**SAMPLED, "seed": 3 + number, "max_tokens": 60, "n": 3}
            whole = await post(client, "/v1/completions", prompt=PROMPT, **options)
            full = [choice["text"] for choice in whole["choices"]]
            stop = [text[9 + 11 * i : 12 + 11 * i] for i, text in enumerate(full)]
            asked = {"prompt": PROMPT, **options, "stop": stop, "stream": stream}
            texts, ends = ["", "", ""], {}
            if stream:
                async with client.stream("POST", "/v1/completions", json=asked) as response:
                    async for chunk in chunks_of(response):
                        choice = chunk["choices"][0]
                        texts[choice["index"]] += choice["text"]
                        ends[choice["index"]] = choice
            else:
                for choice in (await post(client, "/v1/completions", **asked))["choices"]:
                    texts[choice["index"]], ends[choice["index"]] = choice["text"], choice
            for index, text in enumerate(texts):
                left = ends[index]["mallee"]
                assert full[index].startswith(text + stop[index])
                assert ends[index]["finish_reason"] == "stop"
                assert left["boundary"] == len(PROMPT) + len(text)
                path = f"/v1/capsules/{left['capsule']}"
                forked = await post(
                    client, f"{path}/fork", suffixes=["Observation"], max_tokens=9, **SAMPLED
                )
                cold = await complete(client, f"{PROMPT}{text}Observation", max_tokens=9)
                assert forked["choices"][0]["text"] == cold["text"]
                assert forked["choices"][0]["mallee"]["prefill_tokens"] < 4 + 12
                shown = (await client.get(path)).json()
                assert shown["tokens"] == left["boundary"]
                again = await post(client, f"{path}/restore", max_tokens=60 - len(text))
                assert again["choices"][0]["text"] == full[index][len(text) :]


async def test_a_capsule_at_a_cut_is_computed_again_where_its_worker_died() -> None:
    """F28, part, X4, part: from the text that the client saw; restores draw on as before."""
    async with api() as (client, fleet):
        whole = await complete(client, PROMPT, max_tokens=60)
        stop = whole["text"][20:23]
        cut = await complete(client, PROMPT, max_tokens=60, stop=stop)
        assert cut["text"] == whole["text"][:20]
        left = cut["mallee"]
        path = f"/v1/capsules/{left['capsule']}"
        before = await post(client, f"{path}/restore", max_tokens=12)
        host = await lose(fleet, left["worker"])
        restored = await post(client, f"{path}/restore", max_tokens=12)
        assert restored["choices"][0]["mallee"]["worker"] != left["worker"]
        assert restored["choices"][0]["text"] == before["choices"][0]["text"]
        assert before["choices"][0]["text"] == whole["text"][20:32]
        await host.close()


@pytest.mark.slow
@pytest.mark.parametrize("model", [MODEL, HYBRID], ids=["plain", "hybrid"])
async def test_a_restored_branch_goes_on_elsewhere_when_its_worker_dies(model: RandomModel) -> None:
    """F1, part, X4, part: in mid-answer; it counts its penalties and draws from where it was."""
    async with api(model) as (client, fleet):
        whole = await complete(client, PROMPT, max_tokens=300)
        path = f"/v1/capsules/{whole['mallee']['capsule']}"
        asked = {"at": len(PROMPT) + 30, "stream": True, "max_tokens": 270}
        text, host = "", None
        async with client.stream("POST", f"{path}/restore", json=asked) as response:
            async for chunk in chunks_of(response):
                choice = chunk["choices"][0]
                text += choice["text"]
                if host is None and len(text) > 40:
                    host = await lose(fleet, whole["mallee"]["worker"])
        assert text == whole["text"][30:]
        assert choice["mallee"]["worker"] != whole["mallee"]["worker"]
        again = await post(client, f"/v1/capsules/{choice['mallee']['capsule']}/rewind", to=200)
        assert again["drawn"] == 200 - len(PROMPT)
        assert host is not None
        await host.close()


async def test_forks_that_were_hung_up_on_leave_their_capsule_as_it_was() -> None:
    """F28, part: it and its forks go on as if new; the turn after a fork that broke off is a cold one's."""
    async with api() as (client, fleet):
        made = await post(client, "/v1/capsules", prompt=PROMPT)
        path = f"/v1/capsules/{made['id']}/fork"
        greedy = {"ignore_eos": True, "temperature": 0, "frequency_penalty": 0}
        asked = {**greedy, "suffixes": ["ab", "cd"]}
        seen = ["", ""]
        cut = {**asked, "stream": True, "max_tokens": 900}
        async with client.stream("POST", path, json=cut) as response:
            async for chunk in chunks_of(response):
                (choice,) = chunk["choices"]
                seen[choice["index"]] += choice["text"]
                if min(map(len, seen)) >= 6:
                    break
        await until(lambda: not any(each.stats().jobs for each in fleet.engines.values()))
        again = await post(client, path, **asked, max_tokens=24)
        for choice, suffix, text in zip(again["choices"], asked["suffixes"], seen, strict=True):
            turn = f"{PROMPT}{suffix}{text}what was that? "
            for prompt in (PROMPT + suffix, turn, turn[:-20] + "~"):
                options: dict[str, Any] = {**greedy, "max_tokens": 24}
                warm = await complete(client, prompt, **options)
                cold = await complete(client, prompt, **options, cache_salt=f"cold {prompt}")
                assert cold["mallee"]["cached_tokens"] == 0
                assert warm["text"] == cold["text"]
                if prompt == PROMPT + suffix:
                    assert choice["text"] == cold["text"]
                    assert choice["text"].startswith(text[:24])


async def test_pins_are_asked_for_seen_changed_and_listed() -> None:
    """F10, F17: over HTTP: kept by a field of the request, pinned, unpinned, deleted; bytes are shown."""
    async with api() as (client, _):
        kept = await complete(client, PROMPT, max_tokens=6, mallee={"keep": {"ttl_s": 50}})
        left = await complete(client, PROMPT + "other", max_tokens=6)
        assert (kept["mallee"]["kept"], "kept" in left["mallee"]) == ("kept", False)
        paths = [f"/v1/capsules/{each['mallee']['capsule']}" for each in (kept, left)]
        shown = [(await client.get(path)).json() for path in paths]
        assert [each["pinned"] for each in shown] == [True, False]
        assert 40 < shown[0]["ttl_s"] <= 50
        assert shown[1]["ttl_s"] is None
        assert [each["tier"] for each in shown] == ["device", "device"]
        assert all(each["nbytes"] > 0 for each in shown)
        pinned = await post(client, f"{paths[1]}/pin", ttl_s=9)
        assert (pinned["pinned"], round(pinned["ttl_s"])) == (True, 9)
        unpinned = (await client.delete(f"{paths[1]}/pin")).json()
        assert (unpinned["pinned"], unpinned["ttl_s"]) == (False, None)
        # a page at a time, in order, and of the caller's scope alone
        salted = await complete(client, PROMPT, max_tokens=6, cache_salt="mine")
        names = sorted(each["id"] for each in shown)
        first = (await client.get("/v1/capsules?limit=1")).json()
        assert ([each["id"] for each in first["data"]], first["has_more"]) == (names[:1], True)
        rest = (await client.get(f"/v1/capsules?after={first['last_id']}")).json()
        assert ([each["id"] for each in rest["data"]], rest["has_more"]) == (names[1:], False)
        own = (await client.get("/v1/capsules", headers={"x-cache-salt": "mine"})).json()
        assert [each["id"] for each in own["data"]] == [salted["mallee"]["capsule"]]
        for verb in ("pin", "rewind", "restore"):
            answer = await client.post(
                f"/v1/capsules/{salted['mallee']['capsule']}/{verb}",
                json={"to": 1} if verb == "rewind" else {},
            )
            assert answer.status_code == 404
        assert (await client.delete(paths[0])).status_code == 200
        assert (await client.post(f"{paths[0]}/pin", json={})).status_code == 404


async def test_a_refused_pin_is_served_cold() -> None:
    """F8: the answer comes, its capsule does not, and both are told; a pin by itself is 400, for good."""
    async with api() as (client, fleet):
        for engine in fleet.engines.values():
            capsules = engine._capsules
            capsules.limits = capsules.limits._replace(max_kept_blocks=4)
        refused = await complete(client, PROMPT, max_tokens=6, mallee={"keep": True})
        assert len(refused["text"]) == 6
        assert (refused["mallee"]["kept"], refused["mallee"]["capsule"]) == ("refused", None)
        left = await complete(client, PROMPT, max_tokens=6)
        pin = await client.post(f"/v1/capsules/{left['mallee']['capsule']}/pin", json={})
        assert (pin.status_code, pin.json()["error"]["code"]) == (400, "capsules_full")
        assert sum(each.stats().capsules.num_refused for each in fleet.engines.values()) == 2


@pytest.mark.slow
async def test_the_sdk_has_every_verb() -> None:
    """F10, part: capture, restore, rewind, pin, unpin, list; a branch that is over is not captured."""
    async with api() as (http, _), AsyncMallee(str(http.base_url)) as client:
        options: Any = {**SAMPLED, "max_tokens": 300}
        stream = client.stream(PROMPT, **options)
        capsule = None
        async for event in stream.events():
            if capsule is None and len(stream.branches[0].text) > 10:
                capsule = await stream.branches[0].capture(ttl_s=30)
            assert event.index == 0
        branch = stream.branches[0]
        assert capsule is not None
        drawn = capsule.data.drawn
        assert drawn is not None
        (again,) = await capsule.restore().wait()
        assert again.text == branch.text[drawn:]
        assert branch.boundary == len(PROMPT) + 300
        (part,) = await branch.restore(at=len(PROMPT) + 5, max_tokens=20).wait()
        assert part.text == branch.text[5:25]
        early = await capsule.rewind(len(PROMPT) + 3)
        (rest,) = await early.restore(max_tokens=9).wait()
        assert rest.text == branch.text[3:12]
        assert not (await early.unpin()).data.pinned
        assert (await early.pin(ttl_s=5)).data.pinned
        names = [each.id async for each in client.capsules(limit=1)]
        assert {capsule.id, early.id, branch.capsule} <= set(names)
        assert names == sorted(names)
        assert [each async for each in client.capsules(after=names[-1])] == []
        with pytest.raises(UnknownBranch):
            await branch.capture()
        with pytest.raises(UnknownCapsule):
            await client.capsule(early.id, cache_salt="another's")
        refused = await client.complete(PROMPT, **options, keep={"ttl_s": 60})
        assert refused.kept == "kept"


@one_gateway
async def test_a_block_of_the_sdk_keeps_an_answers_capsule_that_the_cache_would_lose() -> None:
    """K15, part: handles with `with`, of an answer whose blocks others want, until the block's end."""
    one_worker = tiny_api(MODEL, 1)
    async with one_worker as (http, fleet), AsyncMallee(str(http.base_url)) as client:
        options: Any = {**SAMPLED, "max_tokens": 40}
        branch = await client.complete(PROMPT, **options)
        lost = await client.complete(PROMPT[::-1], **options)
        assert branch.capsule is not None
        assert lost.capsule is not None
        async with client.capsule(branch.capsule) as capsule:
            for i in range(20):  # each takes 75 of the worker's 512 blocks
                await client.complete(f"{i:03}" * 100, ignore_eos=True, max_tokens=2)
            (rest,) = await capsule.fork(1, max_tokens=4).wait()
            assert rest.prefill_tokens == 1, "the token that was drawn last"
            (rest,) = await lost.fork(1, max_tokens=4).wait()
            assert rest.prefill_tokens is not None
            assert rest.prefill_tokens > 80, "without a block around it is computed again"
        with pytest.raises(UnknownCapsule):
            await client.capsule(branch.capsule)
        assert sum(each.stats().capsules.kept for each in fleet.engines.values()) == 0
