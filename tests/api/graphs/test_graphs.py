"""Graphs by the SDK, on engines that compute a tiny model: one token a character."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from mallee.api.text.chat import ChatTemplate
from mallee.client import (
    AsyncGraphRun,
    AsyncMallee,
    BudgetSpent,
    Graph,
    GraphEvent,
    Handle,
    InvalidGraph,
    InvalidParameter,
    ToolFailed,
    ToolTimeout,
    Unavailable,
)
from mallee.mocker.passes import mock_spec
from mallee.router.config import RouterConfig
from support.graph_runs import CHAT, DOC, GREEDY, MODEL, client_of, nothing_left, times_add_up
from support.live_api import served
from support.live_fleet import LiveFleet, kill_gateway, lose, running
from support.plain_ids import scopes_at
from support.tiny_fleet import tiny_fleet
from support.waiting import elapse, until, until_asked


async def until_event(run: AsyncGraphRun, kind: str, node: str = "") -> list[GraphEvent]:
    """The events up to the next of that type, of that node if one is given."""
    found = []
    async for event in run:
        found.append(event)
        if event.type == kind and node in ("", event.node):
            return found
    raise AssertionError(f"no {kind} of {node}: {found}")


async def test_fifty_evaluators_share_one_prefill_of_their_document() -> None:
    """S1: on a real engine, document tokens are computed once; no more run at once than may."""
    names = [f"e{i:02d}" for i in range(50)]
    texts = [f"{name}? A question." for name in names]  # no two begin with an equal block
    async with client_of(num_blocks=2048) as (client, _):
        graph = Graph()
        doc = graph.prefill(DOC)
        asked = [graph.branch(doc, text, max_tokens=6, **GREEDY) for text in texts]
        graph.join(asked)
        found = await client.run(graph, max_running=20).wait()
        times_add_up(found)
        assert found.status == "done"
        assert found.nodes[doc.name].work.prefill_tokens == len(DOC)
        nodes = [found.nodes[each.name] for each in asked]
        assert [node.work.cached_tokens for node in nodes] == [len(DOC)] * 50
        assert found.prefill_tokens == len(DOC) + sum(map(len, texts))
        # Siblings that were ready together went out as one fork.
        assert 3 <= len({node.work.request for node in nodes}) < 50


@pytest.mark.parametrize("workers", [1, 4])
async def test_what_prefills_begin_with_alike_is_computed_once(workers: int) -> None:
    """S1, part: also while it is computed, and whichever workers there are."""
    shared = "A tree of many trunks from one root. " * 20
    async with client_of(workers, num_blocks=2048) as (client, _):
        graph = Graph()
        docs = [graph.prefill(f"{shared}{i} tail") for i in range(4)]
        for doc in docs:
            graph.branch(doc, "?", max_tokens=6, **GREEDY)
        found = await client.run(graph).wait()
    assert found.status == "done"
    nodes = [found.nodes[doc.name] for doc in docs]
    assert sum(node.work.prefill_tokens or 0 for node in nodes) == len(shared) + 4 * len("0 tail")
    assert len({node.work.worker for node in nodes}) == 1


async def test_a_graph_says_what_calls_by_hand_say() -> None:
    """S7, part: branches of branches, and texts made of answers, on a real model."""
    async with client_of(2) as (client, _):
        graph = Graph()
        doc = graph.prefill(DOC)
        a = graph.branch(doc, " Why?", max_tokens=6, **GREEDY)
        b = graph.branch(doc, " When?", max_tokens=6, **GREEDY)
        c = graph.branch(a, [" And ", b, "?"], max_tokens=6, **GREEDY)
        new = graph.prefill(["About ", c])
        d = graph.branch(new, max_tokens=4, **GREEDY)
        found = await client.run(graph).wait()

        async def alone(prompt: str, num: int = 6) -> str:
            answer = await client.complete(prompt, max_tokens=num, **GREEDY)
            return str(answer.text)

        said = [await alone(f"{DOC} Why?"), await alone(f"{DOC} When?")]
        said.append(await alone(f"{DOC} Why?{said[0]} And {said[1]}?"))
        said.append(await alone(f"About {said[2]}", 4))
        assert [found[each] for each in (a, b, c, d)] == said
        assert found.outputs == {d.name: said[3]}


async def test_messages_and_places_are_those_of_the_api() -> None:
    """S1, part: a chat graph says what forks say, with outputs and items in messages computed once."""
    async with client_of(chat=ChatTemplate(CHAT)) as (client, _):
        system = {"role": "system", "content": "Be short. " * 4}
        greedy: Any = {"max_tokens": 4, **GREEDY}
        graph = Graph()
        doc = graph.prefill(messages=[system])
        why = graph.branch(doc, messages=[{"role": "user", "content": "Why?"}], **greedy)
        so = graph.branch(doc, messages=[{"role": "user", "content": ["So ", why]}], **greedy)
        early = graph.branch(doc, " mind.", at=8 + 5, **greedy)
        is_it: Any = [{"role": "user", "content": ["Is it ", graph.item, "?"]}]
        each = graph.map(doc, graph.tool(lambda _: ["red", "blue"]), messages=is_it, **greedy)
        found = await client.run(graph, outputs=[doc, so, early, each]).wait()
        contents = ["Why?", f"So {found[why]}", "Is it red?", "Is it blue?"]
        asked = [{"messages": [{"role": "user", "content": text}]} for text in contents]
        async with client.prefill(messages=[system]) as alone:
            said = [branch.text for branch in await alone.fork(asked, **greedy).wait()]
        assert [found[why], found[so], *(found.nodes[each.name].items or ())] == said
        assert found.nodes[why.name].work.prefill_tokens == len("<user>Why?|<assistant>")
        async with client.prefill("<system>Be sh") as text:
            (branch,) = await text.fork([" mind."], **greedy).wait()
        assert found[early] == branch.text


async def test_a_worker_that_dies_in_the_middle_changes_nothing() -> None:
    """S4, part: the graph goes on elsewhere, token for token."""
    graph = Graph()
    doc = graph.prefill(DOC)
    asked = [graph.branch(doc, f" {name}", max_tokens=200, **GREEDY) for name in "abcd"]
    graph.branch(graph.prefill(["So ", graph.join(asked)]), max_tokens=6, **GREEDY)
    async with client_of(2, num_blocks=1024) as (client, fleet):
        calm = await client.run(graph).wait()
        run = client.run(graph)
        for _ in range(30):
            await until_event(run, "node.delta")
        await lose(fleet, next(name for name, each in fleet.engines.items() if each.branches))
        found = await run.wait()
        assert found.status == "done"
        outputs = [{name: n.output for name, n in each.nodes.items()} for each in (found, calm)]
        assert outputs[0] == outputs[1]


async def test_what_can_not_run_is_refused_before_anything_is_allocated() -> None:
    """S2, S3: unknown nodes, cycles, the context budget with all numbers; pools are untouched."""
    template = CHAT.replace(
        "{% for",
        "{% if messages[0].role == 'assistant' %}{{ raise_exception('an answer begins it') }}"
        "{% endif %}{% for",
        1,
    )
    async with client_of(chat=ChatTemplate(template)) as (client, fleet):
        engine = next(iter(fleet.engines.values()))
        before = engine.stats()

        async def refusal(text: str = DOC, messages: Any = (), **branch: Any) -> str:
            graph = Graph()
            doc = graph.prefill(text, messages=messages, name="doc")
            graph.branch(doc, name="a", **{"max_tokens": 6, **branch})
            with pytest.raises(InvalidGraph) as caught:
                await client.run(graph).wait()
            return caught.value.message

        graph = Graph()
        graph.branch(graph.prefill("x"), Graph().prefill("y", name="elsewhere"))
        with pytest.raises(InvalidGraph, match="edge elsewhere -> branch-1: the graph has no node"):
            client.run(graph)
        fine = Graph()
        doc = fine.prefill("x")
        with pytest.raises(InvalidGraph, match="a message has role, text; give role and content"):
            fine.branch(doc, messages=[{"role": "user", "text": "x"}])
        with pytest.raises(InvalidGraph, match=r"a text is \('x', 5\): give a string, a handle"):
            fine.branch(doc, ("x", 5))  # type: ignore[arg-type]
        items = Graph()
        items.map(doc, doc, items.item)
        assert items.nodes[0].text == (items.item,)
        assert await refusal("x" * 1700, max_tokens=221) == (
            "prefix 1700 (doc) + largest branch 221 (a) + headroom 128 = 2049 > n_ctx 2048; shorten the"
            " texts, or lower max_tokens or max_items"
        )
        with pytest.raises(InvalidGraph, match="node a: n is not a field of a branch's sampling"):
            fine.branch(doc, name="a", n=3)
        assert (await refusal(temperature=object())).startswith("a node's sampling is not JSON")
        told = await refusal("", [{"role": "user", "content": "x" * 1950}])
        assert told.startswith("prefix 1957 (doc) + largest branch 6 (a)")
        told = await refusal("", [{"role": "assistant", "content": "x"}])
        assert told.startswith("node doc: messages=")
        assert told.endswith("an answer begins it")
        assert await refusal(at=150) == "node a: at=150: doc has at most 148 tokens; give 1 to 148"
        wrong: Any
        for wrong in ({"max_running": 0}, {"keep": True}):
            with pytest.raises(InvalidParameter):
                client.run(fine, **wrong)
        assert engine.stats() == before


async def test_the_first_answer_ends_those_that_nobody_needs_while_others_go_on() -> None:
    """F19, part: their KV is free, and nothing of them is kept."""
    async with client_of(num_blocks=1024) as (client, _):
        graph = Graph()
        doc = graph.prefill(DOC)
        a = graph.branch(doc, max_tokens=300, name="a", **GREEDY)
        graph.branch(doc, " b", max_tokens=300, name="b", **GREEDY)
        q = graph.branch(doc, " q", max_tokens=3, name="q", **GREEDY)
        graph.join([a, q], wait="first", name="any")
        found = await client.run(graph).wait()
        states = {name: node.status for name, node in found.nodes.items() if name != doc.name}
        assert states == {"a": "cancelled", "b": "done", "q": "done", "any": "done"}
        assert found.status == "done"
        assert found.outputs["any"] == found["q"]
        assert found.nodes["a"].cause == "any"
        assert found.nodes["a"].work.request == found.nodes["b"].work.request
        assert found.nodes["b"].work.completion_tokens == 300
        assert (found.nodes["a"].work.completion_tokens or 0) < 300


async def test_functions_are_called_and_their_outputs_are_texts_of_later_nodes() -> None:
    """S4, part: a list is the items of a map; functions of one name are told apart."""
    asked: list[str] = []

    async def look_up(text: str) -> list[str]:
        asked.append(text)
        return ["red", "blue"]

    async with client_of() as (client, _):
        graph = Graph()
        doc = graph.prefill(DOC, keep=True)
        first = graph.branch(doc, "Why?", max_tokens=5, name="why", **GREEDY)
        found = graph.tool(look_up, ["about ", first], max_tokens=16)
        each = graph.map(doc, found, ["Is it ", graph.item], max_tokens=4, **GREEDY)
        others = [
            graph.tool(lambda text: text * 2, "x", max_tokens=16),
            graph.tool(lambda _: None, "x", max_tokens=16),
        ]
        last = graph.branch(first, [each, *others], max_tokens=3, **GREEDY)
        run = client.run(graph, outputs=[each, last])
        events = [event async for event in run]
        result = await run.wait()
        assert result.status == "done"
        assert asked == [f"about {result[first]}"]
        assert len(result.nodes[each.name].items or ()) == 2
        assert [result[other] for other in others] == ["xx", ""]
        assert result.outputs == {each.name: result[each], last.name: result[last]}
        deltas = [e.text for e in events if e.type == "node.delta" and e.node == "why"]
        assert "".join(deltas) == result[first]
        ended = [e.node for e in events if e.type == "node.ended"]
        assert sorted(ended) == sorted(result.nodes)
        capsule = result.nodes[doc.name].work.capsule
        assert capsule is not None
        await (await client.capsule(capsule)).delete()


async def test_what_a_function_raises_fails_its_node() -> None:
    """S4, part: with its own text; one that is too slow, or says too much, fails too."""

    def broken(_: str) -> str:
        raise TimeoutError("no such page")

    async def slow(_: str) -> str:
        await elapse(30)
        return "late"

    async def leaves(_: str) -> str:
        sys.exit(3)

    async def cancelled(_: str) -> str:
        task = asyncio.create_task(elapse(30))
        task.cancel()
        await task
        return "never"

    async with client_of() as (client, _):
        graph = Graph()
        doc = graph.prefill("A document. ")
        bad, late = graph.tool(broken), graph.tool(slow, timeout_s=0.2)
        long = graph.tool(lambda _: "x" * 1025)
        ends = {
            "CancelledError": graph.tool(cancelled),
            "SystemExit: 3": graph.tool(leaves),
            "UnicodeEncodeError": graph.tool(lambda _: "a\udcff"),
        }
        after = graph.branch(doc, bad)
        outputs = [after, late, long, *ends.values()]
        result = await client.run(graph, outputs=outputs).wait()
        for why, node in ends.items():
            with pytest.raises(ToolFailed, match=why):
                _ = result[node]
        assert result.status == "failed"
        with pytest.raises(ToolFailed, match="tool 'broken' failed: TimeoutError: no such page"):
            _ = result[after]
        assert result.nodes[after.name].cause == bad.name
        with pytest.raises(ToolTimeout, match=r"no result of tool 'slow' came in 0\.2 s"):
            _ = result[late]
        with pytest.raises(ToolFailed, match="its result has 1025 tokens > max_tokens 1024"):
            _ = result[long]


async def test_what_the_service_refuses_fails_its_node_and_all_that_needs_it() -> None:
    """S4, part."""
    async with client_of() as (client, _):
        graph = Graph()
        doc = graph.prefill("x")
        hot = graph.branch(doc, temperature=9.0)
        below = graph.branch(hot)
        calm = graph.branch(doc, max_tokens=2, **GREEDY)
        result = await client.run(graph, outputs=[below, calm]).wait()
        with pytest.raises(InvalidParameter, match="temperature=9"):
            _ = result[below]
        assert result.nodes[below.name].cause == hot.name
        assert len(result[calm]) == 2


async def test_a_run_that_is_cancelled_or_left_ends_its_graph() -> None:
    async with client_of() as (client, fleet):
        graph = Graph()
        a = graph.branch(graph.prefill(DOC), max_tokens=1500, name="a", **GREEDY)
        graph.branch(a, name="b")
        graph.tool(lambda _: elapse(9.0), name="t")
        run = client.run(graph)
        await until_event(run, "node.delta")
        run.cancel()
        result = await run.wait()
        states = {name: node.status for name, node in result.nodes.items()}
        assert states == {"prefill-0": "done"} | dict.fromkeys("abt", "cancelled")
        assert result.status == "cancelled"
        await nothing_left(client, fleet)
        async with client.session("s") as session, session.run(graph) as run:
            await until_event(run, "node.delta")
        run = client.run(graph)
        await until_event(run, "node.delta")
        reading = asyncio.create_task(until_event(run, "graph.ended"))
        await run.close()
        with pytest.raises(AssertionError, match=r"no graph\.ended"):
            await reading
        with pytest.raises(Unavailable, match="closed before its end"):
            await run.wait()


async def test_a_budget_bounds_the_whole_graph() -> None:
    """X19, part: tokens and branches of all nodes together, and their time."""
    async with client_of() as (client, _):
        graph = Graph()
        doc = graph.prefill(DOC)
        for text in ("", " b"):
            graph.branch(doc, text, max_tokens=40, **GREEDY)

        async def codes(**given: Any) -> set[str]:
            budget: Any = given
            found = await client.run(graph, budget=budget).wait()
            if "tokens" in budget:
                assert found.completion_tokens == budget["tokens"]
            return {node.error.code for node in found.nodes.values() if node.error is not None}

        assert await codes(tokens=50) == {"budget_spent"}
        assert await codes(branches=1) == {"budget_spent"}
        long = Graph()
        long.branch(long.prefill(DOC), max_tokens=1500, **GREEDY)
        found = await client.run(long, budget={"wall_s": 0.2}).wait()
        with pytest.raises(BudgetSpent):
            _ = found["branch-1"]
        assert found.wall_ms < 5000
        assert [each.id async for each in client.sessions()] == []


@asynccontextmanager
async def two_clients() -> AsyncIterator[tuple[AsyncMallee, AsyncMallee, LiveFleet, "Entry"]]:
    """A client of each of two gateways, and an entry before the first, by which clients find another."""
    async with (
        tiny_fleet(MODEL, 1, gateways=2, syncs=True, ids=scopes_at) as fleet,
        served(fleet.gateways[0]) as (here, server),
        served(fleet.gateways[1]) as (there, _),
        AsyncMallee(here) as a,
        AsyncMallee(there) as b,
    ):
        await until(lambda: all(len(each.peers.others) == 1 for each in fleet.gateways))

        def kill() -> None:
            kill_gateway(fleet, 0)
            for connection in list(server.server_state.connections):
                assert connection.transport is not None
                connection.transport.abort()

        yield a, b, fleet, Entry([here, there], kill)
        assert fleet.gateways[1].operator.failure is None


class Entry(httpx.AsyncHTTPTransport):
    """A proxy before two gateways, which goes on with the other when the first is killed."""

    def __init__(self, urls: list[str], kill: Any) -> None:
        super().__init__()
        self._urls = urls
        self._kill = kill

    def kill(self) -> None:
        del self._urls[0]
        self._kill()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        to = httpx.URL(self._urls[0])
        request.url = request.url.copy_with(host=to.host, port=to.port)
        return await super().handle_async_request(request)


async def test_a_graph_draws_of_its_session_s_budget_at_any_gateway() -> None:
    """X19: its own is reserved of the session's, which another gateway keeps, and returns."""
    async with two_clients() as (a, b, _, _):
        await a.session("s").give_budget({"tokens": 60})

        async def is_back() -> bool:
            budget = (await a.session("s").show()).budget
            assert budget is not None
            assert budget.tokens is not None
            return (budget.tokens.used, budget.tokens.reserved) == (12, 0)

        def of(max_tokens: int) -> Graph:
            graph = Graph()
            doc = graph.prefill(DOC)
            for _ in range(2):
                graph.branch(doc, max_tokens=max_tokens, **GREEDY)
            return graph

        session = b.session("s")
        with pytest.raises(InvalidParameter, match=r"budget\.tokens"):
            await session.run(of(6), budget={"tokens": 61}).wait()
        found = await session.run(of(6), budget={"tokens": 20}).wait()
        assert found.status == "done"
        await until_asked(is_back)  # what it did not spend comes a moment later
        found = await session.run(of(200)).wait()
        for name in ("branch-1", "branch-2"):
            with pytest.raises(BudgetSpent):
                _ = found[name]
        assert found.completion_tokens == 48
        for client in (a, b):
            found = await client.session("s").run(of(6)).wait()
            with pytest.raises(BudgetSpent):
                _ = found["branch-1"]


