"""Sessions as a forest: each below the one that it comes from, its capsules below those they continue.

A capsule that alone continues the one before stands beneath it in the same column, with an arrow: sessions
are long runs with few forks, and the indent counts the forks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from mallee.client.sessions import SessionNode, SessionTree

MAX_DEPTH: Final = 12
"""Deeper ones stand in the last column, and name what they are below."""
NONE: Final = "no session: requests name theirs (docs/api/sessions.md)"


class Place(NamedTuple):
    """A session, or a capsule of one."""

    session: str
    capsule: str | None = None


@dataclass(frozen=True, slots=True)
class ForestNode:
    """A line of the forest, with those that are indented below it."""

    place: Place
    label: Text
    below: "list[ForestNode]" = field(default_factory=list)


def forest(
    sessions: Sequence[SessionTree],
    before: Sequence[SessionTree] | None = None,
    name_of: Callable[[str], str] = str,
) -> list[ForestNode]:
    """The roots, in the order of `sessions`. Capsules that `before` has not are new, and bold.

    `name_of`: a capsule's id as it is shown.
    """
    old = None if before is None else {node.capsule for each in before for node in each.nodes}
    parents = {each.id: each.parent for each in sessions}
    depths = {name: _depth(name, parents) for name in parents}
    made: dict[str, ForestNode] = {}
    for each in sessions:
        below = _Capsules(each, old, name_of).lines(depths[each.id])
        below += [
            ForestNode(Place(child), Text(f"session {child}"))
            for child in each.children
            if child not in parents
        ]
        made[each.id] = ForestNode(Place(each.id), _head(each, depths[each.id]), below)
    roots: list[ForestNode] = []
    for each in sessions:
        lines = made[each.parent].below if each.parent and depths[each.id] else roots
        lines.append(made[each.id])
    return roots


def drawn(
    sessions: Sequence[SessionTree], before: Sequence[SessionTree] | None = None
) -> RenderableType:
    """The forest for a terminal."""
    roots = forest(sessions, before)
    return Group(*map(_tree, roots)) if roots else Text(NONE)


def _tree(root: ForestNode) -> Tree:
    tree = Tree(root.label)
    todo = [(tree, root)]
    while todo:
        above, node = todo.pop()
        todo += [(above.add(each.label), each) for each in node.below]
    return tree


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
    """The lines of one session's capsules."""

    def __init__(
        self, session: SessionTree, old: set[str] | None, name_of: Callable[[str], str]
    ) -> None:
        self._session = session.id
        self._old = old
        self._name_of = name_of
        self._below: dict[str | None, list[SessionNode]] = {}
        seen: set[str] = set()
        for node in session.nodes:  # parents come first
            above = node.parent if node.parent in seen else None
            self._below.setdefault(above, []).append(node)
            seen.add(node.capsule)

    def lines(self, depth: int) -> list[ForestNode]:
        """The lines below the session, which itself stands at `depth`."""
        top: list[ForestNode] = []
        todo = [(top, node, depth, "") for node in reversed(self._below.get(None, []))]
        while todo:
            lines, node, depth, mark = todo.pop()
            below = self._below.get(node.capsule, [])
            line = ForestNode(Place(self._session, node.capsule), self._label(node, mark))
            lines.append(line)
            if len(below) == 1:
                todo.append((lines, below[0], depth, "↓ "))
            elif depth + 1 < MAX_DEPTH:
                todo += [(line.below, each, depth + 1, "") for each in reversed(below)]
            else:
                mark = f"below {self._name_of(node.capsule)}: "
                todo += [(lines, each, depth, mark) for each in reversed(below)]
        return top

    def _label(self, node: SessionNode, mark: str) -> Text:
        num = len(self._below.get(node.capsule, ()))
        forks = f", {num} branches" if num > 1 else ""
        is_new = self._old is not None and node.capsule not in self._old
        look = "bold" if is_new else "" if node.held else "dim"
        return Text.assemble(
            (mark, "dim"), (f"{self._name_of(node.capsule)}  {node.words}{forks}", look)
        )
