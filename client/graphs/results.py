"""Graphs as their callers see them: events while they run, at the end nodes, results and a timeline."""

import os
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from mallee.graphs.nodes import Handle, Prefill
from mallee.graphs.run import NodeRun, Run, Status
from mallee.protocol.errors import MalleeError

MAX_TEXT: Final = 2000  # characters of an output that are shown

_COLOURS: Final = {"waited": "#bbb8", "computed": "#e5a83b", "drew": "#2a7", "lost": "#c33"}
_LANE: Final = "display:grid;grid-template-columns:13em 1fr 22em;gap:.6em;align-items:center"
_TRACK: Final = "position:relative;height:13px;background:#8882;border-radius:3px"
_PAGE: Final = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><body style="font:14px'
    ' system-ui,sans-serif;max-width:90em;margin:1.5em auto;padding:0 1em">{body}</body></html>\n'
)


class Work(msgspec.Struct, omit_defaults=True):
    """The work of workers for one node. A prefill that was forked early tells no tokens.

    `capsule`: until it is given back, so at the graph's end only of a node that keeps it.
    """

    request: str = ""
    worker: str | None = None
    capsule: str = ""
    cached_tokens: int | None = None
    prefill_tokens: int | None = None
    completion_tokens: int | None = None
    finish: str | None = None


class GraphNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node at its end. Times are milliseconds since the graph began.

    `after` is the node whose end made it ready, or ended it; `cause` the one that it failed by, or that
    needed it no more. `resumed`: an earlier run of its journal had done it.
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
    work: Work


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
        return sum(node.work.prefill_tokens or 0 for node in self.nodes.values())

    @property
    def completion_tokens(self) -> int:
        """Tokens that were drawn."""
        return sum(node.work.completion_tokens or 0 for node in self.nodes.values())

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline as one page that needs no other file."""
        Path(path).write_text(page_html(self), encoding="utf-8")

    def _repr_html_(self) -> str:
        """The timeline, which notebooks show."""
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
        work=work,
    )


def result_of_run(run: Run, work: Mapping[str, Work]) -> GraphResult:
    """The result of a run that is over."""
    assert run.wall_s is not None
    nodes = {name: node_at_end(node, work.get(name, Work())) for name, node in run.nodes.items()}
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


# The timeline


def page_html(result: GraphResult) -> str:
    """A page that needs no other file."""
    return _PAGE.format(title=escape(_title(result)), body=timeline_html(result))


def timeline_html(result: GraphResult) -> str:
    """A lane for each node, with those that the end waited for in bold. Texts are escaped."""
    names = {"waited": "waiting", "computed": "prompt", "drew": "drawing", "lost": "failed"}
    legend = " ".join(
        f'<span style="border-left:.9em solid {_COLOURS[key]};padding:0 .8em 0 .3em">{name}</span>'
        for key, name in names.items()
    )
    way = " &rarr; ".join(f"{escape(step.node)} {step.ms:.0f} ms" for step in result.path)
    path = {step.node for step in result.path}
    most = max(result.wall_ms, 1e-3)
    lanes = "".join(_lane(node, most, node.node in path) for node in result.nodes.values())
    head = f"<b>{escape(_title(result))}</b><p>{legend}</p><p>The end waited for: {way}</p>"
    return f'<div style="font-variant-numeric:tabular-nums">{head}{lanes}</div>'


def _title(result: GraphResult) -> str:
    return (
        f"graph {result.status}: {len(result.nodes)} nodes, {result.wall_ms:.0f} ms,"
        f" {result.prefill_tokens} tokens computed, {result.completion_tokens} drawn"
    )


def _lane(node: GraphNode, most: float, is_on_path: bool) -> str:
    """The node's name, its times as bars, and its figures; its output opens below."""
    ready, start, first, end = node.ready_ms, node.start_ms, node.first_token_ms, node.end_ms
    drew = "drew" if node.status == "done" else "lost"
    bars = _bar("waited", ready, end if start is None else start, most)
    is_computed = node.kind in ("prefill", "branch")
    bars += _bar("computed" if is_computed else drew, start, end if first is None else first, most)
    bars += _bar(drew, first, end, most)
    state = node.kind if node.status == "done" else f"{node.kind}, {node.status}"
    figures = {
        "": None if end is None else f"{end:.0f} ms",
        "cached ": node.work.cached_tokens,
        "computed ": node.work.prefill_tokens,
        "drew ": node.work.completion_tokens,
        "on ": node.work.worker,
        "by ": node.cause,
    }
    told = ", ".join(f"{name}{value}" for name, value in figures.items() if value is not None)
    text = str(node.error) if node.error is not None else node.output or ""
    shown = text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"
    weight = "bold" if is_on_path else "normal"
    return (
        f'<details><summary style="{_LANE}"><span style="font-weight:{weight}">{escape(node.node)}'
        f' <small>{escape(state)}</small></span><span style="{_TRACK}">{bars}</span>'
        f'<small>{escape(told)}</small></summary><div style="white-space:pre-wrap;margin:.4em 1em">'
        f"{escape(shown)}</div></details>"
    )


def _bar(kind: str, begin: float | None, end: float | None, most: float) -> str:
    if begin is None or end is None or end <= begin:
        return ""
    place = f"left:{100 * begin / most:.3f}%;width:{100 * (end - begin) / most:.3f}%"
    return f'<i style="position:absolute;height:100%;background:{_COLOURS[kind]};{place}"></i>'
