"""`/v1/sessions` over real gateways: trees, forks, closes, scopes, other gateways; by the SDK, by agents."""

import asyncio
import json
from contextlib import suppress
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers
from typer.testing import CliRunner

from bench.doubles.random_model import random_model
from mallee.api.sessions.names import SessionNames, read_session
from mallee.api.text.chat import ChatTemplate
from mallee.api.text.families import FAMILIES
from mallee.cli.main import cli
from mallee.client import AsyncMallee, Mallee, NotFound, Session, UnknownCapsule
from mallee.protocol.api.shared import MAX_SESSION, AnyRequest, Extras
from mallee.protocol.errors import InvalidParameter
from support.any_gateway import one_gateway
from support.live_api import served
from support.tiny_fleet import post, tiny_api, tiny_fleet, two_gateways
from support.waiting import until, until_asked

MODEL = random_model("llama", 5, max_position_embeddings=4096)
PROMPT = "".join(chr(33 + 7 * i % 90) for i in range(60))
FEW: Any = {"max_tokens": 3, "ignore_eos": True}
SHORT = {"max_tokens": 4, "ignore_eos": True, "seed": 1}


async def ask(client: httpx.AsyncClient, prompt: str, session: str, **more: Any) -> Any:
    body = {"prompt": prompt, **SHORT, "mallee": {"session": session}, **more}
    return (await post(client, "/v1/completions", **body))["choices"]


def capsule_of(choice: Any) -> str:
    return str(choice["mallee"]["capsule"])


async def tree_of(client: httpx.AsyncClient, session: str, **more: Any) -> Any:
    answer = await client.get(f"/v1/sessions/{session}", **more)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_conversation_is_a_tree_of_capsules() -> None:
    """F31, part: turns by prompts that extend earlier ones and by forks; shown, forked and closed."""
    async with tiny_api(MODEL, 1) as (client, _):
        a, b = await ask(client, PROMPT, "s", n=2, temperature=1)
        turn = PROMPT + b["text"] + "and what then? " * 2
        (c,) = await ask(client, turn, "s")
        path = f"/v1/capsules/{capsule_of(a)}/fork"
        own = {"mallee": {"session": "s", "keep": True}}
        fork = await post(client, path, suffixes=["x", "y"], **SHORT, **own)
        tree = await tree_of(client, "s")
        parents = {node["capsule"]: node["parent"] for node in tree["nodes"]}
        assert parents == {
            capsule_of(a): None,
            capsule_of(b): None,
            capsule_of(c): capsule_of(b),
            **{capsule_of(each): capsule_of(a) for each in fork["choices"]},
        }
        tokens = {node["capsule"]: node["tokens"] for node in tree["nodes"]}
        assert tokens[capsule_of(c)] == len(turn) + 4
        assert all(node["held"] and node["tier"] == "device" for node in tree["nodes"])
        pinned = {node["capsule"] for node in tree["nodes"] if node["pinned"]}
        assert pinned == {capsule_of(each) for each in fork["choices"]}
        assert (tree["capsules"], tree["running"], tree["parent"]) == (5, 0, None)

        forked = await post(client, "/v1/sessions/s/fork", session="t", capsule=capsule_of(b))
        assert (forked["id"], forked["parent"], forked["capsule"]) == ("t", "s", capsule_of(b))
        (d,) = await ask(client, turn, "t")
        nodes = (await tree_of(client, "t"))["nodes"]
        assert [(node["is_root"], node["parent"]) for node in nodes] == [
            (True, None),
            (False, capsule_of(b)),
        ]
        unnamed = await post(client, "/v1/sessions/t/fork")
        assert unnamed["capsule"] == capsule_of(d)
        assert (await tree_of(client, "s"))["children"] == ["t"]

        closed = (await client.delete("/v1/sessions/t")).json()
        assert (closed["released"], closed["left"], closed["cancelled"]) == (1, 0, 0)
        assert (await client.get(f"/v1/capsules/{capsule_of(d)}")).status_code == 404
        assert (await client.get(f"/v1/capsules/{capsule_of(b)}")).status_code == 200
        closed = (await client.delete("/v1/sessions/s")).json()
        assert closed["released"] == 5
        assert (await client.get("/v1/sessions/s")).status_code == 404
        left = (await client.get("/v1/capsules")).json()["data"]
        assert left == []


