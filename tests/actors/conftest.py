"""Workers for tests: the real engine over a mocked forward pass, on an in-memory bus."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.doubles.bus import LocalBus, LocalHub
from bench.doubles.forward import MockForward
from bench.doubles.random_model import random_model
from mallee.actors.hosting.engine import add_engine
from mallee.actors.hosting.host import Host
from mallee.actors.hosting.worker import Capacity
from mallee.mocker.passes import mock_spec
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.worker.engine import Engine
from mallee.worker.forward import ForwardBatch, Logits
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from support.tokenizers_made import byte_level


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model with random weights."""
    folder = tmp_path_factory.mktemp("model")
    random_model("llama", 5, vocab_size=320).save(folder)
    byte_level().save(str(folder / "tokenizer.json"))
    return folder


class FaultyForward(MockForward):
    """Waits `delay_s` before each pass; raises in it once `is_broken`."""

    delay_s = 0.0
    is_broken = False

    def forward(self, batch: ForwardBatch) -> list[Logits]:
        if self.delay_s:
            time.sleep(self.delay_s)
        if self.is_broken:
            raise RuntimeError("the device fell off the bus")
        return list(super().forward(batch))


class Rig:
    """One worker host on a bus of its own; more workers may be added to its first."""

    def __init__(
        self, hub: LocalHub | None = None, *, num_blocks: int = 256, **options: Any
    ) -> None:
        self.hub = hub or LocalHub()
        self.now = 100.0
        self.bus = LocalBus(self.hub)
        self.forward = options.pop("forward", None) or FaultyForward(
            mock_spec(), num_blocks=num_blocks, block_size=4
        )
        worker, life = options.pop("worker", "w0"), options.pop("incarnation", 1)
        structures, address = options.pop("structures", None), options.pop("address", "a0")
        self.host = Host(
            options.pop("host", worker),
            self.bus,
            address=address,
            fleet="test",
            clock=lambda: self.now,
            **options,
        )
        self.engine = self.add(worker, life, self.forward, structures=structures)

    def add(self, worker: str, life: int, forward: MockForward, structures: Any = None) -> Engine:
        engine = Engine(
            forward,
            config=EngineConfig(SchedulerConfig(64, 64, 1024), 0),
            clock=lambda: self.now,
            worker=WorkerId(worker),
            incarnation=Incarnation(life),
            structures=structures,
        )
        add_engine(self.host, engine, Capacity(4, forward.num_blocks, 64))
        return engine

    async def __aenter__(self) -> "Rig":
        await self.bus.connect()
        await self.host.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.host.close()
        await self.bus.close()

    def listen(self) -> "Listener":
        return Listener(self.hub)


class Listener:
    """A bus that keeps what it hears."""

    def __init__(self, hub: LocalHub) -> None:
        self.bus = LocalBus(hub)
        self.heard: list[bytes] = []

    async def __aenter__(self) -> "Listener":
        await self.bus.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.bus.close()

    async def to(self, subject: str) -> None:
        await self.bus.subscribe(subject, self.heard.append)


@pytest.fixture
def rig() -> Callable[..., Rig]:
    return Rig
