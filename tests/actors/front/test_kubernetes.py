"""The pods of an InferencePool, through an API server that is not real: lists, watches, faults."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from mallee.actors.front.pods import kubernetes
from mallee.actors.front.pods.endpoints import Endpoint
from mallee.actors.front.pods.kubernetes import ApiServer, PoolEndpoints, account_namespace
from mallee.protocol.errors import ConfigError
from support.pool_api import PODS, POOLS, FakeApi, pod, pool
from support.waiting import until


class Seen:
    """The endpoints as they were told last."""

    def __init__(self) -> None:
        self.endpoints: list[Endpoint] = []
        self.num_told = 0

    def __call__(self, endpoints: Sequence[Endpoint]) -> None:
        self.endpoints = list(endpoints)
        self.num_told += 1

    @property
    def ready(self) -> list[str]:
        return sorted(each.address for each in self.endpoints if not each.is_draining)


@asynccontextmanager
async def following(
    api: FakeApi, token: Path | None = None
) -> AsyncIterator[tuple[PoolEndpoints, Seen]]:
    source = PoolEndpoints(ApiServer(api.url, token, None), namespace="models", pool="llama")
    seen = Seen()
    task = asyncio.create_task(source.follow(seen))
    try:
        yield source, seen
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_ready_pods_of_the_pool_are_endpoints_at_each_of_its_ports() -> None:
    async with FakeApi() as api:
        api.page = 1
        api.objects[POOLS]["pool"] = pool(8000, 8001)
        for each in (pod("a", "10.0.0.1"), pod("b", "fd00::2"), pod("c", "10.0.0.3", ready=False)):
            api.objects[PODS][each["metadata"]["uid"]] = each
        api.objects[PODS]["d"] = pod("d", "10.0.0.4", labels="other")
        async with following(api) as (_, seen):
            await until(lambda: bool(seen.endpoints))
            assert seen.ready == [
                "10.0.0.1:8000",
                "10.0.0.1:8001",
                "[fd00::2]:8000",
                "[fd00::2]:8001",
            ]
            assert {e.address: e.rank for e in seen.endpoints}["10.0.0.1:8001"] == 1
            assert "10.0.0.3:8000" in {e.address for e in seen.endpoints if e.is_draining}


async def test_pods_that_come_change_and_go_and_other_selections_are_followed() -> None:
    async with FakeApi() as api:
        api.objects[POOLS]["pool"] = pool(80)
        async with following(api) as (_, seen):
            await until(lambda: api.num_watchers(PODS) == 1)
            api.change("ADDED", PODS, pod("a", "10.0.0.1", ready=False))
            await until(lambda: seen.num_told == 2)
            assert seen.ready == []
            api.change("MODIFIED", PODS, pod("a", "10.0.0.1"))
            await until(lambda: seen.ready == ["10.0.0.1:80"])
            leaving = pod("a", "10.0.0.1")
            leaving["metadata"]["deletionTimestamp"] = "now"
            api.change("MODIFIED", PODS, leaving)
            await until(lambda: seen.ready == [])
            assert [e.is_draining for e in seen.endpoints] == [True]
            api.change("DELETED", PODS, leaving)
            await until(lambda: seen.endpoints == [])
            api.tell(PODS, {"type": "BOOKMARK", "object": {"metadata": {}}})
            api.change("ADDED", PODS, pod("b", "10.0.0.1"))
            await until(lambda: seen.ready == ["10.0.0.1:80"])
            assert seen.endpoints[0].owner == "b"
            api.change("ADDED", PODS, pod("c", "10.0.0.2", labels="other"))
            api.change("MODIFIED", POOLS, pool(81, app="other"))
            await until(lambda: seen.ready == ["10.0.0.2:81"])


@pytest.mark.parametrize("fault", ["hang up", "outdated", "nonsense", "refused"])
async def test_after_a_fault_all_is_listed_again(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Endpoints stay as they were meanwhile."""
    monkeypatch.setattr(kubernetes, "RETRY_S", (0.01, 0.05))
    async with FakeApi() as api:
        api.objects[POOLS]["pool"] = pool(80)
        api.objects[PODS]["a"] = pod("a", "10.0.0.1")
        async with following(api) as (_, seen):
            await until(lambda: api.num_watchers(PODS) == 1)
            api.objects[PODS]["b"] = pod("b", "10.0.0.2")  # no watcher hears of it
            if fault == "outdated":
                status = {"code": 410, "message": "too old"}
                api.tell(PODS, {"type": "ERROR", "object": status})
            elif fault == "nonsense":
                api.tell(PODS, {"kind": "?"})
            else:
                api.refusal = 403 if fault == "refused" else 0
                api.hang_up()
            if fault == "refused":
                await until(lambda: "403" in caplog.text)
                assert seen.ready == ["10.0.0.1:80"]
                api.refusal = 0
            await until(lambda: seen.ready == ["10.0.0.1:80", "10.0.0.2:80"])


async def test_the_token_is_read_for_each_request(tmp_path: Path) -> None:
    """Kubernetes replaces it every hour."""
    token = tmp_path / "token"
    token.write_text("one\n")
    async with FakeApi() as api:
        api.objects[POOLS]["pool"] = pool(80)
        async with following(api, token) as (_, __):
            await until(lambda: api.num_watchers(PODS) == 1)
            assert api.tokens == {"one"}
            token.write_text("two")
            api.hang_up()
            await until(lambda: "two" in api.tokens)


async def test_a_pool_that_is_not_there_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kubernetes, "RETRY_S", (0.01, 0.05))
    async with FakeApi() as api, following(api) as (_, seen):
        await until(lambda: "no such InferencePool" in caplog.text)
        assert caplog.text.count("no such InferencePool") == 1
        assert not seen.num_told
        api.objects[PODS]["a"] = pod("a", "10.0.0.1")
        api.objects[POOLS]["pool"] = pool(80)
        await until(lambda: seen.ready == ["10.0.0.1:80"])


def test_outside_of_a_pod_the_settings_say_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no pod of Kubernetes"):
        ApiServer.of_pod({})
    with pytest.raises(ConfigError, match="give --namespace"):
        account_namespace({}, tmp_path)
    (tmp_path / "namespace").write_text("models")
    assert account_namespace({}, tmp_path) == "models"
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    server = ApiServer.of_pod(environ, tmp_path)
    assert server.url == "https://[fd00::1]:443"
    with pytest.raises(ConfigError, match=r"ca\.crt"):
        server.client()
