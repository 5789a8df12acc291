"""Trees of branches and of capsules as HTML, for notebooks, and as text; no I/O."""

from collections.abc import Iterable, Mapping
from html import escape
from typing import Final, TypeAlias

from mallee.client.results import BranchState

Rows: TypeAlias = Iterable[tuple[str, str | None, str]]
"""Of each node its id, that of its parent, which comes first, and figures."""

_ROW = "border-left:2px solid #2a7;margin:.3em 0 .3em .6em;padding-left:.7em"
_SOFT = "opacity:.65;font-size:90%"
MAX_DEPTH: Final = 24  # that is drawn: what is deeper stands there


def tree_html(title: str, branches: Mapping[int, BranchState]) -> str:
    """The title, and below it each branch's figures and text. Nothing of a text is taken as HTML."""
    rows = "".join(_row(branches[index]) for index in sorted(branches))
    return f"<div><b>{escape(title)}</b>{rows}</div>"


def nodes_text(title: str, nodes: Rows) -> str:
    """The title, and the nodes as a tree; one that alone continues another stands beneath it."""
    children = _children(nodes)
    lines: list[str] = [title]
    todo = _text_rows(children.get("", []), "")
    while todo:
        node, figures, mark, indent = todo.pop()
        lines.append(f"{mark}{node}  {figures}")
        below = children.get(node, [])
        one = [(*each, indent, indent) for each in below]
        todo += one if len(below) == 1 else _text_rows(below, indent)
    return "\n".join(lines)


def _text_rows(nodes: list[tuple[str, str]], indent: str) -> list[tuple[str, str, str, str]]:
    """Nodes side by side, the first one last, each with its mark and the indent below it."""
    marks = [("├── ", "│   ")] * (len(nodes) - 1) + [("└── ", "    ")] * bool(nodes)
    rows = zip(nodes, marks, strict=True)
    return [(*node, indent + mark, indent + below) for node, (mark, below) in rows][::-1]


def _children(nodes: Rows) -> dict[str, list[tuple[str, str]]]:
    """Each node's children with their figures; below "" those without a parent."""
    children: dict[str, list[tuple[str, str]]] = {}
    known: set[str] = set()
    for node, parent, figures in nodes:
        above = parent if parent is not None and parent in known else ""
        children.setdefault(above, []).append((node, figures))
        known.add(node)
    return children


def nodes_html(title: str, nodes: Rows) -> str:
    """The title, and a row for each node, below its parent."""
    children = _children(nodes)
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
