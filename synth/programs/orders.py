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


class Waits(IntEnum):
    """The nodes that a node waits for besides its parent."""

    RECORDED = 0
    NONE = 1
    LEVEL = 2  # the whole level before, from the second level on
    VISIT = 3  # the visit before
    BATCH = 4  # all visits that began together before


class Search(NamedTuple):
    """The order and waits of a program, and the places of its nodes that begin a batch."""

    order: Order
    waits: Waits
    batches: tuple[int, ...] = ()


RECORDED = Search(Order.RECORDED, Waits.RECORDED)


def recognise(parents: Sequence[int], waits: Sequence[Iterable[int]]) -> Search | None:
    """The search of a program. `parents[i]` < i, -1 for a root; `waits[i]` are earlier nodes.

    None if nobody waits and the visits would suit more than one order: other programs decide.
    """
    if parents[0] >= 0 or any(parent < 0 for parent in parents[1:]):
        return RECORDED
    beyond = [set(w) - {parent} for w, parent in zip(waits, parents, strict=True)]
    if not any(beyond):
        return _by_visits(parents)
    if _waits_for_visits(parents, beyond):
        order = Order.DEPTH if is_depth_first(parents) else Order.BEST
        return Search(order, Waits.VISIT)
    if _waits_for_levels(parents, beyond):
        return Search(Order.BREADTH, Waits.LEVEL)
    batches = _batches(parents, waits)
    return Search(Order.BEST, Waits.BATCH, batches) if batches else RECORDED


def undecided(searches: Sequence[Search | None]) -> Search:
    """The search of programs that suit several orders: that of most others, or free."""
    known = Counter(s for s in searches if s is not None and s.waits is Waits.NONE)
    return known.most_common(1)[0][0] if known else Search(Order.FREE, Waits.NONE)


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


def _by_visits(parents: Sequence[int]) -> Search | None:
    depths = depths_of(parents)
    is_breadth = all(a <= b for a, b in pairwise(depths))
    is_depth = is_depth_first(parents)
    if is_breadth and is_depth:
        return None
    if is_breadth:
        return Search(Order.BREADTH, Waits.NONE)
    return Search(Order.DEPTH if is_depth else Order.FREE, Waits.NONE)


def _waits_for_visits(parents: Sequence[int], beyond: Sequence[set[int]]) -> bool:
    return not beyond[0] and all(
        beyond[i] == {i - 1} - {parents[i]} for i in range(1, len(parents))
    )


def _waits_for_levels(parents: Sequence[int], beyond: Sequence[set[int]]) -> bool:
    depths = depths_of(parents)
    levels: dict[int, set[int]] = {}
    for node, depth in enumerate(depths):
        levels.setdefault(depth, set()).add(node)
    return all(
        beyond[i] == (levels[depth - 1] - {parents[i]} if depth > 1 else set())
        for i, depth in enumerate(depths)
    )


def _batches(parents: Sequence[int], waits: Sequence[Iterable[int]]) -> tuple[int, ...]:
    """First nodes of the batches, the root alone in the first; () if nodes wait for anything else."""
    firsts = [0]
    before: set[int] = set()  # the batch before this one
    for node in range(1, len(parents)):
        parent = {parents[node]}
        named = set(waits[node]) - parent
        if len(firsts) > 1 and named == before - parent:
            continue
        before = set(range(firsts[-1], node))
        if named != before - parent:
            return ()
        firsts.append(node)
    return tuple(firsts)
