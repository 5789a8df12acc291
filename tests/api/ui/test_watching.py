"""The events of `/v1/watch` against the sessions of all gateways that they tell of; and texts of capsules."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import yaml
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec import structs

from bench.doubles.random_model import random_model
from mallee.api.text.tokenizer import Tokenizer
from mallee.api.ui.elsewhere import Elsewhere, Told
from mallee.api.ui.handlers import MAX_OF_TENANT
from mallee.api.ui.watching import MAX_SESSIONS, SessionWatch
from mallee.client import AsyncMallee
from mallee.gateway.access.keys import new_key
from mallee.gateway.gateway import Gateway
from mallee.gateway.requests.requests import OpenBranch
from mallee.gateway.sessions.trees import SessionKey, SessionTrees
from mallee.gateway.store.store import Entry
from mallee.protocol.hashing import NO_HASHES
from mallee.protocol.ids import CapsuleId, RequestId, Scope
from support.mock_scene import make_folder, mock_config
from support.mock_stack import Stack, mock_stack
from support.tiny_fleet import post, two_gateways
from support.virtual.loop import virtual_loop
from support.waiting import until_asked

ACME, EVIL, ROOT = (
    new_key("acme", "client", None),
    new_key("evil", "client", None),
    new_key("root", "operator", None),
)
SCOPE = Scope("acme")
NAMES = st.sampled_from([f"s{i}" for i in range(4)])


class Watcher:
    """Believes all that it is told, as the page does."""

    def __init__(self) -> None:
        self.sessions: dict[str, dict[str, Any]] = {}

    def take(self, event: dict[str, Any] | None) -> None:
        if event is None:
            return
        for name in event["gone"]:
            del self.sessions[name]
        for told in event["sessions"]:
            if told["is_new"]:
                self.sessions[told["id"]] = {"nodes": {}}
            session = self.sessions[told["id"]]
            session |= {"parent": told["parent"], "running": told["running"]}
            for node in told["nodes"]:
                session["nodes"][node["capsule"]] = node
            for name in told["gone"]:
                del session["nodes"][name]


async def told(caller: httpx.AsyncClient, **query: Any) -> AsyncIterator[dict[str, Any]]:
    """The events of a watch, to its end."""
    async with caller.stream("GET", "/v1/watch", params=query) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return
            if line:
                yield json.loads(line.removeprefix("data: "))


class Watching(RuleBasedStateMachine):
    """A watcher knows sessions as they are after each look, through all that they go through."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.trees = SessionTrees(max_nodes=24, ttl_s=500.0, block_size=4, clock=lambda: self.now)
        self.counts: dict[RequestId, int] = {}
        self.num = 0
        gateway = SimpleNamespace(
            sessions=SimpleNamespace(trees=self.trees),
            capsules=SimpleNamespace(hashes=lambda capsule: NO_HASHES),
            requests=SimpleNamespace(open_branches=self.branches),
        )
        tokenizer = SimpleNamespace(decode=lambda ids, **_: "".join(map(str, ids)))
        self.watch = SessionWatch(cast(Gateway, gateway), cast(Tokenizer, tokenizer), SCOPE, "acme")
        self.watcher = Watcher()

    def branches(self, request: RequestId, scope: Scope) -> list[OpenBranch]:
        num = self.counts[request]
        return [OpenBranch(0, "answering", num, (num,))]

    @rule(name=NAMES, parent=st.sampled_from(["", "s0", "s1"]))
    def begin(self, name: str, parent: str) -> None:
        self.num += 1
        request = RequestId(f"r{self.num}")
        self.counts[request] = 0
        key = SessionKey(SCOPE, name)
        self.trees.begin(request, key, parent=parent, tenant="acme", prompt_tokens=9)

    @rule(data=st.data())
    def draw(self, data: st.DataObject) -> None:
        if self.counts:
            self.counts[data.draw(st.sampled_from(sorted(self.counts)))] += 1

    @rule(data=st.data(), is_over=st.booleans())
    def leave(self, data: st.DataObject, is_over: bool) -> None:
        if not self.counts:
            return
        request = data.draw(st.sampled_from(sorted(self.counts)))
        self.num += 1
        self.trees.left(request, CapsuleId(f"{request}.{self.num}"), 10 + self.num)
        if is_over:
            del self.counts[request]
            self.trees.ended(request)

    @rule(data=st.data(), tokens=st.integers(1, 9))
    def cut_or_derive(self, data: st.DataObject, tokens: int) -> None:
        found = [node for tree in self.all() for node in tree.nodes.values() if not node.is_root]
        if found:
            node = data.draw(st.sampled_from(found))
            self.num += 1
            if tokens % 2:
                self.trees.cut(RequestId(node.request), CapsuleId(node.capsule), tokens)
            else:
                self.trees.derived(
                    CapsuleId(f"derived.{self.num}"), CapsuleId(node.capsule), tokens
                )

    @rule(source=NAMES, name=NAMES)
    def fork(self, source: str, name: str) -> None:
        tree = self.trees.get(SessionKey(SCOPE, source))
        key = SessionKey(SCOPE, name)
        if tree is not None and tree.last and self.trees.get(key) is None:
            head = tree.head("g0", 100.0)
            made = structs.replace(head, parent=source, created=self.now, used=self.now)
            self.trees.fork(key, Entry(made, 1), tree.last)

    @rule(name=NAMES)
    def close(self, name: str) -> None:
        tree = self.trees.close(SessionKey(SCOPE, name))
        for request in () if tree is None else tree.running:
            del self.counts[request]

    @rule(name=NAMES)
    def another_scope(self, name: str) -> None:
        self.num += 1
        key = SessionKey(Scope("acme/salt"), name)
        self.trees.begin(RequestId(f"r{self.num}"), key, tenant="acme")

    @rule(seconds=st.sampled_from([1.0, 400.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def look(self) -> None:
        self.watcher.take(self.watch.changes())
        assert self.watch.changes() is None, "it has told all"
        wanted = {tree.key.name: tree for tree in self.all()}
        assert self.watcher.sessions.keys() == wanted.keys()
        for name, tree in wanted.items():
            told = self.watcher.sessions[name]
            assert told["parent"] == (tree.parent or None)
            assert {
                (node["capsule"], node["parent"] or "", node["tokens"], node["is_root"])
                for node in told["nodes"].values()
            } == {(n.capsule, n.parent, n.tokens, n.is_root) for n in tree.nodes.values()}
            assert {(each["request"], each["tokens"]) for each in told["running"]} == {
                (request, self.counts[request]) for request in tree.running
            }

    @invariant()
    def holds(self) -> None:
        self.trees.check()

    def all(self) -> list[Any]:
        return self.trees.of(SCOPE)


TestWatching = Watching.TestCase


def test_a_session_that_takes_the_name_of_one_that_was_closed_is_told_whole() -> None:
    """Also within one tick of the clock, and after as many changes."""
    machine = Watching()
    machine.begin("s0", "")
    machine.trees.left(RequestId("r1"), CapsuleId("r1.0"), 12)
    machine.fork("s0", "s2")
    machine.look()
    machine.close("s2")
    machine.trees.cut(RequestId("r1"), CapsuleId("r1.0"), 5)
    machine.fork("s0", "s2")
    machine.look()


def test_a_watcher_has_the_sessions_that_were_used_last() -> None:
    now = [0.0]
    trees = SessionTrees(max_nodes=4096, ttl_s=1e6, block_size=4, clock=lambda: now[0])
    for i in range(MAX_SESSIONS + 50):
        now[0] += 1
        trees.begin(RequestId(f"r{i}"), SessionKey(SCOPE, f"s{i}"), tenant="acme")
    found = trees.newest(SCOPE, "acme", MAX_SESSIONS)
    assert [tree.key.name for tree in found] == [f"s{i}" for i in range(305, 49, -1)]
    assert trees.newest(SCOPE, "nobody", MAX_SESSIONS) == []


# Over HTTP


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump({"keys": [key.entry for key in (ACME, EVIL, ROOT)]}))
    folder = tmp_path / "model"
    folder.mkdir()
    config = mock_config(make_folder(folder), http__keys_file=str(file), mock__speedup=1.0)
    async with mock_stack(config) as made:
        yield made


def client(stack: Stack, token: str | None) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return httpx.AsyncClient(base_url=stack.base_url, headers=headers, timeout=30)


async def test_a_session_is_seen_as_it_grows_by_its_own_tenant_alone(stack: Stack) -> None:
    """X12, part: a branch under way with the end of its text, then its capsule, then nothing."""
    watcher, others = Watcher(), Watcher()
    async with client(stack, ACME.token) as acme, client(stack, EVIL.token) as evil:
        body = {"prompt": "A mallee is", "max_tokens": 60, "n": 2, "ignore_eos": True}
        asking = asyncio.create_task(
            acme.post("/v1/completions", json={**body, "mallee": {"session": "grove"}})
        )

        async def watch_others() -> None:
            async for event in told(evil, seconds=2):
                others.take(event)

        watching = asyncio.create_task(watch_others())
        tails: dict[str, list[str]] = {}
        events = told(acme)
        async for event in events:
            watcher.take(event)
            session = watcher.sessions.get("grove", {"running": [], "nodes": {}})
            for each in session["running"]:
                if each["tail"]:
                    tails.setdefault(f"{each['request']}.{each['branch']}", []).append(each["tail"])
            if len(session["nodes"]) == 2 and not session["running"]:
                break
        answer = (await asking).json()
        texts = {each["mallee"]["capsule"]: each["text"] for each in answer["choices"]}
        assert tails.keys() == texts.keys() == watcher.sessions["grove"]["nodes"].keys()
        assert all(tail in texts[name] for name, seen in tails.items() for tail in seen)
        assert (await acme.delete("/v1/sessions/grove")).status_code == 200
        async for event in events:
            watcher.take(event)
            if not watcher.sessions:
                break
        await watching
    assert others.sessions == {}


async def test_a_watch_ends_by_itself_and_too_many_are_refused(stack: Stack) -> None:
    async with client(stack, ACME.token) as acme, client(stack, None) as stranger:
        assert [each async for each in told(acme, seconds=1)] == [
            {"object": "watch.sessions", "sessions": [], "gone": []}
        ]
        for bad in ("0", "26", "a", "-1"):
            refused = await acme.get("/v1/watch", params={"seconds": bad})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "seconds"
        assert (await stranger.get("/v1/watch")).status_code == 401
        streams = [told(acme) for _ in range(MAX_OF_TENANT)]
        for each in streams:
            await anext(each)
        refused = await acme.get("/v1/watch")
        assert refused.status_code == 503
        assert f"{MAX_OF_TENANT} clients watch this gateway already" in refused.text
        async with client(stack, EVIL.token) as other:
            assert (await other.get("/v1/watch", params={"seconds": 1})).status_code == 200
        for each in streams:
            await each.aclose()

        async def is_free() -> bool:
            return (await acme.get("/v1/watch", params={"seconds": 1})).status_code == 200

        await until_asked(is_free)


async def test_a_capsules_text_is_that_of_its_answer(stack: Stack) -> None:
    prompt = "a mallee is a tree of many trunks from one root"
    async with client(stack, ACME.token) as acme, client(stack, EVIL.token) as evil:
        asked = {"prompt": prompt, "max_tokens": 12, "ignore_eos": True}
        answer = (await acme.post("/v1/completions", json=asked)).json()
        capsule = answer["choices"][0]["mallee"]["capsule"]
        path = f"/v1/capsules/{capsule}/text"
        whole = (await acme.get(path)).json()
        assert whole["text"] == prompt + answer["choices"][0]["text"]
        assert whole["tokens"] == answer["usage"]["total_tokens"]
        num_prompt = answer["usage"]["prompt_tokens"]
        rest = (await acme.get(path, params={"start": num_prompt})).json()
        assert (rest["start"], rest["tokens"]) == (num_prompt, whole["tokens"])
        assert rest["text"] == answer["choices"][0]["text"].lstrip("\ufffd")
        async with AsyncMallee(stack.base_url, api_key=ACME.token) as mallee:
            found = await mallee.capsule(capsule)
            assert await found.text(num_prompt) == rest["text"]
            assert await found.text() == whole["text"]
        beyond = (await acme.get(path, params={"start": 10**8})).json()
        assert (beyond["text"], beyond["start"]) == ("", whole["tokens"])
        for bad in ("-1", "x", "1e3", "9" * 10):
            refused = await acme.get(path, params={"start": bad})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "start")
        assert (await evil.get(path)).status_code == 404
        assert (await acme.delete(f"/v1/capsules/{capsule}")).status_code == 200
        gone = await acme.get(path)
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "capsule_not_found")


