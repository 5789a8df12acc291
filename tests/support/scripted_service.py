"""A service over HTTP whose answers a test gives, and which can go away and come back at its address."""

import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, TypeAlias

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mallee.runtime.addresses import free_port
from support.live_api import serving

Body: TypeAlias = str | dict[str, Any]
Answer: TypeAlias = Body | tuple[int, Body] | Callable[[], Body | Awaitable[Body]]


class ScriptedService:
    """Answers by method and path, as `"GET /health"`; all others are 404. A context manager."""

    def __init__(self, answers: dict[str, Answer]) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        everything = Route("/{path:path}", self._answer, methods=["GET", "POST", "DELETE"])
        self._app = Starlette(routes=[everything])
        self._serving = AsyncExitStack()

    async def _answer(self, request: Request) -> Response:
        asked = f"{request.method} {request.url.path}"
        self.asked.append(asked)
        found = self.answers.get(asked, (404, error("no such path", "not_found")))
        body: Any = found() if callable(found) else found
        if isinstance(body, Awaitable):
            body = await body
        status, body = body if isinstance(body, tuple) else (200, body)
        return Response(body if isinstance(body, str) else json.dumps(body), status)

    async def start(self) -> None:
        await self._serving.enter_async_context(serving(self._app, port=self.port))

    async def stop(self) -> None:
        await self._serving.aclose()

    async def __aenter__(self) -> "ScriptedService":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


def error(message: str, code: str) -> dict[str, Any]:
    """A body in OpenAI's shape."""
    return {"error": {"message": message, "type": "invalid_request_error", "code": code}}


def worker(name: str, **more: Any) -> dict[str, Any]:
    """As `/v1/router/workers` has it."""
    moved = {"offload": 5, "park": 1, "spill": 2, "fetch_host": 3, "fetch_disk": 0, "fetch_peer": 1}
    tiers = {
        **{"block_nbytes": 4096, "blocks": {"host": 20, "disk": 7}, "held_blocks": 0},
        **{"moved_blocks": moved, "dropped_blocks": 4, "declined_blocks": 0, "failed_moves": 0},
    }
    live, cached, found, computed = (40, 12, 300, 100) if name == "w0" else (90, 3, 0, 400)
    use = {
        **{"running_branches": 3, "waiting_branches": 1, "live_blocks": live},
        **{"cached_blocks": cached, "cached_tokens": found, "prefill_tokens": computed},
        **{"evicted_blocks": 0, "preemptions": 0, "capsules": 2},
    }
    return {
        **{"worker": name, "state": "ready", "active_blocks": 30, "num_blocks": 100, "rows": 3},
        **{"waiting": 1, "prefill_tokens": 5, "indexed_blocks": 9, "lease_age_s": 0.5},
        **{"weight_version": "base", "device": "", "use": use, "tiers": tiers},
        **{
            "object": "worker",
            "incarnation": "1",
            "address": "",
            "is_whole": True,
            "is_new": False,
        },
        **{"lends_at": "", "lacks": [], "metrics_at": "", "weight_change": None},
        **more,
    }
