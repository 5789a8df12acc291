"""Graphs that stopped and go on, as their gateway died or nobody read them; one token a character."""

from typing import Any

import httpx
import pytest

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
from support.tiny_fleet import post, two_gateways
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


async def test_calls_of_tools_are_asked_again_and_results_that_were_told_are_kept() -> None:
    nodes = [
        DOC,
        tool("told", max_tokens=16),
        tool("open", max_tokens=16),
        branch("a", text=[{"node": "told"}, {"node": "open"}]),
    ]
    async with two_gateways(MODEL) as s:
        async with streamed(s.a, *nodes) as stream:
            await stream.until("tool.call", "open")
            name = stream.events[0]["id"]
            await post(s.b, f"/v1/graphs/{name}/nodes/told/result", output=["x", "y"])
            await stream.until("node.ended", "told")
            kill_gateway(s.fleet, 0)
        async with streamed(s.b, *nodes, resume=name) as resumed:
            assert (await resumed.until("tool.call"))["node"] == "open"
            await post(s.b, f"/v1/graphs/{name}/nodes/open/result", output="z")
            ended = await resumed.until("graph.ended")
            assert ended["status"] == "done"
        found = (await s.b.get(f"/v1/graphs/{name}")).json()
        assert found["nodes"]["told"]["items"] == ["x", "y"]
        calls = [each["node"] for each in resumed.events if each["type"] == "tool.call"]
        assert calls == ["open"]


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
            await until(lambda: late._num_others() >= 1)
            async with streamed(newcomer, DOC, branch("a"), tool("t"), resume=name) as resumed:
                assert (await resumed.until("node.ended", "a"))["resumed"]
