"""The timeline of a graph as HTML: when its nodes waited, computed their prompts and drew."""

from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mallee.client.graphs.results import GraphNode, GraphResult

MAX_TEXT: Final = 2000  # characters of an output that are shown

_COLOURS: Final = {"waited": "#bbb8", "computed": "#e5a83b", "drew": "#2a7", "lost": "#c33"}
_LANE: Final = "display:grid;grid-template-columns:13em 1fr 22em;gap:.6em;align-items:center"
_TRACK: Final = "position:relative;height:13px;background:#8882;border-radius:3px"
_PAGE: Final = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><body style="font:14px'
    ' system-ui,sans-serif;max-width:90em;margin:1.5em auto;padding:0 1em">{body}</body></html>\n'
)


def page_html(result: "GraphResult") -> str:
    """A page that needs no other file."""
    return _PAGE.format(title=escape(_title(result)), body=timeline_html(result))


def timeline_html(result: "GraphResult") -> str:
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


def _title(result: "GraphResult") -> str:
    return (
        f"graph {result.status}: {len(result.nodes)} nodes, {result.wall_ms:.0f} ms,"
        f" {result.prefill_tokens} tokens computed, {result.completion_tokens} drawn"
    )


def _lane(node: "GraphNode", most: float, is_on_path: bool) -> str:
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
        "cached ": node.cached_tokens,
        "computed ": node.prefill_tokens,
        "drew ": node.completion_tokens,
        "on ": node.worker,
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
