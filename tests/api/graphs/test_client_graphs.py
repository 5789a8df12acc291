"""Graphs by the SDK, sync and async, over a tiny real model."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest

from mallee.api.text.chat import ChatTemplate
from mallee.client import (
    AsyncMallee,
    Graph,
    InvalidGraph,
    Mallee,
    StreamBroken,
    ToolFailed,
    ToolTimeout,
)
from mallee.client.graphs.builder import Handle
from mallee.client.graphs.results import GraphReader, NodeExtras
from mallee.client.graphs.resuming import resume_waits
from mallee.testing.random_model import random_model
from support.graphs_asked import CHAT
from support.live_api import served
from support.live_fleet import LiveFleet, kill_gateway
from support.plain_ids import SCOPES
from support.tiny_fleet import tiny_fleet
from support.virtual.threads import wait_for
from support.waiting import elapse, until

MODEL = random_model("llama", 5, max_position_embeddings=2048)


@asynccontextmanager
async def address(**settings: Any) -> AsyncIterator[tuple[str, LiveFleet]]:
    async with tiny_fleet(MODEL, 1) as fleet, served(fleet.gateways[0], **settings) as (url, _):
        yield url, fleet


def is_idle(fleet: LiveFleet) -> bool:
    engines = fleet.engines.values()
    return not any(each.branches or each.stats().capsules.kept for each in engines)


async def test_a_graph_is_built_and_its_functions_run_here() -> None:
    """S4, part: outputs of functions are texts of later nodes, a list is the items of a map."""
    asked: list[str] = []

    def look_up(text: str) -> list[str]:
        asked.append(text)
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


async def test_messages_and_places_are_those_of_the_api() -> None:
    """S1, part: a chat graph says what forks say, with outputs and items in messages computed once."""

    def work(url: str) -> None:
        graph = Graph()
        doc = graph.prefill(messages=[{"role": "system", "content": "Be short. " * 4}])
        greedy: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
        why = graph.branch(doc, messages=[{"role": "user", "content": "Why?"}], **greedy)
        so = graph.branch(doc, messages=[{"role": "user", "content": ["So ", why]}], **greedy)
        early = graph.branch(doc, " mind.", at=8 + 5, **greedy)
        is_it = [{"role": "user", "content": ["Is it ", graph.item, "?"]}]
        each = graph.map(doc, graph.tool(lambda _: ["red", "blue"]), messages=is_it, **greedy)
        with Mallee(url) as client:
            result = client.run(graph, outputs=[doc, so, early, each]).wait()
            chat = [{"role": "system", "content": "Be short. " * 4}]
            alone = client.prefill(messages=chat)
            contents = ["Why?", f"So {result[why]}", "Is it red?", "Is it blue?"]
            asked = [{"messages": [{"role": "user", "content": text}]} for text in contents]
            said = [branch.text for branch in alone.fork(asked, **greedy).wait()]
            assert [result[why], result[so], *(result.nodes[each.name].items or ())] == said
            computed = [
                (result.nodes[n.name].mallee or NodeExtras("")).prefill_tokens for n in (doc, why)
            ]
            assert computed == [len("<system>|") + 40, len("<user>Why?|<assistant>")]
            text = client.prefill("<system>Be sh")
            assert result[early] == text.fork([" mind."], **greedy).wait()[0].text

    async with address(chat=ChatTemplate(CHAT)) as (url, _):
        await asyncio.to_thread(work, url)


async def test_what_a_function_raises_fails_its_node() -> None:
    def broken(_: str) -> str:
        raise ValueError("no such page")

    async def slow(_: str) -> str:
        await elapse(30)
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


async def test_what_can_not_run_is_refused_here_and_there() -> None:
    """S2, part: before it is sent, if that can be told here."""
    graph, other = Graph(), Graph()
    doc = graph.prefill("x")
    graph.branch(doc, other.tool("t", name="elsewhere"))
    with Mallee("http://127.0.0.1:1") as client, pytest.raises(InvalidGraph) as caught:
        client.run(graph)
    assert str(caught.value).startswith("edge elsewhere -> branch-1: the graph has no node")
    with pytest.raises(InvalidGraph, match="a message has role, text; give role and content"):
        graph.branch(doc, messages=[{"role": "user", "text": "x"}])
    # The server's refusal has its type.
    async with address() as (url, _), AsyncMallee(url) as aclient:
        graph = Graph()
        graph.branch(graph.prefill("x"), temperature=9.0)
        with pytest.raises(InvalidGraph, match="node branch-1: sampling: temperature"):
            await aclient.run(graph).wait()


class Entry(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """A proxy before gateways: it sends everything to the one at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._sync, self._async = httpx.HTTPTransport(), httpx.AsyncHTTPTransport()

    def _sent_on(self, request: httpx.Request) -> httpx.Request:
        to = httpx.URL(self.url)
        request.url = request.url.copy_with(host=to.host, port=to.port)
        return request

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return self._sync.handle_request(self._sent_on(request))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self._async.handle_async_request(self._sent_on(request))

    def close(self) -> None:
        self._sync.close()

    async def aclose(self) -> None:
        await self._async.aclose()


