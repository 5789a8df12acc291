"""Sessions as notebooks show them."""

import re

from mallee.client.html import MAX_DEPTH, nodes_html
from mallee.client.sessions import SessionNode, SessionTree


def node(capsule: str, parent: str | None, **more: object) -> SessionNode:
    given = {"tokens": 7, "created": 1, "is_root": False, "held": True, **more}
    return SessionNode(capsule=capsule, parent=parent, request="r", **given)  # type: ignore[arg-type]


def lines(html: str) -> list[tuple[float, str]]:
    """Each row's margin, and its text."""
    rows = re.findall(r"margin-left:([0-9.]+)em\">(.*?)</div>", html)
    return [(float(margin), re.sub("<[^>]*>", "", text)) for margin, text in rows]


def test_capsules_stand_below_those_that_they_continue() -> None:
    tree = SessionTree(
        id="<b>bug-7",
        parent="a",
        created=1,
        last_used=1,
        capsules=4,
        running=0,
        children=[],
        nodes=[
            node("c1", None, tier="host", pinned=True),
            node("c2", "c1"),
            node("c3", "elsewhere", held=False),
            node("c4", "c1"),
        ],
    )
    html = tree._repr_html_()
    assert "<b>session &lt;b&gt;bug-7, below a</b>" in html
    assert lines(html) == [
        (0.6, "c1 7 tokens, host pinned"),
        (1.8, "c2 7 tokens, held"),
        (1.8, "c4 7 tokens, held"),
        (0.6, "c3 7 tokens, gone"),
    ]


def test_a_long_conversation_stays_on_the_page() -> None:
    html = nodes_html("s", [(str(i), str(i - 1) if i else None, "") for i in range(1000)])
    margins = [margin for margin, _ in lines(html)]
    assert len(margins) == 1000
    assert max(margins) == 0.6 + 1.2 * MAX_DEPTH
