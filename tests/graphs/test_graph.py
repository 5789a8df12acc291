"""Graphs before they run, refused or by the context that they need, and step by step."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.graphs.context import Need, check_context, context_needs
from mallee.graphs.effects import Cancel, Effect, Ended, Expanded, Over, Release, Start
from mallee.graphs.graph import MAX_EDGES, MAX_NODES, Graph, checked_graph
from mallee.graphs.nodes import Branch, Join, Map, Node, Prefill, Ref, Tool
from mallee.graphs.run import Output, Run, RunLimits
from mallee.protocol.errors import BudgetSpent, GraphContextExceeded, InvalidGraph, Unavailable


def read(*nodes: dict[str, Any], outputs: tuple[str, ...] = ()) -> Graph:
    return checked_graph(msgspec.convert(list(nodes), list[Node]), outputs)


def refusal(*nodes: dict[str, Any], outputs: tuple[str, ...] = ()) -> str:
    with pytest.raises(InvalidGraph) as caught:
        read(*nodes, outputs=outputs)
    assert caught.value.fields["param"] == "nodes"
    return caught.value.message


DOC = {"name": "doc", "kind": "prefill", "text": "A document."}


def branch(name: str, of: str = "doc", **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": "branch", "of": of, **more}


def join(name: str, *inputs: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": "join", "inputs": [*inputs], **more}


def test_a_graph_is_read_from_json() -> None:
    raw = b"""[
        {"kind": "prefill", "name": "doc", "text": "A document."},
        {"kind": "branch", "name": "a", "of": "doc", "text": "Why?", "max_tokens": 8},
        {"kind": "tool", "name": "look", "call": "search", "input": ["for ", {"node": "a"}]},
        {"kind": "map", "name": "each", "of": "doc", "over": "look", "text": ["Is ", {"item": true}]},
        {"kind": "join", "name": "both", "inputs": ["a", "each"], "wait": 1}
    ]"""
    graph = checked_graph(msgspec.json.decode(raw, type=list[Node]))
    assert [*graph.nodes] == ["doc", "a", "look", "each", "both"]
    assert graph.takers == {
        "doc": ("a", "each"),
        "a": ("look", "both"),
        "look": ("each",),
        "each": ("both",),
        "both": (),
    }
    assert graph.outputs == ("both",)
    assert graph.order == ("doc", "a", "look", "each", "both")
    assert graph.nodes["look"] == Tool(
        name="look", call="search", input=["for ", Ref(node="a")], timeout_s=60.0
    )


def test_a_cycle_is_named_by_the_edge_that_closes_it() -> None:
    """S2: by a search in depth with three colours, which follows edges as data flows; a self-edge too."""
    told = refusal(
        DOC,
        branch("a", text=[{"node": "c"}]),
        branch("b", text=[{"node": "a"}]),
        branch("c", text=[{"node": "b"}]),
    )
    assert told == (
        "edge c -> a closes a cycle of 3 nodes (a -> b -> c -> a); take one of its edges out"
    )
    told = refusal(DOC, branch("a", text=["again ", {"node": "a"}]))
    assert told == "edge a -> a: a node can't take from itself"
    assert refusal(branch("a", of="a")) == "edge a -> a: a node can't take from itself"


def test_an_unknown_node_is_named_with_its_edge() -> None:
    """S2: what the graph has instead is said too; long lists and long cycles are told in short."""
    assert refusal(DOC, branch("a", of="docs")) == (
        "edge docs -> a: the graph has no node of the first name; it has doc, a"
    )
    many = [branch(f"b{i}") for i in range(9)]
    assert refusal(DOC, *many, join("j", "b0", "x")) == (
        "edge x -> j: the graph has no node of the first name;"
        " it has doc, b0, b1, b2, b3, b4, b5, b6 and 3 more"
    )
    tools = [
        {"name": f"t{i}", "kind": "tool", "call": "x", "input": [{"node": f"t{(i - 1) % 500}"}]}
        for i in range(500)
    ]
    told = refusal(*tools)
    assert told.startswith("edge t499 -> t0 closes a cycle of 500 nodes (t0 -> t1 -> t2")
    assert told.endswith("t6 -> ... -> t499 -> t0); take one of its edges out")


@given(st.data())
def test_a_cycle_is_found_exactly_if_there_is_one(data: st.DataObject) -> None:
    """S2: against the plain rule that nodes without open inputs are taken away until none is left."""
    n = data.draw(st.integers(1, 12))
    pairs = st.sets(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=2 * n)
    edges = {(u, v) for u, v in data.draw(pairs) if u != v}
    nodes: list[Node] = [
        Tool(name=f"n{v}", call="x", input=[Ref(node=f"n{u}") for u in range(n) if (u, v) in edges])
        for v in range(n)
    ]
    left, rest = set(range(n)), edges
    while free := {v for v in left if not any(to == v for _, to in rest)}:
        left -= free
        rest = {(u, v) for u, v in rest if u in left}
    if not left:
        order = checked_graph(nodes).order
        assert sorted(order) == sorted(node.name for node in nodes)
        assert all(order.index(f"n{u}") < order.index(f"n{v}") for u, v in edges)
        return
    with pytest.raises(InvalidGraph) as caught:
        checked_graph(nodes)
    u, arrow, v = caught.value.message.split()[1:4]
    assert arrow == "->"
    named = int(u[1:]), int(v[1:])
    assert named in edges
    assert reaches(edges, named[1], named[0])


def reaches(edges: set[tuple[int, int]], begin: int, end: int) -> bool:
    found = {begin}
    while fresh := {v for u, v in edges if u in found} - found:
        found |= fresh
    return end in found


def test_doubled_and_wrong_names_are_refused() -> None:
    assert refusal(DOC, DOC) == "two nodes are named 'doc': give each a name of its own"
    assert refusal({**DOC, "name": "a b"}) == (
        "nodes[0].name='a b': names are 1 to 64 letters, digits, '_', '.' and '-'"
    )
    assert refusal({**DOC, "name": "each[0]"}).startswith("nodes[0].name='each[0]'")
    assert refusal() == "a graph has at least one node"


@pytest.mark.parametrize(
    ("node", "told"),
    [
        (branch("a", max_tokens=0), "node a: max_tokens=0: give at least 1"),
        (branch("a", of="j"), "node a: of='j': a join leaves no capsule to go on from"),
        (
            branch("a", text=[{"item": True}]),
            "node a: text[0]={'item': True}: only a map has items",
        ),
        (
            branch("a", text=[{}]),
            "node a: text[0]={'item': False, 'node': ''}: give {\"node\": name}",
        ),
        (branch("a", text=[{"node": "doc"}]), "edge doc -> a: a prefill has no output"),
        (branch("a", text=["x"] * 1025), "node a: text=1025: give at most 1024 parts"),
        (join("a"), "node a: inputs=[]: name at least one node"),
        (join("a", "b", "b"), "node a: inputs='b': it is named twice"),
        (join("a", "b", wait=2), "node a: wait=2: give all, first, or 1 to 1"),
        (join("a", "doc"), "edge doc -> a: a prefill has no output"),
        ({"name": "a", "kind": "tool", "call": ""}, "node a: call='': give 1 to 64 characters"),
        (
            {"name": "a", "kind": "tool", "call": "x", "timeout_s": 0.0},
            "node a: timeout_s=0.0: give up to 3600 seconds, more than 0",
        ),
        (
            {"name": "a", "kind": "map", "of": "doc", "over": "b", "text": "", "max_items": 0},
            "node a: max_items=0: give at least 1",
        ),
        (
            {"name": "a", "kind": "map", "of": "doc", "over": "doc", "text": ""},
            "edge doc -> a: a prefill has no output",
        ),
    ],
)
def test_wrong_fields_are_named_with_their_node(node: dict[str, Any], told: str) -> None:
    assert refusal(DOC, branch("b"), join("j", "b"), node).startswith(told)


def test_graphs_are_bounded() -> None:
    many: list[Node] = [Prefill(name=f"p{i}", text="x") for i in range(MAX_NODES)]
    assert len(checked_graph(many).nodes) == MAX_NODES
    with pytest.raises(InvalidGraph, match=rf"{MAX_NODES + 1} nodes > {MAX_NODES}"):
        checked_graph([*many, Prefill(name="more", text="x")])
    wide = Map(name="m", of="p0", over="b", text="", max_items=MAX_NODES)
    with pytest.raises(InvalidGraph, match=r"2051 nodes > 2048, the items of maps"):
        checked_graph([many[0], Branch(name="b", of="p0"), wide])
    tools: list[Node] = [Tool(name=f"t{i}", call="x") for i in range(200)]
    joins: list[Node] = [
        Join(name=f"j{i}", inputs=[each.name for each in tools]) for i in range(90)
    ]
    with pytest.raises(InvalidGraph, match=rf"18000 edges > {MAX_EDGES}"):
        checked_graph([*tools, *joins])


def test_nodes_that_lead_to_no_output_are_refused() -> None:
    assert read(DOC, branch("a"), branch("b"), outputs=("a", "b")).outputs == ("a", "b")
    assert refusal(DOC, branch("a"), branch("b"), outputs=("a",)) == (
        "no output comes of b: leave them out, or name them in outputs"
    )
    assert refusal(DOC, branch("a"), outputs=("c",)) == "outputs has 'c'; the graph has doc, a"
    # A node on the way may be an output too.
    assert read(DOC, branch("a"), branch("b", of="a"), outputs=("b", "a")).outputs == ("b", "a")


# The context budget: hand-computed needs, one token a character

LONG = Prefill(name="doc", text="d" * 1000)


def test_the_largest_branch_of_each_prefill_counts() -> None:
    nodes: list[Node] = [
        LONG,
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
        LONG,
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
    graph = checked_graph([LONG, Branch(name="a", of="doc", text="why", max_tokens=93)])
    check_context(graph, len, 1000 + 96 + 128)
    with pytest.raises(GraphContextExceeded) as caught:
        check_context(graph, len, 1223)
    assert caught.value.message == (
        "prefix 1000 (doc) + largest branch 96 (a) + headroom 128 = 1224 > n_ctx 1223; shorten the"
        " texts, or lower max_tokens or max_items"
    )
    told = {name: caught.value.fields[name] for name in ("prefix", "branch", "headroom", "n_ctx")}
    assert told == {"prefix": 1000, "branch": 96, "headroom": 128, "n_ctx": 1223}
    alone = r"prefix 1000 \(doc\) \+ largest branch 0 \+ "
    with pytest.raises(GraphContextExceeded, match=alone):
        check_context(checked_graph([LONG]), len, 1127)


def test_numbers_of_thousands_of_digits_are_refused_in_short() -> None:
    endless = Tool(name="t", call="x", max_tokens=10**5000)
    graph = checked_graph([endless, Prefill(name="p", text=[Ref(node="t")])])
    with pytest.raises(GraphContextExceeded, match=r"prefix a number of \d+ bits \(p\)"):
        check_context(graph, len, 2048)
    many = Map(name="m", of="doc", over="t", text="", max_items=10**5000)
    with pytest.raises(InvalidGraph, match=r"^a number of \d+ bits nodes > 2048"):
        checked_graph([LONG, endless, many])


# Runs of small graphs, step by step, with effects and times computed by hand

LIMITS = RunLimits(running=4, tools=2, fork=8)


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": "tool", "call": "search", **more}


class Play:
    """A run whose effects are read after each event; one second passes before each."""

    def __init__(
        self, *nodes: dict[str, Any], limits: RunLimits = LIMITS, due: float | None = None
    ) -> None:
        self.now = 100.0
        graph = checked_graph(msgspec.convert(list(nodes), list[Node]))
        self.run = Run(graph, limits, self.now, due)

    def effects(self) -> list[Effect]:
        self.run.check()
        return self.run.effects()

    def done(self, name: str, text: str = "", items: tuple[str, ...] | None = None) -> list[Effect]:
        self.now += 1.0
        self.run.finished(name, Output(text, items), self.now)
        return self.effects()

    def fail(self, name: str) -> list[Effect]:
        self.now += 1.0
        self.run.failed(name, Unavailable(f"{name} broke"), self.now)
        return self.effects()

    def states(self) -> dict[str, str]:
        return {name: node.status for name, node in self.run.nodes.items()}


def test_siblings_go_out_as_one_fork_and_the_capsule_goes_when_the_last_has_ended() -> None:
    """S1, part: the document is one prefill, whatever the number of branches."""
    play = Play(DOC, branch("a", text="x"), branch("b", text="y"), join("both", "a", "b"))
    assert play.effects() == [Start(("doc",), ("A document.",))]
    assert play.done("doc") == [Ended("doc"), Start(("a", "b"), ("x", "y"))]
    assert play.done("b", "B") == [Ended("b"), Release("b")]
    assert play.done("a", "A") == [
        *(Ended("a"), Ended("both"), Release("doc"), Release("a")),
        Over(),
    ]
    assert play.run.nodes["both"].output == Output("A\nB", ("A", "B"))
    assert play.run.status == "done"


def test_branches_that_draw_otherwise_or_by_seeds_of_their_own_go_apart() -> None:
    play = Play(
        DOC,
        branch("a"),
        branch("b", max_tokens=17),
        branch("c", sampling={"temperature": 0, "seed": 1}),
        branch("d", sampling={"seed": 1}),
        branch("e", sampling={"seed": 1}),
        branch("f", sampling={"temperature": 0, "seed": 1}),
        branch("g"),
        limits=LIMITS._replace(running=7),
    )
    play.effects()
    starts = [each.nodes for each in play.done("doc") if isinstance(each, Start)]
    assert starts == [("a", "g"), ("b",), ("c", "f"), ("d",), ("e",)]


def test_a_map_runs_once_for_each_item() -> None:
    play = Play(
        DOC,
        branch("list"),
        {
            **{"name": "each", "kind": "map", "of": "doc", "over": "list", "max_items": 3},
            "text": ["Is it ", {"item": True}, "?"],
        },
        tool("t", input=[{"node": "each"}]),
    )
    play.effects()
    play.done("doc")
    names = ("each[0]", "each[1]")
    assert play.done("list", "  red\n\nblue ") == [
        *(Ended("list"), Expanded("each", names), Release("list")),
        Start(names, ("Is it red?", "Is it blue?")),
    ]
    play.done("each[1]", "no")
    assert play.done("each[0]", "yes") == [
        *(Ended("each[0]"), Ended("each"), Release("each[0]"), Release("doc")),
        Start(("t",), ("yes\nno",)),
    ]
    assert play.run.nodes["each"].output.items == ("yes", "no")


@pytest.mark.parametrize(
    ("over", "more", "output", "told"),
    [
        ("list", {}, "a\nb\nc", "max_items=2: list has 3 items; raise it, or have fewer"),
        ("list", {"wait": "first"}, " \n", "wait='first': list has 0 items"),
        ("list", {"split": "json"}, "no", "split='json': the output of list is no JSON array"),
    ],
)
def test_a_map_fails_where_its_items_are_none(
    over: str, more: dict[str, Any], output: str, told: str
) -> None:
    each = {"name": "each", "kind": "map", "of": "doc", "over": over, "text": "", "max_items": 2}
    play = Play(DOC, branch("list"), {**each, **more})
    play.effects()
    play.done("doc")
    play.done(over, output)
    assert str(play.run.nodes["each"].error).startswith(told)
    assert play.run.status == "failed"


def test_items_of_json_are_texts_or_their_json() -> None:
    each = {"name": "each", "kind": "map", "of": "doc", "over": "l", "text": [{"item": True}]}
    play = Play(DOC, branch("l"), {**each, "split": "json"})
    play.effects()
    play.done("doc")
    assert play.done("l", '["a\\"b", {"x": 1}, 2]')[-1] == Start(
        ("each[0]", "each[1]", "each[2]"), ('a"b', '{"x": 1}', "2")
    )


def test_items_of_joins_and_of_tools_that_list_are_theirs() -> None:
    each = {"kind": "map", "of": "doc", "text": [{"item": True}]}
    play = Play(
        DOC,
        tool("t"),
        tool("u"),
        join("j", "t", "u"),
        {**each, "name": "m", "over": "j"},
        {**each, "name": "n", "over": "t"},
    )
    play.effects()
    play.done("doc")
    assert play.done("t", "", ("1\n2", "3"))[-1] == Start(("n[0]", "n[1]"), ("1\n2", "3"))
    assert play.done("u", "4\n5")[-1] == Start(("m[0]", "m[1]"), ("", "4\n5"))


def test_a_call_without_a_result_in_time_fails() -> None:
    play = Play(tool("t", timeout_s=5), tool("u", timeout_s=9), tool("v", timeout_s=1))
    assert play.effects() == [Start(("t",), ("",)), Start(("u",), ("",))]  # two at once
    assert play.run.on_time(104.9) == 105.0
    assert play.effects() == []
    assert play.run.on_time(105.0) == 106.0  # the third one was begun now
    assert play.effects() == [Cancel("t"), Ended("t"), Start(("v",), ("",))]
    assert str(play.run.nodes["t"].error) == (
        "no result of tool 'search' came in 5 s; answer sooner, or raise timeout_s"
    )
    play.now = 105.5
    assert play.done("v", "late") == [Ended("v")]  # a bit late, and nobody had looked
    assert play.done("t", "late") == []
    play.done("u")
    assert play.run.on_time(1000.0) is None


def test_all_that_is_not_over_fails_when_the_time_is() -> None:
    play = Play(DOC, branch("a"), tool("t"), due=102.0)
    play.effects()
    assert play.run.on_time(101.0) == 102.0
    assert play.run.on_time(102.0) is None
    assert play.effects() == [
        *(Cancel("doc"), Ended("doc"), Ended("a"), Cancel("t"), Ended("t")),
        Over(),
    ]
    assert {type(node.error) for node in play.run.nodes.values()} == {BudgetSpent}
    assert play.done("doc") == [Release("doc")]


def test_times_of_nodes_add_up_to_the_wall_time() -> None:
    """S14, part: in the state machine, hand-computed."""
    play = Play(
        DOC, branch("a"), branch("b"), join("j", "a", "b"), branch("c", text=[{"node": "j"}])
    )
    run = play.run
    run.started("doc", 100.5)
    run.finished("doc", Output(), 102.0)
    run.started("a", 102.25)
    run.first_token("a", 102.5)
    run.first_token("a", 102.75)  # only the first one counts
    run.first_token("b", 103.0)
    run.finished("b", Output("B"), 103.5)
    run.finished("a", Output("A"), 104.0)
    run.first_token("c", 106.0)
    run.finished("c", Output("C"), 107.0)
    times = {
        name: (node.ready_s, node.start_s, node.first_s, node.end_s)
        for name, node in run.nodes.items()
    }
    assert times == {
        "doc": (0.0, 0.5, None, 2.0),
        "a": (2.0, 2.25, 2.5, 4.0),
        "b": (2.0, 3.0, 3.0, 3.5),
        "j": (4.0, 4.0, None, 4.0),
        "c": (4.0, 6.0, 6.0, 7.0),
    }
    assert run.wall_s == 7.0
    assert run.path() == [("doc", 2.0), ("a", 2.0), ("j", 0.0), ("c", 3.0)]
