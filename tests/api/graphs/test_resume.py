"""Graphs that stopped and go on, as their gateway died or nobody read them; one token a character."""

import random
from typing import Any

import httpx
import pytest

from mallee.api.graphs import progress
from mallee.api.graphs.progress import ProgressCopies, outputs, still_done, within
from mallee.graphs.graph import checked_graph
from mallee.graphs.nodes import Branch, Join, Map, Node, Prefill, Ref, Tool
from mallee.graphs.run import Output
from mallee.protocol.codec import encode
from mallee.protocol.errors import UnknownCapsule
from mallee.protocol.gateways.graph_progress import GraphProgress, NodeDone, decode_graph_progress
from mallee.protocol.ids import COMMON, CapsuleId, Scope
from mallee.testing.random_model import random_model
from support.graphs_asked import (
    DOC,
    GREEDY,
    branch,
    join,
    nothing_left,
    run,
    streamed,
    tool,
)
from support.live_api import served
from support.live_fleet import kill_gateway
from support.tiny_fleet import two_gateways
from support.waiting import until, until_asked

MODEL = random_model("llama", 5, max_position_embeddings=2048)
NODES = [
    DOC,
    *(branch(name, text=f" {name}") for name in "abc"),
    branch("long", text=" long", max_tokens=400),
    branch("after", of="a", text=[" and ", {"node": "b"}]),
    {
        **{"name": "each", "kind": "map", "of": "doc", "over": "c", "sampling": GREEDY},
        "text": [" x", {"item": True}],
    },
    join("all", "after", "long", "each"),
    {"name": "new", "kind": "prefill", "text": ["So ", {"node": "all"}]},
    branch("end", of="new", keep=True),
]


@pytest.mark.slow
async def test_a_graph_goes_on_at_another_gateway_when_its_own_has_died() -> None:
    """S4: what was done is not done again, and the outputs are those of a calm run."""
    async with two_gateways(MODEL) as s:
        calm = await run(s.b, *NODES)
        async with streamed(s.a, *NODES) as stream:
            await stream.until("node.ended", "each")
            kill_gateway(s.fleet, 0)
            name = stream.events[0]["id"]
        before = {each["node"]: each for each in stream.events if each["type"] == "node.ended"}
        assert {"doc", "a", "b", "c", "each"} <= {*before}
        assert not {"long", "all", "new", "end"} & {*before}
        async with streamed(s.b, *NODES, resume=name) as resumed:
            await resumed.until("graph.ended")
            await resumed.rest()
        assert resumed.events[0]["type"] == "graph.resumed"
        assert {"doc", "a", "b", "c", "each"} <= {*resumed.ends()}
        found = (await s.b.get(f"/v1/graphs/{name}")).json()
        assert found["outputs"] == calm["outputs"]
        for node, ended in before.items():
            known = found["nodes"][node]
            assert known["status"] == "done"
            assert known.get("mallee") == ended.get("mallee"), "by the same request"
        assert "resumed" not in found["nodes"]["end"]
        started = {each["node"] for each in resumed.events if each["type"] == "node.started"}
        assert started == {"long", "new", "end"}
        for graph in (calm, found):
            capsule = graph["nodes"]["end"]["mallee"]["capsule"]
            assert (await s.b.delete(f"/v1/capsules/{capsule}")).status_code == 200
        await nothing_left(s.b, s.fleet)


@pytest.mark.slow
async def test_a_graph_that_nobody_read_goes_on_at_any_gateway() -> None:
    """Its capsules were given back, so that a prefill with branches to come is computed again."""
    async with two_gateways(MODEL) as s:
        calm = await run(s.b, *NODES)
        for first, second in ((s.a, s.b), (s.a, s.a)):
            async with streamed(first, *NODES) as stream:
                await stream.until("node.ended", "each")
            name = stream.events[0]["id"]
            answers: list[httpx.Response] = []

            async def is_resumed(
                name: str = name, client: httpx.AsyncClient = second, to: Any = answers
            ) -> bool:
                to.append(await client.post("/v1/graphs", json={"nodes": NODES, "resume": name}))
                if to[-1].status_code == 409:  # it has not been noticed
                    assert to[-1].json()["error"]["code"] == "graph_running"
                return bool(to[-1].status_code != 409)

            await until_asked(is_resumed)
            found = answers[-1].json()
            assert found["outputs"] == calm["outputs"]
            assert found["nodes"]["b"].get("resumed")
            assert "resumed" not in found["nodes"]["doc"]
            again = await run(second, *NODES, resume=name)  # all of it is done
            assert again["outputs"] == calm["outputs"]
            assert sum("resumed" in node for node in again["nodes"].values()) == 9
            gone = await s.b.delete(f"/v1/graphs/{name}")
            assert gone.status_code == 200
            for client in (s.a, s.b):
                refused = await client.post("/v1/graphs", json={"nodes": NODES, "resume": name})
                assert refused.status_code == 404


