"""Capsules that are answered before their prefill has ended, over HTTP: forked, looked at, given up."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.doubles.forward import MockForward
from bench.doubles.random_model import random_model
from mallee.client import AsyncGraphRun, AsyncMallee, Graph, Timeout
from mallee.gateway.access.access import Access
from mallee.mocker.passes import mock_spec
from mallee.protocol.errors import CapsulesFull, Saturated
from mallee.protocol.ids import CapsuleId
from mallee.router.config import RouterConfig
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from support.gated import Gate
from support.graph_runs import times_add_up
from support.live_api import keyed, served
from support.live_fleet import LiveFleet, lose, running
from support.torch_threads import torch_threads
from support.waiting import until

STEP = 256  # tokens of a step
PROMPT = [33 + 7 * i % 90 for i in range(3500)]
ALONE = -(-len(PROMPT) // STEP)  # steps of the prefill
AT = 500
SUFFIX = [40, 50]
DRAWN: dict[str, Any] = {"ignore_eos": True, "seed": 3, "temperature": 1.0}
MODEL = random_model("llama", 5, max_position_embeddings=4096)
KINDS = ("mocked", "tiny")


class Scene:
    """A fleet whose passes go through `gate`, and a client of each of its gateways."""

    def __init__(self, fleet: LiveFleet, gate: Gate, clients: list[httpx.AsyncClient]) -> None:
        self.fleet = fleet
        self.gate = gate
        self.clients = clients
        self.client = clients[0]

    async def promise(self, prompt: list[int] = PROMPT, **more: Any) -> dict[str, Any]:
        """A capsule that is being computed, as it was answered."""
        asked = {"prompt": prompt, "wait": False, **more}
        answer = await self.client.post("/v1/capsules", json=asked)
        assert answer.status_code == 202, answer.text
        made: dict[str, Any] = answer.json()
        return made

    async def show(self, capsule: str, gateway: int = 0) -> dict[str, Any]:
        """The capsule as it is told; one pass is let through for its worker's answer, if it needs one."""
        asked = asyncio.create_task(self.clients[gateway].get(f"/v1/capsules/{capsule}"))
        await self.run(asked.done)
        body: dict[str, Any] = asked.result().json()
        return body

    async def run(self, claim: Callable[[], bool]) -> None:
        """Let passes through, one by one, until `claim` holds."""
        while not claim():
            await until(lambda: claim() or self.gate.num_waiting > 0)
            # What the last pass led to is on its way: a pass more would be too many.
            with suppress(TimeoutError):
                await until(claim, timeout_s=0.04)
                return
            if self.gate.num_waiting:
                await self.gate.let()

    def fork(self, capsule: str, gateway: int = 0, **more: Any) -> "Fork":
        return Fork(self.clients[gateway], capsule, more)

    async def expected(self, prompt: list[int], **more: Any) -> dict[str, Any]:
        """The answer to a prompt that is asked by itself."""
        asked = {"prompt": prompt, **DRAWN, **more}
        answer = await self.client.post("/v1/completions", json=asked)
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    async def lose(self, worker: str) -> None:
        """Have a worker die in mid-pass, and everything else go on."""
        self.gate.kill(self.fleet.forwards[worker])
        await lose(self.fleet, worker)
        self.gate.open()

    @property
    def num_jobs(self) -> int:
        return sum(engine.stats().jobs for engine in self.fleet.engines.values())

    @property
    def num_kept(self) -> int:
        return sum(engine.stats().capsules.kept for engine in self.fleet.engines.values())


