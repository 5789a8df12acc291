"""The tree of a request's branches as HTML, for notebooks; no I/O."""

from collections.abc import Mapping
from html import escape

from mallee.client.results import BranchState

_ROW = "border-left:2px solid #2a7;margin:.3em 0 .3em .6em;padding-left:.7em"
_SOFT = "opacity:.65;font-size:90%"


def tree_html(title: str, branches: Mapping[int, BranchState]) -> str:
    """The title, and below it each branch's figures and text. Nothing of a text is taken as HTML."""
    rows = "".join(_row(branches[index]) for index in sorted(branches))
    return f"<div><b>{escape(title)}</b>{rows}</div>"


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
