"""The port on which each process serves its own metrics and health."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from mallee.actors.access.access import Access
from mallee.actors.access.keys import new_key
from mallee.actors.addresses import free_port
from mallee.actors.config import TelemetrySettings
from mallee.actors.mock.stack import MockStack
from mallee.actors.telemetry.catalog import exposed_by
from mallee.actors.telemetry.listener import NUM_PORTS, MetricsListener
from mallee.protocol.errors import ConfigError
from support.expositions import check_against_catalog
from support.mock_scene import make_folder, mock_config

CLIENT, ROOT = new_key("acme", "client", None), new_key("root", "operator", None)
SIX = {"max_tokens": 6, "ignore_eos": True}
PROMPT = "a mallee is a tree of many trunks from one root, which re-sprouts after fire and rain"


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def make_listener(
    port: int, *, host: str | None = None, keys: Path | None = None
) -> MetricsListener:
    async def render(accept: str) -> bytes:
        return b"up 1\n"

    return MetricsListener(
        *(render, lambda: True, Access(keys, {})),
        settings=TelemetrySettings(metrics_host=host, metrics_port=port),
        own_ip="10.0.0.7",
    )


@asynccontextmanager
async def listening(listener: MetricsListener) -> AsyncIterator[str]:
    address = listener.start_up()
    try:
        yield address
    finally:
        await listener.close()


async def test_processes_of_a_machine_take_the_next_free_port() -> None:
    port = free_port()
    async with listening(make_listener(port)) as one, listening(make_listener(port)) as other:
        first, second = (int(each.rpartition(":")[2]) for each in (one, other))
        assert first == port < second < port + NUM_PORTS
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"http://{other}/metrics")).text == "up 1\n"
            assert (await http.get(f"http://{one}/health/ready")).json() == {"status": "ready"}
    with pytest.raises(OSError, match="Connect call failed"):
        await asyncio.open_connection("127.0.0.1", first)


async def test_ports_that_are_all_taken_are_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        last = make_listener(65_535, host="192.0.2.1")
        with pytest.raises(ConfigError, match=r"192.0.2.1.*no API key is set"):
            last.start_up()
        listener = make_listener(port)
        listener.start_up()
        assert listener._socket is not None
        assert listener._socket.getsockname()[1] > port
        await listener.close()


async def test_beyond_loopback_a_key_must_be_set_and_sent(tmp_path: Path) -> None:
    """Refused without any; with keys it is the operator's, and health needs none."""
    with pytest.raises(ConfigError, match="no API key is set"):
        make_listener(free_port(), host="0.0.0.0").start_up()
    keys = tmp_path / "keys.yaml"
    keys.write_text(yaml.safe_dump({"keys": [CLIENT.entry, ROOT.entry]}))
    listener = make_listener(free_port(), host="0.0.0.0", keys=keys)
    async with listening(listener) as address, httpx.AsyncClient() as http:
        assert address.startswith("10.0.0.7:"), "an address that others can reach"
        own = f"http://127.0.0.1:{address.rpartition(':')[2]}"
        for headers in ({}, bearer(CLIENT.token), {"authorization": "Basic eDp5"}):
            answer = await http.get(f"{own}/metrics", headers=headers)
            assert answer.status_code == 401
            assert "up 1" not in answer.text
        assert (await http.get(f"{own}/metrics", headers=bearer(ROOT.token))).status_code == 200
        assert (await http.get(f"{own}/health/live")).json() == {"status": "live"}


async def ask(http: httpx.AsyncClient, path: str, **body: object) -> dict[str, object]:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, object] = answer.json()
    return found


@pytest.mark.nats
async def test_every_process_of_a_deployment_is_found_and_shows_its_part_of_the_catalog(
    tmp_path: Path,
) -> None:
    """D22, part, D36, part: gateway and two worker processes, by service discovery."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(yaml.safe_dump({"keys": [CLIENT.entry, ROOT.entry]}))
    config = mock_config(
        make_folder(tmp_path),
        workers=2,
        mock__engines_per_worker=2,
        mock__host_kv_tokens=4096,
        http__keys_file=str(keys),
        telemetry__metrics_port=free_port(),
    )
    async with (
        MockStack(config, port=free_port()) as stack,
        httpx.AsyncClient(base_url=stack.base_url, headers=bearer(CLIENT.token)) as acme,
        httpx.AsyncClient(headers=bearer(ROOT.token)) as root,
    ):
        await ask(acme, "/v1/completions", prompt=PROMPT, n=3, **SIX)
        kept = (await ask(acme, "/v1/capsules", prompt=PROMPT))["id"]
        await ask(acme, f"/v1/capsules/{kept}/fork", n=4, **SIX)
        assert (await acme.get("/v1/router/metrics-targets")).status_code == 403
        listed = await root.get(f"{stack.base_url}/v1/router/metrics-targets")
        assert listed.headers["content-type"] == "application/json"
        targets = {each["labels"]["process"]: each["targets"] for each in listed.json()}
        assert {process: len(found) for process, found in targets.items()} == {
            "gateway": 1,
            "worker": 2,
        }
        assert {each["labels"]["fleet"] for each in listed.json()} == {"test"}
        await asyncio.sleep(3 * config.lease_interval_s)
        texts = {
            address: (await root.get(f"http://{address}/metrics")).text
            for found in targets.values()
            for address in found
        }
        for address in targets["worker"]:
            found = check_against_catalog(texts[address], "worker")
            assert found == {each.name for each in exposed_by("worker")}
            ready = await root.get(f"http://{address}/health/ready")
            assert ready.json() == {"status": "ready"}
        workers = "".join(texts[address] for address in targets["worker"])
        first_tokens = [
            float(line.split()[-1])
            for line in workers.splitlines()
            if line.startswith("vllm:time_to_first_token_seconds_count")
        ]
        assert sum(first_tokens) == 3 + 4
        (gateway,) = targets["gateway"]
        shown = check_against_catalog(texts[gateway], "gateway")
        missing = {each.name: each.when for each in exposed_by("gateway") if each.name not in shown}
        assert all("lends KV" in when or "mocked" in when for when in missing.values()), missing
        for line in (
            'mallee_branch_latency_seconds_count{gateway="g0",how="stay"} 4.0',
            'mallee_forked_branches_total{gateway="g0",how="stay"} 4.0',
            'mallee_branch_phase_seconds_count{gateway="g0",phase="decode"} 7.0',
            'mallee_tenant_requests_total{gateway="g0",tenant="acme"} 3.0',
            'mallee_tenant_tokens_total{gateway="g0",kind="output",tenant="acme"} 42.0',
            'mallee_tenant_first_token_seconds_count{gateway="g0",tenant="acme"} 7.0',
        ):
            assert line in texts[gateway].splitlines(), line
        through_the_api = (await root.get(f"{stack.base_url}/metrics")).text
        assert check_against_catalog(through_the_api, "gateway") == shown
