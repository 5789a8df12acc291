"""Capsules of one scope listed, counted and deleted together."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bench.doubles.random_model import random_model
from mallee.api.capsules import bulk
from mallee.api.capsules.bulk import TIERS
from mallee.gateway.access.access import Access
from mallee.gateway.access.keys import new_key
from mallee.gateway.capsules.capsules import CapsuleInfo
from mallee.protocol.errors import StorageFailed, UnknownCapsule
from mallee.protocol.ids import CapsuleId, Scope, WorkerId
from mallee.protocol.messages import CapsuleStatus
from support.examples import examples
from support.plain_ids import SCOPES
from support.tiny_fleet import post, tiny_api

NOW = 1_760_000_005.5
SALTS = ("", "mine")
MODEL = random_model("llama", 5, max_position_embeddings=2048)


class Shelf:
    """A service's capsules, by scope; `inspect` tells what a worker would."""

    def __init__(self, service: Any) -> None:
        self.context, self.tasks = service.context, service.tasks
        self.store, self.peers = service.store, service.peers
        self.new_name = service.new_name
        self.health, self.router = service.health, service.router
        self.requests = self.operator = self.capsules = self
        self.held: dict[Scope, dict[CapsuleId, CapsuleInfo]] = {}
        self.silent: set[CapsuleId] = set()
        self.broken: set[CapsuleId] = set()
        self.vanishing: set[CapsuleId] = set()
        self.num_scans = 0

    def of(self, scope: Scope, after: str) -> Iterator[CapsuleInfo]:
        self.num_scans += 1
        for name in sorted(name for name in self.held.get(scope, {}) if name > after):
            if name in self.held[scope]:
                yield self.held[scope][name]._replace(status=None)

    async def inspect(self, capsule: CapsuleId, scope: Scope) -> CapsuleInfo:
        info = self.held.get(scope, {}).get(capsule)
        if info is None:
            raise UnknownCapsule(capsule)
        return info._replace(status=None) if capsule in self.silent else info

    async def release(self, capsule: CapsuleId, scope: Scope) -> None:
        await asyncio.sleep(0)
        if capsule in self.broken:
            raise StorageFailed("write", "w0.log", 5, "I/O error")
        if self.held.get(scope, {}).pop(capsule, None) is None or capsule in self.vanishing:
            raise UnknownCapsule(capsule)


@st.composite
def capsules(draw: st.DrawFn) -> CapsuleInfo:
    request, branch = draw(st.integers(0, 3)), draw(st.integers(0, 4))
    part = draw(st.sampled_from(["", "-1"]))
    name = CapsuleId(f"req_{request}{part}.{branch}")
    tokens = draw(st.integers(1, 99))
    tier, is_pinned = draw(st.sampled_from(TIERS)), draw(st.booleans())
    status = CapsuleStatus(name, tokens, 1, 0, is_pinned, tier=tier)
    return CapsuleInfo(name, WorkerId("w0"), tokens, NOW - draw(st.integers(0, 9)), status=status)


FILTERS = st.fixed_dictionaries(
    {},
    optional={
        "request": st.sampled_from([f"req_{i}" for i in range(5)]),
        "pinned": st.sampled_from(["true", "false"]),
        "tier": st.sampled_from(TIERS),
        "min_age_s": st.sampled_from(["0", "3", "5.5", "100"]),
    },
)


def is_meant(info: CapsuleInfo, asked: dict[str, str]) -> bool:
    """The oracle, written apart."""
    assert info.status is not None
    return all(
        {
            "request": lambda v: info.capsule.split(".")[0].split("-")[0] == v,
            "pinned": lambda v: str(info.status.is_pinned).lower() == v,
            "tier": lambda v: info.status.tier == v,
            "min_age_s": lambda v: NOW - info.created >= float(v),
        }[name](value)
        for name, value in asked.items()
    )


@pytest.fixture(scope="module")
def call_with_shelf(call_over: Any, fake_service: Any) -> Any:
    shelf = Shelf(fake_service())
    return call_over(shelf), shelf


def path_of(asked: dict[str, str], path: str = "/v1/capsules", **more: object) -> str:
    query = "&".join(f"{name}={value}" for name, value in {**asked, **more}.items())
    return f"{path}?{query}"


