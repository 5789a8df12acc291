"""Sessions as a forest: each below the one that it comes from, its capsules below those they continue.

A capsule that alone continues the one before stands beneath it in the same column, with an arrow: sessions
are long runs with few forks, and the indent counts the forks.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from mallee.client import SessionNode, SessionTree
from mallee.client.sessions import words

MAX_DEPTH: Final = 12
"""Deeper ones stand in the last column, and name what they are below."""
NONE: Final = "no session: requests name theirs (docs/api/sessions.md)"


def drawn(
    sessions: Sequence[SessionTree], before: Sequence[SessionTree] | None = None
) -> RenderableType:
    """The forest for a terminal, in the order of `sessions`. Capsules that `before` has not are bold."""
    old = None if before is None else {node.capsule for each in before for node in each.nodes}
    parents = {each.id: each.parent for each in sessions}
    depths = {name: _depth(name, parents) for name in parents}
    made: dict[str, Tree] = {}
    for each in sessions:
        tree = made[each.id] = Tree(_head(each, depths[each.id]))
        _Capsules(each, old).add_to(tree, depths[each.id])
        for child in each.children:
            if child not in parents:
                tree.add(Text(f"session {child}"))
    roots: list[Tree] = []
    for each in sessions:
        lines = made[each.parent].children if each.parent and depths[each.id] else roots
        lines.append(made[each.id])
    return Group(*roots) if roots else Text(NONE)


def _depth(name: str, parents: Mapping[str, str | None]) -> int:
    """The number of sessions that it is indented below.

    0 as well if it is above itself, for clients may name any parents, and at each multiple of MAX_DEPTH.
    """
    seen: set[str] = set()
    above = parents[name]
    while above is not None and above in parents and above not in seen and above != name:
        seen.add(above)
        above = parents[above]
    return 0 if above == name else len(seen) % MAX_DEPTH


def _head(session: SessionTree, depth: int) -> Text:
    is_hidden = session.parent not in (None, "", session.id) and not depth
    text = Text(f"{session.id}, below {session.parent}" if is_hidden else session.id)
    if session.running:
        text.append(f"  {session.running} running", style="green")
    return text


class _Capsules:
    """The lines of one session's capsules. Those that are not `old` are new."""

    def __init__(self, session: SessionTree, old: set[str] | None) -> None:
        self._old = old
        self._below: dict[str | None, list[SessionNode]] = {}
        seen: set[str] = set()
        for node in session.nodes:  # parents come first
            above = node.parent if node.parent in seen else None
            self._below.setdefault(above, []).append(node)
            seen.add(node.capsule)

    def add_to(self, session: Tree, depth: int) -> None:
        """Add the lines below the session, which itself stands at `depth`."""
        todo = [(session, node, depth, "") for node in reversed(self._below.get(None, []))]
        while todo:
            above, node, depth, mark = todo.pop()
            below = self._below.get(node.capsule, [])
            line = above.add(self._label(node, mark))
            if len(below) == 1:
                todo.append((above, below[0], depth, "↓ "))
            elif depth + 1 < MAX_DEPTH:
                todo += [(line, each, depth + 1, "") for each in reversed(below)]
            else:
                mark = f"below {node.capsule}: "
                todo += [(above, each, depth, mark) for each in reversed(below)]

    def _label(self, node: SessionNode, mark: str) -> Text:
        num = len(self._below.get(node.capsule, ()))
        forks = f", {num} branches" if num > 1 else ""
        is_new = self._old is not None and node.capsule not in self._old
        look = "bold" if is_new else "" if node.held else "dim"
        return Text.assemble((mark, "dim"), (f"{node.capsule}  {words(node)}{forks}", look))
