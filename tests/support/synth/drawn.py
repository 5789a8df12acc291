"""Traces drawn by hand or at random, for tests of what is measured of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from mallee.traces.trace import Rule, Trace, trace_of
from mallee.traces.workload import NO_PARENT, Request, Workload

SIZE = 4


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a drawn trace: its blocks, and what is told besides."""

    ids: Sequence[int]
    at_s: float
    tokens: int | None = None  # by default whole blocks
    answer: int = 1
    session: str = ""
    cls: str = "turn"
    waits: tuple[int, ...] = ()
    tool_s: float = 0.0
    parent: int = NO_PARENT
    branches: int = 1


def workload(lines: Sequence[Line], size: int = SIZE) -> Workload:
    children = [line.parent for line in lines]
    requests = [
        Request(
            number=i,
            arrival_s=line.at_s,
            ids=list(line.ids),
            input_tokens=size * len(line.ids) if line.tokens is None else line.tokens,
            output_tokens=line.answer,
            session=line.session,
            cls=line.cls,
            wait_for=line.waits,
            tool_wait_s=line.tool_s,
            branches=line.branches,
            parent=line.parent,
            num_children=children.count(i),
        )
        for i, line in enumerate(lines)
    ]
    return Workload("drawn", size, lambda: iter(requests), has_forks=max(children) >= 0)


def drawn(lines: Sequence[Line], size: int = SIZE, rule: Rule = "floor") -> Trace:
    return trace_of(workload(lines, size), rule=rule)


def paths_trace(paths: Sequence[Sequence[int]]) -> Trace:
    """Requests a second apart that have these blocks."""
    return drawn([Line(path, float(i)) for i, path in enumerate(paths)])


@st.composite
def tree_paths(draw: st.DrawFn, most: int = 24) -> list[list[int]]:
    """Paths of one random forest; some empty, some twice, some ending inside others."""
    nodes: list[list[int]] = [[]]  # path to each
    paths = []
    for _ in range(draw(st.integers(1, most))):
        path = nodes[draw(st.integers(0, len(nodes) - 1))]
        for _ in range(draw(st.integers(0, 4))):
            path = [*path, len(nodes)]
            nodes.append(path)
        paths.append(path)
    return paths