async def test_the_pages_files_are_open_and_load_nothing_from_elsewhere(stack: Stack) -> None:
    async with client(stack, None) as stranger:
        page = await stranger.get("/ui")
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        names = ["page.css", "main.js", "api.js", "details.js", "dom.js", "forest.js"]
        names += ["layout.js", "store.js", "workers.js"]
        for name in names:
            file = await stranger.get(f"/ui/{name}")
            assert file.status_code == 200, name
            assert "://" not in file.text, f"{name} loads from elsewhere"
        for name in ("none.js", "handlers.py", "..%2fhandlers.py", "%2e%2e/handlers.py"):
            assert (await stranger.get(f"/ui/{name}")).status_code in (401, 404), name


# Branches of other gateways

MODEL = random_model("llama", 5, max_position_embeddings=2048)
GROVE = {"mallee": {"session": "grove"}}
LONG = {"prompt": "A mallee is", "max_tokens": 1900, "n": 2, "ignore_eos": True, "stream": True}


async def seen(client: httpx.AsyncClient, count: int) -> Watcher:
    """A watcher, once it knows of so many running branches of the session."""
    watcher = Watcher()
    async for event in told(client):
        watcher.take(event)
        session = watcher.sessions.get("grove")
        if session is not None and len(session["running"]) == count:
            return watcher
    raise AssertionError(f"never {count}: {watcher.sessions}")