@one_gateway
async def test_an_answer_that_a_stop_string_ends_leaves_its_capsule_in_its_session() -> None:
    """F31, part: it is counted as stopped, and goes with the session."""
    async with tiny_api(MODEL, 1) as (client, _):
        (whole,) = await ask(client, PROMPT, "whole")
        (cut,) = await ask(client, PROMPT, "cut", stop=[whole["text"][2]])
        assert (cut["text"], cut["finish_reason"]) == (whole["text"][:2], "stop")
        (node,) = (await tree_of(client, "cut"))["nodes"]
        assert (node["capsule"], node["held"]) == (capsule_of(cut), True)
        assert (await client.delete("/v1/sessions/cut")).json()["released"] == 1
        counted = (await client.get("/metrics")).text.splitlines()
        name = "mallee_branches_ended_total"
        assert f'{name}{{reason="stop"}} 1.0' in counted
        assert f'{name}{{reason="cancelled"}} 0.0' in counted


async def test_sessions_are_their_scope_s_alone_and_listed_in_pages() -> None:
    """F7, part: a session of another salt is as one that never was."""
    async with tiny_api(MODEL, 1) as (client, _):
        for name in ("b", "a", "c"):
            await ask(client, PROMPT, name)
        await ask(client, PROMPT, "b", cache_salt="eve")
        page = (await client.get("/v1/sessions", params={"limit": 2})).json()
        assert [each["id"] for each in page["data"]] == ["a", "b"]
        assert (page["first_id"], page["last_id"], page["has_more"]) == ("a", "b", True)
        page = (await client.get("/v1/sessions", params={"after": "b"})).json()
        assert [each["id"] for each in page["data"]] == ["c"]
        assert not page["has_more"]
        eve = {"x-cache-salt": "eve"}
        page = (await client.get("/v1/sessions", headers=eve)).json()
        assert [each["id"] for each in page["data"]] == ["b"]
        strange = await client.get("/v1/sessions/a", headers=eve)
        never = await client.get("/v1/sessions/never", headers=eve)
        assert (strange.status_code, strange.json()) == (never.status_code, never.json())
        for method, path in (("DELETE", "/v1/sessions/a"), ("POST", "/v1/sessions/a/fork")):
            answer = await client.request(method, path, headers=eve)
            assert answer.status_code in (400, 404)
        answer = await client.post("/v1/sessions/a/fork", json={}, headers=eve)
        assert answer.status_code == 404
        taken = await client.post("/v1/sessions/a/fork", json={"session": "b"})
        assert taken.status_code == 409
        assert [taken.json()["error"][key] for key in ("code", "param")] == [
            *("session_taken", "session")
        ]
        other = {"capsule": "req_no.0"}
        unknown = await client.post("/v1/sessions/a/fork", json=other)
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "capsule")
        assert len((await tree_of(client, "a"))["nodes"]) == 1


async def test_headers_make_child_sessions_and_the_last_request_closes() -> None:
    """aiperf's and Dynamo's headers: a child that inherits the context hangs below its parent's capsule."""
    async with tiny_api(MODEL, 1) as (client, fleet):
        (a,) = await ask(client, PROMPT, "root")
        above = {"x-dynamo-session-id": "child", "x-dynamo-parent-session-id": "root"}
        prompt = PROMPT + a["text"] + "do this part of it"
        body = {"prompt": prompt, **SHORT}
        made = await client.post("/v1/completions", json=body, headers=above)
        child = await tree_of(client, "child")
        assert child["parent"] == "root"
        assert [node["parent"] for node in child["nodes"]] == [capsule_of(a)]
        assert (await tree_of(client, "root"))["children"] == ["child"]
        final = {**above, "x-dynamo-session-final": "true"}
        last = await client.post("/v1/completions", json=body, headers=final)
        gone = [capsule_of(each.json()["choices"][0]) for each in (made, last)]

        await until(lambda: not any(map(fleet.gateways[0].capsules.is_kept, gone)))  # type: ignore[arg-type]
        assert (await client.get("/v1/sessions/child")).status_code == 404
        assert (await tree_of(client, "root"))["children"] == []


