"""The context budget: hand-computed needs, one token a character."""

import pytest

from mallee.graphs.context import Need, check_context, context_needs
from mallee.graphs.graph import checked_graph
from mallee.graphs.nodes import Branch, Join, Map, Node, Prefill, Ref, Tool
from mallee.protocol.errors import GraphContextExceeded, InvalidGraph

DOC = Prefill(name="doc", text="d" * 1000)


def test_the_largest_branch_of_each_prefill_counts() -> None:
    nodes: list[Node] = [
        DOC,
        Branch(name="short", of="doc", text="ab", max_tokens=10),
        Branch(name="long", of="short", text="c", max_tokens=20),
        Branch(name="other", of="doc", text="", max_tokens=30),
        Prefill(name="alone", text="xyz"),
    ]
    # long: 2 + 10 + 1 + 20 after the document
    needs = context_needs(checked_graph(nodes), len)
    assert needs == [Need("doc", 1000, "long", 33), Need("alone", 3, "", 0)]


def test_outputs_of_other_nodes_count_with_the_most_that_they_can_be() -> None:
    nodes: list[Node] = [
        DOC,
        Branch(name="a", of="doc", max_tokens=5),
        Branch(name="b", of="doc", max_tokens=7),
        Tool(name="t", call="x", max_tokens=40),
        Join(name="all", inputs=["a", "b", "t"], separator="--"),
        Join(name="two", inputs=["a", "b", "t"], wait=2, separator="--"),
        Map(name="m", of="doc", over="t", text=["q", Ref(item=True)], max_items=3, max_tokens=6),
        Prefill(name="p1", text=["=", Ref(node="all")]),  # 1 + 5 + 7 + 40 + 2 * 2
        Prefill(name="p2", text=[Ref(node="two")]),  # 40 + 7 + 2
        Prefill(name="p3", text=[Ref(node="m"), Ref(node="m")]),  # 2 * (3 * 6 + 2 * 1)
    ]
    needs = {need.prefill: need for need in context_needs(checked_graph(nodes), len)}
    assert [needs[name].prefix for name in ("p1", "p2", "p3")] == [57, 49, 40]
    assert needs["doc"] == Need("doc", 1000, "m", 1 + 40 + 6)


def test_a_graph_that_does_not_fit_is_refused_with_all_the_numbers() -> None:
    """S3, part: the arithmetic; nothing is allocated by it."""
    graph = checked_graph([DOC, Branch(name="a", of="doc", text="why", max_tokens=93)])
    check_context(graph, len, 1000 + 96 + 128)
    with pytest.raises(GraphContextExceeded) as caught:
        check_context(graph, len, 1223)
    assert caught.value.message == (
        "prefix 1000 (doc) + largest branch 96 (a) + headroom 128 = 1224 > n_ctx 1223; shorten the"
        " texts, or lower max_tokens or max_items"
    )
    told = {name: caught.value.fields[name] for name in ("prefix", "branch", "headroom", "n_ctx")}
    assert told == {"prefix": 1000, "branch": 96, "headroom": 128, "n_ctx": 1223}


def test_a_prefill_without_branches_has_to_fit_too() -> None:
    graph = checked_graph([DOC])
    with pytest.raises(GraphContextExceeded, match=r"prefix 1000 \(doc\) \+ largest branch 0 \+ "):
        check_context(graph, len, 1127)


def test_numbers_of_thousands_of_digits_are_refused_in_short() -> None:
    endless = Tool(name="t", call="x", max_tokens=10**5000)
    graph = checked_graph([endless, Prefill(name="p", text=[Ref(node="t")])])
    with pytest.raises(GraphContextExceeded, match=r"prefix a number of \d+ bits \(p\)"):
        check_context(graph, len, 2048)
    many = Map(name="m", of="doc", over="t", text="", max_items=10**5000)
    with pytest.raises(InvalidGraph, match=r"^a number of \d+ bits nodes > 2048"):
        checked_graph([DOC, endless, many])
