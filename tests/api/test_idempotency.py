"""POSTs that are sent again under their `Idempotency-Key`."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from bench.doubles.bus import LocalHub
from mallee.api.entry import idempotency
from mallee.api.entry.idempotency import GRACE_S
from mallee.gateway.access.access import Access
from mallee.protocol.errors import Overloaded, Unavailable
from mallee.runtime.config import HttpSettings
from support.any_gateway import one_gateway
from support.live_api import serving
from support.waiting import elapse, until

MODEL = "tiny/bytes"
PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
FORK = "/v1/capsules/req_x.0/fork"
MESSAGES = [{"role": "user", "content": "hi"}]
REPLAYED = "idempotent-replayed"


def keyed(key: str, **more: str) -> dict[str, str]:
    return {"Idempotency-Key": key, **more}


@pytest.fixture
async def client(call: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with call.client() as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"prompt": "abc"}),
        (PATH, {"prompt": "abc", "n": 3, "stream": True}),
        (CHAT, {"messages": MESSAGES}),
        (CHAT, {"messages": MESSAGES, "stream": True}),
        ("/v1/capsules", {"prompt": "abc"}),
        (FORK, {"n": 2}),
        (FORK, {"n": 2, "stream": True}),
        ("/v1/tokenize", {"prompt": "abc"}),
    ],
)
async def test_a_key_sent_again_gets_the_same_answer_and_runs_nothing(
    client: httpx.AsyncClient, call: Any, path: str, body: dict[str, Any]
) -> None:
    first = await client.post(path, json=body, headers=keyed("a"))
    assert first.status_code == 200
    assert REPLAYED not in first.headers
    num = len(call.service.streams)
    again = await client.post(path, json=body, headers=keyed("a"))
    assert (again.status_code, again.content) == (200, first.content)
    assert again.headers[REPLAYED] == "true"
    assert again.headers["content-type"] == first.headers["content-type"]
    assert len(call.service.streams) == num
    other = await client.post(path, json=body, headers=keyed("b"))
    assert REPLAYED not in other.headers
    assert len(call.service.streams) == 2 * num
    counted = call.service.gateway_metrics.render().decode()
    assert '",status="200"} 3.0' in counted, "replays are answers of their path"


async def test_another_request_under_a_key_is_refused_by_name(client: httpx.AsyncClient) -> None:
    await client.post(PATH, json={"prompt": "abc"}, headers=keyed("once"))
    for path, body in [(PATH, {"prompt": "abd"}), (f"{PATH}?x=1", {"prompt": "abc"}), (CHAT, {})]:
        answer = await client.post(path, json=body, headers=keyed("once"))
        assert answer.status_code == 422
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("idempotency_key_reused", "idempotency-key")
        assert "'once'" in error["message"]


@pytest.mark.parametrize(
    ("path", "key"),
    [(PATH, ""), (PATH, "k" * 256), (PATH, "a\tb"), ("/v1/capsules/import", "a")],
)
async def test_keys_are_short_and_printable_and_not_of_an_import(
    client: httpx.AsyncClient, path: str, key: str
) -> None:
    answer = await client.post(path, json={"prompt": "abc"}, headers=keyed(key))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "idempotency-key"


async def test_keys_belong_to_a_scope(call_with: Any) -> None:
    """Tenants, salts, and callers who see workers, each have keys of their own."""
    call = call_with(HttpSettings(), Access(None, {"MALLEE_API_KEY": "k" * 16}))
    operator = {"Authorization": f"Bearer {'k' * 16}"}
    async with call.client() as client:
        scopes = [{}, {"x-tenant-id": "t"}, {"x-tenant-id": "u"}, {"x-cache-salt": "s"}]
        for headers in scopes:
            body = {"prompt": f"of {headers}"}
            answer = await client.post(PATH, json=body, headers=keyed("a", **headers, **operator))
            assert (answer.status_code, REPLAYED in answer.headers) == (200, False)
        assert (await client.post(PATH, json={}, headers=keyed("a"))).status_code == 401


async def test_refusals_are_not_kept(client: httpx.AsyncClient, call: Any) -> None:
    """A refused request changed nothing: sent again, it runs."""
    call.service.refuses = Overloaded(5, 5, 1.0)
    first = await client.post(PATH, json={"prompt": "abc"}, headers=keyed("a"))
    assert first.status_code in (429, 503)
    call.service.refuses = None
    again = await client.post(PATH, json={"prompt": "abc"}, headers=keyed("a"))
    assert (again.status_code, REPLAYED in again.headers) == (200, False)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"prompt": "abc"}),
        (CHAT, {"messages": MESSAGES}),
        (FORK, {"n": 2}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}),
        ("/v1/responses", {"input": "abc"}),
    ],
)
async def test_a_stream_that_ends_by_an_error_is_not_kept(
    client: httpx.AsyncClient, call: Any, failed: Any, path: str, body: dict[str, Any]
) -> None:
    """Its beginning was sent: it runs again, and the whole answer is kept then."""

    async def breaks(stream: Any) -> AsyncIterator[Any]:
        num = 0
        async for delta in call.service.plain(stream):
            yield delta
            if (num := num + 1) == 3:
                break
        yield failed(0, Unavailable("it broke"))

    call.service.script = breaks
    asked = {"json": {"model": MODEL, "stream": True, **body}, "headers": keyed("a")}
    first = await client.post(path, **asked)
    assert (first.status_code, "it broke" in first.text) == (200, True)
    call.service.script = call.service.plain
    again = await client.post(path, **asked)
    assert (REPLAYED in again.headers, "it broke" in again.text) == (False, False)
    third = await client.post(path, **asked)
    assert (REPLAYED in third.headers, third.text) == (True, again.text)


@one_gateway
async def test_a_bug_is_told_to_all_that_wait_for_it(client: httpx.AsyncClient, call: Any) -> None:
    go = asyncio.Event()

    async def broken(stream: Any) -> AsyncIterator[Any]:
        await go.wait()
        raise ZeroDivisionError
        yield

    call.service.script = broken
    asked = [
        asyncio.create_task(client.post(PATH, json={"prompt": "abc"}, headers=keyed("a")))
        for _ in range(3)
    ]
    await until(call.service.started.is_set)
    go.set()
    for task in asked:
        assert (await task).status_code == 500
    assert len(call.service.streams) == 1
    call.service.reset()
    assert (await client.post(PATH, json={"prompt": "abc"}, headers=keyed("a"))).status_code == 200


@one_gateway
async def test_answers_are_kept_for_a_time_and_in_bounded_room(call_with: Any) -> None:
    call = call_with(HttpSettings(replay_ttl_s=60.0, replay_max_mib=1))
    async with call.client() as client:

        async def is_replayed(key: str) -> bool:
            answer = await client.post(PATH, json={"prompt": "abc"}, headers=keyed(key))
            return REPLAYED in answer.headers

        assert not await is_replayed("a")
        await elapse(59.9)
        assert await is_replayed("a")
        await elapse(0.2)
        assert not await is_replayed("a"), "its time is over"
        spec = _middleware(call)._kept._spec
        assert (spec.ttl_s, spec.max_nbytes) == (60.0, 1 << 20), "the broker holds to it"
    assert _middleware(call)._records == {}


@pytest.fixture
def limits() -> dict[str, Any]:
    """Settings of the gateways."""
    return {}


@pytest.fixture
async def gateways(
    fake_service: Any, call_over: Any, limits: dict[str, Any]
) -> AsyncIterator[list[Any]]:
    """The API of two gateways with one store."""
    hub = LocalHub()
    calls = [call_over(fake_service(name, hub), **limits) for name in ("g0", "g1")]
    for each in calls:
        await each.service.peers.start_up()
    yield calls
    for each in calls:
        await each.service.store.close(0.0)


@pytest.mark.parametrize("body", [{"prompt": "abc"}, {"prompt": "abc", "n": 2, "stream": True}])
async def test_another_gateway_gives_the_same_answer(
    gateways: list[Any], body: dict[str, Any]
) -> None:
    """After its end, also when the first gateway has gone, and with the same refusals."""
    one, two = gateways
    async with one.client() as here, two.client() as there:
        first = await here.post(PATH, json=body, headers=keyed("a"))
        again = await there.post(PATH, json=body, headers=keyed("a"))
        assert (again.status_code, again.content) == (200, first.content)
        assert again.headers[REPLAYED] == "true"
        await one.service.store.close()
        await one.service.bus.close()
        again = await there.post(PATH, json=body, headers=keyed("a"))
        assert again.content == first.content
        refused = await there.post(PATH, json={"prompt": "other"}, headers=keyed("a"))
        assert refused.status_code == 422
        assert two.service.streams == []


async def test_a_key_that_comes_to_two_gateways_at_once_runs_at_one(gateways: list[Any]) -> None:
    """The other waits for its answer; when the first is cancelled, it runs it."""
    one, two = gateways
    for each in gateways:
        each.service.holds_after = 1
    async with one.client() as here, two.client() as there:
        first = asyncio.ensure_future(here.post(PATH, json={"prompt": "abc"}, headers=keyed("a")))
        await until(one.service.started.is_set)
        other = asyncio.ensure_future(there.post(PATH, json={"prompt": "abc"}, headers=keyed("a")))
        await elapse(20.0)
        assert not other.done()
        assert two.service.streams == []
        two.service.holds_after = None
        first.cancel()
        answer = await other
        assert answer.status_code == 200
        assert REPLAYED not in answer.headers
        assert len(two.service.streams) == 1


@pytest.mark.parametrize("limits", [{"replay_ttl_s": 60.0}])
async def test_a_run_that_lasts_longer_than_answers_are_kept_stays_the_only_one(
    gateways: list[Any],
) -> None:
    one, two = gateways
    one.service.holds_after = 1
    async with one.client() as here, two.client() as there:
        first = asyncio.ensure_future(here.post(PATH, json={"prompt": "abc"}, headers=keyed("a")))
        await until(one.service.started.is_set)
        await elapse(70.0)
        other = asyncio.ensure_future(there.post(PATH, json={"prompt": "abc"}, headers=keyed("a")))
        await elapse(20.0)
        assert not other.done()
        assert two.service.streams == []
        first.cancel()
        other.cancel()


async def test_a_question_for_a_run_waits_for_no_other_write(gateways: list[Any]) -> None:
    """A busy gateway has some that wait at any time."""
    one, two = gateways
    asked = {"json": {"prompt": "abc"}, "headers": keyed("a")}
    never = asyncio.Event()
    one.service.store.spawn(never.wait(), name="a write that waits")
    async with one.client() as here, two.client() as there:
        one.service.holds_after = 1
        first = asyncio.ensure_future(here.post(PATH, **asked))
        await until(one.service.started.is_set)
        other = asyncio.ensure_future(there.post(PATH, **asked))
        await elapse(1.0)
        first.cancel()
        await elapse(1.0)
        assert other.done()
        assert other.result().status_code == 200
    never.set()


async def test_a_run_that_failed_does_not_take_the_claim_of_the_next_with_it(
    gateways: list[Any],
) -> None:
    """Though the answer to the delete of its claim is lost, and it is deleted again."""
    one, two = gateways
    asked = {"json": {"prompt": "abc"}, "headers": keyed("a")}
    async with one.client() as here, two.client() as there:
        one.service.refuses = Overloaded(5, 5, 1.0)
        refused = await here.post(PATH, **asked)
        one.service.hub.kept.loses_answers = True  # of the delete, which is under way
        assert refused.status_code in (429, 503)
        one.service.refuses, one.service.holds_after = None, 1
        await elapse(0.1)
        one.service.hub.kept.loses_answers = False
        first = asyncio.ensure_future(here.post(PATH, **asked))
        await until(one.service.started.is_set)
        await elapse(1.0)
        other = asyncio.ensure_future(there.post(PATH, **asked))
        await elapse(1.0)
        assert two.service.streams == []
        first.cancel()
        other.cancel()


async def test_a_run_of_a_gateway_that_is_gone_is_run_again(gateways: list[Any]) -> None:
    one, two = gateways
    one.service.holds_after = 1
    async with one.client() as here, two.client() as there:
        first = asyncio.ensure_future(here.post(PATH, json={"prompt": "abc"}, headers=keyed("a")))
        await until(one.service.started.is_set)
        await one.service.bus.close()  # as a kill does
        answer = await there.post(PATH, json={"prompt": "abc"}, headers=keyed("a"))
        assert answer.status_code == 200
        assert REPLAYED not in answer.headers
        first.cancel()


async def test_while_the_store_is_away_a_key_says_when_to_come_back(
    client: httpx.AsyncClient, call: Any
) -> None:
    """Whether the request has run elsewhere can't be told."""
    call.service.hub.set_up(False)
    refused = await client.post(PATH, json={"prompt": "abc"}, headers=keyed("a"))
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["code"] == "store_away"
    assert (await client.post(PATH, json={"prompt": "abc"})).status_code == 200
    call.service.hub.set_up(True)
    answer = await client.post(PATH, json={"prompt": "abc"}, headers=keyed("a"))
    assert answer.status_code == 200


