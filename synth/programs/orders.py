"""The order of a search, recognised by its waits or, without any, by its visits."""

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple


class Order(IntEnum):
    """The choice of a program's next request."""

    RECORDED = 0  # no tree, or one searched in a way not known here
    FREE = 1  # children begin when their parent has ended
    BREADTH = 2  # level after level
    DEPTH = 3  # along one path, back to the deepest node with more to try
    BEST = 4  # one visit after the other, at any place of the tree


class Search(NamedTuple):
    """The order of a program. Visits go in batches: a level of `BREADTH`, else what began together.

    With `has_waits` all visits of a batch wait for the whole batch before.
    """

    order: Order
    has_waits: bool
    batches: tuple[int, ...] = ()  # their first nodes; () if each visit, or each level, is one


RECORDED = Search(Order.RECORDED, has_waits=False)


def recognise(parents: Sequence[int], waits: Sequence[Iterable[int]]) -> Search | None:
    """The search of a program. `parents[i]` < i, -1 for a root; `waits[i]` are earlier nodes.

    None if no request waits and the visits would suit more than one order: other programs decide.
    """
    if parents[0] >= 0 or any(parent < 0 for parent in parents[1:]):
        return RECORDED
    beyond = [set(w) - {parent} for w, parent in zip(waits, parents, strict=True)]
    levels = _levels(parents)
    if not any(beyond):
        return _by_visits(parents, is_breadth=bool(levels))
    batches = _batches(parents, beyond)
    if not batches:
        return RECORDED
    if batches == levels:
        return Search(Order.BREADTH, has_waits=True)
    if len(batches) < len(parents):
        return Search(Order.BEST, True, batches)
    return Search(Order.DEPTH if is_depth_first(parents) else Order.BEST, has_waits=True)


def undecided(searches: Sequence[Search | None]) -> Search:
    """The search of programs that suit several orders: that of most others, or free."""
    known = Counter(s for s in searches if s and s is not RECORDED and not s.has_waits)
    return known.most_common(1)[0][0] if known else Search(Order.FREE, has_waits=False)


def is_depth_first(parents: Sequence[int]) -> bool:
    """Whether each visit continues the visit before or one of those that this hangs from."""
    path: list[int] = []
    for node, parent in enumerate(parents):
        while path and path[-1] != parent:
            path.pop()
        if node and not path:
            return False
        path.append(node)
    return True


def depths_of(parents: Sequence[int]) -> list[int]:
    """Depth of each node; roots have 0."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def _by_visits(parents: Sequence[int], *, is_breadth: bool) -> Search | None:
    is_depth = is_depth_first(parents)
    if is_breadth and is_depth:
        return None
    if is_breadth:
        return Search(Order.BREADTH, has_waits=False)
    return Search(Order.DEPTH if is_depth else Order.FREE, has_waits=False)


def _levels(parents: Sequence[int]) -> tuple[int, ...]:
    """First node of each level; () if the visits go back to a level before."""
    steps = [after - before for before, after in pairwise(depths_of(parents))]
    return () if min(steps, default=0) < 0 else (0, *(i for i, step in enumerate(steps, 1) if step))


def _batches(parents: Sequence[int], beyond: Sequence[set[int]]) -> tuple[int, ...]:
    """First nodes of the batches, the root alone in the first; () if nodes wait for anything else.

    `beyond` are the nodes that each waits for besides its parent.
    """
    firsts = [0]
    before: set[int] = set()  # the batch before this one
    for node in range(1, len(parents)):
        parent = {parents[node]}
        if len(firsts) > 1 and beyond[node] == before - parent:
            continue
        before = set(range(firsts[-1], node))
        if beyond[node] != before - parent:
            return ()
        firsts.append(node)
    return tuple(firsts)
