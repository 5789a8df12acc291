"""Graphs for a client that blocks: the asynchronous run, in a thread with an event loop."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal

from mallee.client.aio import AsyncMallee
from mallee.client.graphs.builder import Graph
from mallee.client.graphs.results import GraphEvent, GraphResult
from mallee.client.graphs.running import AsyncGraphRun
from mallee.graphs.nodes import Handle
from mallee.protocol.errors import InvalidParameter


class GraphRun:
    """A graph that runs, for a client that blocks. Iterate for its events, or `wait`; closing early ends it.

    An `AsyncGraphRun` in a thread with a loop and connections of its own, as it begins.
    """

    def __init__(self, client: Any, graph: Graph, outputs: Sequence[Handle], **more: Any) -> None:
        """As `AsyncGraphRun`. Raises InvalidParameter also for an `http_client`, which has no event loop."""
        owner = getattr(client, "_client", client)  # a session's
        if owner._given is not None:
            remedy = "a graph has an event loop; leave it out, or use AsyncMallee with an httpx.AsyncClient"
            raise InvalidParameter("http_client", type(owner._given).__name__, remedy)
        self._client = AsyncMallee(
            owner.base_url,
            model=owner.model,
            timeout=owner.timeout,
            max_retries=owner.max_retries,
            default_headers=owner._headers,
        )
        self._run = AsyncGraphRun(self._client, graph, outputs, **more)
        self._stack = ExitStack()
        # One that is left without a word ends, too: at the latest before its thread does, with the process.
        weakref.finalize(self, self._stack.close)
        self._portal: BlockingPortal | None = None
        self._events = self._read()

    def __iter__(self) -> Iterator[GraphEvent]:
        return self._events

    def wait(self) -> GraphResult:
        """As `AsyncGraphRun.wait`."""
        with self:
            return self._run.result or self._opened().call(self._run.wait)

    def cancel(self) -> None:
        """As `AsyncGraphRun.cancel`; nothing of a graph that is over."""
        if self._run.result is None:
            self._opened().call(self._run.cancel)

    def close(self) -> None:
        """End what still runs."""
        self._stack.close()

    def __enter__(self) -> "GraphRun":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _opened(self) -> BlockingPortal:
        if self._portal is None:
            self._portal = self._stack.enter_context(start_blocking_portal())
            for ends in (self._client.close, self._run.close):
                self._stack.callback(self._portal.call, ends)
        return self._portal

    def _read(self) -> Iterator[GraphEvent]:
        async def step() -> GraphEvent | None:
            return await anext(self._run._events, None)

        with self:
            while (event := self._opened().call(step)) is not None:
                yield event