def _middleware(call: Any) -> Any:
    return call.app._guarded._replays


@asynccontextmanager
async def reading(live: Any, key: str) -> AsyncIterator[httpx.Response]:
    """A stream that is read over a real connection, until the caller leaves."""
    body = {"prompt": "abc", "stream": True}
    async with (
        httpx.AsyncClient(base_url=live.url, headers=keyed(key)) as client,
        client.stream("POST", PATH, json=body) as response,
    ):
        yield response


async def events(response: httpx.Response, num: int) -> list[str]:
    found: list[str] = []
    async for line in response.aiter_lines():
        if line:
            found.append(line)
        if len(found) == num:
            break
    return found


@one_gateway
async def test_a_stream_is_joined_from_its_beginning_and_goes_on_for_a_client_that_comes_back(
    live: Any,
) -> None:
    live.service.holds_after = 3
    async with reading(live, "back") as first:
        seen = await events(first, 2)
        async with reading(live, "back") as beside:
            assert beside.headers[REPLAYED] == "true"
            assert await events(beside, 2) == seen
    await elapse(GRACE_S - 0.1)
    assert not live.service.closed.is_set()
    async with reading(live, "back") as second:
        assert (await events(second, 3))[:2] == seen
    assert len(live.service.streams) == 1
    await elapse(GRACE_S - 0.1)
    assert not live.service.closed.is_set()
    await elapse(0.2)
    assert live.service.closed.is_set(), "nobody came back"
    live.service.holds_after = None
    async with reading(live, "back") as third:
        assert REPLAYED not in third.headers