@pytest.mark.slow
async def test_branches_of_another_gateway_are_seen_and_end_by_a_click_here() -> None:
    """X12, part: with the ends of their texts, by their own scope alone."""
    async with two_gateways(MODEL) as two:
        async with two.b.stream("POST", "/v1/completions", json={**LONG, **GROVE}) as answer:
            assert answer.status_code == 200
            reading = asyncio.create_task(answer.aread())
            watcher = await asyncio.wait_for(seen(two.a, 2), 10)
            running = watcher.sessions["grove"]["running"]
            assert {each["branch"] for each in running} == {0, 1}
            assert all(each["state"] == "answering" and each["tokens"] for each in running)
            assert any(each["tail"] for each in running)
            salt = {"x-cache-salt": "other"}
            async with httpx.AsyncClient(base_url=two.a.base_url, headers=salt) as other:
                assert [e["sessions"] async for e in told(other, seconds=1)] == [[]]
            pruned = await two.a.post(f"/v1/requests/{running[0]['request']}/prune", json={})
            assert pruned.status_code == 200, pruned.text
            await reading
        await asyncio.wait_for(seen(two.a, 0), 10)


async def test_a_watcher_sees_sessions_of_other_gateways_grow_and_end_also_of_one_that_is_gone() -> (
    None
):
    async with two_gateways(MODEL) as two:
        watcher, events = Watcher(), told(two.a)

        async def until_seen(count: int | None) -> None:
            async with asyncio.timeout(5):
                while True:
                    session = watcher.sessions.get("grove")
                    if (None if session is None else len(session["nodes"])) == count:
                        return
                    watcher.take(await anext(events))

        for count in (1, 2):
            await post(two.b, "/v1/completions", prompt="A mallee", max_tokens=2, **GROVE)
            await until_seen(count)
        assert (await two.b.delete("/v1/sessions/grove")).status_code == 200
        await until_seen(None)
        await events.aclose()
        await post(two.b, "/v1/completions", prompt="A mallee", max_tokens=2, **GROVE)
        await two.fleet.gateways[1].close()
        watcher, events = Watcher(), told(two.a)
        await until_seen(1)
        await events.aclose()


async def test_answers_take_a_share_of_the_gateways_time_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that took long is told again for a while; each scope has its own."""
    asked: list[str] = []

    def slow(self: Elsewhere, scope: Scope, tenant: str) -> Told:
        asked.append(scope)
        loop = virtual_loop()
        assert loop is not None
        loop.fall_behind(0.05)
        return Told("g1", {}, {})

    monkeypatch.setattr(Elsewhere, "_told", slow)
    async with two_gateways(MODEL) as two:
        async for _ in told(two.a, seconds=2):
            pass
        assert 1 <= len(asked) <= 3, "0.05 s of every second, not of every look"
        assert len(set(asked)) == 1
        salt = {"x-cache-salt": "other"}
        async with httpx.AsyncClient(base_url=two.a.base_url, headers=salt) as other:
            async for _ in told(other, seconds=1):
                pass
        assert len(set(asked)) == 2
