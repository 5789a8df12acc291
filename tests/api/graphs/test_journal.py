"""Graphs that go on from their journal; one token a character."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mallee.client import (
    AsyncGraphRun,
    BudgetSpent,
    Graph,
    GraphResult,
    InvalidParameter,
    JournalFailed,
)
from mallee.client.graphs import journal as journals
from mallee.client.graphs.journal import Done, Head, Journal, fingerprint, needed, without
from mallee.client.graphs.results import Work
from mallee.graphs.graph import checked_graph
from mallee.graphs.nodes import Branch, Item, Join, Map, Prefill, Tool
from mallee.graphs.run import Output
from support.graph_runs import DOC, GREEDY, client_of, nothing_left

DRAWN: Any = {"temperature": 1.0, "seed": 5, "ignore_eos": True}


def story(call: Any) -> Graph:
    """Nodes of all kinds, of which `call` holds up the last ones."""

    async def look_up(text: str) -> str:
        return str(await call(text))

    graph = Graph()
    doc = graph.prefill(DOC, name="doc")
    a, b, c = (graph.branch(doc, f" {x}", max_tokens=6, name=x, **DRAWN) for x in "abc")
    late = graph.tool(look_up, name="late")
    after = graph.branch(a, [" and ", b], max_tokens=6, name="after", **GREEDY)
    each = graph.map(doc, c, [" x", graph.item], max_tokens=6, name="each", **GREEDY)
    last = graph.branch(a, [late, " so"], max_tokens=6, name="last", **GREEDY)
    end = graph.join([after, each, last], name="all")
    graph.branch(graph.prefill(["So ", end], name="new"), max_tokens=6, name="end", **GREEDY)
    return graph


async def hang(_: str) -> str:
    await asyncio.Event().wait()
    return ""


async def find(_: str) -> str:
    return "found"


async def read(run: AsyncGraphRun, *until: str) -> set[str]:
    """The nodes that were started, until those that are named have ended."""
    left, found = {*until}, set()
    async for event in run:
        found |= {event.node} if event.type == "node.started" else set()
        left -= {event.node} if event.type == "node.ended" else set()
        if until and not left:
            break
    return found


async def test_a_run_goes_on_from_what_one_that_died_has_done(tmp_path: Path) -> None:
    """S4: what was done is not done again, whatever it drew; the rest begins where that ended."""
    async with client_of() as (client, _):
        done = ("doc", "a", "b", "c", "after", "each")
        dead = client.run(story(hang), journal=tmp_path / "dead")
        await read(dead, *done)
        with pytest.raises(InvalidParameter, match="another run is writing it"):
            await client.run(story(hang), journal=tmp_path / "dead").wait()
        written = (tmp_path / "dead").read_bytes()
        (tmp_path / "next").write_bytes(written + b'{"node":"late","out')  # it died in mid-line
        run = client.run(story(find), journal=tmp_path / "next")
        assert await read(run) == {"late", "last", "new", "end"}
        result = await run.wait()
        assert result.status == "done"
        for name in done:
            assert result.nodes[name].resumed == (name != "each")
            output = msgspec.json.encode(result.nodes[name].output or "")
            assert output in written or name == "each"
        assert result.nodes["last"].work.cached_tokens == len(DOC) + len(" a") + 6
        again = await client.run(story(hang), journal=tmp_path / "next").wait()
        assert (again.outputs, again.prefill_tokens) == (result.outputs, result.prefill_tokens)
        await dead.close()


async def test_what_is_needed_and_gone_is_computed_again_with_all_that_was_made_of_it(
    tmp_path: Path,
) -> None:
    """S4, part: a run that was left has given its capsules back."""
    async with client_of() as (client, fleet):
        async with client.run(story(hang), journal=tmp_path / "j") as run:
            await read(run, "doc", "a", "b", "c", "after", "each")
        await nothing_left(client, fleet)
        run = client.run(story(find), journal=tmp_path / "j")
        assert await read(run) == {"doc", "a", "after", "late", "last", "new", "end"}
        result = await run.wait()
        names = ("b", "c", "each[0]", "a", "doc")
        assert [result.nodes[name].resumed for name in names] == [True] * 3 + [False] * 2


async def test_a_budget_goes_on_with_its_graph(tmp_path: Path) -> None:
    """X19, part: what earlier runs have drawn stays drawn, also where the service has forgotten it."""

    def pair(call: Any) -> Graph:
        async def look_up(text: str) -> str:
            return str(await call(text))

        graph = Graph()
        doc = graph.prefill(DOC)
        graph.branch(doc, " a", max_tokens=30, name="a", **GREEDY)
        graph.branch(doc, [graph.tool(look_up), " b"], max_tokens=30, name="b", **GREEDY)
        return graph

    async with client_of() as (client, _):

        async def again(name: str, **budget: int) -> GraphResult:
            given: Any = {"budget": budget}
            run = client.run(pair(find), journal=tmp_path / name, **given)
            return await run.wait()

        for name in ("known", "forgotten"):
            async with client.run(
                pair(hang), journal=tmp_path / name, budget={"tokens": 50}
            ) as run:
                await read(run, "a")
        head = (tmp_path / "forgotten").read_text()
        (session,) = [each.id async for each in client.sessions() if each.id in head]
        await client.session(session).close()
        for name in ("known", "forgotten"):
            result = await again(name, tokens=50)
            with pytest.raises(BudgetSpent):
                _ = result["b"]
            assert result.nodes["b"].work.completion_tokens == 20
        with pytest.raises(BudgetSpent, match="earlier runs of the journal"):
            await again("forgotten", tokens=30)


async def test_a_journal_that_can_not_be_written_ends_its_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client_of() as (client, fleet):
        write = Journal.write

        def full(journal: Journal, record: Head | Done) -> None:
            if isinstance(record, Done) and record.node == "b":
                raise JournalFailed(journal.path, "No space left on device")
            write(journal, record)

        monkeypatch.setattr(journals.Journal, "write", full)
        with pytest.raises(JournalFailed, match="j' failed: No space left on device; the graph"):
            await client.run(story(hang), journal=tmp_path / "j").wait()
        await nothing_left(client, fleet)
        with pytest.raises(JournalFailed, match="No such file or directory"):
            await client.run(story(hang), journal=tmp_path / "no" / "j").wait()


# The file

GRAPH = checked_graph(
    [
        Prefill(name="doc", text=("x",)),
        Branch(name="a", of="doc"),
        Branch(name="b", of="a"),
        Branch(name="kept", of="doc", keep=True),
        Tool(name="t", call="c"),
        Map(name="each", of="a", over="t", text=(Item(),)),
        Join(name="all", inputs=("b", "kept", "each")),
    ]
)


def done(name: str, *items: str) -> Done:
    return Done(node=name, output=Output(name, items or None), work=Work(completion_tokens=3))


def opened(path: Path, graph: str = "g") -> Journal:
    return Journal(path, Head(graph=graph, session="s"))


def test_a_journal_has_what_was_written_to_it_and_knows_its_graph(tmp_path: Path) -> None:
    path = tmp_path / "j"
    first = opened(path)
    records = [done("a"), done("b", "x", "y"), done("a")]
    for record in records:
        first.write(record)
    first.close()
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        journal = opened(path)
        num = max(whole[:cut].count(b"\n") - 1, 0)
        assert journal.done == {each.node: each for each in records[:num]}
        journal.write(done("c"))
        journal.close()
        again = opened(path)
        assert [*again.done] == [*journal.done, "c"]
        again.close()
    path.write_bytes(whole)
    again = Journal(path, Head(graph="g", session="other"))
    assert (list(again.done), again.head.session) == (["b", "a"], "s")
    again.close()
    with pytest.raises(InvalidParameter, match="j': it is the journal of another graph"):
        opened(path, "h")
    path.write_bytes(whole.replace(b'"node":"b"', b'"nodes":"b"'))
    with pytest.raises(JournalFailed, match=r"a line can't be read: .*`node`"):
        opened(path)
    for text in ("notes of mine", "notes\nof mine", "\n"):
        path.write_text(text)
        with pytest.raises(JournalFailed):
            opened(path)
        assert path.read_text() == text


def test_graphs_differ_by_their_nodes_and_outputs() -> None:
    nodes = [*GRAPH.nodes.values()]
    graphs = [
        GRAPH,
        checked_graph(nodes, ["all", "t"]),
        checked_graph([Prefill(name="doc", text=("y",)), *nodes[1:]]),
        checked_graph([*nodes[:1], Branch(name="a", of="doc", sampling={"seed": 1}), *nodes[2:]]),
    ]
    assert len({fingerprint(graph) for graph in graphs}) == 4
    assert fingerprint(checked_graph(nodes, ["all"])) == fingerprint(GRAPH)


def test_a_node_counts_while_all_that_goes_on_from_it_is_done_or_its_capsule_is_there() -> None:
    assert needed(GRAPH, dict.fromkeys(["doc", "a", "t"])) == ["doc", "a"]
    every = {name: done(name) for name in ("doc", "a", "b", "t", "each[0]", "each", "kept")}
    assert needed(GRAPH, every) == ["kept"], "what nothing goes on from need not be there"
    # What was made of a branch that is drawn again is made again; a prefill is the same again.
    assert [*without(GRAPH, every, ["a"])] == ["doc", "t", "kept"]
    assert [*without(GRAPH, every, ["doc"])] == ["a", "b", "t", "each[0]", "each", "kept"]