async def test_what_can_not_be_resumed_is_refused() -> None:
    async with two_gateways(MODEL) as s:
        done = await run(s.a, DOC, branch("a"))
        name = done["id"]

        async def refused(client: httpx.AsyncClient, **body: Any) -> tuple[int, str]:
            asked = {"nodes": [DOC, branch("a")], "resume": name, **body}
            answer = await client.post("/v1/graphs", json=asked)
            return answer.status_code, answer.json()["error"]["code"]

        for client in (s.a, s.b):
            unknown = (404, "graph_not_found")
            assert await refused(client, resume=name[:-1] + "x") == unknown
            assert await refused(client, resume=name.removeprefix("graph_")) == unknown
            assert await refused(client, resume="") == unknown
            assert await refused(client, cache_salt="other") == unknown
            other = (400, "invalid_parameter")
            assert await refused(client, nodes=[DOC, branch("a", text="!")]) == other
            assert await refused(client, nodes=[DOC, branch("b")]) == other
            assert await refused(client, outputs=["a", "doc"]) == other
            assert (await run(client, DOC, branch("a"), resume=name))["outputs"] == done["outputs"]
        async with streamed(s.a, tool("t")) as stream:
            running = (await stream.until("tool.call"))["id"]
            for client in (s.a, s.b):
                asked = await refused(client, nodes=[tool("t")], resume=running, stream=True)
                assert asked == (409, "graph_running")


async def test_the_copy_of_a_dead_gateway_s_graph_can_be_deleted() -> None:
    async with two_gateways(MODEL) as s:
        async with streamed(s.a, DOC, tool("t")) as stream:
            await stream.until("node.ended", "doc")
            name = stream.events[0]["id"]
            kill_gateway(s.fleet, 0)
        assert (await s.b.get(f"/v1/graphs/{name}")).status_code == 404
        assert (await s.b.delete(f"/v1/graphs/{name}")).json()["cancelled"] is False
        body = {"nodes": [DOC, tool("t")], "resume": name, "stream": True}
        assert (await s.b.post("/v1/graphs", json=body)).status_code == 404


async def test_a_gateway_that_came_later_asks_the_others() -> None:
    async with two_gateways(MODEL) as (client, _, fleet):
        async with streamed(client, DOC, branch("a"), tool("t")) as stream:
            await stream.until("node.ended", "a")
            name = stream.events[0]["id"]
            kill_gateway(fleet, 0)
        late = await fleet.add_gateway()
        router = fleet.routers[2]
        await until(lambda: [each.is_whole for each in router.workers()] == [True])
        async with (
            served(late) as (late_url, _),
            httpx.AsyncClient(base_url=late_url, timeout=30) as newcomer,
        ):
            await until(lambda: len(late.records._others()) >= 1)
            async with streamed(newcomer, DOC, branch("a"), tool("t"), resume=name) as resumed:
                assert (await resumed.until("node.ended", "a"))["resumed"]


# Copies of progress: what they keep, for how long, and what of it still holds

EVE = Scope("eve")


def news(*names: str, digest: bytes = b"d", text: str = "x") -> GraphProgress:
    return GraphProgress(digest, tuple(NodeDone(name, text) for name in names))


def names(copies: ProgressCopies, graph: str, scope: Scope = COMMON) -> list[str] | None:
    found = copies.get(graph, scope)
    return None if found is None else [each.node for each in found.nodes]


def test_news_of_a_graph_add_up_in_their_order_for_their_scope_and_a_time() -> None:
    now = 0.0
    copies = ProgressCopies(ttl_s=10, clock=lambda: now)
    copies.hear("g", COMMON, news("a", "b"))
    copies.hear("h", COMMON, news("a"))
    now = 8.0
    copies.hear("g", COMMON, news("c", "a"))
    assert names(copies, "g", EVE) is None
    now = 12.0
    assert (names(copies, "g"), names(copies, "h")) == (["a", "b", "c"], None)
    now = 19.0
    assert names(copies, "g") is None
    copies.hear("g", COMMON, news("a", "b"))
    other = news("z", digest=b"other")  # another graph: its first run is forgotten
    copies.hear("g", COMMON, other)
    assert names(copies, "g") == ["z"]
    copies.forget("g", COMMON)
    copies.forget("g", COMMON)
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
