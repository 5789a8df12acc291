"""Graphs over HTTP, on engines that compute a tiny model: one token a character."""

from typing import Any

import httpx
import pytest

from mallee.api.text.chat import ChatTemplate
from mallee.mocker.passes import mock_spec
from mallee.router.config import RouterConfig
from mallee.testing.random_model import random_model
from support.graphs_asked import (
    CHAT,
    DOC,
    GREEDY,
    branch,
    join,
    nothing_left,
    run,
    streamed,
    times_add_up,
    tool,
)
from support.live_api import served
from support.live_fleet import LiveFleet, lose, running
from support.tiny_fleet import post, tiny_api, two_gateways
from support.waiting import until_asked

MODEL = random_model("llama", 5, max_position_embeddings=2048)


async def test_fifty_evaluators_share_one_prefill_of_their_document() -> None:
    """S1: on a real engine, document tokens are computed once; no more run at once than may."""
    names = [f"e{i:02d}" for i in range(50)]
    texts = {name: f"{name}? A question." for name in names}  # no two begin with an equal block
    nodes = [branch(name, text=texts[name]) for name in names]
    async with tiny_api(MODEL, 1, num_blocks=2048) as (client, fleet):
        found = await run(client, DOC, *nodes, join("all", *names), max_running=20)
        assert found["status"] == "done"
        told = {name: node["mallee"] for name, node in found["nodes"].items() if name != "all"}
        length = len(str(DOC["text"]))
        assert told["doc"]["prefill_tokens"] == length
        assert [told[name]["cached_tokens"] for name in names] == [length] * 50
        computed = sum(each["prefill_tokens"] for each in told.values())
        assert computed == length + sum(map(len, texts.values()))
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        requests = {each["request"] for name, each in told.items() if name != "doc"}
        assert 3 <= len(requests) < 50  # siblings that were ready together went out as one fork
        await nothing_left(client, fleet)


@pytest.mark.parametrize("workers", [1, 4])
async def test_what_prefills_begin_with_alike_is_computed_once(workers: int) -> None:
    """S1, part: also while it is computed, and whichever workers there are."""
    shared = "A tree of many trunks from one root. " * 20
    nodes = [{**DOC, "name": f"d{i}", "text": f"{shared}{i} tail"} for i in range(4)]
    branches = [branch(f"b{i}", f"d{i}", text="?") for i in range(4)]
    async with tiny_api(MODEL, workers, num_blocks=2048) as (client, _):
        found = await run(client, *nodes, *branches)
    assert found["status"] == "done"
    told = [found["nodes"][f"d{i}"]["mallee"] for i in range(4)]
    assert sum(each["prefill_tokens"] for each in told) == len(shared) + 4 * len("0 tail")
    assert len({each["worker"] for each in told}) == 1


async def test_a_graph_says_what_calls_by_hand_say() -> None:
    """S7, part: branches of branches, and texts made of answers, on a real model."""
    async with tiny_api(MODEL, 2) as (client, _):
        found = await run(
            client,
            DOC,
            branch("a", text=" Why?"),
            branch("b", text=" When?"),
            branch("c", of="a", text=[" And ", {"node": "b"}, "?"]),
            {"name": "new", "kind": "prefill", "text": ["About ", {"node": "c"}]},
            branch("d", of="new", max_tokens=4),
        )
        assert found["status"] == "done"
        doc = str(DOC["text"])

        async def alone(prompt: str, num: int = 6) -> str:
            more = {**GREEDY, "max_tokens": num}
            answer = await post(client, "/v1/completions", prompt=prompt, **more)
            text: str = answer["choices"][0]["text"]
            return text

        a, b = await alone(f"{doc} Why?"), await alone(f"{doc} When?")
        c = await alone(f"{doc} Why?{a} And {b}?")
        d = await alone(f"About {c}", 4)
        said = {name: found["nodes"][name]["output"] for name in "abcd"}
        assert said == {"a": a, "b": b, "c": c, "d": d}
        assert found["outputs"] == {"d": d}
        again = (await client.get(f"/v1/graphs/{found['id']}")).json()
        assert again == found


