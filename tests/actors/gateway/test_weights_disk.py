"""New weights for a worker with a disk, whose next life has the same memory and the same volume."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mallee.actors.hosting import engine as engine_thread
from mallee.actors.hosting import weights as changes
from mallee.actors.hosting.host import Host
from mallee.mocker.passes import mock_spec
from mallee.protocol.errors import WorkerLost
from mallee.protocol.hashing import as_tokens
from mallee.protocol.ids import COMMON, CapsuleId
from mallee.router.config import RouterConfig
from mallee.router.dispatch.jobs import PrefillJob
from mallee.worker.kv.tiers.moves import DISK
from mallee.worker.storage.files import Directory
from support.live_fleet import LiveFleet, running
from support.versions import VersionedForward, Weights
from support.volumes import volume_tiers
from support.waiting import elapse, until

SPEC = mock_spec(max_model_len=4096)
PROMPT = as_tokens([i % 61 for i in range(160)])


class Gate:
    """Something that a disk does; a test may have it wait."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.may_go.set()
        self.is_waiting = threading.Event()

    def hold(self) -> None:
        self.may_go.clear()

    def passed(self) -> None:
        if not self.may_go.is_set():
            self.is_waiting.set()
            assert self.may_go.wait(20)


class Scene(LiveFleet):
    """One worker over a disk in `folder` that writes and looks through its files when it may."""

    def __init__(self, folder: Path) -> None:
        writes, looks = self.writes, self.looks = Gate(), Gate()

        class Slow(Directory):
            def sync(self, names: Sequence[str]) -> None:
                writes.passed()
                super().sync(names)

            def heads(self, names: Sequence[str], nbytes: int) -> Iterator[bytes | OSError]:
                looks.passed()
                return super().heads(names, nbytes)

        below = volume_tiers(folder, files=Slow)
        super().__init__(
            SPEC,
            RouterConfig(block_size=16),
            forward=VersionedForward,
            source=lambda *about: Weights(*about, below=below),
            below=lambda worker: below,
        )

    @property
    def host(self) -> Host:
        (host,) = self.hosts.values()
        return host

    @property
    def served(self) -> list[str]:
        """The labels of the weights that the worker serves now; none between two lives."""
        return [worker.model.weights.label for worker in self.host.workers.values()]

    async def keep(self) -> CapsuleId:
        """A capsule of the prompt, on the device."""
        async for delta in await self.gateways[0].start(PrefillJob(PROMPT)):
            last = delta
        assert last.capsule is not None
        return last.capsule

    async def begin_change(self, label: str) -> None:
        await self.gateways[0].change_weights(label, path=label, drain_s=0.05, wait_s=0.0)


@asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[Scene]:
    made = Scene(folder)
    try:
        async with running(made, 1):
            yield made
    finally:
        made.writes.may_go.set()
        made.looks.may_go.set()


async def test_a_life_that_writes_for_long_ends_before_the_next_one_opens_its_volume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capsule is committed meanwhile, longer than one wait for a thread: then the volume is free again."""
    monkeypatch.setattr(engine_thread, "JOIN_S", 0.02)
    async with scene(tmp_path) as s:
        capsule = await s.keep()
        s.writes.hold()
        demoted = asyncio.create_task(s.gateways[0].demote(capsule, DISK, COMMON))
        await until(s.writes.is_waiting.is_set)
        await s.begin_change("one")
        await until(lambda: s.served == [])
        await elapse(0.2)
        assert s.served == [], "two lives share a volume"
        assert s.host.healthy()
        s.writes.may_go.set()
        await until(lambda: s.served == ["one"])
        with pytest.raises(WorkerLost):
            await demoted
        await until(lambda: len(s.routers[0].workers()) == 1)
        found = await s.gateways[0].demote(await s.keep(), DISK, COMMON)
        assert found.status is not None
        assert found.status.tier == "disk", "the next life has the volume"


async def test_the_next_life_looks_through_its_volume_beside_the_loop(tmp_path: Path) -> None:
    """Leases, links and other workers of the process go on while the files are read."""
    async with scene(tmp_path) as s:
        await s.gateways[0].demote(await s.keep(), DISK, COMMON)
        s.looks.hold()
        await s.begin_change("one")
        await until(s.looks.is_waiting.is_set)
        await elapse(5.0)
        assert s.host.healthy()
        assert s.served == []
        s.looks.may_go.set()
        await until(lambda: s.served == ["one"])


@pytest.mark.parametrize("limit", ["MAX_END_S", "MAX_MAKE_S"])
async def test_a_life_that_does_not_end_or_begin_in_time_fails_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """The task is the host's: health says so, and the process is replaced. Nothing waits for ever."""
    monkeypatch.setattr(changes, limit, 0.2)
    async with scene(tmp_path) as s:
        capsule = await s.keep()
        waits: list[asyncio.Task[Any]] = []
        if limit == "MAX_END_S":
            s.writes.hold()
            waits.append(asyncio.create_task(s.gateways[0].demote(capsule, DISK, COMMON)))
            await until(s.writes.is_waiting.is_set)
        else:
            s.looks.hold()
        await s.begin_change("one")
        await until(lambda: s.host.tasks.failure is not None)
        assert not s.host.healthy()
        told = "has not ended" if limit == "MAX_END_S" else "was not made"
        assert told in str(s.host.tasks.failure)
        assert s.served == []
        s.writes.may_go.set()
        s.looks.may_go.set()
        await asyncio.gather(*waits, return_exceptions=True)
