"""Branches that a verifier, or a critic of the SDK, scores beside decoding: poor ones end, others go on."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from bench.doubles.random_model import random_model
from mallee.client import AsyncMallee, InvalidParameter, Mallee
from mallee.worker.engine import Engine
from support.live_api import served
from support.live_fleet import LiveFleet
from support.mock_scene import make_folder, mock_config, mocked
from support.tiny_fleet import chunks_of, post, tiny_api, tiny_fleet
from support.verifiers import Raw, Verifier, verdict, verifying
from support.virtual.threads import wait_for
from support.waiting import elapse, until

MODEL = random_model("llama", 5, max_position_embeddings=2048)
ASKED: Any = {
    **{"prompt": "A verifier scores", "ignore_eos": True, "seed": 3, "temperature": 1.0},
    **{"n": 3, "max_tokens": 200},
}


class Scene(NamedTuple):
    client: httpx.AsyncClient
    fleet: LiveFleet
    verifier: Verifier

    @property
    def engine(self) -> Engine:
        return self.fleet.engines["w0"]

    async def undisturbed(self, **more: Any) -> list[str]:
        answer = await post(self.client, "/v1/completions", **(ASKED | more))
        return [choice["text"] for choice in answer["choices"]]

    async def ask(
        self, *, query: str = "", request: dict[str, Any] | None = None, **terms: Any
    ) -> Any:
        """An answer whose branches are scored; `terms` of the scoring."""
        score = {"url": self.verifier.url + query, "below": 0.5, "every": 8, **terms}
        body = {**ASKED, **(request or {}), "mallee": {"stop_when": {"score": score}}}
        return await self.client.post("/v1/completions", json=body)

    async def choices(self, **more: Any) -> list[Any]:
        answer = await self.ask(**more)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"])


@asynccontextmanager
async def scene(
    *, allowed: Callable[[str], str] = lambda url: url, **settings: Any
) -> AsyncIterator[Scene]:
    """An API whose operator allows the URL of a verifier, or what `allowed` makes of it."""
    async with verifying() as verifier, tiny_fleet(MODEL, 1) as fleet:
        (gateway,) = fleet.gateways
        settings = {"callbacks": (allowed(verifier.url),), **settings}
        async with (
            served(gateway, **settings) as (url, _),
            httpx.AsyncClient(base_url=url, timeout=30) as client,
        ):
            yield Scene(client, fleet, verifier)
            await until(lambda: not fleet.engines["w0"].branches)
            fleet.engines["w0"].check()
            gateway.check()
            assert gateway.operator.failure is None


async def test_a_poor_branch_ends_within_one_step_of_the_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F19, F28, part: even if nothing else comes; its capsule goes on as the undisturbed branch."""
    async with scene() as s:
        texts = await s.undisturbed()
        ran: list[set[int]] = []  # the branches of each step
        held, gate, step = 0, threading.Event(), s.engine.step
        gate.set()

        def watched() -> Any:
            gate.wait(10)
            ran.append({branch.index for branch in s.engine.branches})
            return step()

        def score(branch: dict[str, Any]) -> float:
            nonlocal held
            if branch["index"] != 1 or branch["tokens"] < 40:
                return 1.0
            gate.clear()  # no further step begins
            held = held or len(ran)
            return 0.25

        monkeypatch.setattr(s.engine, "step", watched)
        s.verifier.score = score
        asking = asyncio.create_task(s.choices())
        gateway = s.fleet.gateways[0]
        await until(lambda: held > 0)
        # The engine stands still in a step, and the verdict ends the branch all the same.
        await until(lambda: _num_open(gateway) == 2)
        assert len(ran) <= held + 1
        gate.set()
        choices = await asking
        # The step that was under way may have it; no later one.
        assert all(1 not in each for each in ran[held + 1 :])
        assert any({0, 2} <= each for each in ran[held + 1 :])
        ends = [(c["finish_reason"], c["mallee"].get("ended_by")) for c in choices]
        assert ends == [("length", None), ("condition", "score"), ("length", None)]
        assert [c["mallee"]["score"] for c in choices] == [1.0, 0.25, 1.0]
        assert (choices[0]["text"], choices[2]["text"]) == (texts[0], texts[2])
        cut = choices[1]["text"]
        assert texts[1].startswith(cut)
        assert s.verifier.seen(1)[-1]["text"] == cut[: s.verifier.seen(1)[-1]["tokens"]]
        assert s.verifier.seen(1)[-1]["tokens"] <= len(cut) < 200
        left = choices[1]["mallee"]["capsule"]
        assert choices[1]["mallee"]["boundary"] == len(ASKED["prompt"]) + len(cut)
        more = await post(s.client, f"/v1/capsules/{left}/restore", max_tokens=20)
        assert more["choices"][0]["text"] == texts[1][len(cut) :][:20]
        fork = {"suffixes": [" Why?"], "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        warm = await post(s.client, f"/v1/capsules/{left}/fork", **fork)
        cold = {"prompt": f"{ASKED['prompt']}{cut} Why?", "cache_salt": "cold", "max_tokens": 20}
        anew = await post(s.client, "/v1/completions", **cold, temperature=0, ignore_eos=True)
        assert anew["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert warm["choices"][0]["text"] == anew["choices"][0]["text"]


def _num_open(gateway: Any) -> int:
    """Branches that the gateway's answers have open."""
    return sum(answer.num_open for answer in gateway.shell.running.values())


async def test_texts_are_shown_at_most_every_so_many_tokens_with_nothing_of_the_client() -> None:
    """F19, part: one call at a time; a question has the request's id and the newest texts, and no key."""
    async with scene() as s:
        answer = await s.ask(
            query="?problem=7", every=25, request={"user": "somebody", "cache_salt": "salt"}
        )
        body = answer.json()
        questions = s.verifier.questions
        assert {q["request"] for q in questions} == {body["id"]}
        assert s.verifier.most_running == 1
        assert set(s.verifier.paths) == {"/verify?problem=7"}
        for index, choice in enumerate(body["choices"]):
            seen = s.verifier.seen(index)
            assert 1 <= len(seen) <= 200 // 25
            before = 0
            for branch in seen:
                assert branch["tokens"] - before >= 25
                before = branch["tokens"]
                assert branch["text"] == choice["text"][: branch["tokens"]]
                assert branch["reasoning"] == ""
            assert choice["mallee"]["score"] == 1.0
        for head in s.verifier.heads:
            assert set(head) == {"host", "content-type", "accept-encoding", "content-length"}


FLAWS = {
    "status 500": Raw(500, b'{"scores": [0, 0, 0]}'),
    "status 204": Raw(204),
    "status 302": Raw(302, headers={"location": "/other"}),
    "Expected `object`": Raw(200, b"0.1"),
    "missing required field": Raw(200, b"{}"),
    "Expected `float | null`, got `str`": Raw(200, b'{"scores": ["low"]}'),
    "Expected `float | null`, got `bool`": Raw(200, b'{"scores": [true]}'),
    "4 scores for": Raw(200, b'{"scores": [0, 0, 0, 0]}'),
    "out of range": Raw(200, b'{"scores": [1e999]}'),
    "over 65536 bytes": Raw(200, b" " * 70_000),
    "compressed": Raw(200, b"{}", {"content-encoding": "gzip"}),
    "can't be reached": Raw(200, b"x", {"content-length": "9", "connection": "close"}),
}


async def test_branches_go_on_when_their_verifier_fails_and_say_so() -> None:
    """F19, part: whatever it answers instead of scores; redirects are not followed."""
    async with scene() as s:
        texts = await s.undisturbed(max_tokens=30)
        for why, reply in FLAWS.items():
            s.verifier.reply = lambda question, reply=reply: reply  # type: ignore[misc]
            choices = await s.choices(query="?key=hush", request={"max_tokens": 30})
            for choice, text in zip(choices, texts, strict=True):
                assert (choice["text"], choice["finish_reason"]) == (text, "length")
                assert choice["mallee"]["score"] is None
                assert why in choice["mallee"]["score_error"]
                assert s.verifier.url in choice["mallee"]["score_error"]
                assert "hush" not in choice["mallee"]["score_error"]
        assert set(s.verifier.paths) == {"/verify?key=hush"}
        outcomes = s.fleet.gateways[0].operator.metrics("").decode()
        assert 'mallee_callback_duration_seconds_count{outcome="answered"} 0.0' in outcomes


async def test_a_verifier_that_takes_too_long_fails() -> None:
    """F19, part: a later call may succeed; the failure is told all the same."""
    async with scene(callback_timeout_s=0.05, allowed=lambda url: url.partition("/verify")[0]) as s:

        async def first_waits(question: dict[str, Any]) -> Raw:
            if len(s.verifier.questions) == 1:
                await asyncio.Future()
            return verdict([0.75])

        s.verifier.reply = first_waits
        choices = await s.choices(request={"n": 1, "max_tokens": 800})
        assert "within 0.05 s" in choices[0]["mallee"]["score_error"]
        assert choices[0]["mallee"]["score"] == 0.75


async def test_a_required_verifier_that_fails_ends_the_branches_that_it_was_asked_about() -> None:
    """F19, part: with an error; the others are as undisturbed. If all do, the request fails."""
    async with scene() as s:
        texts = await s.undisturbed()
        failed: set[int] = set()

        def reply(question: dict[str, Any]) -> Raw:
            asked = [branch["index"] for branch in question["branches"]]
            if failed or 0 in asked:
                return verdict([float(index != 0) for index in asked])
            failed.update(asked)
            return Raw(500)

        s.verifier.reply = reply
        choices = await s.choices(required=True, every=16)
        assert failed
        assert choices[0]["mallee"]["ended_by"] == "score"
        for index, (choice, text) in enumerate(zip(choices, texts, strict=True)):
            if index in failed:
                assert choice["finish_reason"] == "error"
                assert choice["mallee"]["error"]["code"] == "callback_failed"
                assert choice["mallee"]["capsule"] is None
                assert text.startswith(choice["text"])
            elif index:
                assert (choice["text"], choice["finish_reason"]) == (text, "length")
        s.verifier.reply = lambda question: Raw(500)
        answer = await s.ask(required=True, query="?key=hush", request={"n": 1})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "callback_failed"
        assert "hush" not in answer.text


async def test_without_the_setting_no_url_is_called_and_the_refusal_names_it() -> None:
    """F19, part, F30, part: by default; also of a fork, a restore and a response."""
    async with scene(callbacks=()) as s:
        made = await post(s.client, "/v1/completions", prompt="x", max_tokens=1)
        capsule = made["choices"][0]["mallee"]["capsule"]
        stop_when = {"score": {"url": s.verifier.url, "below": 0.5}}
        bodies = {
            "/v1/completions": {"prompt": "x"},
            f"/v1/capsules/{capsule}/fork": {"n": 1},
            f"/v1/capsules/{capsule}/restore": {},
            "/v1/responses": {"input": "x"},
        }
        for path, body in bodies.items():
            asked = {**body, "mallee": {"stop_when": stop_when}}
            answer = await s.client.post(path, json=asked)
            assert answer.status_code == 400, path
            if path != "/v1/responses":  # this model has no template
                assert "http.callbacks" in answer.json()["error"]["message"], path
                assert answer.json()["error"]["param"] == "mallee.stop_when.score.url", path
        prefill = {"prompt": "x", "mallee": {"stop_when": stop_when}}
        assert (await s.client.post("/v1/capsules", json=prefill)).status_code == 400
        assert s.verifier.questions == []


async def test_terms_that_cannot_be_are_refused_by_name() -> None:
    """F30, part: before anything runs."""
    wrong: list[tuple[str, Any]] = [("every", 0), ("every", 1 << 30), ("below", "low")]
    wrong += [("below", None), ("url", None), ("beside", 1)]
    async with scene() as s:
        for name, value in wrong:
            answer = await s.ask(**{name: value})
            assert answer.status_code == 400
            assert name in answer.json()["error"]["message"]


async def test_tenants_share_neither_connections_state_nor_turns() -> None:
    """F19, part: one tenant's verifier that hangs takes only its own places; no cookie comes back."""
    async with scene() as s:
        over = asyncio.Event()

        async def reply(question: dict[str, Any]) -> Raw:
            if "hang" in s.verifier.paths[-1]:
                await over.wait()
            scores = [1.0] * len(question["branches"])
            return verdict(scores)._replace(headers={"set-cookie": "tenant=first; Path=/"})

        s.verifier.reply = reply
        first = [
            asyncio.create_task(
                s.ask(query=f"?hang{i}", request={"n": 1, "max_tokens": 400, "user": "first"})
            )
            for i in range(4)
        ]
        await until(lambda: s.verifier.running >= 2)
        other = await s.choices(request={"cache_salt": "second"})
        assert [choice["mallee"]["score"] for choice in other] == [1.0] * 3
        over.set()
        await asyncio.gather(*first)
        assert not any("cookie" in head for head in s.verifier.heads)


async def test_the_sdk_tells_scores() -> None:
    """F19, part: of branches that a verifier ended, and of those that went on."""
    async with scene() as s:
        s.verifier.score = lambda branch: float(branch["index"] != 0 or branch["tokens"] < 30)

        def ask() -> list[Any]:
            with Mallee(str(s.client.base_url)) as client:
                score: Any = {"url": s.verifier.url, "below": 0.5, "every": 8}
                return client.stream(**ASKED, stop_when={"score": score}).wait()

        found = await asyncio.to_thread(ask)
        assert [b.finish_reason for b in found] == ["condition", "length", "length"]
        assert [b.score for b in found] == [0.0, 1.0, 1.0]
        assert [b.score_error for b in found] == [""] * 3


# Steps beside a verifier

BRANCHES, TOKENS = 8, 80


async def gaps_s(client: httpx.AsyncClient, **more: Any) -> list[float]:
    """Seconds between two tokens of a branch, in order of length; of all branches."""
    body = {"prompt": [1, 2, 3], "n": BRANCHES, "max_tokens": TOKENS, "ignore_eos": True}
    now = asyncio.get_running_loop().time
    last: dict[int, float] = {}
    found = []
    asked = {**body, "stream": True, **more}
    async with client.stream("POST", "/v1/completions", json=asked) as answer:
        async for chunk in chunks_of(answer):
            for choice in chunk["choices"]:
                if choice["index"] in last:
                    found.append(now() - last[choice["index"]])
                last[choice["index"]] = now()
    return sorted(found)


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 60.0])
async def test_a_verifier_delays_no_step(tmp_path: Path, delay_s: float) -> None:
    """D12: in virtual time the p99 of steps is within 10 % of that without, however slow the verifier is."""
    config = mock_config(make_folder(tmp_path), mock__engines_per_worker=1, mock__speedup=1.0)

    async def think(question: dict[str, Any]) -> Raw:
        await elapse(delay_s)
        return verdict([1.0] * len(question["branches"]))

    async with (
        mocked(config) as scene,
        verifying() as verifier,
        served(scene.gateway, callbacks=(verifier.url,)) as (api, _),
        httpx.AsyncClient(base_url=api, timeout=100) as client,
    ):
        await until(lambda: any(view.is_whole for view in scene.router.workers()))
        verifier.reply = think
        alone = await gaps_s(client)
        score = {"score": {"url": verifier.url, "below": 0.5, "every": 8}}
        beside = await gaps_s(client, mallee={"stop_when": score})
        assert len(alone) == len(beside) > TOKENS
        assert len(verifier.questions) >= (1 if delay_s > 1 else 5)
        at = len(alone) * 99 // 100
        assert 0 < beside[at] <= 1.1 * alone[at]