async def test_a_worker_that_dies_in_the_middle_changes_nothing() -> None:
    """S4, part: the graph goes on elsewhere, token for token."""
    nodes = [
        DOC,
        *(branch(name, text=f" {name}", max_tokens=200) for name in "abcd"),
        join("all", *"abcd"),
        {"name": "new", "kind": "prefill", "text": ["So ", {"node": "all"}]},
        branch("end", of="new"),
    ]
    async with tiny_api(MODEL, 2, num_blocks=1024) as (client, fleet):
        calm = await run(client, *nodes)
        async with streamed(client, *nodes) as stream:
            for _ in range(30):
                await stream.until("node.delta")
            busy = next(name for name, each in fleet.engines.items() if each.branches)
            await lose(fleet, busy)
            ended = await stream.until("graph.ended")
            await stream.rest()
        assert ended["status"] == "done"
        assert ended["outputs"] == calm["outputs"]
        outputs = {e["node"]: e.get("output") for e in stream.events if e["type"] == "node.ended"}
        assert outputs == {name: node.get("output") for name, node in calm["nodes"].items()}


async def test_what_can_not_run_is_refused_before_anything_is_allocated() -> None:
    """S2, S3: cycles, unknown nodes, the context budget with all numbers; pools are untouched."""
    async with tiny_api(MODEL, 1) as (client, fleet):
        engine = next(iter(fleet.engines.values()))
        before = engine.stats()

        async def refusal(*nodes: dict[str, Any], **more: Any) -> str:
            answer = await client.post("/v1/graphs", json={"nodes": list(nodes), **more})
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            return str(error["message"])

        a, b = branch("a", text=[{"node": "b"}]), branch("b", text=[{"node": "a"}])
        assert (await refusal(DOC, a, b)).startswith("edge b -> a closes a cycle of 2 nodes")
        assert (await refusal(DOC, branch("a", of="a"))).startswith("edge a -> a: ")
        assert (await refusal(DOC, branch("a", of="x"))).startswith("edge x -> a: the graph has no")
        text = "x" * 1700
        long = {"name": "doc", "kind": "prefill", "text": text}
        assert await refusal(long, branch("a", text="why?", max_tokens=217)) == (
            "prefix 1700 (doc) + largest branch 221 (a) + headroom 128 = 2049 > n_ctx 2048; shorten the"
            " texts, or lower max_tokens or max_items"
        )
        hot = branch("a", sampling={"temperature": 3.0})
        assert (await refusal(DOC, hot)).startswith("node a: sampling: temperature=3.0: give 0.0")
        odd = branch("a", sampling={"n": 3})
        assert (await refusal(DOC, odd)).startswith("node a: sampling.n=3: not a field of")
        assert "give true" in await refusal(tool("t"))
        assert (await refusal(DOC, max_running=0)).startswith("max_running=0: give 1 to 128")
        assert (await refusal(DOC, {**DOC, "name": "d2", "kind": "what"})).startswith("nodes[1]")
        wrong = branch("a", max_tokens="many")
        assert "nodes[1].max_tokens" in await refusal(DOC, wrong)
        assert "mallee.keep" in await refusal(DOC, mallee={"keep": True})
        stops = {"stop_when": {"done": 1}}
        assert "mallee.stop_when" in await refusal(DOC, mallee=stops)
        assert engine.stats() == before


async def test_the_first_answer_ends_those_that_nobody_needs_while_others_go_on() -> None:
    """F19, part: their KV is free, and nothing of them is kept."""
    async with tiny_api(MODEL, 1, num_blocks=1024) as (client, fleet):
        found = await run(
            client,
            DOC,
            branch("a", max_tokens=300),
            branch("b", text=" b", max_tokens=300),
            branch("q", text=" q", max_tokens=3),
            join("any", "a", "q", wait="first"),
        )
        states = {name: node["status"] for name, node in found["nodes"].items()}
        assert states == {"doc": "done", "a": "cancelled", "b": "done", "q": "done", "any": "done"}
        assert found["status"] == "done"
        assert found["outputs"]["any"] == found["nodes"]["q"]["output"]
        assert found["nodes"]["a"]["cause"] == "any"
        assert found["nodes"]["a"]["mallee"]["request"] == found["nodes"]["b"]["mallee"]["request"]
        assert found["nodes"]["b"]["mallee"]["completion_tokens"] == 300
        assert found["nodes"]["a"]["mallee"]["completion_tokens"] < 300
        await nothing_left(client, fleet)


