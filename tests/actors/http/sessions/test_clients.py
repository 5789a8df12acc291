"""Agents' own APIs and headers: each makes the tree of its session, without a line of change."""

from typing import Any

import httpx

from mallee.actors.text.chat import ChatTemplate
from mallee.actors.text.families import FAMILIES
from mallee.testing.random_model import random_model
from support.tiny_fleet import tiny_api

MODEL = random_model("llama", 5, max_position_embeddings=4096)
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
