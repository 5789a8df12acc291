"""The way in: those inside are answered, no others are let in once it is closed."""

import asyncio
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from uvicorn.lifespan.on import LifespanOn

from mallee.api.entry.gate import Gate, refuse
from mallee.api.entry.middleware import PER_TURN, Turns
from mallee.api.messages.errors import AnthropicErrors
from mallee.runtime.proxy import direct


class Slow:
    """An app whose answers come when they are let go."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        paths = ("/health", "/health/live", "/health/ready")
        routes = [Route("/v1/slow", self._answer), *(Route(path, self._health) for path in paths)]
        self.gate = Gate(Starlette(routes=routes))
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.gate), base_url="http://test"
        )

    async def _answer(self, _: Request) -> PlainTextResponse:
        await self.go.wait()
        return PlainTextResponse("done")

    async def _health(self, _: Request) -> PlainTextResponse:
        return PlainTextResponse("ok")


async def test_a_closed_gate_answers_those_inside_and_refuses_others() -> None:
    slow = Slow()
    async with slow.client as client:
        inside = asyncio.create_task(client.get("/v1/slow"))
        await asyncio.sleep(0)
        assert await slow.gate.drain(0.01) == 1, "one is late"
        draining = asyncio.create_task(slow.gate.drain(10))
        await asyncio.sleep(0)
        refused = await client.get("/v1/slow")
        assert refused.status_code == 503
        assert refused.headers["connection"] == "close"
        assert "retry-after" in refused.headers
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/health/live")).status_code == 200
        assert (await client.get("/health/ready")).status_code == 503
        assert not draining.done()
        slow.go.set()
        assert await draining == 0
        assert (await inside).text == "done"


async def test_a_closed_gate_refuses_in_the_shape_of_the_path() -> None:
    """I17, part: Anthropic's clients read its errors, and know by the type to send again."""
    gate = Gate(Slow().gate, AnthropicErrors(refuse, new_id=lambda: "n"))
    await gate.drain(0)
    transport = httpx.ASGITransport(gate)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.post("/v1/messages")
        assert (answer.status_code, answer.json()["error"]["type"]) == (529, "overloaded_error")
        assert answer.headers["connection"] == "close"
        answer = await client.post("/v1/chat/completions")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")


async def test_rays_server_calls_the_api_for_its_paths_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def ray(_: Request) -> PlainTextResponse:
        return PlainTextResponse("ray")

    slow = Slow()
    paths = ("/-/healthz", "/health", "/nope")
    (made,) = direct.middlewares()
    app = made.cls(Starlette(routes=[Route(path, ray) for path in paths]))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        assert (await client.get("/health")).text == "ray"  # no gateway in this process
        monkeypatch.setattr(direct, "_app", None)
        direct.serve_here(slow.gate)
        assert [(await client.get(path)).text for path in paths] == ["ray", "ok", "ray"]


async def test_requests_begin_a_few_in_each_turn_and_in_order() -> None:
    """So that others' streams go on; callers that have gone meanwhile take no room."""
    turns = Turns()
    begun: list[int] = []

    async def ask(number: int) -> None:
        await turns.wait()
        begun.append(number)

    asking = [asyncio.create_task(ask(number)) for number in range(64)]
    most = 0
    while not all(each.done() for each in asking):
        before = len(begun)
        await asyncio.sleep(0)
        most = max(most, len(begun) - before)
        for each in asking[-2:] if begun else ():
            each.cancel()
    assert (begun, most) == ([*range(62)], PER_TURN)
    await asyncio.wait_for(ask(64), 1)


async def test_a_websocket_is_closed_before_it_opens(call: Any) -> None:
    """HAProxy passes them on to a gateway's server, which has no route for them."""
    said: list[Any] = []

    async def send(message: Any) -> None:
        said.append(message)

    scope = {"type": "websocket", "path": "/v1/completions", "headers": [], "subprotocols": []}
    await Gate(call.app)(scope, asyncio.Queue().get, send)
    assert [each["type"] for each in said] == ["websocket.close"]


async def test_a_server_that_insists_on_a_lifespan_starts_and_ends_the_api(call: Any) -> None:
    lifespan = LifespanOn(uvicorn.Config(Gate(call.app), lifespan="on", log_config=None))
    await lifespan.startup()
    assert not lifespan.should_exit, "as Ray Serve would, the server gives up"
    await lifespan.shutdown()
    assert not lifespan.should_exit