async def test_a_tool_is_carried_out_by_the_client() -> None:
    """S4, part: a call is an event, its result goes on as text; a list feeds a map."""
    each = {
        **{"name": "each", "kind": "map", "of": "doc", "over": "look", "max_tokens": 5},
        **{"text": ["Is ", {"item": True}, "?"], "sampling": GREEDY},
    }
    async with tiny_api(MODEL, 1) as (client, fleet):
        async with streamed(
            client, DOC, branch("a"), tool("look", input=[{"node": "a"}]), each
        ) as s:
            call = await s.until("tool.call")
            answer = next(e["output"] for e in s.events if e.get("node") == "a" and "output" in e)
            assert {k: call[k] for k in ("node", "call", "input", "timeout_s")} == {
                **{"node": "look", "call": "search", "input": answer, "timeout_s": 60.0}
            }
            path = f"/v1/graphs/{call['id']}"
            standing = (await client.get(path)).json()
            assert standing["status"] == "running"
            assert standing["nodes"]["look"]["status"] == "running"
            too_long = await client.post(f"{path}/nodes/look/result", json={"output": "x" * 1025})
            assert too_long.status_code == 400
            assert "1025 tokens > max_tokens 1024 of node look" in too_long.text
            for node, status in (("a", 409), ("no", 404)):
                refused = await client.post(f"{path}/nodes/{node}/result", json={"output": ""})
                assert refused.status_code == status
            told = await post(client, f"{path}/nodes/look/result", output=["red", "blue"])
            assert told == {"id": call["id"], "object": "graph.result", "node": "look"}
            expanded = await s.until("map.expanded")
            assert expanded["items"] == ["each[0]", "each[1]"]
            ended = await s.until("graph.ended")
            await s.rest()
        again = await client.post(f"{path}/nodes/look/result", json={"output": "late"})
        assert (again.status_code, again.json()["error"]["code"]) == (409, "result_not_awaited")
        items = [e["output"] for e in s.events if e["type"] == "node.ended" and "[" in e["node"]]
        assert sorted(ended["outputs"]["each"].split("\n")) == sorted("\n".join(items).split("\n"))
        assert s.ends() == dict.fromkeys(["doc", "a", "look", "each[0]", "each[1]", "each"], "done")
        deltas = [e["text"] for e in s.events if e["type"] == "node.delta" and e["node"] == "a"]
        assert "".join(deltas) == answer
        await nothing_left(client, fleet)


async def test_a_graph_that_is_deleted_ends_and_is_forgotten() -> None:
    nodes = [DOC, branch("a", max_tokens=1500), branch("b", of="a"), tool("t")]
    async with tiny_api(MODEL, 1) as (client, fleet):
        async with streamed(client, *nodes) as s:
            name = (await s.until("node.delta"))["id"]
            gone = (await client.delete(f"/v1/graphs/{name}")).json()
            assert gone == {
                **{"id": name, "object": "graph.deleted", "deleted": True, "cancelled": True}
            }
            ended = await s.until("graph.ended")
            await s.rest()
        assert ended["status"] == "cancelled"
        assert s.ends() == {"doc": "done", "a": "cancelled", "b": "cancelled", "t": "cancelled"}
        assert (await client.get(f"/v1/graphs/{name}")).status_code == 404
        assert (await client.delete(f"/v1/graphs/{name}")).status_code == 404
        await nothing_left(client, fleet)


async def test_a_budget_bounds_the_whole_graph() -> None:
    """X19, part: tokens and branches of all nodes together, and their time."""
    nodes = [DOC, branch("a", max_tokens=40), branch("b", text=" b", max_tokens=40)]
    async with tiny_api(MODEL, 1) as (client, fleet):
        found = await run(client, *nodes, mallee={"budget": {"tokens": 50}})
        assert found["status"] == "failed"
        assert found["usage"]["completion_tokens"] == 50
        codes = {node["error"]["code"] for node in found["nodes"].values() if "error" in node}
        assert codes == {"budget_spent"}
        found = await run(client, *nodes, mallee={"budget": {"branches": 1}})
        assert {found["nodes"][name]["error"]["code"] for name in "ab"} == {"budget_spent"}
        long = branch("a", max_tokens=1500)
        found = await run(client, DOC, long, mallee={"budget": {"wall_s": 0.2}})
        assert found["nodes"]["a"]["error"]["code"] == "budget_spent"
        assert found["wall_ms"] < 5000
        await nothing_left(client, fleet)