async def test_every_gateway_lists_shows_and_closes_all_sessions() -> None:
    """X24, part: replicas; also one that comes later."""
    async with two_gateways(MODEL) as (a, b, fleet):
        (first,) = await ask(a, PROMPT, "s")
        (second,) = await ask(b, PROMPT + first["text"] + "more of it, please", "s")
        trees = [await tree_of(client, "s") for client in (a, b)]
        for tree in trees:
            parents = {node["capsule"]: node["parent"] for node in tree["nodes"]}
            assert parents == {capsule_of(first): None, capsule_of(second): capsule_of(first)}
        late = await fleet.add_gateway()
        async with (
            served(late) as (url, _),
            httpx.AsyncClient(base_url=url, timeout=20) as c,
        ):
            made = [capsule_of(first), capsule_of(second)]
            await until(lambda: all(map(late.capsules.is_kept, made)))  # type: ignore[arg-type]
            (listed,) = (await c.get("/v1/sessions")).json()["data"]
            assert (listed["id"], listed["capsules"]) == ("s", 2)
            assert (await c.delete("/v1/sessions/s")).json()["released"] == 2
        for client in (a, b):
            assert (await client.get("/v1/sessions")).json()["data"] == []
            assert (await client.get("/v1/sessions/s")).status_code == 404


async def test_a_session_outlives_its_gateway() -> None:
    """X24, part: forked from a capsule that is news, gone on with below what was left there, and closed."""
    async with two_gateways(MODEL) as (a, b, fleet):
        (first,) = await ask(a, PROMPT, "s")
        assert [node["capsule"] for node in (await tree_of(b, "s"))["nodes"]] == [capsule_of(first)]
        (second,) = await ask(a, PROMPT + first["text"] + "and more of it", "s")
        forked = await post(b, "/v1/sessions/s/fork", session="f", capsule=capsule_of(second))
        assert forked["capsule"] == capsule_of(second)
        await ask(a, PROMPT, "t", mallee={"session": "t", "parent_session": "s"})
        await fleet.gateways[0].close()
        assert (await tree_of(b, "s"))["children"] == ["f", "t"]
        assert (await b.delete("/v1/sessions/t")).json()["released"] == 1
        assert (await b.get("/v1/sessions/never")).status_code == 404
        (third,) = await ask(b, PROMPT + first["text"] + "and more of it", "s")
        parents = {node["capsule"]: node["parent"] for node in (await tree_of(b, "s"))["nodes"]}
        assert parents[capsule_of(third)] == capsule_of(first)


async def test_of_two_gateways_that_fork_to_the_same_new_name_one_is_refused() -> None:
    async with two_gateways(MODEL) as (a, b, _):
        await ask(a, PROMPT, "s")
        answers = await asyncio.gather(
            *(client.post("/v1/sessions/s/fork", json={"session": "f"}) for client in (a, b))
        )
        assert sorted(answer.status_code for answer in answers) == [200, 409]
        (refused,) = (answer for answer in answers if answer.status_code == 409)
        assert refused.json()["error"]["param"] == "session"


async def test_a_close_ends_the_requests_of_every_gateway() -> None:
    """A request at each, one of which has just left a capsule; the name can be used anew at once."""
    long = {**SHORT, "max_tokens": 3000}
    async with two_gateways(MODEL, num_blocks=4096) as (a, b, fleet):
        await ask(a, PROMPT, "s")
        body = {"prompt": PROMPT, **long, "mallee": {"session": "s"}}
        asking = [
            asyncio.create_task(client.post("/v1/completions", json=body)) for client in (a, b)
        ]
        await until(lambda: fleet.engines["w0"].stats().jobs == 2)
        closed = (await a.delete("/v1/sessions/s")).json()
        assert (closed["released"], closed["cancelled"]) == (1, 2)
        for answer in await asyncio.gather(*asking):
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "session_closed")
        (new,) = await ask(b, PROMPT, "s")
        assert [node["capsule"] for node in (await tree_of(a, "s"))["nodes"]] == [capsule_of(new)]


