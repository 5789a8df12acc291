"""Two tenants of one service: neither sees, changes or ends anything of the other's."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import yaml

from mallee.api.openapi.document import template
from mallee.api.openapi.operations import OPERATIONS, Operation
from mallee.gateway.access.keys import NewKey, new_key
from support.fuzzing import CHATML
from support.mock_scene import make_folder, mock_config
from support.mock_stack import mock_stack

ACME, EVIL = new_key("acme", "client", None), new_key("evil", "client", None)
SECRET = "xyzzy"
PROMPT = f"{SECRET} many trunks from one root, which sprout again after fire " * 3
SESSION = f"{SECRET}-session"
LISTS = (
    *("/v1/capsules", "/v1/capsules/count", "/v1/sessions"),
    *("/v1/responses", "/v1/conversations"),
)
OWN = ("model", "worker", "file")  # names in paths that belong to no tenant
MAKING = ("sessions.put",)  # what has the name may be new, and is its caller's then


class Tenant:
    """A client with a key."""

    def __init__(self, client: httpx.AsyncClient, key: NewKey) -> None:
        self._client = client
        self._headers = {"authorization": f"Bearer {key.token}"}

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else None
        value = None if content is not None else body
        return await self._client.request(
            *(method, path), json=value, content=content, headers=self._headers | headers
        )

    async def made(self, path: str, **body: Any) -> Any:
        answer = await self.ask("POST", path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def things(self) -> dict[str, str]:
        """One of everything that has a name, by the path's parameter."""
        where: dict[str, Any] = {"mallee": {"session": SESSION, "record": True}}
        capsule = await self.made("/v1/capsules", prompt=PROMPT)
        answer = await self.made("/v1/completions", prompt=PROMPT, max_tokens=4, **where)
        response = await self.made("/v1/responses", input=PROMPT, max_output_tokens=4)
        said = [{"role": "user", "content": PROMPT}]
        conversation = await self.made("/v1/conversations", items=said, metadata={SECRET: SECRET})
        path = f"/v1/conversations/{conversation['id']}/items"
        (item,) = (await self.ask("GET", path)).json()["data"]
        return {
            "capsule": capsule["id"],
            "request": answer["id"],
            "session": SESSION,
            "response": response["id"],
            "conversation": conversation["id"],
            "item": item["id"],
            "branch": "0",
        }


def calls(operation: Operation, names: dict[str, str]) -> tuple[str, Any] | None:
    """The operation's example with these names in path and body; None: it names nothing of a tenant."""
    path = template(operation.path)
    params = set(re.findall(r"{(\w+)}", path)) - set(OWN)
    body: Any = None if operation.body is None else dict(operation.example)
    if not params or operation.handler in MAKING:
        return None
    for name, value in names.items():
        path = path.replace(f"{{{name}}}", value)
    return path, body


def plain(answer: httpx.Response, names: dict[str, str]) -> tuple[int, str]:
    """Status and body of an answer, without the names that were asked for."""
    text = answer.text
    for name, value in names.items():
        text = text.replace(value, name)
    return answer.status_code, text


def unknown(name: str, value: str) -> str:
    """A name of the same form that nothing has."""
    if name == "branch":
        return value
    last = value.rstrip(".0123456789")[-1:] if name == "capsule" else value[-1]
    at = value.rindex(last)
    return value[:at] + ("a" if last != "a" else "b") + value[at + 1 :]