async def test_a_stream_goes_on_for_a_client_that_comes_back_at_another_gateway(
    gateways: list[Any],
) -> None:
    """It runs once, though it lasts longer than a stream that has no reader may."""
    one, two = gateways
    go = asyncio.Event()

    async def waits(stream: Any) -> AsyncIterator[Any]:
        async for delta in one.service.plain(stream):
            yield delta
            if not go.is_set():
                await go.wait()

    one.service.script = waits
    asked = {"json": {"prompt": "abc", "stream": True}, "headers": keyed("a")}
    async with (
        serving(one.app) as (here, _),
        serving(two.app) as (there, _),
        httpx.AsyncClient(timeout=60) as client,
    ):
        async with client.stream("POST", here + PATH, **asked) as first:
            seen = await events(first, 1)
        back = asyncio.ensure_future(client.post(there + PATH, **asked))
        await elapse(3 * GRACE_S)
        assert (back.done(), two.service.streams) == (False, [])
        go.set()
        answer = await back
        assert (answer.headers[REPLAYED], answer.text.split("\n\n")[0]) == ("true", seen[0])
        assert answer.text.endswith("data: [DONE]\n\n")
    assert (len(one.service.streams), two.service.streams) == (1, [])


async def test_an_answer_without_a_reader_is_cancelled_at_once(live: Any) -> None:
    """F28, part: a key keeps nothing running of which nothing was shown."""
    live.service.holds_after = 3
    async with httpx.AsyncClient(base_url=live.url) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post(PATH, json={"prompt": "abc"}, headers=keyed("gone"), timeout=0.3)
    await until(live.service.closed.is_set)