async def test_what_is_known_here_is_shown_while_the_store_is_away() -> None:
    """X24, part: what is not is 503, never 404; a session that begins meanwhile is told once it is back."""
    async with two_gateways(MODEL) as two:
        a, b, fleet = two
        (first,) = await ask(a, PROMPT, "s")
        fleet.hub.set_up(False)
        assert [node["capsule"] for node in (await tree_of(a, "s"))["nodes"]] == [capsule_of(first)]
        (second,) = await ask(a, PROMPT + first["text"] + "and more", "s")
        (begun,) = await ask(a, PROMPT, "new")
        last = await a.post(
            "/v1/completions",
            json={"prompt": PROMPT, **SHORT, "mallee": {"session": "over", "session_final": True}},
        )
        assert last.status_code == 200
        for method, path in (
            *(("GET", "/v1/sessions/s"), ("GET", "/v1/sessions"), ("DELETE", "/v1/sessions/s")),
            ("POST", "/v1/sessions/s/fork"),
        ):
            answer = await b.request(method, path, json={} if method == "POST" else None)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_away"), path
            assert answer.headers["retry-after"] == "1"
        assert (await a.delete("/v1/sessions/s")).status_code == 503
        fleet.hub.set_up(True)

        async def is_told() -> bool:
            names = [each["id"] for each in (await b.get("/v1/sessions")).json()["data"]]
            return names == ["new", "s"] and len((await tree_of(b, "s"))["nodes"]) == 2

        await until_asked(is_told)
        shown = {name: (await tree_of(b, name))["nodes"] for name in ("s", "new")}
        assert [node["capsule"] for node in shown["s"]] == [capsule_of(first), capsule_of(second)]
        assert [node["capsule"] for node in shown["new"]] == [capsule_of(begun)]
        assert (await b.delete("/v1/sessions/s")).json()["released"] == 2


async def test_a_gateway_that_was_cut_off_hears_of_a_close_when_it_is_back() -> None:
    """Its requests of the session end then, and what it left goes."""
    async with two_gateways(MODEL, num_blocks=4096) as two:
        a, b, fleet = two
        await ask(b, PROMPT, "s")
        body = {"prompt": PROMPT, **SHORT, "max_tokens": 3000, "mallee": {"session": "s"}}
        asking = asyncio.create_task(b.post("/v1/completions", json=body))
        await until(lambda: fleet.engines["w0"].stats().jobs == 1)
        fleet.gateways[0].peers._others = lambda: ()  # it counts as gone
        two.bus_of(1).signals.set_up(False)
        (left,) = await ask(b, PROMPT, "s")
        assert (await a.delete("/v1/sessions/s")).json()["released"] == 1
        assert (await a.get("/v1/sessions/s")).status_code == 404
        assert (await tree_of(b, "s"))["running"] == 1
        two.bus_of(1).signals.set_up(True)
        answer = await asking
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "session_closed")
        assert (await b.get("/v1/sessions/s")).status_code == 404

        async def is_gone() -> bool:
            return (await b.get(f"/v1/capsules/{capsule_of(left)}")).status_code == 404

        await until_asked(is_gone)
        assert (await a.get("/v1/sessions")).json()["data"] == []


async def test_a_rewind_belongs_to_its_session_also_at_a_gateway_that_does_not_know_that() -> None:
    async with two_gateways(MODEL) as (a, b, fleet):
        (first,) = await ask(a, PROMPT, "s", mallee={"session": "s", "keep": True})
        await until(lambda: fleet.gateways[1].capsules.is_kept(capsule_of(first)))  # type: ignore[arg-type]
        path = f"/v1/capsules/{capsule_of(first)}/rewind"
        rewound = (await post(b, path, to=20))["id"]

        async def is_noted() -> bool:
            nodes = (await tree_of(b, "s"))["nodes"]
            return [(node["capsule"], node["tokens"]) for node in nodes[1:]] == [(rewound, 20)]

        await until_asked(is_noted)


