"""Runs of small graphs, step by step, with effects and times computed by hand."""

from typing import Any

import msgspec
import pytest

from mallee.graphs.effects import Cancel, Effect, Ended, Expanded, Over, Release, Start
from mallee.graphs.graph import checked_graph
from mallee.graphs.nodes import Node
from mallee.graphs.run import Output, Run, RunLimits
from mallee.protocol.errors import BudgetSpent, Unavailable

LIMITS = RunLimits(running=4, tools=2, fork=8)
DOC = {"name": "doc", "kind": "prefill", "text": "A document."}


def branch(name: str, of: str = "doc", **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": "branch", "of": of, **more}


def join(name: str, *inputs: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": "join", "inputs": [*inputs], **more}


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