# Critics of the SDK

LONG: Any = {"max_tokens": 500, "ignore_eos": True, "seed": 3, "temperature": 1.0}


def plays(branch: Any) -> float | None:
    """The favourite is the second; nobody is known before five characters."""
    return None if len(branch.text) < 5 else float(branch.index == 1)


def check(branches: list[Any], alone: list[Any]) -> None:
    assert [b.finish_reason for b in branches] == ["cancelled", "length", "cancelled"]
    assert branches[1].text == alone[1].text
    assert branches[1].score == 1.0
    for i in (0, 2):
        assert branches[i].score == 0.0
        assert alone[i].text.startswith(branches[i].text)
        assert 5 <= len(branches[i].text) < len(alone[i].text) / 2


@pytest.mark.slow
async def test_a_critic_ends_what_it_finds_poor() -> None:
    """F19, part: while they decode; the others' texts are those of an undisturbed answer."""
    async with tiny_api(MODEL, 1) as (http, fleet):
        url = str(http.base_url)

        def ask(**more: Any) -> list[Any]:
            with Mallee(url) as client:
                return client.stream("A critic scores", n=3, **LONG).wait(**more)

        alone = await asyncio.to_thread(ask)
        check(await asyncio.to_thread(ask, score=plays, below=0.5), alone)
        async with AsyncMallee(url) as client:

            async def thinks(branch: Any) -> float | None:
                await asyncio.sleep(0)
                return plays(branch)

            for score in (plays, thinks):
                branches = client.stream("A critic scores", n=3, **LONG)
                check(await branches.wait(score=score, below=0.5), alone)
        engine: Any = next(iter(fleet.engines.values()))
        await until(lambda: not engine.branches)