class Fork:
    """A fork's stream, read as it comes. `num_passes` were made when its first token came."""

    def __init__(self, client: httpx.AsyncClient, capsule: str, more: dict[str, Any]) -> None:
        self.text = ""
        self.logprobs: list[float] = []
        self.error: dict[str, Any] = {}
        self.finish = ""
        self.worker = ""
        self._client = client
        asked = {"suffixes": [SUFFIX], "max_tokens": 8, "stream": True, **DRAWN, **more}
        self.task = asyncio.create_task(self._read(f"/v1/capsules/{capsule}/fork", asked))

    async def _read(self, path: str, asked: dict[str, Any]) -> None:
        async with self._client.stream("POST", path, json=asked) as response:
            if response.status_code != 200:
                self.error = json.loads(await response.aread())["error"]
                return
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self._take(json.loads(line[6:]))

    def _take(self, chunk: dict[str, Any]) -> None:
        self.error = chunk.get("error", self.error)
        for choice in chunk.get("choices", ()):
            self.text += choice["text"]
            self.logprobs += (choice["logprobs"] or {}).get("token_logprobs", [])
            self.finish = choice["finish_reason"] or self.finish
            ours = choice.get("mallee", {})
            self.worker = ours.get("worker") or self.worker
            self.error = ours.get("error", self.error)

    @property
    def has_begun(self) -> bool:
        return bool(self.text) or self.task.done()


@asynccontextmanager
async def scene(
    kind: str = "mocked",
    *,
    workers: int = 1,
    gateways: int = 1,
    access: Access | None = None,
    **options: Any,
) -> AsyncIterator[Scene]:
    gate = Gate()
    make: Any = MockForward
    spec = mock_spec(vocab_size=128, max_model_len=4096)
    if kind == "tiny":
        spec = MODEL.forward(num_blocks=2).spec
        make = _tiny
    config = EngineConfig(SchedulerConfig(max_step_tokens=STEP), **options)
    made = LiveFleet(
        *(spec, RouterConfig(block_size=16)),
        forward=gate.around(make),  # type: ignore[arg-type]
        num_blocks=1024,
        syncs=True,
        config=config,
    )
    async with AsyncExitStack() as stack:
        stack.enter_context(torch_threads())
        fleet = await stack.enter_async_context(running(made, workers, gateways))
        stack.callback(gate.close)
        num_others = gateways - 1
        await until(lambda: all(len(g.peers.others) == num_others for g in fleet.gateways))
        clients = []
        for gateway in fleet.gateways:
            url, _ = await stack.enter_async_context(served(gateway, access=access))
            client = httpx.AsyncClient(base_url=url, timeout=30)
            clients.append(await stack.enter_async_context(client))
        yield Scene(fleet, gate, clients)
        gate.open()
        await until(lambda: all(not gateway.shell.running for gateway in fleet.gateways))
        for engine in fleet.engines.values():
            engine.check()
        for gateway in fleet.gateways:
            gateway.check()
            assert gateway.operator.failure is None


def _tiny(_: Any, *, num_blocks: int, block_size: int) -> Any:
    return MODEL.forward(num_blocks=num_blocks, block_size=block_size)


