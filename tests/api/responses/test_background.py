"""Background responses: who may start them, what they count, how they end; and a capsule lost on the way."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import AsyncMock, Mock, create_autospec

import httpx
import openai
import pytest
import yaml

from bench.doubles.random_model import random_model
from mallee.api.entry.gate import Gate
from mallee.api.responses.background import Background, follow
from mallee.api.responses.room import Responses
from mallee.api.responses.running import Run
from mallee.api.text.chat import ChatTemplate
from mallee.api.text.families import FAMILIES
from mallee.gateway.access.access import Access
from mallee.gateway.access.keys import new_key
from mallee.gateway.access.visits import UNLIMITED
from mallee.protocol.errors import CapsuleStale, PeerSilent, StoreAway, UnknownCapsule
from mallee.protocol.ids import COMMON
from mallee.router.dispatch.jobs import ForkJob, GenerateJob
from mallee.runtime.config import ResponsesSettings
from support.live_api import api_over, served
from support.live_fleet import LiveFleet
from support.tiny_fleet import tiny_fleet
from support.waiting import until

MODEL = random_model("llama", 5, max_position_embeddings=8192)
OPTIONS: Any = {"ignore_eos": True, "seed": 1}
LONG: Any = {"model": "m", "input": "hi", "max_output_tokens": 6000, "extra_body": OPTIONS}


class Scene(NamedTuple):
    fleet: LiveFleet
    room: Responses
    clients: list[openai.AsyncOpenAI]


@asynccontextmanager
async def scene(monkeypatch: Any, folder: Path, **settings: Any) -> AsyncIterator[Scene]:
    """Clients of two tenants and their gateway; alice may have two branches at once."""
    keys = [new_key(name, "client", name) for name in ("alice", "bob")]
    file = folder / "keys.yaml"
    file.write_text(yaml.safe_dump({"keys": [{**keys[0].entry, "max_branches": 2}, keys[1].entry]}))
    rooms: list[Responses] = []
    init = Responses.__init__

    def seen(self: Responses, *args: Any) -> None:
        init(self, *args)
        rooms.append(self)

    monkeypatch.setattr(Responses, "__init__", seen)
    given: Any = {"chat": ChatTemplate(None, family=FAMILIES[0]), "access": Access(file, {})}
    async with (
        tiny_fleet(MODEL, 1, num_blocks=4096) as fleet,
        served(fleet.gateways[0], responses=ResponsesSettings(**settings), **given) as (url, _),
    ):
        clients = [
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key.token, max_retries=0)
            for key in keys
        ]
        yield Scene(fleet, rooms[0], clients)
        for client in clients:
            await client.close()
        assert rooms[0]._tasks.failure is None


async def num_stored(client: openai.AsyncOpenAI) -> int:
    found: Any = await client.get("/responses", cast_to=object)
    return len(found["data"])


async def test_a_quota_refuses_a_background_response_before_it_is_one(
    monkeypatch: Any, tmp_path: Path
) -> None:
    """F30, part: with 429, and its branch counts as long as it runs."""
    async with scene(monkeypatch, tmp_path) as (_, _room, (alice, _bob)):
        first, second = [await alice.responses.create(**LONG, background=True) for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="branches"):
            await alice.responses.create(**LONG, background=True)
        assert await num_stored(alice) == 2
        await alice.responses.cancel(first.id)
        third = await alice.responses.create(**LONG, background=True)
        for each in (second, third):
            await alice.responses.delete(each.id)
        assert await num_stored(alice) == 1


async def test_one_tenant_may_not_run_all_background_responses(
    monkeypatch: Any, tmp_path: Path
) -> None:
    limits = {"max_background": 2, "max_tenant_background": 1}
    async with scene(monkeypatch, tmp_path, **limits) as (_, _room, (alice, bob)):
        made = [await alice.responses.create(**LONG, background=True)]
        with pytest.raises(openai.RateLimitError, match="1 background responses of this tenant"):
            await alice.responses.create(**LONG, background=True)
        other = await bob.responses.create(**LONG, background=True)
        with pytest.raises(openai.InternalServerError, match="2 background responses run"):
            await bob.responses.create(**LONG, background=True)
        await alice.responses.cancel(made[0].id)
        made.append(await alice.responses.create(**LONG, background=True))
        await bob.responses.delete(other.id)
        await alice.responses.delete(made[1].id)


async def test_one_that_is_deleted_while_its_cancel_ends_does_not_come_back(
    monkeypatch: Any, tmp_path: Path
) -> None:
    gate, closes = asyncio.Event(), 0
    close = Run.close

    async def slow(run: Run) -> None:
        nonlocal closes
        closes += 1
        await gate.wait()
        await close(run)

    async with scene(monkeypatch, tmp_path) as (fleet, room, (alice, _)):
        made = await alice.responses.create(**LONG, background=True)
        await until(lambda: fleet.engines["w0"].stats().jobs == 1)
        monkeypatch.setattr(Run, "close", slow)
        cancelling = asyncio.create_task(alice.responses.cancel(made.id))
        await until(lambda: closes == 1)
        deleting = asyncio.create_task(alice.responses.delete(made.id))
        await alice.models.list()  # later than the deletion
        assert not deleting.done()
        assert not cancelling.done()
        gate.set()
        assert (await cancelling).status == "cancelled"
        await deleting
        assert await num_stored(alice) == 0
        assert not room._background
        await until(lambda: fleet.engines["w0"].stats().jobs == 0)
        with pytest.raises(openai.NotFoundError):
            await alice.responses.retrieve(made.id)


async def test_a_streamed_one_is_read_again_from_any_event_and_all_are_counted(
    monkeypatch: Any, tmp_path: Path
) -> None:
    async with scene(monkeypatch, tmp_path) as (fleet, room, (alice, _bob)):
        short = {**LONG, "max_output_tokens": 8}
        stream = await alice.responses.create(**short, background=True, stream=True)
        events = [event async for event in stream]
        assert (events[1].type, events[-1].type) == ("response.queued", "response.incomplete")
        name = events[0].response.id  # type: ignore[union-attr]
        again = await alice.responses.retrieve(name, stream=True, starting_after=3)
        assert [e.sequence_number async for e in again] == list(range(4, len(events)))
        await until(lambda: not room._background)
        again = await alice.responses.retrieve(name, stream=True, starting_after=3)
        assert [e async for e in again] == events[4:]
        past = await alice.responses.retrieve(name, stream=True, starting_after=len(events))
        assert [e async for e in past] == []
        await alice.responses.delete(name)
        kept = fleet.hub.kept.buckets
        assert not kept["mallee_test_responses"]
        assert not kept["mallee_test_events"]


async def test_what_is_deleted_at_once_leaves_nothing_that_was_still_to_be_stored(
    monkeypatch: Any, tmp_path: Path
) -> None:
    async with scene(monkeypatch, tmp_path) as (fleet, room, (alice, _bob)):
        made = await alice.responses.create(**{**LONG, "max_output_tokens": 8})
        scope = room._asking._scopes.scope("alice")
        record = await room._stored.find(made.id, scope)
        await room._stored.put(scope, record)
        await room._stored.delete(scope, made.id)
        await fleet.gateways[0].store.flush(1.0)
        assert not fleet.hub.kept.buckets["mallee_test_responses"]


async def test_events_that_lack_some_break_off() -> None:
    async def batches(*_: Any) -> AsyncIterator[tuple[str, list[bytes]]]:
        yield "000000000", [b"0"]
        yield "000000003", [b"3", b"4", b"5", b"6", b"7"]

    stored = Mock(events=SimpleNamespace(follow=batches))
    reading = follow(stored, COMMON, "resp_a", -1)
    assert await anext(reading) == b"0"
    with pytest.raises(ConnectionError, match="events 1 to 2"):
        await anext(reading)


async def test_events_that_were_forgotten_are_refused(monkeypatch: Any, tmp_path: Path) -> None:
    async with scene(monkeypatch, tmp_path) as (fleet, room, (alice, _bob)):
        stream = await alice.responses.create(
            **{**LONG, "max_output_tokens": 8}, background=True, stream=True
        )
        events = [event async for event in stream]
        await until(lambda: not room._background)
        fleet.hub.kept.buckets["mallee_test_events"].clear()
        with pytest.raises(openai.BadRequestError, match="not stored any more"):
            await alice.responses.retrieve(events[0].response.id, stream=True)  # type: ignore[union-attr]


async def test_what_an_earlier_life_of_a_gateway_left_running_has_failed(
    monkeypatch: Any, tmp_path: Path
) -> None:
    """Alone for good, and none of it here: at once, in lists too."""
    async with scene(monkeypatch, tmp_path) as (fleet, room, (alice, _bob)):
        made = await alice.responses.create(**LONG, background=True)
        await until(lambda: fleet.engines["w0"].stats().jobs == 1)
        (background,) = room._background.values()
        assert background._answering is not None
        for task in (background._answering, background.life):
            room._tasks.cancel(task)
        monkeypatch.setattr(room._stored, "put", AsyncMock(side_effect=StoreAway("gone")))
        await until(lambda: not room._background)
        monkeypatch.undo()
        listed: Any = await alice.get("/responses", cast_to=object)
        assert [each["status"] for each in listed["data"]] == ["failed"]
        found = await alice.responses.retrieve(made.id)
        assert found.error is not None
        assert "is gone" in found.error.message


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    "lost",
    [
        lambda: UnknownCapsule("c"),
        lambda: CapsuleStale("c", "a", "b"),
        lambda: PeerSilent("none in 2 s"),
    ],
)
async def test_a_capsule_that_is_lost_on_the_way_is_computed_from_the_stored_conversation(
    monkeypatch: Any, tmp_path: Path, lost: Callable[[], Exception], background: bool
) -> None:
    async with scene(monkeypatch, tmp_path) as (fleet, _, (alice, _bob)):
        short = {**LONG, "max_output_tokens": 6}
        first = await alice.responses.create(**short)
        expected = await alice.responses.create(**short, previous_response_id=first.id)
        assert expected.mallee["turn"] == "capsule"
        gateway, jobs = fleet.gateways[0], []
        start = gateway.requests.start

        async def losing(job: Any, *args: Any, **named: Any) -> Any:
            jobs.append(type(job))
            if isinstance(job, ForkJob):
                raise lost()
            return await start(job, *args, **named)

        monkeypatch.setattr(gateway.requests, "start", losing)
        given = {**short, "previous_response_id": first.id, "background": background}
        found = await alice.responses.create(**given)
        while found.status in ("queued", "in_progress"):
            found = await alice.responses.retrieve(found.id)
        assert jobs == [ForkJob, GenerateJob]
        assert found.mallee["turn"] == "whole"
        assert found.status == "incomplete"  # at its 6 tokens
        assert found.output_text == expected.output_text
        assert found.usage.input_tokens == expected.usage.input_tokens


async def test_a_gateway_that_stops_waits_for_what_runs_in_the_background() -> None:
    """As for a request: its client has an answer, and nobody is connected."""
    async with tiny_fleet(MODEL, 1, num_blocks=4096) as fleet:
        api = api_over(fleet.gateways[0], chat=ChatTemplate(None, family=FAMILIES[0]))
        gate = Gate(api)
        clients = [
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test/v1")
            for app in (gate, api)
        ]
        body = {"input": "hi", "background": True, "max_output_tokens": 200, "ignore_eos": True}
        begun = (await clients[0].post("/responses", json=body)).json()
        assert begun["status"] == "queued"
        assert await gate.drain(0.0) == 1
        assert (await clients[0].post("/responses", json=body)).status_code == 503
        assert await gate.drain(30.0) == 0
        ended = (await clients[1].get(f"/responses/{begun['id']}")).json()
        assert ended["usage"]["output_tokens"] == 200
        for client in clients:
            await client.aclose()


async def test_a_reader_that_is_slow_at_the_end_gets_the_end() -> None:
    run = create_autospec(Run, instance=True)  # it never begins
    run.scope, run.writer = COMMON, SimpleNamespace(body=SimpleNamespace(id="resp_a"))
    background = Background(run, Mock(), UNLIMITED, tenant="", streams=True)
    background._events.append(b"first")
    reading = background.follow(-1)
    assert await anext(reading) == b"first"
    background._events.append(b"last")  # while the first is written
    background._is_over = True
    assert [each async for each in reading] == [b"last"]
