"""`/v1/live`: requests over a WebSocket."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.requests import HTTPConnection
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from mallee.api.entry.gate import PER_TURN, Gate
from mallee.api.live.inner import answer_of
from mallee.api.sse import MAX_WRITE_S
from mallee.gateway.access.access import Access
from mallee.gateway.requests.deltas import Delta
from mallee.runtime.config import HttpSettings
from support.live_api import serving
from support.plain_ids import SCOPES
from support.waiting import until

PATH, FORK = "/v1/completions", "/v1/capsules/req_x.0/fork"


def url(live: Any) -> str:
    return f"ws://127.0.0.1:{live.port}/v1/live"


async def tell(client: ClientConnection, **frame: Any) -> None:
    await client.send(json.dumps(frame))


async def hear(client: ClientConnection) -> dict[str, Any]:
    frame: dict[str, Any] = json.loads(await asyncio.wait_for(client.recv(), 10))
    return frame


async def closed(client: ClientConnection) -> int:
    """The code of a close, which is all that comes."""
    with pytest.raises(ConnectionClosed) as told:
        await hear(client)
    assert told.value.rcvd is not None
    return told.value.rcvd.code


async def ends(client: ClientConnection, num: int) -> dict[str, list[dict[str, Any]]]:
    """Frames by request, until `num` are done. Nothing follows what is done."""
    found: dict[str, list[dict[str, Any]]] = {}
    done = set()
    while len(done) < num:
        frame = await hear(client)
        assert frame["id"] not in done
        found.setdefault(frame["id"], []).append(frame)
        if frame.get("done"):
            done.add(frame["id"])
    return found


async def test_answers_and_streams_come_together_each_done_once(live: Any) -> None:
    async with connect(url(live)) as client:
        body = {"prompt": "abc", "n": 2, "seed": 1}
        await tell(client, id="whole", path=PATH, body=body)
        await tell(client, id="stream", path=PATH, body={**body, "stream": True})
        await tell(client, id="fork", path=FORK, body={"n": 3, "stream": True})
        await tell(client, id="get", method="GET", path="/v1/capsules/req_x.0")
        await tell(client, id="lost", method="GET", path="/v1/capsules/never")
        found = await ends(client, 5)
    (whole,) = found["whole"]
    assert (whole["status"], len(whole["body"]["choices"])) == (200, 2)
    assert [(each["status"], each["body"]["object"]) for each in found["get"]] == [(200, "capsule")]
    assert [each["status"] for each in found["lost"]] == [404]
    assert found["lost"][0]["body"]["error"]["code"] == "capsule_not_found"
    for name, num in (("stream", 2), ("fork", 3)):
        *events, last = found[name]
        assert last == {"id": name, "status": 200, "done": True}
        texts = [""] * num
        for frame in events:
            for choice in frame["event"]["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == [f"hello {i}" for i in range(num)]


async def test_one_request_is_cancelled_and_the_others_go_on(live: Any) -> None:
    """F20, part: as if its client had hung up; a whole answer too."""
    live.service.holds_after = 3
    async with connect(url(live)) as client:
        await tell(client, id="a", path=PATH, body={"prompt": "abc", "stream": True})
        await tell(client, id="b", path=PATH, body={"prompt": "abc", "stream": True})
        await tell(client, id="c", path=PATH, body={"prompt": "abc"})
        seen = [await hear(client) for _ in range(6)]
        assert {frame["id"] for frame in seen} == {"a", "b"}
        for name in "ac":
            await tell(client, id=name, cancel=True)
        found = await ends(client, 2)
        assert {name: frames[-1]["cancelled"] for name, frames in found.items()} == dict.fromkeys(
            "ac", True
        )
        assert [stream.num_closes > 0 for stream in live.service.streams] == [True, False, True]
        await tell(client, id="d", method="GET", path="/v1/models")
        assert (await hear(client))["id"] == "d"
    await until(live.service.closed.is_set)


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ("no json", None),
        ("[]", None),
        ('{"path": "/v1/models"}', None),
        ('{"id": "", "path": "/v1/models"}', "id"),
        ('{"id": "a", "cancel": true}', "id"),
        ('{"id": "a", "path": "/metrics"}', "path"),
        ('{"id": "a", "path": "/v1/capsules/x/export", "method": "GET"}', "path"),
        ('{"id": "a", "path": "/v1/models", "method": "PUT"}', "method"),
    ],
)
async def test_a_wrong_frame_is_told_and_the_socket_stays(
    live: Any, text: str, param: str | None
) -> None:
    async with connect(url(live)) as client:
        await client.send(text)
        frame = await hear(client)
        assert frame["status"] == 400
        if param is not None:
            assert frame["error"]["param"] == param
        await client.send(b"bytes")
        assert (await hear(client))["status"] == 400
        await tell(client, id="a", method="GET", path="/v1/models")
        assert (await hear(client))["status"] == 200


async def test_requests_of_a_socket_and_their_ids_are_bounded(live: Any) -> None:
    live.service.holds_after = 0
    async with connect(url(live)) as client:
        for i in range(64):
            await tell(client, id=str(i), path=PATH, body={"prompt": "abc"})
        await tell(client, id="0", path=PATH, body={"prompt": "abc"})
        assert (await hear(client))["error"]["param"] == "id"
        await tell(client, id="more", path=PATH, body={"prompt": "abc"})
        assert (await hear(client))["status"] == 429
    await until(live.service.closed.is_set)


async def test_a_frame_that_is_too_large_closes_the_socket(live: Any) -> None:
    async with connect(url(live)) as client:
        await tell(client, id="a", path=PATH, body={"prompt": "x" * 100_000})
        assert await closed(client) == 1009


@pytest.mark.parametrize(
    ("origin", "is_let_in"),
    [(None, True), ("http://evil.example", False), ("null", False), ("own", True)],
)
async def test_pages_of_other_origins_are_refused(
    live: Any, origin: str | None, is_let_in: bool
) -> None:
    given = {"origin": f"http://127.0.0.1:{live.port}"} if origin == "own" else {}
    if origin not in (None, "own"):
        given = {"origin": str(origin)}
    connecting = connect(url(live), additional_headers=given)
    if is_let_in:
        async with connecting:
            return
    with pytest.raises(InvalidStatus) as told:
        await connecting
    assert told.value.response.status_code == 403


async def test_a_socket_needs_a_key_in_its_header(call_with: Any) -> None:
    """Not in its address, which ends up in logs; requests that come by it have the key's rights."""
    call = call_with(HttpSettings(), Access(None, {"MALLEE_API_KEY": "k" * 16}))
    async with serving(call.app, takes_sockets=True) as (served_at, _):
        address, key = f"{served_at.replace('http', 'ws')}/v1/live", "k" * 16
        for where, headers in [
            (address, {}),
            (f"{address}?token={key}", {}),
            (address, {"authorization": "Bearer wrong"}),
        ]:
            with pytest.raises(InvalidStatus) as told:
                await connect(where, additional_headers=headers)
            assert told.value.response.status_code == 401
        headers = {"authorization": f"Bearer {key}", "x-cache-salt": "s"}
        async with connect(address, additional_headers=headers) as client:
            await tell(client, id="a", method="GET", path="/v1/capsules/req_x.0")
            assert (await hear(client))["status"] == 200
        assert call.service.capsules.asked_scope == SCOPES.scope("", "s")


