"""The pane of sessions: their forest, and the session or capsule at the cursor."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Final, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text
from textual.widgets import Tree
from textual.widgets.tree import TreeNode

from mallee.cli.remote.course import Course, course_parts
from mallee.cli.remote.forest import NONE, ForestNode, Place, forest
from mallee.client.sessions import SessionNode, SessionTree

_ID_CHARS: Final = 12


def short(capsule: str) -> str:
    """An id that fits a line: its beginning, and the number of its branch."""
    name, dot, number = capsule.rpartition(".")
    if not dot:
        name, number = capsule, ""
    return f"{name[:_ID_CHARS]}…{dot}{number}" if len(name) > _ID_CHARS + 1 else capsule


class Forest(Tree[Place]):
    """Sessions with their capsules. What was folded stays so, and the cursor stays with its line."""

    def __init__(self, *, id: str) -> None:
        super().__init__("sessions", id=id)
        self.show_root = False
        self.guide_depth = 3
        self.sessions: Sequence[SessionTree] = ()
        self._before: Sequence[SessionTree] | None = None
        self._shape: list[tuple[int, Place]] = []
        self._planted: dict[Place, TreeNode[Place]] = {}

    @property
    def selected(self) -> Place | None:
        node = self.cursor_node
        return None if node is None else node.data

    def tell(self, sessions: Sequence[SessionTree]) -> None:
        """Show these, in place of those before."""
        self._before, self.sessions = (self.sessions if self._shape else None), sessions
        roots = forest(sessions, self._before, short)
        shape = [(depth, node.place) for depth, node in walk(roots)]
        if shape != self._shape:
            self._plant(roots)
            self._shape = shape
        else:
            for _, node in walk(roots):
                at = self._planted[node.place]
                if at.label != node.label:
                    at.set_label(node.label)

    def _plant(self, roots: Sequence[ForestNode]) -> None:
        folded = {place for place, node in self._planted.items() if node.is_collapsed}
        cursor = self.selected
        self.clear()
        self.root.expand()
        self._planted = {}
        todo = [(self.root, root) for root in reversed(roots)]
        while todo:
            above, node = todo.pop()
            self._planted[node.place] = made = above.add(
                node.label,
                node.place,
                expand=node.place not in folded,
                allow_expand=bool(node.below),
            )
            todo += [(made, each) for each in reversed(node.below)]
        if not roots:
            self.root.add_leaf(Text(NONE, style="dim"))
        at = self._planted.get(cursor) if cursor is not None else None
        if self.last_line >= 0:  # which lays the lines out
            self.move_cursor(at or self.root.children[0])

    def session(self, name: str) -> SessionTree | None:
        return next((each for each in self.sessions if each.id == name), None)

    def capsule(self, place: Place) -> SessionNode | None:
        session = self.session(place.session)
        nodes = () if session is None else session.nodes
        return next((node for node in nodes if node.capsule == place.capsule), None)

    def num_below(self, place: Place) -> int:
        """Capsules of its session that went on from a capsule, as far as is shown."""
        session = self.session(place.session)
        below = {place.capsule}
        for node in () if session is None else session.nodes:  # parents come first
            if node.parent in below:
                below.add(node.capsule)
        return len(below) - 1


def walk(roots: Sequence[ForestNode]) -> Iterator[tuple[int, ForestNode]]:
    """Every line with its depth, from top to bottom."""
    todo = [(0, root) for root in reversed(roots)]
    while todo:
        depth, node = todo.pop()
        yield depth, node
        todo += [(depth + 1, each) for each in reversed(node.below)]


class Details(NamedTuple):
    """The line at the cursor. `course`: of the request that left the capsule, or why it isn't known."""

    session: SessionTree | None
    capsule: SessionNode | None
    course: Course | str | None = None

    def drawn(self) -> RenderableType:
        if self.session is None:
            return Text("")
        return Group(*(_capsule(self) if self.capsule is not None else _session(self.session)))


def _session(session: SessionTree) -> Iterator[RenderableType]:
    below = f", below {session.parent}" if session.parent else ""
    yield Text(f"session {session.id}{below}", style="bold")
    yield Text(f"{session.capsules} capsules, {session.running} requests running")
    yield Text(f"created {_clock(session.created)}, last used {_clock(session.last_used)}")


def _capsule(details: Details) -> Iterator[RenderableType]:
    node, course = details.capsule, details.course
    assert node is not None
    yield Text(f"capsule {node.capsule}", style="bold")
    where = f" on {node.worker}" if node.worker else ""
    yield Text(f"{node.words}{where}, created {_clock(node.created)}")
    if isinstance(course, str):
        yield Text(course, style="dim")
    elif course is not None:
        yield from course_parts(course)


def _clock(at: int) -> str:
    """The time of day here."""
    return datetime.fromtimestamp(at).astimezone().strftime("%H:%M:%S")
