"""The bus in memory, by what every bus does; queue depths over it; an operator's credentials."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client

from bench.doubles.bus import LocalBus, LocalHub
from mallee.protocol.errors import ConfigError
from mallee.runtime.bus.access import operators_broker
from mallee.runtime.bus.buckets import BucketSpec, WritesStopped
from mallee.runtime.bus.bus import Bus
from mallee.runtime.bus.jetstream import JetStreamBuckets
from mallee.runtime.bus.nats import BusClient, SendQueue, check_overrides
from mallee.runtime.bus.queues import QueueDepths, publish_depth
from mallee.runtime.config import AppConfig
from support.buses import *  # noqa: F403
from support.buses import Place
from support.waiting import until


class LocalPlace:
    def __init__(self) -> None:
        self.hub = LocalHub()

    async def bus(self) -> Bus:
        bus = LocalBus(self.hub)
        await bus.connect()
        return bus

    async def down(self) -> None:
        self.hub.set_up(False)

    async def up(self) -> None:
        self.hub.set_up(True)

    async def close(self) -> None:
        pass


@pytest.fixture
def place() -> Place:
    return LocalPlace()


def test_an_outbox_refuses_what_is_beyond_its_bounds() -> None:
    outbox = SendQueue(max_messages=2, max_bytes=10)
    assert outbox.put("s", b"12345")
    assert not outbox.put("s", b"123456")
    assert outbox.put("s", b"1")
    assert not outbox.put("s", b"")
    outbox.check()
    assert outbox.take() == ("s", b"12345")
    assert outbox.clear() == 1
    outbox.check()


async def test_depths_of_gateways_add_up_and_silent_ones_count_no_more() -> None:
    hub, now = LocalHub(), 0.0
    bus = LocalBus(hub)
    await bus.connect()
    depths = QueueDepths(lambda: now)
    await depths.start_up(bus, "f")
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(publish_depth(bus, fleet, name, lambda n=waiting: n))  # type: ignore[misc]
            for fleet, name, waiting in (("f", "g1", 3), ("f", "g2", 4), ("other", "g3", 9))
        ]
        await until(lambda: depths.total() == 7)
        for task in tasks:
            task.cancel()
    now = 60.0
    assert depths.total() == 0
    await bus.close()


def config(**settings: Any) -> AppConfig:
    return AppConfig(model="m", fleet="f", nats_url="nats://127.0.0.1:1", **settings)


@pytest.mark.parametrize("text", [None, "", "one\ntwo", b"\xff\xfe"])
def test_a_file_without_credentials_is_one_error_that_does_not_show_it(
    tmp_path: Path, text: str | bytes | None
) -> None:
    file = tmp_path / "file"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=f"nats_credentials='{file}': ") as caught:
        operators_broker(config(nats_credentials=str(file)), "worker")
    assert "two" not in str(caught.value)


def test_a_creds_file_needs_the_library_for_its_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "it.creds"
    file.write_text("-----BEGIN NATS USER JWT-----\nabc\n------END NATS USER JWT------\n")
    monkeypatch.setattr("mallee.runtime.bus.access.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'nats-py\[nkeys\]'"):
        operators_broker(config(nats_credentials=str(file)), "gateway")
    monkeypatch.setattr("mallee.runtime.bus.access.find_spec", lambda name: name)
    found = operators_broker(config(nats_credentials=str(file)), "gateway")
    assert found.options()["user_credentials"] == str(file)


def test_a_package_whose_method_is_not_the_one_that_is_overridden_is_refused() -> None:
    class Ours(Client):
        async def _greet(self) -> None: ...

        async def _process_info(self, info: dict[str, Any]) -> None: ...

    check_overrides(BusClient, names=["_process_info"], needs="nats-py>=2.10")
    for name in ("_greet", "_process_info"):
        with pytest.raises(ConfigError, match=rf"has no {name} as .* install 'nats-py<9'"):
            check_overrides(Ours, names=[name], needs="nats-py<9")


@pytest.mark.parametrize("num_replicas", [1, 3])
async def test_silence_of_a_lone_server_that_answers_else_is_a_full_disk(num_replicas: int) -> None:
    """Of several servers it is that most are away: another one would lead if one's disk were full."""
    asked = 0

    class Silent(JetStreamBuckets):
        async def _call(self, *_: Any) -> Any:
            nonlocal asked
            asked += 1
            if asked == 1:
                raise TimeoutError("no answer")

    spec = BucketSpec("b", 60.0, 1 << 20, num_replicas=num_replicas)
    with pytest.raises(TimeoutError) as caught:
        await Silent(lambda: None).put(spec, "key", b"value")
    assert isinstance(caught.value, WritesStopped) == (num_replicas == 1)
