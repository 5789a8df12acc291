"""The port on which each process serves its own metrics and health."""

import asyncio
import io
import logging
import logging.handlers
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from mallee.gateway.access.access import Access
from mallee.gateway.access.keys import new_key
from mallee.protocol.errors import ConfigError
from mallee.runtime.addresses import free_port
from mallee.runtime.config import TelemetrySettings
from mallee.runtime.telemetry.listener import NUM_PORTS, MetricsListener

CLIENT, ROOT = new_key("acme", "client", None), new_key("root", "operator", None)


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
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", first)


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


async def test_the_log_of_the_process_goes_on() -> None:
    """uvicorn's configuration of loggers closes all handlers there are, a replica's among them."""
    told = io.StringIO()
    handler = logging.handlers.MemoryHandler(1, target=logging.StreamHandler(told))
    log = logging.getLogger("mallee")
    log.addHandler(handler)
    try:
        async with listening(make_listener(free_port())):
            log.error("a fault")
    finally:
        log.removeHandler(handler)
    assert told.getvalue() == "a fault\n"