async def test_the_sdk_and_the_command_list_show_fork_and_close(capsys: Any) -> None:
    async with tiny_fleet(MODEL, 1) as fleet, served(fleet.gateways[0]) as (url, _):
        async with AsyncMallee(url) as client:
            with suppress(ZeroDivisionError):
                async with client.session("left") as left:
                    await left.complete("abc", **FEW)
                    raise ZeroDivisionError
            branch = await client.complete(PROMPT, session="a b", **FEW)
            (listed,) = [each async for each in client.sessions()]
            assert (listed.id, listed.capsules) == ("a b", 1)
            session = client.session("a b")
            tree = await session.show()
            assert [node.tokens for node in tree.nodes] == [len(PROMPT) + 3]
            fork = await session.fork("c")
            assert (fork.root, (await fork.show()).parent) == (tree.nodes[0].capsule, "a b")
            assert branch.text is not None

        def work() -> list[Any]:
            found = []
            for words in (["list"], ["show", "a b"], ["close", "c"]):
                ran = CliRunner().invoke(cli, ["sessions", *words, "--url", url, "--json"])
                assert ran.exit_code == 0, ran.output
                found.append(json.loads(ran.output))
            shown = CliRunner().invoke(cli, ["sessions", "show", "a b", "--url", url])
            assert tree.nodes[0].capsule in shown.output.replace("\n", "")
            listed = CliRunner().invoke(cli, ["sessions", "list", "--url", url])
            assert "a b" in listed.output
            return found

        listing, one, closed = await asyncio.to_thread(work)
        assert [each["id"] for each in listing["sessions"]] == ["a b", "c"]
        assert one["children"] == ["c"]
        assert (closed["released"], closed["cancelled"]) == (0, 0)


def talk(url: str) -> None:
    with Mallee(url) as client:
        with client.session("bug-7", cache_salt="s") as session:
            with pytest.raises(NotFound):
                session.show()
            first = session.complete("A tree", **FEW)
            more = first.fork([" of", " and"], **FEW).wait()
            with session.stream("A tree of", **FEW) as branches:
                streamed = branches.wait()
            tree = session.show()
            capsules = [each.capsule for each in (first, *more, *streamed)]
            assert {node.capsule for node in tree.nodes} == set(capsules)
            parents = {node.capsule: node.parent for node in tree.nodes}
            assert [parents[each.capsule] for each in more] == [first.capsule] * 2
            with session.fork("bug-7b", capsule=first.capsule) as other:
                assert (other.id, other.root) == ("bug-7b", first.capsule)
                (again,) = other.capsule(first.capsule).fork(1, **FEW).wait()
                assert {n.capsule for n in other.show().nodes} == {first.capsule, again.capsule}
                assert other.show().parent == "bug-7"
                assert session.show().children == ["bug-7b"]
            with pytest.raises(UnknownCapsule):
                client.capsule(again.capsule, cache_salt="s")
            assert client.capsule(first.capsule, cache_salt="s").id == first.capsule
            assert list(client.sessions()) == []  # of another salt
            assert [each.id for each in client.sessions(cache_salt="s")] == ["bug-7"]
        for capsule in capsules:
            with pytest.raises(UnknownCapsule):
                client.capsule(capsule, cache_salt="s")
        mine = client.session()
        assert mine.id != client.session().id
        branch = mine.complete("abc", priority=2, **FEW)
        assert [node.capsule for node in mine.show().nodes] == [branch.capsule]
        assert mine.close().released == 1
        with pytest.raises(NotFound):
            mine.close()
        with client.session("nothing is asked in it"):
            pass
        with suppress(ZeroDivisionError), client.session("left") as left:
            left.complete("abc", **FEW)
            raise ZeroDivisionError
        assert list(client.sessions()) == []
        assert repr(Session(client, "x", None)) == "Session('x', root=None)"


async def test_a_session_is_an_object_with_verbs() -> None:
    """F29, part: its requests name it, also those of its capsules and branches; its block closes it."""
    async with tiny_api(MODEL, 1) as (http, _):
        await asyncio.to_thread(talk, str(http.base_url))


# Agents' own APIs and headers

SYSTEM = "You are a coding agent. Read before you write. " * 8