async def test_a_graph_draws_of_its_session_s_budget_at_any_gateway() -> None:
    """X19, part: its own is reserved of the session's, which another gateway keeps, and returns."""
    async with two_gateways(MODEL) as s:

        async def tokens() -> tuple[float, float]:
            found = (await s.a.get("/v1/sessions/s")).json()["budget"]["tokens"]
            return found["used"], found["reserved"]

        put = await s.a.put("/v1/sessions/s", json={"budget": {"tokens": 60}})
        assert put.status_code == 200, put.text
        nodes = (DOC, branch("a"), branch("b"))
        own = {"session": "s", "budget": {"tokens": 61}}
        over = await s.b.post("/v1/graphs", json={"nodes": list(nodes), "mallee": own})
        assert (over.status_code, over.json()["error"]["param"]) == (400, "mallee.budget.tokens")
        own["budget"] = {"tokens": 20}
        found = await run(s.b, *nodes, mallee=own)
        assert {node["status"] for node in found["nodes"].values()} == {"done"}

        async def is_back() -> bool:
            return await tokens() == (12, 0)

        await until_asked(is_back)  # what it did not spend comes a moment later
        long = (DOC, branch("a", max_tokens=200), branch("b", max_tokens=200))
        found = await run(s.b, *long, mallee={"session": "s"})
        assert {found["nodes"][name]["error"]["code"] for name in "ab"} == {"budget_spent"}
        for client in (s.a, s.b):
            again = await client.post(
                "/v1/graphs", json={"nodes": list(nodes), "mallee": {"session": "s"}}
            )
            assert (again.status_code, again.json()["error"]["code"]) == (409, "budget_spent")


async def test_graphs_are_their_scopes_own_and_are_found_from_every_gateway() -> None:
    """S4, part: another scope gets the 404 of an unknown id; a second gateway passes results on."""
    async with two_gateways(MODEL) as (client, other, _):
        async with streamed(client, DOC, tool("t"), branch("a", text=[{"node": "t"}])) as s:
            name = (await s.until("tool.call"))["id"]
            path = f"/v1/graphs/{name}"
            salt = {"x-cache-salt": "other"}
            for each in (client, other):
                foreign = await each.get(path, headers=salt)
                unknown = await each.get(f"/v1/graphs/{name[:-1]}x")
                assert foreign.status_code == unknown.status_code == 404
                body = {"output": "no", "cache_salt": "other"}
                refused = await each.post(f"{path}/nodes/t/result", json=body)
                assert refused.status_code == 404
            assert (await other.get(path)).json()["nodes"]["t"]["status"] == "running"
            wrong = await other.post(f"{path}/nodes/a/result", json={"output": "x"})
            assert (wrong.status_code, wrong.json()["error"]["code"]) == (
                *(409, "result_not_awaited"),
            )
            await post(other, f"{path}/nodes/t/result", output=" found")
            assert (await s.until("graph.ended"))["status"] == "done"
        assert (await other.delete(path)).json()["cancelled"] is False
        assert (await client.get(path)).status_code == 404


async def test_no_more_graphs_run_than_may() -> None:
    async with tiny_api(MODEL, 1, settings={"max_graphs": 1}) as (client, _):
        async with streamed(client, tool("t")) as s:
            name = (await s.until("tool.call"))["id"]
            refused = await client.post("/v1/graphs", json={"nodes": [DOC]})
            assert refused.status_code == 503
            assert "1 graphs run at this gateway" in refused.text
        answers: list[httpx.Response] = []

        async def is_taken() -> bool:
            answers.append(await client.post("/v1/graphs", json={"nodes": [DOC]}))
            return answers[-1].status_code != 503

        await until_asked(is_taken)  # its place is free once all that it held is
        first = answers[-1].json()
        assert first["status"] == "done"
        assert (await client.get(f"/v1/graphs/{name}")).status_code == 404  # one is remembered
        assert (await client.get(f"/v1/graphs/{first['id']}")).json() == first