@asynccontextmanager
async def dying_gateway() -> AsyncIterator[tuple[Entry, Callable[[], None]]]:
    """An entry to the first of two gateways, and what kills that one."""
    async with (
        tiny_fleet(MODEL, 1, gateways=2, syncs=True, ids=SCOPES) as fleet,
        served(fleet.gateways[0]) as (url, server),
        served(fleet.gateways[1]) as (other, _),
    ):
        await until(lambda: all(len(each.records._others()) == 1 for each in fleet.gateways))
        entry = Entry(url)

        def kill() -> None:
            kill_gateway(fleet, 0)
            entry.url = other
            for connection in list(server.server_state.connections):
                assert isinstance(connection.transport, asyncio.Transport)
                connection.transport.abort()

        yield entry, kill
        assert fleet.gateways[1].operator.failure is None


def long_graph(*calls: Callable[[str], Any]) -> tuple[Graph, list[Handle]]:
    """A graph in which `calls` are under way beside a long branch, and what waits for both."""
    graph = Graph()
    greedy: Any = {"temperature": 0, "ignore_eos": True}
    doc = graph.prefill("A document. ")
    first = graph.branch(doc, "Why?", max_tokens=4, name="first", **greedy)
    long = graph.branch(doc, "At length?", max_tokens=600, name="long", **greedy)
    found = [graph.tool(call, max_tokens=16) for call in calls]
    last = graph.branch(first, [*found, "So?"], max_tokens=4, **greedy)
    return graph, [last, long]


@pytest.mark.slow
async def test_a_run_goes_on_when_its_gateway_dies() -> None:
    """S4, part: by itself, at another gateway; what was done is told once, and no function runs twice."""
    num_asked = 0

    async def look_up(_: str) -> str:
        nonlocal num_asked
        num_asked += 1
        await elapse(0.5)
        return "found"

    async with dying_gateway() as (entry, kill):
        graph, outputs = long_graph(look_up)
        async with AsyncMallee(http_client=httpx.AsyncClient(transport=entry)) as client:
            events = []
            async with client.run(graph, outputs=outputs) as run:
                async for event in run:
                    events.append(event)
                    if event.type == "node.ended" and event.node == "first":
                        kill()
                result = await run.wait()
            calm = await client.run(graph, outputs=outputs).wait()
        assert [e.type for e in events if not e.node] == [
            *("graph.started", "graph.resumed", "graph.ended"),
        ]
        ended = [event.node for event in events if event.type == "node.ended"]
        assert sorted(ended) == sorted(result.nodes)
        assert result.outputs == calm.outputs
        assert {event.id for event in events} == {result.id}
        assert num_asked == 2  # once in each of the two graphs


@pytest.mark.slow
async def test_a_blocking_run_goes_on_when_its_gateway_dies() -> None:
    """S4, part."""
    asked: list[str] = []

    def look_up(text: str) -> str:
        asked.append(text)
        wait_for(elapse(0.5))
        return "found"

    async with dying_gateway() as (entry, kill):
        loop = asyncio.get_running_loop()

        def work() -> None:
            graph, outputs = long_graph(look_up)
            with Mallee(http_client=httpx.Client(transport=entry)) as client:
                kinds = []
                with client.run(graph, outputs=outputs) as run:
                    for event in run:
                        kinds += [] if event.node else [event.type]
                        if event.type == "node.ended" and event.node == "first":
                            loop.call_soon_threadsafe(kill)
                    result = run.wait()
                assert kinds == ["graph.started", "graph.resumed", "graph.ended"]
                assert result.outputs == client.run(graph, outputs=outputs).wait().outputs
            assert len(asked) == 2

        await asyncio.to_thread(work)


async def test_a_run_that_may_not_be_sent_again_ends_with_its_gateway() -> None:
    async with dying_gateway() as (entry, kill):
        graph, outputs = long_graph()
        async with AsyncMallee(
            http_client=httpx.AsyncClient(transport=entry), max_retries=0
        ) as client:
            run = client.run(graph, outputs=outputs)
            async for event in run:
                if event.type == "node.ended":
                    break
            kill()
            with pytest.raises(StreamBroken):
                await run.wait()


def test_ends_that_an_earlier_stream_told_alike_are_not_told_again() -> None:
    """A node that failed there and is done now, or was done again with another output, is told."""
    reader = GraphReader("u")

    def told(**ends: tuple[str, str]) -> dict[str, str]:
        events = [
            {"type": "node.ended", "id": "g", "node": name, "kind": "branch"}
            | {"status": status, "output": output}
            for name, (status, output) in ends.items()
        ]
        chunk = b"".join(b"data: %s\n\n" % msgspec.json.encode(each) for each in events)
        return {event.node: event.type for event in reader.feed(chunk)}

    ends = {"a": ("done", "x"), "b": ("failed", ""), "c": ("done", "y"), "d": ("cancelled", "")}
    assert list(told(**ends)) == ["a", "b", "c", "d"]
    reader.begin_next()
    assert list(told(**{**ends, "b": ("done", "z"), "c": ("done", "other")})) == ["b", "c", "d"]
    assert {name: node.output for name, node in reader._nodes.items()} == {
        **{"a": "x", "b": "z", "c": "other", "d": ""},
    }


def test_a_stream_that_breaks_off_is_an_error_after_which_the_graph_is_resumed() -> None:
    """Also if the connection ended in order, without the stream's end mark; not after nonsense."""
    reader = GraphReader("u")
    list(reader.feed(b'data: {"type": "graph.started", "id": "g"}\n\n'))
    with pytest.raises(StreamBroken, match="without its end mark") as ended:
        reader.finished()
    assert list(resume_waits(ended.value, "g", 1))
    assert not list(resume_waits(StreamBroken("u", "an event can't be read"), "g", 1))
    with pytest.raises(StreamBroken, match="an event can't be read"):
        list(reader.feed(b"data: {\n\n"))