# Watermarks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gateway", [0, 1])
async def test_a_branch_draws_its_first_token_before_the_prefill_has_ended(
    kind: str, gateway: int
) -> None:
    """S6: at 500 of 3,500 tokens, as the 500 alone; the prefill takes no step more. From any gateway."""
    async with scene(kind, gateways=2) as s:
        s.gate.shut()
        made = await s.promise()
        assert (made["status"], made["tokens"], made["object"]) == ("computing", 3500, "capsule")
        fork = s.fork(made["id"], gateway, at=AT, logprobs=0)
        await s.run(lambda: fork.has_begun)
        assert fork.text, fork.error
        assert s.gate.passes[-1][-1].end < len(PROMPT), "the prefill has not ended"
        shown = await s.show(made["id"], gateway)
        assert shown["status"] == "computing"
        assert AT <= shown["computed_tokens"] < len(PROMPT)
        s.gate.open()
        await fork.task
        await until(lambda: s.num_jobs == 0)
        (first,) = (n for n, rows in enumerate(s.gate.passes) if _reaches(rows, AT + len(SUFFIX)))
        last = s.gate.first(len(PROMPT))
        assert first <= -(-AT // STEP) + 1, "it waits no step longer than it must"
        assert first < last
        assert last + 1 == ALONE, "the prefill takes as many steps as alone"
        shown = await s.show(made["id"], gateway)
        assert (shown["status"], shown["tokens"], shown["pinned"]) == ("ready", 3500, True)
        alone = await s.expected(PROMPT[:AT] + SUFFIX, max_tokens=8, logprobs=0)
        assert fork.text == alone["text"]
        assert fork.logprobs == pytest.approx(alone["logprobs"]["token_logprobs"], abs=1e-4)
        whole = s.fork(made["id"])
        await whole.task
        assert whole.text == (await s.expected(PROMPT + SUFFIX, max_tokens=8))["text"]


def _reaches(rows: list[Any], end: int) -> bool:
    """Whether the text of a row that is no prefill's gets to `end` for the first time."""
    return any(part.end == end and part.end - part.start < STEP // 2 for part in rows)


async def test_many_branches_begin_at_their_watermarks() -> None:
    """S6, part: in the order of their tokens, though they were asked the other way round.

    Without a watermark when the prefill has ended; each computes its suffix alone.
    """
    async with scene() as s:
        s.gate.shut()
        made = await s.promise()
        places = [3500, 3000, 2000, 1000, 1, 16]
        wholes: dict[str, Any] = {"max_tokens": 2}
        forks = [
            s.fork(made["id"], **(wholes if at == 3500 else {**wholes, "at": at})) for at in places
        ]
        await until(lambda: len(s.fleet.gateways[0].shell.running) == 7)
        s.gate.open()
        await asyncio.gather(*(fork.task for fork in forks))
        firsts = [s.gate.first(at + len(SUFFIX)) for at in places[:4]]
        assert firsts == sorted(firsts, reverse=True)
        assert len(set(firsts)) == 4
        assert s.gate.first(len(PROMPT)) < firsts[0]
        computed = sum(part.end - part.start for rows in s.gate.passes for part in rows)
        again = sum(at % 16 for at in places[1:])  # of blocks that are not full
        assert computed <= len(PROMPT) + again + len(places) * (len(SUFFIX) + 1)
        for at, fork in zip(places, forks, strict=True):
            alone = await s.expected(PROMPT[:at] + SUFFIX, max_tokens=2)
            assert fork.text == alone["text"]


async def first(run: AsyncGraphRun, kind: str, node: str = "") -> str:
    """The node of the first event of that kind, or of that node."""
    return (await anext(e async for e in run if e.type == kind and node in ("", e.node))).node


@pytest.mark.parametrize("kind", KINDS)
async def test_a_graph_s_branch_draws_its_first_token_before_its_prefill_has_ended(
    kind: str,
) -> None:
    """S6: at 500 of 3,500 tokens, as the 500 alone; what goes on from all waits for all."""
    graph = Graph()
    doc = graph.prefill(bytes(PROMPT).decode())
    drawn: Any = {"max_tokens": 8, **DRAWN}
    early = graph.branch(doc, "(2", at=AT, name="early", **drawn)
    late = graph.branch(doc, "(2", name="late", **drawn)
    async with scene(kind) as s, AsyncMallee(str(s.client.base_url)) as client:
        s.gate.shut()
        run = client.run(graph)
        drew = asyncio.create_task(first(run, "node.delta"))
        await s.run(drew.done)
        assert drew.result() == "early"
        assert s.gate.passes[-1][-1].end < len(PROMPT), "the prefill has not ended"
        s.gate.open()
        found = await run.wait()
        times_add_up(found)
        assert {node.status for node in found.nodes.values()} == {"done"}
        assert (found.nodes["early"].work.cached_tokens or 0) <= AT
        for node, text in ((early, PROMPT[:AT]), (late, PROMPT)):
            alone = await s.expected(text + SUFFIX, max_tokens=8)
            assert found[node] == alone["text"]
        assert found.prefill_tokens == 2 * len(SUFFIX) + AT % 16  # of a block that is not full


async def test_a_prefill_ends_when_no_branch_needs_more_of_it() -> None:
    """S6, part: nothing is computed that nobody asked for, though the graph goes on; and nothing stays."""
    is_over = asyncio.Event()

    async def hold(_: str) -> None:
        await is_over.wait()

    graph = Graph()
    doc = graph.prefill(bytes(PROMPT).decode())
    early = graph.branch(doc, "(2", at=AT, max_tokens=1)
    graph.tool(hold)
    async with scene() as s, AsyncMallee(str(s.client.base_url)) as client:
        s.gate.shut()
        run = client.run(graph)
        asked = asyncio.create_task(first(run, "node.ended", doc.name))
        await s.run(asked.done)
        s.gate.open()
        await until(lambda: s.num_jobs == 0 and s.num_kept == 0)
        assert all(part.end < len(PROMPT) for each in s.gate.passes for part in each)
        is_over.set()
        found = await run.wait()
        assert (found.status, found.nodes[doc.name].status) == ("done", "cancelled")
        assert found.nodes[doc.name].cause == early.name


# Ends


@pytest.mark.parametrize(("way", "gateway"), [("delete", 0), ("delete", 1), ("prune", 0)])
async def test_a_deleted_capsule_is_computed_no_further(way: str, gateway: int) -> None:
    """S6, part: its forks that wait end, one that has begun goes on, nothing is left, its id is unknown.

    By its own id, or as a branch of its request.
    """
    async with scene(gateways=2) as s:
        s.gate.shut()
        made = await s.promise()
        early, late, whole = (
            s.fork(made["id"], at=AT, max_tokens=40),
            s.fork(made["id"], at=3000),
            s.fork(made["id"], 1 - gateway),
        )
        await s.run(lambda: early.has_begun)
        assert early.text
        if way == "delete":
            asked = s.clients[gateway].delete(f"/v1/capsules/{made['id']}")
        else:
            request = made["id"].rpartition(".")[0]
            asked = s.clients[gateway].post(f"/v1/requests/{request}/prune", json={})
        deleting = asyncio.create_task(asked)
        await s.run(deleting.done)
        assert deleting.result().status_code == 200
        s.gate.open()
        await asyncio.gather(early.task, late.task, whole.task)
        assert late.error["code"] == whole.error["code"] == "capsule_abandoned"
        alone = await s.expected(PROMPT[:AT] + SUFFIX, max_tokens=40)
        assert early.text == alone["text"]
        assert not any(part.end == len(PROMPT) for rows in s.gate.passes for part in rows)
        await until(lambda: s.num_kept == s.num_jobs == 0)
        for client in s.clients:
            answer = await client.get(f"/v1/capsules/{made['id']}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (
                404,
                "capsule_not_found",
            )


@pytest.mark.parametrize("gateway", [0, 1])
async def test_a_capsule_that_could_not_be_made_says_why(gateway: int) -> None:
    """S6, part: until it is deleted; a fork gets the same error. Nothing is kept."""
    async with scene(gateways=2, max_kept_share=0.1) as s:
        made = await s.promise()
        await until(lambda: not s.fleet.gateways[0].shell.running)
        path = f"/v1/capsules/{made['id']}"
        client = s.clients[gateway]
        shown = (await client.get(path)).json()
        assert (shown["status"], shown["tokens"]) == ("failed", 3500)
        assert shown["error"]["code"] == CapsulesFull.code
        for ask in ("fork", "rewind", "pin"):
            body = {"fork": {"n": 1}, "rewind": {"to": 5}, "pin": {}}[ask]
            answer = await client.post(f"{path}/{ask}", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, CapsulesFull.code)
            assert "retry-after" not in answer.headers  # it never fits
        other = {"x-cache-salt": "another"}
        assert (await client.get(path, headers=other)).status_code == 404
        assert s.num_kept == 0
        assert (await client.delete(path)).json()["deleted"]
        await until(
            lambda: s.fleet.gateways[0].shell.dispatcher.promise(CapsuleId(made["id"])) is None
        )
        assert (await client.get(path)).status_code == 404
        assert (await client.delete(path)).status_code == 404


async def test_only_its_tenant_knows_a_capsule_that_is_computing() -> None:
    """S6, part, X14, part: others get the 404 of an unknown one, from any gateway.

    Its own tenant is refused what needs the whole capsule, or more.
    """
    async with scene(gateways=2) as s:
        s.gate.shut()
        made = await s.promise(cache_salt="mine")
        path = f"/v1/capsules/{made['id']}"
        for client in s.clients:
            for headers in ({}, {"x-cache-salt": "another"}):
                found = [
                    await client.get(path, headers=headers),
                    await client.delete(path, headers=headers),
                    await client.post(f"{path}/fork", json={"n": 1}, headers=headers),
                ]
                codes = {(each.status_code, each.json()["error"]["code"]) for each in found}
                assert codes == {(404, "capsule_not_found")}
        salt = {"x-cache-salt": "mine"}
        for verb, body in {"rewind": {"to": 5}, "pin": {}, "demote": {"tier": "host"}}.items():
            answer = await s.client.post(f"{path}/{verb}", json=body, headers=salt)
            assert (answer.status_code, answer.json()["error"]["code"]) == (
                409,
                "capsule_computing",
            )
        assert (await s.client.get(f"{path}/export", headers=salt)).status_code == 409
        fork = s.fork(made["id"], at=3501, cache_salt="mine")
        await fork.task
        assert (fork.error["param"], fork.error["type"]) == ("at", "invalid_request_error")
        mine = s.fork(made["id"], at=AT, cache_salt="mine")
        await s.run(lambda: mine.has_begun)
        assert mine.text


# Losses


@pytest.mark.parametrize("kind", KINDS)
async def test_a_prefill_whose_worker_dies_goes_on_elsewhere_with_its_forks(kind: str) -> None:
    """S6, part, X4, part: under its own id; forks that had begun and that wait answer as undisturbed ones."""
    async with scene(kind, workers=2) as s:
        s.gate.shut()
        made = await s.promise()
        early, late, whole = (
            s.fork(made["id"], at=AT, max_tokens=60),
            s.fork(made["id"], at=3000),
            s.fork(made["id"]),
        )
        await s.run(lambda: early.has_begun)
        assert early.text
        worker = made["worker"]
        await s.lose(worker)
        await asyncio.gather(early.task, late.task, whole.task)
        assert [fork.error for fork in (early, late, whole)] == [{}] * 3
        for fork, at in ((early, AT), (late, 3000), (whole, len(PROMPT))):
            num = 60 if fork is early else 8
            alone = await s.expected(PROMPT[:at] + SUFFIX, max_tokens=num)
            assert fork.text == alone["text"]
            assert fork.worker != worker
        shown = (await s.client.get(f"/v1/capsules/{made['id']}")).json()
        assert (shown["status"], shown["tokens"]) == ("ready", 3500)
        assert shown["worker"] != worker


async def test_a_fork_at_another_gateway_follows_or_fails_when_the_worker_dies() -> None:
    """S6, part: with a clear error, at once; asked again it goes on from the capsule that is made anew."""
    async with scene(workers=2, gateways=2) as s:
        s.gate.shut()
        made = await s.promise()
        fork = s.fork(made["id"], 1)
        await until(lambda: len(s.fleet.gateways[1].shell.running) == 1)
        await s.lose(made["worker"])
        await fork.task
        alone = await s.expected(PROMPT + SUFFIX, max_tokens=8)
        assert fork.error.get("code") == "capsule_lost" or fork.text == alone["text"]
        again = s.fork(made["id"], 1)
        await again.task
        assert again.text == alone["text"]


async def test_a_capsule_that_waits_for_a_worker_can_be_forked_at_any_gateway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S6, part: forks are held until it is placed."""
    async with scene(gateways=2) as s:
        dispatcher = s.fleet.gateways[0].shell.dispatcher
        monkeypatch.setattr(dispatcher, "_place", _no_room)
        made = await s.promise()
        assert made["worker"] is None
        forks = [s.fork(made["id"], 0, at=AT), s.fork(made["id"], 1, at=AT)]
        shown = [(await client.get(f"/v1/capsules/{made['id']}")).json() for client in s.clients]
        assert [each["status"] for each in shown] == ["computing"] * 2
        assert not any("computed_tokens" in each for each in shown)
        monkeypatch.undo()
        await asyncio.gather(*(fork.task for fork in forks))
        alone = await s.expected(PROMPT[:AT] + SUFFIX, max_tokens=8)
        assert [fork.text for fork in forks] == [alone["text"]] * 2


def _no_room(*_: Any) -> int:
    raise Saturated(1, 1)


# Limits


async def test_a_capsule_counts_in_its_key_s_quota_from_the_beginning(tmp_path: Path) -> None:
    """F30, part: as one that is computing, as one that is there, and no more when it is deleted."""
    access, headers = keyed(tmp_path, max_capsules=1)
    async with scene(access=access) as s:
        s.client.headers.update(headers)
        s.gate.shut()
        made = await s.promise()
        assert made["worker"] is None, "a client does not learn of workers"
        asked = {"prompt": [1, 2, 3], "wait": False}
        for _ in range(2):
            answer = await s.client.post("/v1/capsules", json=asked)
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "quota_exceeded")
            s.gate.open()
            await until(lambda: s.num_kept == 1)
        await s.client.delete(f"/v1/capsules/{made['id']}")
        answer = await s.client.post("/v1/capsules", json=asked)
        assert answer.status_code == 202


async def test_a_prefill_runs_on_its_key_s_account_until_it_ends(tmp_path: Path) -> None:
    """F30, part: it is one of its requests at once, and of its tokens, however early it was answered."""
    access, headers = keyed(tmp_path, max_running=1)
    async with scene(access=access) as s:
        s.client.headers.update(headers)
        s.gate.shut()
        await s.promise()
        refused = await s.client.post("/v1/completions", json={"prompt": [1]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
        s.gate.open()
        await until(lambda: s.num_jobs == 0)
        await until(lambda: not s.fleet.gateways[0].shell.running)
        answer = await s.client.post("/v1/completions", json={"prompt": [1]})
        assert answer.status_code == 200


async def test_a_refusal_is_the_answer_itself() -> None:
    """S6, part: there is no id of what never began."""
    async with scene(workers=0) as s:
        answer = await s.client.post("/v1/capsules", json={"prompt": [1], "wait": False})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")
        assert not (await s.client.get("/v1/capsules")).json()["data"]


async def test_a_session_has_the_capsule_when_it_is_there_and_ends_it_before() -> None:
    """S6, part: the capsule of a session that is closed meanwhile is computed no further.

    Under one idempotency key one prefill runs.
    """
    async with scene() as s:
        terms = {"mallee": {"session": "tree"}}
        s.client.headers["idempotency-key"] = "one"
        made = await s.promise(**terms)
        assert (await s.promise(**terms))["id"] == made["id"]
        del s.client.headers["idempotency-key"]
        await until(lambda: s.num_kept == 1)
        (await s.client.get("/v1/sessions/tree")).raise_for_status()
        s.gate.shut()
        second = await s.promise([5, *PROMPT], **terms)
        closing = asyncio.create_task(s.client.delete("/v1/sessions/tree"))
        await s.run(closing.done)
        s.gate.open()
        await until(lambda: s.num_jobs == s.num_kept == 0)
        for each in (made, second):
            assert (await s.client.get(f"/v1/capsules/{each['id']}")).status_code == 404


async def test_the_sdk_forks_at_once_and_waits_for_the_rest() -> None:
    """S6, part: `prefill(wait=False)`, a fork at a watermark, `wait`; and the error of one that fails."""
    async with scene(max_kept_share=0.3) as s:
        s.gate.shut()
        async with AsyncMallee(str(s.client.base_url)) as mallee:
            capsule = await mallee.prefill(PROMPT, wait=False)
            assert (capsule.data.status, capsule.tokens) == ("computing", 3500)
            with pytest.raises(Timeout, match="still computing"):
                await capsule.wait(timeout=0.0)
            asked = capsule.fork([SUFFIX], at=AT, max_tokens=8, **DRAWN)
            waiting = asyncio.create_task(_wait(asked))
            await s.run(lambda: s.gate.passes[-1][-1].end > 1000 if s.gate.passes else False)
            s.gate.open()
            (branch,) = await waiting
            assert branch.text == (await s.expected(PROMPT[:AT] + SUFFIX, max_tokens=8))["text"]
            await capsule.wait()
            assert (capsule.data.status, capsule.data.pinned) == ("ready", True)
            failing = await mallee.prefill([5, *PROMPT], wait=False)
            with pytest.raises(CapsulesFull):
                await failing.wait()


async def _wait(asked: Any) -> Any:
    return await asked.wait()
