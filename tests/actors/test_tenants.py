"""Two tenants and an operator at one service: nothing of one is seen or changed by the other."""

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml

from mallee.gateway.access.keys import NewKey, new_key
from support.mock_scene import make_folder, mock_config
from support.mock_stack import Stack, mock_stack

ACME, EVIL = new_key("acme", "client", None), new_key("evil", "client", None)
SHARED, ROOT = new_key("acme-2", "client", "acme"), new_key("root", "operator", None)
PROXY = new_key("proxy", "proxy", None)
SECRET_TEXT = "the secret of acme: many trunks from one root "
SALT = "salt-of-ann"
ABSENT = "req_" + "0" * 40


class Client:
    """Requests with one key."""

    def __init__(self, stack: Stack, key: NewKey) -> None:
        headers = {"authorization": f"Bearer {key.token}"}
        self.http = httpx.AsyncClient(base_url=stack.base_url, headers=headers, timeout=20)

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http.request(method, path, json=body, headers=named)

    async def complete(self, prompt: str, **more: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, **more}
        answer = await self.ask("POST", "/v1/completions", body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


class Scene(NamedTuple):
    stack: Stack
    acme: Client
    evil: Client
    shared: Client
    root: Client
    proxy: Client


@asynccontextmanager
async def scene(folder: Path, **settings: Any) -> AsyncIterator[Scene]:
    keys = (ACME, EVIL, SHARED, ROOT, PROXY)
    file = folder / "keys.yaml"
    file.write_text(yaml.safe_dump({"keys": [key.entry for key in keys]}))
    config = mock_config(make_folder(folder), http__keys_file=str(file), **settings)
    async with mock_stack(config) as stack:
        made = Scene(stack, *(Client(stack, key) for key in keys))
        try:
            yield made
        finally:
            for client in made[1:]:
                await client.http.aclose()


async def test_a_capsule_is_there_for_any_key_of_its_tenant_and_for_its_salt_alone(
    tmp_path: Path,
) -> None:
    """F7, part: of answers, capsules, forks of forks; by a proxy that names the tenant, too."""
    async with scene(tmp_path) as s:
        whole = await s.acme.complete(SECRET_TEXT * 3, n=2)
        salted = await s.acme.complete(SECRET_TEXT * 3, cache_salt=SALT)
        kept = (await s.acme.ask("POST", "/v1/capsules", {"prompt": SECRET_TEXT})).json()["id"]
        fork = (await s.acme.ask("POST", f"/v1/capsules/{kept}/fork", {"n": 2})).json()
        left = [choice["mallee"]["capsule"] for choice in (*whole["choices"], *fork["choices"])]
        for name in (*left, kept):
            assert (await s.shared.ask("GET", f"/v1/capsules/{name}")).status_code == 200
            again = await s.proxy.ask("GET", f"/v1/capsules/{name}", x_tenant_id="acme")
            assert again.status_code == 200
            assert (await s.proxy.ask("GET", f"/v1/capsules/{name}")).status_code == 404
        refused = await s.evil.ask("GET", f"/v1/capsules/{kept}", x_tenant_id="acme")
        assert refused.status_code == 403
        # With several gateways an unknown capsule is asked for over the broker: not one of another scope.
        taken = []
        for name in (kept, f"{ABSENT}.0"):
            begin = time.monotonic()
            assert (await s.evil.ask("GET", f"/v1/capsules/{name}")).status_code == 404
            taken.append(time.monotonic() - begin)
        assert taken[0] == taken[1], "a refused id takes as long as an unknown one"
        path = f"/v1/capsules/{salted['choices'][0]['mallee']['capsule']}"
        assert (await s.acme.ask("GET", path)).status_code == 404, "a salt is a scope of its own"
        assert (await s.evil.ask("GET", path, x_cache_salt=SALT)).status_code == 404
        assert (await s.acme.ask("GET", path, x_cache_salt=SALT)).status_code == 200
        forked = await s.acme.ask("POST", f"{path}/fork", {"n": 1, "cache_salt": SALT})
        assert forked.status_code == 200
        assert (await s.acme.ask("DELETE", path, x_cache_salt=SALT)).status_code == 200


async def test_what_one_tenant_has_cached_is_cold_for_another(tmp_path: Path) -> None:
    """F7: counts of cached tokens and the time to the first token, with and without salts."""
    prompt = SECRET_TEXT * 60
    async with scene(
        tmp_path, mock__speedup=0.2, mock__engines_per_worker=1, mock__jitter=0.0
    ) as s:
        await s.acme.complete("warm up", max_tokens=1)

        async def first_token_s(client: Client, **more: Any) -> tuple[float, int]:
            begin = time.monotonic()
            answer = await client.complete(prompt, max_tokens=1, **more)
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return time.monotonic() - begin, cached

        cold, cached = await first_token_s(s.acme)
        assert cached == 0
        again, cached = await first_token_s(s.shared)
        assert cached > 0
        salted, cached = await first_token_s(s.acme, cache_salt=SALT)
        assert cached == 0
        theirs, cached = await first_token_s(s.evil)
        assert cached == 0
        assert again < cold / 2
        assert theirs == salted == pytest.approx(cold, rel=0.05)


async def test_what_tells_of_the_service_wants_the_operator_s_key(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        answer = await s.acme.complete(SECRET_TEXT)
        closed = [
            ("GET", "/metrics"),
            ("GET", "/v1/router/explain"),
            ("GET", "/v1/router/workers"),
            ("GET", f"/v1/router/explain?request={answer['id']}"),
            ("POST", "/v1/router/workers/w0/drain"),
        ]
        for client in (s.acme, s.evil, s.proxy):
            for method, path in closed:
                refused = await client.ask(method, path)
                assert refused.status_code == 403
                assert refused.json()["error"]["code"] == "forbidden"
            assert (await client.ask("GET", "/health")).json() == {"status": "ok"}
        for _, path in closed[:4]:
            assert (await s.root.ask("GET", path)).status_code == 200
        assert len((await s.root.ask("GET", "/health")).json()["workers"]) == 4
        assert answer["choices"][0]["mallee"]["worker"] is None
        mine = await s.root.complete(SECRET_TEXT)
        assert mine["choices"][0]["mallee"]["worker"].startswith("w")


OPEN = ("/docs", "/ui", "/openapi.json")  # the same for everybody; they tell of no tenant
HEALTH = {"/health": "ok", "/health/live": "live", "/health/ready": "ready"}


async def test_every_route_but_health_and_the_api_document_refuses_strangers(
    tmp_path: Path,
) -> None:
    """Also paths that don't exist: without a key nobody learns which ones do."""
    async with scene(tmp_path) as s, httpx.AsyncClient(base_url=s.stack.base_url) as nobody:
        routes: list[Any] = s.stack.gateway.api.routes
        named = [(method, route.path) for route in routes for method in route.methods]
        assert len(named) > 12
        for method, path in (*named, ("GET", "/nothing"), ("POST", "/v1/nothing")):
            answer = await nobody.request(method, path.replace("{", "").replace("}", ""))
            if method == "HEAD":
                continue
            if path in HEALTH:
                assert answer.json() == {"status": HEALTH[path]}
            elif path in OPEN:
                assert answer.status_code == 200
            elif path.startswith("/ui/"):  # the page's files
                assert answer.status_code == 404
            else:
                assert (answer.status_code, answer.json()["error"]["code"]) == (
                    401,
                    "invalid_api_key",
                )


async def test_texts_names_and_keys_are_in_no_log_metric_or_decision(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with scene(tmp_path) as s:
        await s.acme.complete(SECRET_TEXT, cache_salt=SALT, user="ann-of-acme")
        made = await s.acme.ask("POST", "/v1/capsules", {"prompt": SECRET_TEXT})
        await s.evil.ask("GET", f"/v1/capsules/{made.json()['id']}")
        await s.evil.ask("POST", "/v1/completions", {"prompt": SECRET_TEXT, "n": 10_000})
        await s.evil.ask("POST", "/v1/completions", {"prompt": 5})
        bare = httpx.AsyncClient(base_url=s.stack.base_url)
        async with bare:
            await bare.get("/v1/models", headers={"authorization": f"Bearer {ROOT.token[:-1]}"})
        told = (await s.root.ask("GET", "/metrics")).text
        told += (await s.root.ask("GET", "/v1/router/explain?candidates=16")).text
        told += (await s.root.ask("GET", "/v1/router/workers")).text
        told += (await s.root.ask("GET", "/health")).text
    for secret in ("secret of acme", SALT, "ann-of-acme"):
        assert secret not in told + caplog.text
    for key in (ACME, EVIL, ROOT):
        assert key.token[:-1] not in told + caplog.text
        assert key.entry["sha256"] not in told + caplog.text


async def test_a_key_s_limits_are_refusals_with_numbers_over_http(tmp_path: Path) -> None:
    """F30, part: 429 with Retry-After; other keys go on. An unpinned or deleted capsule counts no more."""
    async with scene(tmp_path) as s:

        async def limit(**limits: int) -> None:
            entries = [{**ACME.entry, **limits}, EVIL.entry]
            (tmp_path / "keys.yaml").write_text(yaml.safe_dump({"keys": entries}))
            await s.stack.gateway.access.reload()

        async def make(prompt: str) -> httpx.Response:
            return await s.acme.ask("POST", "/v1/capsules", {"prompt": prompt})

        await limit(max_capsules=1)
        for path in ("/pin", ""):
            made = await make("a" + path)
            assert made.status_code == 200
            assert (await make("b")).status_code == 429
            capsule = f"/v1/capsules/{made.json()['id']}"
            assert (await s.acme.ask("DELETE", capsule + path)).status_code == 200
            assert (await s.acme.ask("GET", capsule)).status_code == (200 if path else 404)
        await limit(max_capsules=1, requests_per_minute=3)
        answers = [await make("a") for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200, 429, 429, 429]
        messages = [answer.json()["error"]["message"] for answer in answers[1:]]
        assert "1 of 1 capsules" in messages[0]
        assert "3 of 3 requests per minute" in messages[2]
        assert 1 <= int(answers[3].headers["retry-after"]) <= 21
        assert answers[3].json()["error"]["code"] == "quota_exceeded"
        await s.evil.complete("a")