async def turns(
    client: httpx.AsyncClient, path: str, headers: dict[str, str], bodies: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    answers = []
    for body in bodies:
        response = await client.post(path, json=body, headers=headers)
        assert response.status_code == 200, response.text
        answers.append(response.json())
    return answers


async def parents(client: httpx.AsyncClient, session: str) -> list[int | None]:
    """Of each node in order, the place of its parent."""
    nodes = (await client.get(f"/v1/sessions/{session}")).json()["nodes"]
    places = {node["capsule"]: i for i, node in enumerate(nodes)}
    return [None if node["parent"] is None else places[node["parent"]] for node in nodes]


async def test_claude_code_codex_and_opencode_make_trees() -> None:
    """F31: sessions of real agents: messages, responses and chat; a subagent's is a child."""
    (family,) = (each for each in FAMILIES if each.name == "chatml")
    question, answer = (
        {"role": "user", "content": "Fix it."},
        {"role": "assistant", "content": "ok"},
    )
    later = [question, answer, {"role": "user", "content": "And the other one, too, please."}]
    async with tiny_api(
        MODEL, 1, num_blocks=4096, settings={"chat": ChatTemplate(None, family=family)}
    ) as (client, _):
        claude = {"x-claude-code-session-id": "c"}
        asked = {"model": "m", "max_tokens": 4, "system": SYSTEM}
        bodies = [{**asked, "messages": [question]}, {**asked, "messages": later}]
        await turns(client, "/v1/messages", claude, bodies)
        agent = claude | {"x-claude-code-agent-id": "a"}
        await turns(
            client, "/v1/messages", agent, [{**asked, "system": "Else.", "messages": later}]
        )
        assert await parents(client, "c") == [None, 0]
        shown = (await client.get("/v1/sessions/c:a")).json()
        assert (shown["parent"], [node["parent"] for node in shown["nodes"]]) == ("c", [None])
        assert (await client.get("/v1/sessions/c")).json()["children"] == ["c:a"]

        codex = {"thread-id": "t"}
        said: dict[str, Any] = {"model": "m", "instructions": SYSTEM, "max_output_tokens": 16}
        (first,) = await turns(client, "/v1/responses", codex, [{**said, "input": "Fix it."}])
        again = {**said, "previous_response_id": first["id"]}
        await turns(client, "/v1/responses", codex, [{**again, "input": t} for t in ("a", "b")])
        assert await parents(client, "t") == [None, 0, 0]

        system = {"role": "system", "content": SYSTEM}
        chat = [{"messages": [system, *each], "max_tokens": 4} for each in ([question], later)]
        await turns(client, "/v1/chat/completions", {"x-session-id": "o"}, chat)
        assert await parents(client, "o") == [None, 0]
        names = [each["id"] for each in (await client.get("/v1/sessions")).json()["data"]]
        assert names == ["c", "c:a", "o", "t"]


# The session of a request, by its body and headers

LONG = "s" * (MAX_SESSION + 1)
PLAIN = AnyRequest()


def read(headers: dict[str, str], request: AnyRequest = PLAIN) -> SessionNames:
    return read_session(request, Headers(headers))


@pytest.mark.parametrize(
    ("headers", "session", "parent"),
    [
        ({"X-Dynamo-Session-ID": "d"}, "d", ""),
        ({"x-dynamo-session-id": "d", "x-dynamo-parent-session-id": "p"}, "d", "p"),
        ({"x-claude-code-session-id": "c"}, "c", ""),
        ({"x-claude-code-session-id": "c", "x-claude-code-agent-id": "a"}, "c:a", "c"),
        (
            {
                "x-claude-code-session-id": "c",
                "x-claude-code-agent-id": "b",
                "x-claude-code-parent-agent-id": "a",
            },
            "c:b",
            "c:a",
        ),
        ({"thread-id": "t", "x-codex-parent-thread-id": "u"}, "t", "u"),
        ({"x-session-id": "o", "x-parent-session-id": "q"}, "o", "q"),
        ({"session-id": "l"}, "l", ""),
        ({"session_id": "l"}, "l", ""),
        ({"x-session-affinity": "l"}, "l", ""),
        ({"X-SMG-Routing-Key": "k"}, "k", ""),
        ({"x-correlation-id": "one of many requests"}, "", ""),
        ({"x-dynamo-parent-session-id": "p", "x-session-id": "o"}, "o", ""),
        ({"x-dynamo-session-id": "d", "x-dynamo-parent-session-id": "d"}, "d", ""),
        ({"x-dynamo-session-id": " d "}, "d", ""),
    ],
)
def test_each_client_s_headers_name_its_session(
    headers: dict[str, str], session: str, parent: str
) -> None:
    """F31, part: the sessions of agents, as their clients name them."""
    assert read(headers) == (session, parent, False)


def test_slashes_of_a_header_are_written_as_in_a_path() -> None:
    """F31, part: the request is served as before; no other name becomes the same."""
    headers = {"x-session-id": "repo/fix-7", "x-parent-session-id": "repo"}
    assert read(headers) == ("repo%2Ffix-7", "repo", False)
    agent = {"x-claude-code-session-id": "c/1", "x-claude-code-agent-id": "a/2"}
    assert read(agent) == ("c%2F1:a%2F2", "c%2F1", False)


async def test_a_name_with_a_slash_is_refused_wherever_one_is_given() -> None:
    """With the name and the remedy; an agent's header names a session that its path finds."""
    async with tiny_api(MODEL, 1) as (client, _):
        asked = {"prompt": PROMPT, **FEW}
        bodies: list[tuple[str, str, dict[str, Any], str]] = [
            ("POST", "/v1/completions", {**asked, "session_id": "a/b"}, "session_id"),
            (
                "POST",
                "/v1/capsules",
                {"prompt": PROMPT, "mallee": {"session": "a/b"}},
                "mallee.session",
            ),
            ("POST", "/v1/sessions/s/fork", {"session": "a/b"}, "session"),
            ("PUT", "/v1/sessions/s", {"budget": {"tokens": 9}, "parent": "a/b"}, "parent"),
        ]
        for method, path, body, param in bodies:
            error = (await client.request(method, path, json=body)).json()["error"]
            assert error["param"] == param
            assert "'a/b'" in error["message"]
            assert "slash" in error["message"]
        for method, path in (("PUT", "a%2Fb"), ("GET", "a%2Fb"), ("POST", "a%2Fb/fork")):
            answer = await client.request(method, f"/v1/sessions/{path}", json={})
            assert answer.status_code == 404
            assert "/v1/sessions/a/b" in answer.json()["error"]["message"]
            assert "no slash" in answer.json()["error"]["message"]
        served = await client.post("/v1/completions", json=asked, headers={"x-session-id": "a/b"})
        assert served.status_code == 200
        (listed,) = (await client.get("/v1/sessions")).json()["data"]
        assert listed["id"] == "a%2Fb"
        assert (await client.get("/v1/sessions/a%252Fb")).json()["capsules"] == 1


def test_the_body_comes_first_and_headers_in_the_order_of_the_table() -> None:
    headers = {
        "x-smg-routing-key": "k",
        "x-session-affinity": "f",
        "session_id": "e",
        "x-session-id": "o",
        "thread-id": "t",
        "x-claude-code-session-id": "c",
        "x-dynamo-session-id": "d",
        "x-dynamo-parent-session-id": "p",
    }
    both = AnyRequest(session_id="v", mallee=Extras(session="m"))
    assert read(headers, both).session == "m"
    assert read(headers, AnyRequest(session_id="v")) == ("v", "", False)
    for name in ("d", "c", "t", "o", "e", "f", "k"):
        assert read(headers).session == name
        headers = {key: each for key, each in headers.items() if each != name}
    assert read(headers) == ("", "", False)


@pytest.mark.parametrize("bad", [LONG, "a\x07b", "", "/" * 43])
def test_a_header_that_is_no_name_is_none_and_fails_no_request(bad: str) -> None:
    headers = {"x-dynamo-session-id": bad, "x-session-id": "o"}
    assert read(headers).session == "o"
    twice = Headers(raw=[(b"x-session-id", b"a"), (b"x-session-id", b"b")])
    assert read_session(PLAIN, twice).session == ""


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (AnyRequest(mallee=Extras(session=LONG)), "mallee.session"),
        (AnyRequest(mallee=Extras(session="a\nb")), "mallee.session"),
        (AnyRequest(session_id=LONG), "session_id"),
        (AnyRequest(session_id="a/b"), "session_id"),
        (AnyRequest(mallee=Extras(session="a", parent_session=LONG)), "mallee.parent_session"),
        (AnyRequest(mallee=Extras(parent_session="p")), "mallee.parent_session"),
    ],
)
def test_a_body_that_names_it_wrongly_is_refused(request_: AnyRequest, param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        read({}, request_)
    assert caught.value.fields["param"] == param


def test_the_last_request_of_a_session_says_so() -> None:
    for value, is_final in (("true", True), ("True", True), ("1", True), ("false", False)):
        given = {"x-dynamo-session-id": "d", "x-dynamo-session-final": value}
        assert read(given).is_final == is_final
    assert not read({"x-dynamo-session-final": "true"}).is_final
    assert read({}, AnyRequest(mallee=Extras(session="m", session_final=True))).is_final