@examples(100)
@given(
    mine=st.lists(capsules(), max_size=30),
    theirs=st.lists(capsules(), max_size=10),
    asked=FILTERS,
    limit=st.integers(1, 7),
)
def test_what_is_meant_is_found_counted_and_deleted_and_nothing_else(
    call_with_shelf: Any,
    mine: list[CapsuleInfo],
    theirs: list[CapsuleInfo],
    asked: dict[str, str],
    limit: int,
) -> None:
    """F10, part: against brute force, with another scope's of the same names beside them."""
    call, shelf = call_with_shelf
    own, other = (SCOPES.scope("", salt) for salt in ("mine", ""))
    shelf.held = {
        own: {each.capsule: each for each in mine},
        other: {each.capsule: each for each in theirs},
    }
    before = dict(shelf.held[other])
    salt = {"x-cache-salt": "mine"}
    meant = sorted(name for name, each in shelf.held[own].items() if is_meant(each, asked))
    kept = set(shelf.held[own]) - set(meant)
    counted = call("GET", path_of(asked, "/v1/capsules/count"), headers=salt).body
    tokens = sum(shelf.held[own][name].boundary for name in meant)
    assert counted == {
        **{"object": "capsule.count", "count": len(meant), "tokens": tokens, "unknown": 0}
    }
    found: list[str] = []
    has_more = True
    while has_more:
        page = call(
            "GET", path_of(asked, limit=limit, after=found[-1] if found else ""), headers=salt
        ).body
        found += [each["id"] for each in page["data"]]
        has_more = page["has_more"]
        assert len(page["data"]) <= limit
    assert found == meant
    where = path_of(asked) if asked else "/v1/capsules?all=true"
    for expected in (len(meant), 0):  # the second time nothing is left
        answer = call("DELETE", where, headers=salt)
        assert (answer.status, answer.body) == (
            200,
            {"object": "capsules.deleted", "deleted": expected},
        )
    assert set(shelf.held[own]) == kept
    assert shelf.held[other] == before


def some(n: int, prefix: str = "req_0") -> dict[CapsuleId, CapsuleInfo]:
    names = [CapsuleId(f"{prefix}.{i:04d}") for i in range(n)]
    return {
        name: CapsuleInfo(
            name, WorkerId("w0"), 10, NOW, status=CapsuleStatus(name, 10, 1, 0, True, tier="device")
        )
        for name in names
    }


@pytest.mark.parametrize("query", ["all=true", "pinned=true"])
def test_more_than_a_page_is_deleted_at_once(call_with_shelf: Any, query: str) -> None:
    call, shelf = call_with_shelf
    scope = SCOPES.scope("", "")
    shelf.held = {scope: some(2 * bulk.PAGE + 3)}
    shelf.vanishing = {CapsuleId("req_0.0007")}
    shelf.num_scans = 0
    assert call("DELETE", f"/v1/capsules?{query}").body["deleted"] == 2 * bulk.PAGE + 3
    assert shelf.num_scans == 1, "a page at a time would take the square of it"
    assert shelf.held[scope] == {}


def test_looking_through_a_scope_counts_as_a_request_of_its_key(
    call_over: Any, service: Any, tmp_path: Path
) -> None:
    """F10, part: it takes as long as the scope is large."""
    key, file = new_key("alice", "client", None), tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump({"keys": [{**key.entry, "requests_per_minute": 3}]}))
    call = call_over(Shelf(service), Access(file, {}))

    def status(method: str, path: str) -> int:
        headers = {"authorization": f"Bearer {key.token}"}
        return int(call(method, path, headers=headers).status)

    assert status("GET", "/v1/capsules") == 200
    assert status("GET", "/v1/capsules/count") == 200
    assert status("DELETE", "/v1/capsules?all=true") == 200
    assert status("GET", "/v1/capsules/count") == 429
    assert status("DELETE", "/v1/capsules?all=true") == 429
    assert status("GET", "/v1/models") == 200


