"""Graphs before they run, refused or by the context that they need, and step by step."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.graphs.context import Need, check_context, context_needs
from mallee.graphs.graph import checked_graph
from mallee.graphs.nodes import Branch, Handle, Item, Join, Map, Node, Prefill, Tool, Turn
from mallee.graphs.run import Cancel, Effect, Ended, Output, Release, Run, RunLimits, Start
from mallee.protocol.errors import BudgetSpent, GraphContextExceeded, InvalidGraph

DOC = Prefill(name="doc", text=("A document.",))


def branch(name: str, of: str = "doc", *text: str | Handle | Item, **more: Any) -> Branch:
    return Branch(name=name, of=of, text=text, **more)


def join(name: str, *inputs: str, **more: Any) -> Join:
    return Join(name=name, inputs=inputs, **more)


def tool(name: str, *text: str | Handle, **more: Any) -> Tool:
    return Tool(name=name, call="search", text=text, **more)


def each(name: str, over: str, *text: str | Handle | Item, **more: Any) -> Map:
    return Map(name=name, of="doc", over=over, text=text or (Item(),), **more)


def of(name: str) -> Handle:
    return Handle(name)


def refusal(*nodes: Node, outputs: tuple[str, ...] = ()) -> str:
    with pytest.raises(InvalidGraph) as caught:
        checked_graph(nodes, outputs)
    return caught.value.message


def test_edges_lead_to_what_takes_from_a_node() -> None:
    graph = checked_graph(
        [
            DOC,
            branch("a", "doc", "Why?", max_tokens=8),
            tool("look", "for ", of("a")),
            each("each", "look", "Is ", Item()),
            join("both", "a", "each", wait=1),
        ]
    )
    assert [*graph.nodes] == [*graph.order] == ["doc", "a", "look", "each", "both"]
    assert graph.takers == {
        "doc": ("a", "each"),
        "a": ("look", "both"),
        "look": ("each",),
        "each": ("both",),
        "both": (),
    }
    assert graph.outputs == ("both",)


def test_a_cycle_is_named_by_the_edge_that_closes_it() -> None:
    """S2: along the edges as data flows; a self-edge too."""
    a, b, c = branch("a", "doc", of("c")), branch("b", "doc", of("a")), branch("c", "doc", of("b"))
    assert refusal(DOC, a, b, c) == (
        "edge c -> a closes a cycle of 3 nodes (a -> b -> c -> a); take one of its edges out"
    )
    told = "edge a -> a: a node can't take from itself"
    assert refusal(DOC, branch("a", "doc", "again ", of("a"))) == told
    assert refusal(branch("a", "a")) == told


def test_an_unknown_node_is_named_with_its_edge() -> None:
    """S2: what the graph has instead is said too; long lists and long cycles are told in short."""
    assert refusal(DOC, branch("a", "docs")) == (
        "edge docs -> a: the graph has no node of the first name; it has doc, a"
    )
    many = [branch(f"b{i}") for i in range(9)]
    assert refusal(DOC, *many, join("j", "b0", "x")) == (
        "edge x -> j: the graph has no node of the first name;"
        " it has doc, b0, b1, b2, b3, b4, b5, b6 and 3 more"
    )
    told = refusal(*(tool(f"t{i}", of(f"t{(i - 1) % 500}")) for i in range(500)))
    assert told.startswith("edge t499 -> t0 closes a cycle of 500 nodes (t0 -> t1 -> t2")
    assert told.endswith("t6 -> ... -> t499 -> t0); take one of its edges out")


@given(st.data())
def test_a_cycle_is_found_exactly_if_there_is_one(data: st.DataObject) -> None:
    """S2: against the plain rule that nodes without open inputs are taken away until none is left."""
    n = data.draw(st.integers(1, 12))
    pairs = st.sets(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=2 * n)
    edges = {(u, v) for u, v in data.draw(pairs) if u != v}
    nodes: list[Node] = [
        tool(f"n{v}", *(of(f"n{u}") for u in range(n) if (u, v) in edges)) for v in range(n)
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
    rule = "names are 1 to 64 letters, digits, '_', '.' and '-'"
    for name in ("a b", "each[0]", ""):
        assert refusal(branch(name)) == f"a node's name is {name!r}: {rule}"
    assert refusal() == "a graph has at least one node"


LONE = Turn("judge", ("x",))


@pytest.mark.parametrize(
    ("node", "told"),
    [
        (branch("a", max_tokens=0), "node a: max_tokens=0: give a whole number, at least 1"),
        (branch("a", max_tokens="5"), "node a: max_tokens='5': give a whole number, at least 1"),
        (branch("a", at=0), "node a: at=0: give a whole number, at least 1"),
        (branch("a", "j"), "node a: of='j': a join leaves no capsule to go on from"),
        (branch("a", "doc", Item()), "node a: text='item': only a map has items"),
        (branch("a", "doc", of("doc")), "edge doc -> a: a prefill has no output"),
        (branch("a", "doc", "x", messages=(LONE,)), "node a: text=('x',): give either text or"),
        (Prefill(name="a"), "node a: text='': give a text, or messages"),
        (join("a"), "node a: inputs=[]: name at least one node"),
        (join("a", "b", "b"), "node a: inputs='b': it is named twice"),
        (join("a", "b", wait=2), "node a: wait=2: give all, first, or 1 to 1"),
        (join("a", "b", wait="most"), "node a: wait='most': give all, first, or 1 to 1"),
        (join("a", "doc"), "edge doc -> a: a prefill has no output"),
        (tool("a", timeout_s=0.0), "node a: timeout_s=0.0: give seconds, more than 0"),
        (each("a", "b", max_items=0), "node a: max_items=0: give a whole number, at least 1"),
        (each("a", "doc"), "edge doc -> a: a prefill has no output"),
    ],
)
def test_wrong_fields_are_named_with_their_node(node: Node, told: str) -> None:
    assert refusal(DOC, branch("b"), join("j", "b"), node).startswith(told)


def test_nodes_that_lead_to_no_output_are_refused() -> None:
    assert checked_graph([DOC, branch("a"), branch("b")], ("a", "b")).outputs == ("a", "b")
    assert refusal(DOC, branch("a"), branch("b"), outputs=("a",)) == (
        "no output comes of b: leave them out, or name them in outputs"
    )
    assert refusal(DOC, branch("a"), outputs=("c",)) == "outputs has 'c'; the graph has doc, a"
    # A node on the way may be an output too.
    assert checked_graph([DOC, branch("a"), branch("b", "a")], ("b", "a")).outputs == ("b", "a")


# The context budget: hand-computed needs, one token a character

LONG = Prefill(name="doc", text=("d" * 1000,))


def count(_: Node, text: Any) -> int:
    return len(text)


def test_the_largest_branch_of_each_prefill_counts() -> None:
    nodes = [
        LONG,
        branch("short", "doc", "ab", max_tokens=10),
        branch("long", "short", "c", max_tokens=20),
        branch("other", max_tokens=30),
        Prefill(name="alone", text=("xyz",)),
    ]
    # long: 2 + 10 + 1 + 20 after the document
    needs = context_needs(checked_graph(nodes), count)
    assert needs == [Need("doc", 1000, "long", 33), Need("alone", 3, "", 0)]


def test_outputs_of_other_nodes_count_with_the_most_that_they_can_be() -> None:
    nodes = [
        LONG,
        branch("a", max_tokens=5),
        branch("b", max_tokens=7),
        tool("t", max_tokens=40),
        join("all", "a", "b", "t", separator="--"),
        join("two", "a", "b", "t", wait=2, separator="--"),
        each("m", "t", "q", Item(), max_items=3, max_tokens=6),
        Prefill(name="p1", text=("=", of("all"))),  # 1 + 5 + 7 + 40 + 2 * 2
        Prefill(name="p2", text=(of("two"),)),  # 40 + 7 + 2
        Prefill(name="p3", text=(of("m"), of("m"))),  # 2 * (3 * 6 + 2 * 1)
    ]
    needs = {need.prefill: need for need in context_needs(checked_graph(nodes), count)}
    assert [needs[name].prefix for name in ("p1", "p2", "p3")] == [57, 49, 40]
    assert needs["doc"] == Need("doc", 1000, "m", 1 + 40 + 6)


def test_a_graph_that_does_not_fit_is_refused_with_all_the_numbers() -> None:
    """S3, part: the arithmetic; nothing is allocated by it."""
    graph = checked_graph([LONG, branch("a", "doc", "why", max_tokens=93)])
    check_context(graph, count, 1000 + 96 + 128)
    with pytest.raises(GraphContextExceeded) as caught:
        check_context(graph, count, 1223)
    assert caught.value.message == (
        "prefix 1000 (doc) + largest branch 96 (a) + headroom 128 = 1224 > n_ctx 1223; shorten the"
        " texts, or lower max_tokens or max_items"
    )
    told = {name: caught.value.fields[name] for name in ("prefix", "branch", "headroom", "n_ctx")}
    assert told == {"prefix": 1000, "branch": 96, "headroom": 128, "n_ctx": 1223}
    alone = r"prefix 1000 \(doc\) \+ largest branch 0 \+ "
    with pytest.raises(GraphContextExceeded, match=alone):
        check_context(checked_graph([LONG]), count, 1127)


# Runs of small graphs, step by step, with effects and times computed by hand

LIMITS = RunLimits(running=4, tools=2, fork=8)


class Play:
    """A run whose effects are read after each event; one second passes before each."""

    def __init__(self, *nodes: Node, limits: RunLimits = LIMITS) -> None:
        self.now = 100.0
        self.run = Run(checked_graph(nodes), limits, self.now)

    def done(self, name: str, text: str = "", items: tuple[str, ...] | None = None) -> list[Effect]:
        self.now += 1.0
        self.run.finished(name, Output(text, items), self.now)
        return self.run.effects()


def test_siblings_go_out_as_one_fork_and_the_capsule_goes_when_the_last_has_ended() -> None:
    """S1, part: the document is one prefill, whatever the number of branches."""
    play = Play(DOC, branch("a", "doc", "x"), branch("b", "doc", "y"), join("both", "a", "b"))
    assert play.run.effects() == [Start(("doc",), ("A document.",))]
    assert play.done("doc") == [Ended("doc"), Start(("a", "b"), ("x", "y"))]
    assert play.done("b", "B") == [Ended("b"), Release("b")]
    assert play.done("a", "A") == [Ended("a"), Ended("both"), Release("doc"), Release("a")]
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
    play.run.effects()
    starts = [each.nodes for each in play.done("doc") if isinstance(each, Start)]
    assert starts == [("a", "g"), ("b",), ("c", "f"), ("d",), ("e",)]


def test_a_map_runs_once_for_each_item() -> None:
    is_it = each("each", "list", "Is it ", Item(), "?", max_items=3)
    play = Play(DOC, branch("list"), is_it, tool("t", of("each")))
    play.run.effects()
    play.done("doc")
    assert play.done("list", "  red\n\nblue ") == [
        *(Ended("list"), Release("list")),
        Start(("each[0]", "each[1]"), ("Is it red?", "Is it blue?")),
    ]
    play.done("each[1]", "no")
    assert play.done("each[0]", "yes") == [
        *(Ended("each[0]"), Ended("each"), Release("each[0]"), Release("doc")),
        Start(("t",), ("yes\nno",)),
    ]
    assert play.run.nodes["each"].output.items == ("yes", "no")


@pytest.mark.parametrize(
    ("more", "output", "told"),
    [
        ({}, "a\nb\nc", "max_items=2: list has 3 items; raise it, or have fewer"),
        ({"wait": "first"}, " \n", "wait='first': list has 0 items"),
        ({"split": "json"}, "no", "split='json': the output of list is no JSON array"),
    ],
)
def test_a_map_fails_where_its_items_are_none(more: Any, output: str, told: str) -> None:
    play = Play(DOC, branch("list"), each("each", "list", max_items=2, **more))
    play.run.effects()
    play.done("doc")
    play.done("list", output)
    assert str(play.run.nodes["each"].error).startswith(told)
    assert play.run.status == "failed"


def test_items_are_lines_or_json_or_what_joins_and_tools_list() -> None:
    play = Play(DOC, branch("l"), each("each", "l", split="json"))
    play.run.effects()
    play.done("doc")
    assert play.done("l", '["a\\"b", {"x": 1}, 2]')[-1] == Start(
        ("each[0]", "each[1]", "each[2]"), ('a"b', '{"x": 1}', "2")
    )
    play = Play(DOC, tool("t"), tool("u"), join("j", "t", "u"), each("m", "j"), each("n", "t"))
    play.run.effects()
    play.done("doc")
    assert play.done("t", "", ("1\n2", "3"))[-1] == Start(("n[0]", "n[1]"), ("1\n2", "3"))
    assert play.done("u", "4\n5")[-1] == Start(("m[0]", "m[1]"), ("", "4\n5"))


def test_all_that_is_not_over_fails_when_the_time_is() -> None:
    play = Play(DOC, branch("a"), tool("t"))
    play.run.effects()
    play.run.end(BudgetSpent("wall_s", "its time is over"), 102.0)
    assert play.run.effects() == [
        *(Cancel("doc"), Ended("doc"), Ended("a"), Cancel("t"), Ended("t")),
    ]
    assert {type(node.error) for node in play.run.nodes.values()} == {BudgetSpent}
    assert (play.run.status, play.run.wall_s) == ("failed", 2.0)
    assert play.done("doc") == [Release("doc")]


def test_times_of_nodes_add_up_to_the_wall_time() -> None:
    """S14, part: in the state machine, hand-computed."""
    play = Play(DOC, branch("a"), branch("b"), join("j", "a", "b"), branch("c", "doc", of("j")))
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
