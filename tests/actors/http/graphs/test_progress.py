"""Copies of graphs' progress: what they keep, for how long, and what of it still holds."""

import random

from mallee.actors.http.graphs import progress
from mallee.actors.http.graphs.progress import ProgressCopies, outputs, still_done, within
from mallee.graphs.graph import checked_graph
from mallee.graphs.nodes import Branch, Join, Map, Node, Prefill, Ref, Tool
from mallee.graphs.run import Output
from mallee.protocol.codec import encode
from mallee.protocol.errors import UnknownCapsule
from mallee.protocol.gateways.graph_progress import (
    GraphProgress,
    NodeDone,
    decode_graph_progress,
)
from mallee.protocol.ids import COMMON, CapsuleId, Scope

EVE = Scope("eve")


def news(*names: str, digest: bytes = b"d", text: str = "x") -> GraphProgress:
    return GraphProgress(digest, tuple(NodeDone(name, text) for name in names))


def names(copies: ProgressCopies, graph: str, scope: Scope = COMMON) -> list[str] | None:
    found = copies.get(graph, scope)
    return None if found is None else [each.node for each in found.nodes]


def test_news_of_a_graph_add_up_in_their_order_for_their_scope() -> None:
    copies = ProgressCopies(ttl_s=10, clock=lambda: 0.0)
    copies.hear("g", COMMON, news("a", "b"))
    copies.hear("g", COMMON, news("c", "a"))
    assert names(copies, "g") == ["a", "b", "c"]
    assert names(copies, "g", EVE) is None
    copies.hear(
        "g", COMMON, news("z", digest=b"other")
    )  # another graph: its first run is forgotten
    assert names(copies, "g") == ["z"]
    copies.forget("g", COMMON)
    copies.forget("g", COMMON)
    assert names(copies, "g") is None
    assert copies._num_chars == 0


def test_copies_are_kept_for_a_time_after_the_last_news() -> None:
    now = 0.0
    copies = ProgressCopies(ttl_s=10, clock=lambda: now)
    copies.hear("g", COMMON, news("a"))
    copies.hear("h", COMMON, news("a"))
    now = 8.0
    copies.hear("g", COMMON, news("b"))
    now = 12.0
    assert (names(copies, "g"), names(copies, "h")) == (["a", "b"], None)
    now = 19.0
    assert names(copies, "g") is None
    assert copies._num_chars == 0


def test_the_oldest_make_room() -> None:
    copies = ProgressCopies(ttl_s=10, clock=lambda: 0.0)
    half = "x" * (progress.MAX_CHARS // 2)
    copies.hear("g", COMMON, news("a", text=half))
    copies.hear("h", COMMON, news("a"))
    copies.hear("i", COMMON, news("a", text=half))
    assert (names(copies, "g"), names(copies, "h"), names(copies, "i")) == (None, ["a"], ["a"])
    copies.hear("i", COMMON, news("a", text=half))  # the same again takes no more room
    assert names(copies, "h") == ["a"]
    for _ in range(3):
        copies.hear("i", COMMON, news("b", text=half + half))
    assert names(copies, "i") is None, "one that is too large by itself is not kept"
    assert copies._num_chars == 0


def test_messages_are_bounded_and_what_is_too_large_is_left_out() -> None:
    rng = random.Random(5)
    nodes = [NodeDone(f"n{i}", "x" * rng.choice([1, 300, 5000])) for i in range(100)]
    messages = within(GraphProgress(b"d", tuple(nodes)), 2000)
    assert all(len(raw) <= 2000 for raw in messages)
    told = [node for raw in messages for node in decode_graph_progress(raw).nodes]
    assert told == [node for node in nodes if len(node.text) < 5000]
    small = GraphProgress(b"d", (NodeDone("a"),))
    assert within(small, 2000) == [encode(small)]


async def test_a_node_counts_while_all_that_goes_on_from_it_is_done_or_its_capsule_is_there() -> (
    None
):
    nodes: list[Node] = [
        Prefill(name="doc", text="x"),
        Branch(name="a", of="doc"),
        Branch(name="b", of="a"),
        Branch(name="kept", of="doc", keep=True),
        Tool(name="t", call="c"),
        Map(name="each", of="a", over="t", text=[Ref(item=True)]),
        Join(name="all", inputs=["b", "kept", "each"]),
    ]
    graph = checked_graph(nodes, [])
    there = {"doc", "kept"}
    asked: list[str] = []

    async def find(capsule: CapsuleId) -> None:
        asked.append(capsule)
        if capsule not in there:
            raise UnknownCapsule(capsule)

    async def still(*done: str) -> list[str]:
        asked.clear()
        told = [NodeDone(name, capsule=name.partition("[")[0]) for name in done]
        return [each.node for each in await still_done(graph, told, find)]

    assert await still("doc", "a", "t") == ["doc", "t"]  # the branch `b` and the map need `a`
    assert asked == ["doc", "a"]
    assert await still("doc", "a", "b", "t", "each[0]", "each[1]", "each", "kept") == [
        *("doc", "a", "b", "t", "each[0]", "each[1]", "each", "kept"),
    ]
    assert asked == ["kept"], "what nothing goes on from need not be there"
    there.clear()
    assert await still("doc", "a", "b", "t", "each[0]", "kept") == ["b", "t", "each[0]"]
    done = [NodeDone("t", "x\ny", ("x", "y")), NodeDone("each"), NodeDone("each[0]", "z")]
    assert outputs(graph, done) == {"t": Output("x\ny", ("x", "y")), "each[0]": Output("z")}
