"""Graphs as their callers see them: events while they run, nodes and results at the end."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from mallee.graphs.nodes import Handle, Prefill
from mallee.graphs.run import NodeRun, Run, Status
from mallee.protocol.errors import MalleeError


class Work(msgspec.Struct, omit_defaults=True):
    """The work of workers for one node. A prefill that was forked early tells no tokens."""

    request: str = ""
    worker: str | None = None
    capsule: str = ""  # until it is given back
    cached_tokens: int | None = None
    prefill_tokens: int | None = None
    completion_tokens: int | None = None
    finish: str | None = None


NO_WORK = Work()


class GraphNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node at its end. Times are milliseconds since the graph began.

    `after` is the node whose end made it ready, or ended it; `cause` the one that it failed by, or that
    needed it no more. `resumed`: an earlier run of its journal had done it. `capsule`: of one that keeps it.
    """

    node: str
    kind: str
    status: Status
    after: str | None
    cause: str | None
    ready_ms: float | None
    start_ms: float | None
    first_token_ms: float | None
    end_ms: float | None
    output: str | None
    items: tuple[str, ...] | None
    error: MalleeError | None
    resumed: bool
    request: str
    worker: str | None
    capsule: str | None
    cached_tokens: int | None
    prefill_tokens: int | None
    completion_tokens: int | None
    finish_reason: str | None


class GraphEvent(NamedTuple):
    """An event of a running graph.

    `type` is graph.started or graph.resumed, node.started, node.delta, node.ended, graph.ended. The text of a
    branch that is started once more, as its connection was cut, begins anew. `ended`: the node at its end.
    """

    type: str
    node: str = ""
    text: str = ""
    request: str = ""
    ended: GraphNode | None = None


class PathStep(NamedTuple):
    """A node that the end waited for, after the one before."""

    node: str
    ms: float


class GraphResult(msgspec.Struct, frozen=True, kw_only=True):
    """A graph at its end. `status` is done, failed or cancelled; the times of `path` add up to `wall_ms`."""

    status: Status
    outputs: dict[str, str]
    nodes: dict[str, GraphNode]
    wall_ms: float
    path: list[PathStep]

    def __getitem__(self, node: Handle | str) -> str:
        """The output of a node. Raises its error, or that of the node that it failed by."""
        found = self.nodes[node if isinstance(node, str) else node.name]
        if found.error is not None:
            raise found.error
        if found.output is None:
            raise KeyError(f"node {found.node} is {found.status}, and has no output")
        return found.output

    @property
    def prefill_tokens(self) -> int:
        """Tokens of prompts that workers computed."""
        return sum(node.prefill_tokens or 0 for node in self.nodes.values())

    @property
    def completion_tokens(self) -> int:
        """Tokens that were drawn."""
        return sum(node.completion_tokens or 0 for node in self.nodes.values())

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline as one page that needs no other file."""
        from mallee.client.graphs.timeline import page_html

        Path(path).write_text(page_html(self), encoding="utf-8")

    def _repr_html_(self) -> str:
        """The timeline, which notebooks show."""
        from mallee.client.graphs.timeline import timeline_html

        return timeline_html(self)


def node_at_end(node: NodeRun, work: Work) -> GraphNode:
    has_output = node.status == "done" and not isinstance(node.node, Prefill)
    return GraphNode(
        node=node.name,
        kind=node.kind,
        status=node.status,
        after=node.after,
        cause=node.cause,
        ready_ms=_ms(node.ready_s),
        start_ms=_ms(node.start_s),
        first_token_ms=_ms(node.first_s),
        end_ms=_ms(node.end_s),
        output=node.output.text if has_output else None,
        items=node.output.items,
        error=node.error,
        resumed=node.is_resumed,
        request=work.request,
        worker=work.worker,
        capsule=(work.capsule or None) if node.stays else None,
        cached_tokens=work.cached_tokens,
        prefill_tokens=work.prefill_tokens,
        completion_tokens=work.completion_tokens,
        finish_reason=work.finish,
    )


def result_of_run(run: Run, work: Mapping[str, Work]) -> GraphResult:
    """The result of a run that is over."""
    assert run.wall_s is not None
    nodes = {name: node_at_end(node, work.get(name, NO_WORK)) for name, node in run.nodes.items()}
    outputs = ((name, nodes[name].output) for name in run.graph.outputs)
    return GraphResult(
        status=run.status,
        outputs={name: output for name, output in outputs if output is not None},
        nodes=nodes,
        wall_ms=run.wall_s * 1e3,
        path=[PathStep(name, seconds * 1e3) for name, seconds in run.path()],
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