def test_what_fails_is_told_after_the_others_are_deleted(call_with_shelf: Any) -> None:
    call, shelf = call_with_shelf
    scope = SCOPES.scope("", "")
    shelf.held, shelf.vanishing = {scope: some(5)}, set()
    shelf.broken = {CapsuleId("req_0.0001"), CapsuleId("req_0.0003")}
    answer = call("DELETE", "/v1/capsules?all=true")
    assert (answer.status, answer.body["error"]["code"]) == (503, "storage_failed")
    assert "2 of 5 capsules could not be deleted" in answer.body["error"]["message"]
    assert set(shelf.held[scope]) == shelf.broken
    shelf.broken = set()
    assert call("DELETE", "/v1/capsules?all=true").body["deleted"] == 2


def test_capsules_of_silent_workers_are_counted_apart_and_not_deleted(call_with_shelf: Any) -> None:
    call, shelf = call_with_shelf
    scope = SCOPES.scope("", "")
    shelf.held, shelf.silent = {scope: some(3)}, {CapsuleId("req_0.0001")}
    counted = call("GET", "/v1/capsules/count?pinned=true").body
    assert (counted["count"], counted["unknown"]) == (2, 1)
    page = call("GET", "/v1/capsules?tier=device").body
    assert (len(page["data"]), page["unknown"]) == (2, 1)
    answer = call("DELETE", "/v1/capsules?pinned=true")
    assert (answer.status, set(shelf.held[scope])) == (503, shelf.silent)
    assert call("DELETE", "/v1/capsules?request=req_0").body["deleted"] == 1
    shelf.silent = set()


@pytest.mark.parametrize(
    ("method", "query", "param"),
    [
        ("DELETE", "", "all"),
        ("DELETE", "all=false", "all"),
        ("DELETE", "all=yes", "all"),
        ("DELETE", "all=true&tier=host", "all"),
        ("DELETE", "teir=host", "teir"),
        ("DELETE", "tier=gpu", "tier"),
        ("DELETE", "pinned=1", "pinned"),
        ("DELETE", "min_age_s=-1", "min_age_s"),
        ("DELETE", "min_age_s=nan", "min_age_s"),
        ("DELETE", "min_age_s=x", "min_age_s"),
        ("DELETE", "request=", "request"),
        ("DELETE", "tier=host&tier=disk", "tier"),
        ("DELETE", "all=true&limit=3", "limit"),
        ("GET", "all=true", "all"),
        ("GET", "limit=0", "limit"),
    ],
)
def test_a_query_that_means_nothing_is_refused(
    call_with_shelf: Any, method: str, query: str, param: str
) -> None:
    call, shelf = call_with_shelf
    shelf.held = {SCOPES.scope("", ""): some(2)}
    answer = call(method, f"/v1/capsules?{query}")
    assert (answer.status, answer.body["error"]["param"]) == (400, param)
    assert len(shelf.held[SCOPES.scope("", "")]) == 2


async def test_a_fleets_capsules_are_deleted_by_what_they_are() -> None:
    """F10, part: over HTTP, with workers that tell; another salt's stay."""
    async with tiny_api(MODEL, 2) as (client, fleet):
        asked = {"prompt": "a tree of many trunks", "max_tokens": 4}
        kept = await post(client, "/v1/completions", **asked, n=3, mallee={"keep": True})
        await post(client, "/v1/completions", **asked, n=2)
        await post(client, "/v1/completions", **asked, cache_salt="mine")
        await post(client, "/v1/capsules", prompt="another tree")

        async def count(query: str = "", **headers: str) -> int:
            path = f"/v1/capsules/count?{query}"
            return int((await client.get(path, headers=headers)).json()["count"])

        assert [await count(q) for q in ("", "pinned=true", "pinned=false")] == [6, 4, 2]
        assert await count(f"request={kept['id']}") == 3
        assert await count("tier=device&min_age_s=3600") == 0
        gone = await client.delete("/v1/capsules?pinned=false")
        assert gone.json() == {"object": "capsules.deleted", "deleted": 2}
        gone = await client.delete(f"/v1/capsules?request={kept['id']}")
        assert gone.json()["deleted"] == 3
        assert (await client.delete("/v1/capsules?all=true")).json()["deleted"] == 1
        assert (await client.delete("/v1/capsules?all=true")).json()["deleted"] == 0
        assert await count(**{"x-cache-salt": "mine"}) == 1
        held = sum(each.stats().capsules.kept for each in fleet.engines.values())
        assert held == 0  # the salted one is an answer's
