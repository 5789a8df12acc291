"""Graphs by the SDK, sync and async, over a tiny real model."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from mallee.client import (
    AsyncMallee,
    Graph,
    InvalidGraph,
    Mallee,
    StreamBroken,
    ToolFailed,
    ToolTimeout,
)
from mallee.client.graphs.results import GraphReader
from mallee.testing.random_model import random_model
from support.live_api import served
from support.live_fleet import LiveFleet
from support.tiny_fleet import tiny_fleet
from support.waiting import until

MODEL = random_model("llama", 5, max_position_embeddings=2048)


@asynccontextmanager
async def address() -> AsyncIterator[tuple[str, LiveFleet]]:
    async with tiny_fleet(MODEL, 1) as fleet, served(fleet.gateways[0]) as (url, _):
        yield url, fleet


def is_idle(fleet: LiveFleet) -> bool:
    engines = fleet.engines.values()
    return not any(each.branches or each.stats().capsules.kept for each in engines)


async def test_a_graph_is_built_and_its_functions_run_here() -> None:
    """S4, part: outputs of functions are texts of later nodes, a list is the items of a map."""
    asked: list[str] = []

    def look_up(text: str) -> list[str]:
        asked.append(text)
        assert threading.current_thread().name.startswith("mallee-tool")
        return ["red", "blue"]

    def work(url: str) -> None:
        graph = Graph()
        doc = graph.prefill("A document. ")
        first = graph.branch(doc, "Why?", max_tokens=5, temperature=0, ignore_eos=True, name="why")
        found = graph.tool(look_up, ["about ", first])
        each = graph.map(
            doc, found, ["Is it ", graph.item], max_tokens=4, temperature=0, ignore_eos=True
        )
        last = graph.branch(first, each, max_tokens=3, temperature=0, ignore_eos=True)
        with Mallee(url) as client:
            run = client.run(graph, outputs=[each, last])
            events = list(run)
            result = run.wait()
            assert run.id == result.id
            kinds = [event.type for event in events if event.node == each.name]
            assert kinds == ["map.expanded", "node.ended"]
            (fork,) = (
                client.prefill("A document. Why?")
                .fork(1, max_tokens=5, temperature=0, ignore_eos=True)
                .wait()
            )
        assert result.status == "done"
        assert result[first] == result["why"] == fork.text
        assert asked == [f"about {result[first]}"]
        assert result.nodes[each.name].items is not None
        assert len(result.nodes[each.name].items) == 2
        assert result.outputs == {each.name: result[each], last.name: result[last]}
        assert sum(step.ms for step in result.path) == pytest.approx(result.wall_ms, abs=0.1)
        deltas = [e.text for e in events if e.type == "node.delta" and e.node == "why"]
        assert "".join(deltas) == result[first]

    async with address() as (url, _):
        await asyncio.to_thread(work, url)


async def test_what_a_function_raises_fails_its_node() -> None:
    def broken(_: str) -> str:
        raise ValueError("no such page")

    async def slow(_: str) -> str:
        await asyncio.sleep(30)
        return "late"

    async with address() as (url, fleet), AsyncMallee(url) as client:
        graph = Graph()
        doc = graph.prefill("A document. ")
        bad, late = graph.tool(broken), graph.tool(slow, timeout_s=0.2)
        after = graph.branch(doc, bad)
        result = await client.run(graph, outputs=[after, late]).wait()
        assert result.status == "failed"
        with pytest.raises(ToolFailed, match="tool 'broken' failed: ValueError: no such page"):
            _ = result[after]
        assert result.nodes[after.name].cause == bad.name
        with pytest.raises(ToolTimeout, match=r"no result of tool 'slow' came in 0\.2 s"):
            _ = result[late]
        await until(lambda: is_idle(fleet))


async def test_a_call_by_name_is_answered_by_the_reader() -> None:
    async with address() as (url, _), AsyncMallee(url) as client:
        graph = Graph()
        doc = graph.prefill("A document. ")
        found, missed = graph.tool("search", "x"), graph.tool("other", "y")
        after = graph.branch(doc, found, max_tokens=2, ignore_eos=True)
        run = client.run(graph, outputs=[after, missed])
        async for event in run:
            if event.type == "tool.call" and event.call == "search":
                assert (event.input, event.timeout_s) == ("x", 60.0)
                await run.answer(event.node, "found")
            elif event.type == "tool.call":
                await run.fail(event.node, "not here")
        result = await run.wait()
        assert len(result[after]) == 2
        with pytest.raises(ToolFailed, match="not here"):
            _ = result[missed]


async def test_leaving_a_run_ends_its_graph() -> None:
    async with address() as (url, fleet), AsyncMallee(url) as client:
        graph = Graph()
        graph.branch(graph.prefill("A document. "), max_tokens=1500, ignore_eos=True)
        async with client.session("s") as session, session.run(graph) as run:
            async for event in run:
                if event.type == "node.delta":
                    break
        await until(lambda: is_idle(fleet))


async def test_what_can_not_run_is_refused_here() -> None:
    """S2, part: before it is sent."""
    graph, other = Graph(), Graph()
    doc = graph.prefill("x")
    graph.branch(doc, other.tool("t", name="elsewhere"))
    with Mallee("http://127.0.0.1:1") as client, pytest.raises(InvalidGraph) as caught:
        client.run(graph)
    assert str(caught.value).startswith("edge elsewhere -> branch-1: the graph has no node")


async def test_the_servers_refusal_has_its_type() -> None:
    async with address() as (url, _), AsyncMallee(url) as client:
        graph = Graph()
        graph.branch(graph.prefill("x"), temperature=9.0)
        with pytest.raises(InvalidGraph, match="node branch-1: sampling: temperature"):
            await client.run(graph).wait()


def test_a_stream_that_breaks_off_is_an_error() -> None:
    reader = GraphReader("u")
    list(reader.feed(b'data: {"type": "graph.started", "id": "g"}\n\n'))
    with pytest.raises(StreamBroken, match="without its end mark"):
        reader.finished()
    with pytest.raises(StreamBroken, match="an event can't be read"):
        list(reader.feed(b"data: {\n\n"))