@pytest.mark.slow
async def test_a_run_goes_on_when_its_gateway_dies() -> None:
    """S4, part: at another gateway, with the outputs of a calm run; no function runs twice."""
    num_asked = 0

    async def look_up(_: str) -> str:
        nonlocal num_asked
        num_asked += 1
        await elapse(0.5)
        return "found"

    graph = Graph()
    doc = graph.prefill("A document. ")
    first = graph.branch(doc, "Why?", max_tokens=4, name="first", **GREEDY)
    long = graph.branch(doc, "At length?", max_tokens=200, name="long", **GREEDY)
    last = graph.branch(first, [graph.tool(look_up), "So?"], max_tokens=4, **GREEDY)
    async with two_clients() as (_, b, _, entry):
        calm = await b.run(graph, outputs=[last, long]).wait()
        async with AsyncMallee(http_client=httpx.AsyncClient(transport=entry)) as client:
            run = client.run(graph, outputs=[last, long])
            events = await until_event(run, "node.ended", "first")
            entry.kill()
            events += [event async for event in run]
            result = await run.wait()
        assert result.outputs == calm.outputs
        ended = [event.node for event in events if event.type == "node.ended"]
        assert sorted(ended) == sorted(result.nodes)
        starts = [event for event in events if event.type == "node.started"]
        assert [event.node for event in starts].count("long") == 2
        assert num_asked == 2  # once in each of the two graphs


