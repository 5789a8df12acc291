"""Watchers of a scope's sessions, over HTTP."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx


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
