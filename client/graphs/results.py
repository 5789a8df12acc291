"""A graph as the server tells of it: its events, its nodes, its end; bytes in, records out."""

from collections.abc import Iterator
from typing import Any

import msgspec

from mallee.client.errors import StreamBroken, from_body
from mallee.client.graphs.builder import Handle
from mallee.client.sse import DONE, SseParser
from mallee.protocol.errors import MalleeError


class NodeFailure(msgspec.Struct, frozen=True):
    """The error of a node."""

    message: str
    code: str


class NodeExtras(msgspec.Struct, frozen=True):
    """The work of workers for a node. `capsule`: of one that keeps it."""

    request: str
    worker: str | None = None
    capsule: str | None = None
    cached_tokens: int = 0
    prefill_tokens: int = 0
    completion_tokens: int = 0


class GraphNode(msgspec.Struct, frozen=True):
    """One node at its end. Times are milliseconds since the graph began.

    `after` is the node whose end made it ready, or ended it; `cause` the one that it failed by, or that
    needed it no more. `resumed`: it was done before the graph went on at another gateway.
    """

    node: str
    kind: str
    status: str
    after: str | None = None
    cause: str | None = None
    ready_ms: float | None = None
    start_ms: float | None = None
    first_token_ms: float | None = None
    end_ms: float | None = None
    output: str | None = None
    items: list[str] | None = None
    error: NodeFailure | None = None
    finish_reason: str | None = None
    mallee: NodeExtras | None = None
    resumed: bool = False

    def says(self, other: "GraphNode") -> bool:
        """Whether both are done with the same output."""
        own, others = ((each.status, each.output, each.items) for each in (self, other))
        return self.status == "done" and own == others

    @property
    def failure(self) -> MalleeError | None:
        """The error of a node that failed, with the server's type."""
        if self.error is None:
            return None
        body = {"error": {"message": self.error.message, "code": self.error.code}}
        return from_body(body, 200)


class GraphEvent(msgspec.Struct, frozen=True):
    """An event of a running graph: docs/api/graphs.md has the fields of each `type`."""

    type: str
    id: str
    node: str = ""
    text: str = ""
    request: str = ""
    call: str = ""
    input: str = ""
    timeout_s: float = 0.0


class PathStep(msgspec.Struct, frozen=True):
    """A node that the end waited for, after the one before."""

    node: str
    ms: float


class _Ended(msgspec.Struct, frozen=True):
    status: str
    outputs: dict[str, str]
    wall_ms: float
    path: list[PathStep]
    usage: dict[str, Any]


class GraphResult(msgspec.Struct, frozen=True):
    """A graph at its end. `status` is done, failed or cancelled; the times of `path` add up to `wall_ms`."""

    id: str
    status: str
    outputs: dict[str, str]
    nodes: dict[str, GraphNode]
    wall_ms: float
    path: list[PathStep]
    usage: dict[str, Any]

    def __getitem__(self, node: Handle | str) -> str:
        """The output of a node. Raises its error, or that of the node that it failed by."""
        found = self.nodes[node if isinstance(node, str) else node.name]
        if found.failure is not None:
            raise found.failure
        if found.output is None:
            raise KeyError(f"node {found.node} is {found.status}, and has no output")
        return found.output


class GraphReader:
    """Reads the streams of one graph, of which the next goes on where one broke off.

    `result` is there once it has ended. The end of a node that an earlier stream told alike is left out; of
    one that failed there, or was done again with another output, it is told.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._parser = SseParser()
        self._nodes: dict[str, GraphNode] = {}
        self.id = ""
        self.is_done = False
        self.result: GraphResult | None = None

    def feed(self, chunk: bytes) -> Iterator[GraphEvent]:
        """The events that `chunk` completes. Raises StreamBroken for what is none."""
        for data in self._parser.feed(chunk):
            if data == DONE:
                self.is_done = True
                return
            try:
                event = msgspec.json.decode(data, type=GraphEvent)
                if event.type == "node.ended":
                    before = self._nodes.get(event.node)
                    node = msgspec.json.decode(data, type=GraphNode)
                    self._nodes[event.node] = node
                    if before is not None and node.says(before):
                        continue
                elif event.type == "graph.ended":
                    end = msgspec.json.decode(data, type=_Ended)
                    fields = {name: getattr(end, name) for name in end.__struct_fields__}
                    self.result = GraphResult(id=event.id, nodes=self._nodes, **fields)
            except msgspec.MsgspecError as error:
                raise StreamBroken(self._url, f"an event can't be read: {error}") from error
            self.id = event.id
            yield event

    def begin_next(self) -> None:
        """Another stream of the graph comes."""
        self._parser = SseParser()

    def finished(self) -> GraphResult:
        """Raises StreamBroken if the end is missing."""
        if self.result is None or not self.is_done:
            raise StreamBroken(self._url)
        return self.result


def outcome(result: object) -> dict[str, Any]:
    """The body of a result, from what a tool's function gave."""
    if isinstance(result, list | tuple):
        return {"output": [str(each) for each in result]}
    return {"output": "" if result is None else str(result)}


def failure(error: Exception) -> dict[str, Any]:
    """The body of a result, from what a tool's function raised."""
    text = f"{type(error).__name__}: {error}"
    return {"error": text[:1024]}