async def test_a_run_that_may_not_be_sent_again_fails_where_its_gateway_died() -> None:
    graph = Graph()
    graph.branch(graph.prefill(DOC), max_tokens=600, name="long", **GREEDY)
    async with two_clients() as (_, _, _, entry):
        async with AsyncMallee(
            http_client=httpx.AsyncClient(transport=entry), max_retries=0
        ) as client:
            run = client.run(graph)
            await until_event(run, "node.delta")
            entry.kill()
            result = await run.wait()
        error = result.nodes["long"].error
        assert error is not None
        assert error.code == "stream_broken"


@pytest.mark.slow
async def test_a_thousand_nodes_run_with_a_few_at_once() -> None:
    """S5, S14: on mocked engines, over HTTP; times of all nodes add up, and nothing is left."""
    graph = Graph()
    chain: list[Handle] = []
    for i in range(25):
        doc = graph.prefill(f"Document {i}. {DOC}")
        drawn: list[Handle] = []
        for level in range(3):  # each but the first goes on from three of the one above
            of = drawn[12 * level - 3 :] if level else [doc]
            drawn += [
                graph.branch(of[j % len(of)], f" {j}", max_tokens=2, **GREEDY) for j in range(12)
            ]
        best = graph.join(drawn, wait="all" if i % 2 else 6)
        chain = [graph.join([best, *chain])]
        graph.prefill(["So: ", best])
    assert len(graph.nodes) == 1000
    spec = mock_spec(vocab_size=128, max_model_len=4096)
    made = LiveFleet(spec, RouterConfig(block_size=16), num_blocks=4096)
    async with (
        running(made, 2) as fleet,
        served(fleet.gateways[0]) as (url, _),
        AsyncMallee(url) as client,
    ):
        run = client.run(graph, max_running=8)
        events = [event async for event in run]
        found = await run.wait()
        times_add_up(found)
        assert found.status == "done"
        states = [node.status for node in found.nodes.values()]
        assert set(states) <= {"done", "cancelled"}
        assert states.count("cancelled") <= 13 * 30
        open_nodes: set[str] = set()
        for event in events:
            if event.type == "node.started":
                open_nodes.add(event.node)
            elif event.type == "node.ended":
                open_nodes.discard(event.node)
            assert len(open_nodes) <= 8
        await nothing_left(client, fleet)