async def test_a_client_that_does_not_read_holds_up_its_own_streams(
    live: Any,
) -> None:
    """Its streams stop, so that little waits for it, and its socket is closed."""
    written = 0

    async def endless(stream: Any) -> AsyncIterator[Delta]:
        nonlocal written
        while True:
            written += 1
            yield Delta(0, (97,) * 1000, None, 0, 3, None, written, None)
            await asyncio.sleep(0)

    live.service.script = endless
    async with connect(url(live), max_queue=1, compression=None, close_timeout=0.1) as client:
        await tell(client, id="a", path=PATH, body={"prompt": "abc", "stream": True})
        await hear(client)
        await until(live.service.closed.is_set, timeout_s=MAX_WRITE_S + 1)
    assert written < 20_000


@asynccontextmanager
async def gated(call: Any) -> AsyncIterator[tuple[Gate, str]]:
    """The API behind a gate of its own, and its address."""
    gate = Gate(call.app)
    async with serving(gate, takes_sockets=True) as (served_at, _):
        yield gate, f"{served_at.replace('http', 'ws')}/v1/live"


async def test_a_gateway_that_stops_lets_the_requests_of_its_sockets_end(call: Any) -> None:
    """Their clients miss nothing, begin nothing more, and are told why by the close's code."""
    go = asyncio.Event()

    async def slow(stream: Any) -> AsyncIterator[Delta]:
        yield Delta(0, (97,), None, 0, 3, None, 1, None)
        await go.wait()
        yield Delta(0, (98,), "stop", 0, 3, None, 2, None)

    call.service.script = slow
    async with gated(call) as (gate, address), connect(address) as client, connect(address) as idle:
        await tell(client, id="a", path=PATH, body={"prompt": "abc", "stream": True})
        assert (await hear(client))["event"]["choices"][0]["text"] == "a"
        draining = asyncio.create_task(gate.drain(10))
        assert await closed(idle) == 1012
        await tell(client, id="late", path=PATH, body={"prompt": "abc"})
        assert ((late := await hear(client))["id"], late["status"]) == ("late", 503)
        with pytest.raises(InvalidStatus) as refused:
            await connect(address)
        assert refused.value.response.status_code == 503
        assert not draining.done()
        go.set()
        found = await ends(client, 1)
        assert [frame["event"]["choices"][0]["text"] for frame in found["a"][:-1]] == ["b"]
        assert found["a"][-1] == {"id": "a", "status": 200, "done": True}
        assert await closed(client) == 1012
        assert await asyncio.wait_for(draining, 5) == 0


