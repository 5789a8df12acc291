"""Graphs as clients see them: bodies of nodes and graphs, and the events of a stream."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Final

from mallee.api.answers import usage_body
from mallee.api.sse import DONE, event
from mallee.graphs.nodes import Branch, Map, Prefill, Tool
from mallee.graphs.run import NodeRun, Run
from mallee.protocol.gateways.graph_progress import NodeDone
from mallee.protocol.ids import CapsuleId, RequestId, WorkerId

MAX_WAITING: Final = 1024  # events that a client has not read; beyond them answers wait


@dataclass(slots=True)
class Computed:
    """The work of workers for one node. `capsule`: until it is given back."""

    request: RequestId
    worker: WorkerId
    prompt_tokens: int  # of its own text, without those of its parent
    capsule: CapsuleId | None = None
    boundary: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    completion_tokens: int = 0
    finish: str | None = None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def kind_of(node: NodeRun) -> str:
    """The kind of a node; an item of a map is a branch."""
    return "branch" if node.item is not None else type(node.node).__name__.lower()


def node_body(node: NodeRun, computed: Computed | None, *, names_workers: bool) -> dict[str, Any]:
    """One node as it stands."""
    body: dict[str, Any] = {
        "kind": kind_of(node),
        "status": node.status,
        "after": node.after,
        "cause": node.cause,
        "ready_ms": _ms(node.ready_s),
        "start_ms": _ms(node.start_s),
        "first_token_ms": _ms(node.first_s),
        "end_ms": _ms(node.end_s),
    }
    if node.is_resumed:
        body["resumed"] = True
    if node.error is not None:
        body["error"] = {"message": node.error.client_message, "code": node.error.code}
    if node.status == "done" and not isinstance(node.node, Prefill):
        body["output"] = node.output.text
        if node.output.items is not None:
            body["items"] = list(node.output.items)
    if computed is not None:
        if not isinstance(node.node, Prefill):
            body["finish_reason"] = computed.finish
        body["mallee"] = {
            "request": computed.request,
            "worker": computed.worker if names_workers else None,
            "capsule": computed.capsule if node.stays else None,
            "cached_tokens": computed.cached_tokens,
            "prefill_tokens": computed.prefill_tokens,
            "completion_tokens": computed.completion_tokens,
        }
    return body


def node_done(node: NodeRun, computed: Computed | None) -> NodeDone:
    """A node that is done, for other gateways."""
    is_map = isinstance(node.node, Map) and node.item is None
    text, items = ("", None) if is_map else node.output
    if computed is None:
        return NodeDone(node.name, text, items)
    return NodeDone(
        node=node.name,
        text=text,
        items=items,
        request=computed.request,
        worker=computed.worker,
        capsule=computed.capsule or "",
        boundary=computed.boundary,
        prompt_tokens=computed.prompt_tokens,
        cached_tokens=computed.cached_tokens,
        prefill_tokens=computed.prefill_tokens,
        completion_tokens=computed.completion_tokens,
        finish=computed.finish,
    )


def computed_before(node: NodeDone) -> Computed:
    """The work of workers for a node of an earlier run."""
    return Computed(
        request=RequestId(node.request),
        worker=WorkerId(node.worker),
        prompt_tokens=node.prompt_tokens,
        capsule=CapsuleId(node.capsule) if node.capsule else None,
        boundary=node.boundary,
        cached_tokens=node.cached_tokens,
        prefill_tokens=node.prefill_tokens,
        completion_tokens=node.completion_tokens,
        finish=node.finish,
    )


def graph_body(head: dict[str, Any], run: Run, computed: dict[str, Computed]) -> dict[str, Any]:
    """A graph as it stands, without its nodes. `head`: id, object, created, model."""
    done = {name: run.nodes[name] for name in run.graph.outputs}
    outputs = {
        name: node.output.text
        for name, node in done.items()
        if node.status == "done" and not isinstance(node.node, Prefill)
    }
    body = {**head, "status": run.status, "outputs": outputs, "wall_ms": _ms(run.wall_s)}
    if run.wall_s is not None:
        body["path"] = [{"node": name, "ms": _ms(seconds)} for name, seconds in run.path()]
    prompt = sum(each.prompt_tokens for each in computed.values())
    new = sum(each.prefill_tokens for each in computed.values())
    drawn = sum(each.completion_tokens for each in computed.values())
    return {**body, "usage": usage_body(prompt, drawn, max(prompt - new, 0))}


def tool_call(node: NodeRun, text: str) -> dict[str, Any]:
    """The event that asks the client for a result."""
    tool = node.node
    assert isinstance(tool, Tool)
    return {
        "type": "tool.call",
        "node": node.name,
        "call": tool.call,
        "input": text,
        "timeout_s": tool.timeout_s,
    }


def spec_of(node: NodeRun) -> Branch | Map:
    """A branch, or the map of an item."""
    assert isinstance(node.node, Branch | Map)
    return node.node


class Events:
    """The events of one graph for its one reader. Belongs to one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._room.set()
        self._is_over = False

    def put(self, body: dict[str, Any]) -> None:
        """Add an event: never refused, as there are few for each node; who adds text waits for `room`."""
        self._waiting.append(event(body))
        if len(self._waiting) >= MAX_WAITING:
            self._room.clear()
        self._news.set()

    async def room(self) -> None:
        """Return once the reader has left room for text, or is gone."""
        await self._room.wait()

    def end(self) -> None:
        """Nothing follows. Idempotent."""
        self._is_over = True
        self._room.set()
        self._news.set()

    async def read(self) -> AsyncGenerator[bytes, None]:
        """All events that wait, in one piece, as often as some do; then the mark of the end."""
        while True:
            while self._waiting:
                found = b"".join(self._waiting)
                self._waiting.clear()
                self._room.set()
                yield found
            if self._is_over:
                yield DONE
                return
            self._news.clear()
            await self._news.wait()
