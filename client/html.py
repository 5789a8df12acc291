"""Trees of branches and of capsules as HTML, for notebooks; no I/O."""

from collections.abc import Iterable, Mapping
from html import escape
from typing import Final

from mallee.client.results import BranchState

_ROW = "border-left:2px solid #2a7;margin:.3em 0 .3em .6em;padding-left:.7em"
_SOFT = "opacity:.65;font-size:90%"
MAX_DEPTH: Final = 24  # that is drawn: what is deeper stands there


def tree_html(title: str, branches: Mapping[int, BranchState]) -> str:
    """The title, and below it each branch's figures and text. Nothing of a text is taken as HTML."""
    rows = "".join(_row(branches[index]) for index in sorted(branches))
    return f"<div><b>{escape(title)}</b>{rows}</div>"


def nodes_html(title: str, nodes: Iterable[tuple[str, str | None, str]]) -> str:
    """The title, and rows of (id, id of its parent, figures), each below its parent, which comes first."""
    children: dict[str, list[tuple[str, str]]] = {}
    known: set[str] = set()
    for node, parent, figures in nodes:
        above = parent if parent is not None and parent in known else ""
        children.setdefault(above, []).append((node, figures))
        known.add(node)
    rows: list[str] = []
    todo = [(node, figures, 0) for node, figures in reversed(children.get("", []))]
    while todo:
        node, figures, depth = todo.pop()
        style = f"{_ROW};margin-left:{0.6 + 1.2 * min(depth, MAX_DEPTH):.1f}em"
        told = f'{escape(node)} <span style="{_SOFT}">{escape(figures)}</span>'
        rows.append(f'<div style="{style}">{told}</div>')
        todo += [(child, told, depth + 1) for child, told in reversed(children.get(node, []))]
    return f"<div><b>{escape(title)}</b>{''.join(rows)}</div>"


def _row(branch: BranchState) -> str:
    figures = {
        "worker": branch.worker,
        "cached": branch.cached_tokens,
        "computed": branch.prefill_tokens,
        "first token ms": None if branch.ttft_ms is None else round(branch.ttft_ms),
        "capsule": branch.capsule,
    }
    told = ", ".join(f"{name} {value}" for name, value in figures.items() if value is not None)
    state = branch.finish_reason or "running"
    return (
        f'<div style="{_ROW}"><span style="{_SOFT}">branch {branch.index} [{escape(state)}]'
        f' {escape(told)}</span><div style="white-space:pre-wrap">{escape(branch.text)}</div></div>'
    )
