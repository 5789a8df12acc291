"""Graphs asked for over HTTP, and their streams."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from support.live_fleet import LiveFleet
from support.tiny_fleet import has_capsules, post
from support.waiting import until, until_asked

GREEDY = {"temperature": 0, "ignore_eos": True}
DOC = {"name": "doc", "kind": "prefill", "text": "A tree of many trunks from one root. " * 4}

# A template: `<role>content|` for each message.
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def branch(name: str, of: str = "doc", **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": "branch", "of": of, "max_tokens": 6, "sampling": GREEDY, **more}


def join(name: str, *inputs: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": "join", "inputs": [*inputs], **more}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": "tool", "call": "search", **more}


async def run(client: httpx.AsyncClient, *nodes: dict[str, Any], **more: Any) -> dict[str, Any]:
    found = await post(client, "/v1/graphs", nodes=list(nodes), **more)
    times_add_up(found)
    return found


def times_add_up(graph: dict[str, Any]) -> None:
    assert sum(step["ms"] for step in graph["path"]) == pytest.approx(graph["wall_ms"], abs=0.1)
    for node in graph["nodes"].values():
        times = [node[f"{name}_ms"] for name in ("ready", "start", "first_token", "end")]
        known = [each for each in times if each is not None]
        assert known == sorted(known)
        assert node["end_ms"] <= graph["wall_ms"]
        if node["kind"] == "branch" and node["status"] == "done" and "resumed" not in node:
            assert None not in times
            if node["after"] is not None:  # None: it went on from a prefill that had begun
                assert graph["nodes"][node["after"]]["end_ms"] == node["ready_ms"]


async def nothing_left(client: httpx.AsyncClient, fleet: LiveFleet, num_kept: int = 0) -> None:
    """No branch runs, and no capsule is there but those that are to stay."""
    await until(lambda: not any(engine.branches for engine in fleet.engines.values()))
    await until_asked(lambda: has_capsules(client, num_kept))
    kept = sum(engine.stats().capsules.kept for engine in fleet.engines.values())
    assert kept == num_kept


class Stream:
    """The events of a graph as they come."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines
        self.events: list[dict[str, Any]] = []
        self.is_done = False

    async def until(self, kind: str, node: str | None = None) -> dict[str, Any]:
        """The next event of that type, of that node if one is given."""
        async for line in self._lines:
            if line == "data: [DONE]":
                self.is_done = True
                break
            if line.startswith("data: "):
                self.events.append(json.loads(line[6:]))
                event = self.events[-1]
                assert (event["object"], event["id"]) == ("graph.event", self.events[0]["id"])
                if event["type"] == kind and node in (None, event.get("node")):
                    return event
        raise AssertionError(f"no {kind} of {node}: {self.events}")

    async def rest(self) -> None:
        with pytest.raises(AssertionError, match="no nothing"):
            await self.until("nothing")
        assert self.is_done

    def ends(self) -> dict[str, str]:
        ended = [each for each in self.events if each["type"] == "node.ended"]
        assert len({each["node"] for each in ended}) == len(ended), "a node ends once"
        return {each["node"]: each["status"] for each in ended}


@asynccontextmanager
async def streamed(
    client: httpx.AsyncClient, *nodes: dict[str, Any], **more: Any
) -> AsyncIterator[Stream]:
    body = {"nodes": list(nodes), "stream": True, **more}
    async with client.stream("POST", "/v1/graphs", json=body) as response:
        assert response.status_code == 200, await response.aread()
        yield Stream(response.aiter_lines())
