"""Copies of what other gateways have done of their graphs, in case they die; and what of it still holds."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from mallee.graphs.graph import Graph
from mallee.graphs.nodes import Branch, Join, Map, Prefill
from mallee.graphs.run import Output
from mallee.protocol.codec import encode
from mallee.protocol.errors import LookupIncomplete, NotFound
from mallee.protocol.gateways.graph_progress import GraphProgress, NodeDone
from mallee.protocol.ids import CapsuleId, Scope

MAX_CHARS: Final = 64 << 20  # of all copies' texts
NODE_CHARS: Final = 500  # that a node takes beside its texts


@dataclass(slots=True)
class _Copy:
    digest: bytes
    heard: float
    nodes: dict[str, NodeDone] = field(default_factory=dict)
    num_chars: int = 0


class ProgressCopies:
    """Copies by graph, for `ttl_s` after the last news. Belongs to one event loop; `clock` gives seconds."""

    def __init__(self, *, ttl_s: float, clock: Callable[[], float]) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._copies: OrderedDict[tuple[str, Scope], _Copy] = OrderedDict()  # heard of last: last
        self._num_chars = 0

    def hear(self, name: str, scope: Scope, news: GraphProgress) -> None:
        """Add what is new."""
        key = name, scope
        if (known := self._copies.get(key)) is not None and known.digest != news.digest:
            self.forget(name, scope)
        copy = self._copies.setdefault(key, _Copy(news.digest, 0.0))
        copy.heard = self._clock()
        self._copies.move_to_end(key)
        for node in news.nodes:
            num_more = num_chars(node)
            if (before := copy.nodes.get(node.node)) is not None:
                num_more -= num_chars(before)
            copy.nodes[node.node] = node
            copy.num_chars += num_more
            self._num_chars += num_more
        self._shrink()

    def get(self, name: str, scope: Scope) -> GraphProgress | None:
        self._shrink()
        copy = self._copies.get((name, scope))
        return None if copy is None else GraphProgress(copy.digest, (*copy.nodes.values(),))

    def forget(self, name: str, scope: Scope) -> None:
        copy = self._copies.pop((name, scope), None)
        self._num_chars -= 0 if copy is None else copy.num_chars

    def _shrink(self) -> None:
        oldest = self._clock() - self._ttl_s
        while self._copies:
            key, copy = next(iter(self._copies.items()))
            if self._num_chars <= MAX_CHARS and copy.heard >= oldest:
                return
            self.forget(*key)


def num_chars(node: NodeDone) -> int:
    return NODE_CHARS + len(node.text) + sum(map(len, node.items or ()))


def within(progress: GraphProgress, max_nbytes: int) -> list[bytes]:
    """It as messages of at most so many bytes. A node that is too large is left out: it is done again."""
    raw = encode(progress)
    if len(raw) <= max_nbytes:
        return [raw]
    nodes = progress.nodes
    if len(nodes) == 1:
        return []
    halves = (nodes[: len(nodes) // 2], nodes[len(nodes) // 2 :])
    parts = (within(GraphProgress(progress.digest, each), max_nbytes) for each in halves)
    return [raw for part in parts for raw in part]


def outputs(graph: Graph, nodes: Sequence[NodeDone]) -> dict[str, Output]:
    """Outputs of nodes that are not done again. Joins and maps are not among them: they follow from these."""
    return {
        each.node: Output(each.text, each.items)
        for each in nodes
        if not isinstance(graph.nodes.get(each.node), Join | Map)
    }


async def still_done(
    graph: Graph, nodes: Sequence[NodeDone], find: Callable[[CapsuleId], Awaitable[object]]
) -> list[NodeDone]:
    """Nodes but those whose capsule is gone, though something is still to go on from it.

    `find(capsule)` raises NotFound for one that is gone, and LookupIncomplete for one that may be.
    """
    gone: dict[str, bool] = {}  # that were asked for
    left = list(nodes)
    while True:  # what is to be computed again needs the capsule above it
        done = {each.node for each in left}
        needed = [each for each in left if _is_needed(graph, each.node, done)]
        fresh = [each for each in needed if each.node not in gone]
        found = await asyncio.gather(*(_is_gone(each, find) for each in fresh))
        gone.update(zip((each.node for each in fresh), found, strict=True))
        lost = {each.node for each in needed if gone[each.node]}
        if not lost:
            return left
        left = [each for each in left if each.node not in lost]


def _is_needed(graph: Graph, name: str, done: Collection[str]) -> bool:
    """Whether the capsule of a node is, if these are done."""
    spec = graph.nodes.get(name)  # None: an item of a map, which nothing goes on from
    if not isinstance(spec, Prefill | Branch):
        return False
    takers = (each for each in graph.takers[name] if each not in done)
    return spec.keep or any(graph.nodes[each].parent == name for each in takers)


async def _is_gone(node: NodeDone, find: Callable[[CapsuleId], Awaitable[object]]) -> bool:
    if not node.capsule:
        return True
    try:
        await find(CapsuleId(node.capsule))
    except (NotFound, LookupIncomplete):
        return True
    return False