async def test_a_tenant_sees_nothing_of_another_s(tmp_path: Path) -> None:
    """X14, F7, part: of all routes, by ids, lists, names in bodies, equal sessions and salts, cache hits."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(yaml.safe_dump({"keys": [key.entry for key in (ACME, EVIL)]}))
    folder = make_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    config = mock_config(
        folder,
        mock__engines_per_worker=1,
        http__keys_file=str(keys),
        recording__folder=str(tmp_path / "records"),
        engine__kv_tokens=16384,
    )
    async with (
        mock_stack(config) as stack,
        httpx.AsyncClient(base_url=stack.base_url, timeout=20) as client,
    ):
        acme, evil = Tenant(client, ACME), Tenant(client, EVIL)
        names = await acme.things()
        others = {name: unknown(name, value) for name, value in names.items()}
        assert all(others[name] != names[name] for name in names if name != "branch")

        for path in LISTS:
            listed = (await evil.ask("GET", path)).json()
            assert listed.get("data", []) == [], path
            assert listed.get("count", 0) == 0, path

        num_asked = 0
        for operation in OPERATIONS:
            theirs, nobodys = calls(operation, names), calls(operation, others)
            if theirs is None or nobodys is None:
                continue
            found = plain(await evil.ask(operation.method, *theirs), names)
            expected = plain(await evil.ask(operation.method, *nobodys), others)
            assert found == expected, f"{operation.method} {operation.path}"
            assert found[0] == 404, f"{operation.method} {operation.path}: {found}"
            assert SECRET not in found[1], f"{operation.method} {operation.path}: {found}"
            num_asked += 1
        assert num_asked > 30, "most operations name something"

        # Names in bodies.
        for path, body in (
            ("/v1/responses", {"input": "x", "previous_response_id": "response"}),
            ("/v1/responses", {"input": "x", "conversation": "conversation"}),
            ("/v1/search", {"policy": {"type": "best_of_n"}, "capsule": "capsule"}),
        ):
            field = next(reversed(body))
            answers = [
                plain(await evil.ask("POST", path, body | {field: known[body[field]]}), known)
                for known in (names, others)
            ]
            assert answers[0] == answers[1], body
            assert answers[0][0] == 404, answers[0]

        # The same session name, salt and idempotency key are others; the cache tells nothing in time.
        body = {"prompt": PROMPT, "max_tokens": 4, "mallee": {"session": SESSION}}
        await acme.ask("POST", "/v1/completions", body, **{"idempotency-key": "k"})
        own = await evil.ask("POST", "/v1/completions", body, **{"idempotency-key": "k"})
        (choice,) = own.json()["choices"]
        assert choice["mallee"]["cached_tokens"] == 0
        assert own.json()["id"] != names["request"]
        tree = (await evil.ask("GET", f"/v1/sessions/{SESSION}")).json()
        assert {node["request"] for node in tree["nodes"]} == {own.json()["id"]}
        forks = [
            plain(
                await evil.ask(
                    "POST", f"/v1/sessions/{SESSION}/fork", {"capsule": known["capsule"]}
                ),
                known,
            )
            for known in (names, others)
        ]
        assert forks[0] == forks[1]
        assert forks[0][0] == 400, forks
        salted = await evil.made("/v1/completions", prompt=PROMPT, max_tokens=4, cache_salt="acme")
        assert salted["choices"][0]["mallee"]["cached_tokens"] == 0
        for path in ("/v1/router/explain", "/v1/router/workers", "/metrics"):
            refused = await evil.ask("GET", path)
            assert refused.status_code == 403, path
            assert SECRET not in refused.text

        # A budget bounds one's own session of that name.
        path = f"/v1/sessions/{SESSION}"
        bound = await evil.ask("PUT", path, {"budget": {"tokens": 1}})
        assert bound.json()["budget"]["tokens"]["left"] == 1
        assert (await acme.ask("GET", path)).json()["budget"] is None

        # A close and a bulk delete of one's own leave all of the other's.
        assert (await evil.ask("DELETE", f"/v1/sessions/{SESSION}")).status_code == 200
        assert (await evil.ask("DELETE", "/v1/capsules?all=true")).status_code == 200
        for path in (
            *(f"/v1/capsules/{names['capsule']}", f"/v1/sessions/{SESSION}"),
            *(f"/v1/requests/{names['request']}", f"/v1/responses/{names['response']}"),
            f"/v1/conversations/{names['conversation']}/items/{names['item']}",
        ):
            kept = await acme.ask("GET", path)
            assert kept.status_code == 200, f"{path}: {kept.text}"