@pytest.mark.slow
async def test_a_thousand_nodes_run_with_a_few_at_once() -> None:
    """S5, S14: on mocked engines, over HTTP; times of all nodes add up, and nothing is left."""
    nodes: list[dict[str, Any]] = []
    for i in range(25):
        names = [f"b{i}-{j}" for j in range(36)]
        nodes.append({**DOC, "name": f"d{i}", "text": f"Document {i}. " * 4})
        for j, name in enumerate(names):
            of = f"d{i}" if j < 12 else names[j - 12]
            nodes.append(branch(name, of, text=f" {j}", max_tokens=2))
        nodes.append(join(f"j{i}", *names[24:], wait="all" if i % 2 else 6))
        nodes.append(join(f"k{i}", f"j{i}", *([f"k{i - 1}"] if i else [])))
        nodes.append({**DOC, "name": f"e{i}", "text": ["So: ", {"node": f"j{i}"}]})
    assert len(nodes) == 1000
    spec = mock_spec(vocab_size=128, max_model_len=4096)
    made = LiveFleet(spec, RouterConfig(block_size=16), num_blocks=4096)
    async with (
        running(made, 2) as fleet,
        served(fleet.gateways[0]) as (url, _),
        httpx.AsyncClient(base_url=url, timeout=60) as client,
        streamed(client, *nodes, max_running=8) as stream,
    ):
        name = (await stream.until("graph.ended"))["id"]
        await stream.rest()
        found = (await client.get(f"/v1/graphs/{name}")).json()
        times_add_up(found)
        assert found["status"] == "done"
        states = stream.ends()
        assert len(states) == 1000
        assert set(states.values()) <= {"done", "cancelled"}
        assert sum(state == "cancelled" for state in states.values()) <= 13 * 6 * 3
        num, most = 0, 0
        for event in stream.events:
            num += event["type"] == "node.started"
            num -= event["type"] == "node.ended" and event["start_ms"] is not None
            num += event["type"] == "node.ended" and event["kind"] == "join"
            most = max(most, num)
        assert most <= 8
        await nothing_left(client, fleet)


STRICT = (
    "{% if messages[0].role == 'assistant' %}"
    "{{ raise_exception('an answer begins the conversation') }}{% endif %}"
)


async def test_messages_that_can_not_be_are_refused_with_their_node() -> None:
    template = CHAT.replace("{% for", STRICT + "{% for", 1)
    async with tiny_api(MODEL, 1, settings={"chat": ChatTemplate(template)}) as (client, _):

        async def refusal(*nodes: dict[str, Any]) -> str:
            answer = await client.post("/v1/graphs", json={"nodes": list(nodes)})
            assert answer.status_code == 400, answer.text
            return str(answer.json()["error"]["message"])

        long = {"role": "user", "content": "x" * 1950}
        told = await refusal({"name": "doc", "kind": "prefill", "messages": [long]}, branch("a"))
        assert told.startswith("prefix 1957 (doc) + largest branch 6 (a)")
        odd = branch("a", messages=[{"role": "judge", "content": "x"}])
        assert (await refusal(DOC, odd)).startswith("node a: messages[0].role='judge': give one of")
        both = branch("a", text="x", messages=[long])
        assert (await refusal(DOC, both)).startswith("node a: text='x': give either text or")
        item = branch("a", messages=[{"role": "user", "content": [{"item": True}]}])
        assert "node a: messages[0].content[0]" in await refusal(DOC, item)
        empty = {"name": "doc", "kind": "prefill"}
        assert await refusal(empty, branch("a")) == "node doc: text='': give a text, or messages"
        unclosed = {"name": "doc", "kind": "prefill", "messages": [{**long, "role": "assistant"}]}
        told = await refusal(unclosed, branch("a"))
        assert told.startswith("node doc: messages=")
        assert told.endswith("an answer begins the conversation")
        far = branch("a", at=150)
        assert await refusal(DOC, far) == (
            "node a: at=150: doc has at most 148 tokens; give 1 to 148"
        )
        assert (await refusal(DOC, branch("a", at=0))).startswith("node a: at=0: give at least 1")