async def test_an_error_of_a_critic_ends_all_of_it() -> None:
    """F19, part: it is raised where the branches are waited for, and nothing runs on."""
    async with tiny_api(MODEL, 1) as (http, fleet):
        url, engine = str(http.base_url), next(iter(fleet.engines.values()))

        def fails(branch: Any) -> float:
            raise ZeroDivisionError(branch.index)

        def ask() -> None:
            with Mallee(url) as client, pytest.raises(ZeroDivisionError):
                client.stream("A critic scores", n=3, **LONG).wait(score=fails)

        await asyncio.to_thread(ask)
        async with AsyncMallee(url) as client:
            with pytest.raises(ZeroDivisionError):
                await client.stream("A critic scores", n=3, **LONG).wait(score=fails)
            with pytest.raises(InvalidParameter, match="score"):
                await client.stream("A critic scores", **LONG).wait(score="good")  # type: ignore[arg-type]
        await until(lambda: not engine.branches)


async def test_a_slow_critic_looks_less_often() -> None:
    """F19, part: reading doesn't wait for it, and it sees the newest text of each branch in turn."""
    seen: list[tuple[int, str]] = []

    def looks(branch: Any) -> float:
        seen.append((branch.index, branch.text))
        wait_for(elapse(0.05))
        return 1.0

    async with tiny_api(MODEL, 1) as (http, _):

        def ask() -> list[Any]:
            with Mallee(str(http.base_url)) as client:
                return client.stream("A critic scores", n=3, **LONG).wait(score=looks, below=0.5)

        found = await asyncio.to_thread(ask)
    assert {branch.finish_reason for branch in found} == {"length"}
    assert 3 <= len(seen) < 200
    for index in range(3):
        texts = [text for i, text in seen if i == index]
        assert texts == sorted(texts, key=len)
        assert found[index].text.startswith(texts[-1])
    assert {index for index, _ in seen[:3]} == {0, 1, 2}