async def test_a_drain_waits_for_sockets_no_longer_than_it_may(call: Any) -> None:
    call.service.holds_after = 0
    async with gated(call) as (gate, address), connect(address) as client:
        await tell(client, id="a", path=PATH, body={"prompt": "abc"})
        await until(call.service.started.is_set)
        assert await gate.drain(0.05) == 1


async def test_frames_take_turns_whatever_they_ask(call: Any) -> None:
    """64 questions of one socket begin a few in each turn of the loop, so that others' streams go on.

    They begin in order, and those that have gone meanwhile take no room.
    """
    begun: list[str] = []

    async def seen(name: str, *_: Any) -> Any:
        begun.append(name)
        return call.service.capsules["req_x.0"]

    call.service.capsules.inspect = seen
    scope = {"type": "websocket", "asgi": {}, "scheme": "ws", "path": "/v1/live", "headers": []}
    outer = HTTPConnection({**scope, "query_string": b"", "server": ("t", 80), "app": call.app})

    def ask(name: str) -> asyncio.Task[Any]:
        return asyncio.create_task(answer_of(outer, "GET", f"/v1/capsules/{name}", None, ""))

    asking = [ask(f"c{i}") for i in range(64)]
    most = 0
    while not all(each.done() for each in asking):
        before = len(begun)
        await asyncio.sleep(0)
        most = max(most, len(begun) - before)
        if begun:
            asking[-1].cancel()
            asking[-2].cancel()
    assert {each.result().status for each in asking[:-2]} == {200}
    assert (begun, most) == ([f"c{i}" for i in range(62)], PER_TURN)
    assert (await asyncio.wait_for(ask("later"), 1)).status == 200