async def test_a_key_sent_again_at_once_after_hanging_up_runs_again(live: Any) -> None:
    """The run that is given up may take its time; its refusal is for nobody."""
    service, going = live.service, asyncio.Event()

    async def held(stream: Any) -> AsyncIterator[Any]:
        try:
            await asyncio.Event().wait()
        finally:
            await going.wait()
        yield

    service.script = held
    async with httpx.AsyncClient(base_url=live.url, headers=keyed("again")) as client:
        gone = asyncio.create_task(client.post(PATH, json={"prompt": "abc"}))
        await until(service.started.is_set)
        gone.cancel()
        await elapse(1)
        service.script = service.plain
        second = asyncio.create_task(client.post(PATH, json={"prompt": "abc"}))
        await elapse(1)
        going.set()
        answer = await second
        assert (answer.status_code, len(service.streams)) == (200, 2)
        third = await client.post(PATH, json={"prompt": "abc"})
        assert third.content == answer.content
        assert len(service.streams) == 2


async def test_a_long_stream_waits_for_its_readers_and_is_not_kept(
    call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a record nor a slow reader fills the memory."""
    record = idempotency._Record(b"", {}, 1776)
    reader, late = object(), object()
    record.join(reader)
    body = {"type": "http.response.body", "body": b"x" * 400, "more_body": True}
    await record.put({"type": "http.response.start", "status": 200, "headers": []})
    await record.put(body)
    await record.put(body)
    writing = asyncio.create_task(record.put(body))
    await elapse(60)
    assert not writing.done()
    assert not record.is_whole
    assert len(await record.read(reader)) == 4
    await writing
    assert record.nbytes <= 1776
    record.join(late)
    record.leave(late)
    record.leave(reader)
    await asyncio.wait_for(record.left(), 1)
    record.end()
    assert record.kept("g0") is None
