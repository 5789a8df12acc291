"""Bodies of answers as types: for the document alone, the code that answers writes them itself."""

from typing import Literal

from mallee.protocol.api.shared import OMITTED, Body, Failure, UsageBody


class NodeExtras(Body, frozen=True, kw_only=True):
    """`capsule`: of a node that keeps it."""

    request: str
    worker: str | None
    capsule: str | None
    cached_tokens: int
    prefill_tokens: int
    completion_tokens: int


class GraphNode(Body, frozen=True, kw_only=True):
    """A node as it stands; times are milliseconds since the graph began.

    `resumed`: an earlier run of the graph has done it.
    """

    kind: Literal["prefill", "branch", "join", "tool", "map"]
    status: Literal["waiting", "queued", "running", "done", "failed", "cancelled"]
    after: str | None
    cause: str | None
    ready_ms: float | None
    start_ms: float | None
    first_token_ms: float | None
    end_ms: float | None
    resumed: bool = OMITTED
    error: Failure = OMITTED
    output: str = OMITTED
    items: list[str] = OMITTED
    finish_reason: str | None = OMITTED
    mallee: NodeExtras = OMITTED


class GraphStep(Body, frozen=True, kw_only=True):
    node: str
    ms: float


class GraphBody(Body, frozen=True, kw_only=True):
    """`path`: the nodes that the end waited for, one after the other; their times add up to `wall_ms`."""

    id: str
    object: Literal["graph"]
    created: int
    model: str
    status: Literal["running", "done", "failed", "cancelled"]
    outputs: dict[str, str]
    wall_ms: float | None
    path: list[GraphStep] = OMITTED
    usage: UsageBody
    nodes: dict[str, GraphNode]


class GraphDeleted(Body, frozen=True, kw_only=True):
    id: str
    object: Literal["graph.deleted"]
    deleted: bool
    cancelled: bool


class GraphResult(Body, frozen=True, kw_only=True):
    id: str
    object: Literal["graph.result"]
    node: str
