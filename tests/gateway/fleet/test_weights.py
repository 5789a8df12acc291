"""New weights in a fleet that serves: no answer, cache or capsule mixes two versions.

A worker's next life has the same memory, and the same volume on its disk.
"""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mallee.actors.hosting import engine as engine_thread
from mallee.actors.hosting import weights as changes
from mallee.actors.hosting.host import Host
from mallee.gateway.gateway import Gateway
from mallee.gateway.requests.deltas import Delta
from mallee.gateway.requests.request import RunningRequest
from mallee.mocker.passes import mock_spec
from mallee.protocol.errors import CapsuleStale, InvalidParameter, WeightsChanged, WorkerLost
from mallee.protocol.hashing import as_tokens
from mallee.protocol.ids import COMMON, CapsuleId
from mallee.protocol.messages import Generate, Limits, Sampling, pack_tokens
from mallee.protocol.model import WeightVersion
from mallee.router.config import RouterConfig
from mallee.router.dispatch.jobs import ForkJob, GenerateJob, PrefillJob
from mallee.worker.storage.files import Directory
from mallee.worker.transfer.values import DISK
from support.live_fleet import LiveFleet, make_engine, running
from support.versions import VersionedForward, Weights
from support.volumes import volume_tiers
from support.waiting import elapse, until

SPEC = mock_spec(max_model_len=4096)
PROMPT = as_tokens([i % 61 for i in range(160)])
HOT = Sampling(temperature=1.0, seed=9)


class Scene(LiveFleet):
    """A fleet whose weights can change; `sources` by worker."""

    def __init__(self) -> None:
        self.sources: dict[str, Weights] = {}

        def source(*about: Any) -> Weights:
            made = Weights(*about)
            return self.sources.setdefault(made.host.name, made)

        super().__init__(
            SPEC,
            RouterConfig(block_size=16),
            forward=VersionedForward,
            source=source,
        )

    async def change(self, label: str, path: str | None = None, **more: Any) -> dict[str, Any]:
        options = {"drain_s": 5.0, "wait_s": 5.0, **more}
        return await self.gateways[0].operator.change_weights(label, path=path, **options)


@asynccontextmanager
async def scene(workers: int = 2, gateways: int = 2) -> AsyncIterator[Scene]:
    made = Scene()
    async with running(made, workers, gateways):
        yield made


async def ended(stream: RunningRequest, last: Delta | None = None) -> tuple[list[int], Delta]:
    """All tokens from the delta `last` on, and the last delta."""
    tokens = list(last.tokens) if last is not None else []
    async for last in stream:
        tokens += last.tokens
    assert last is not None
    return tokens, last


async def ask(gateway: Gateway, n: int = 8) -> tuple[list[int], Delta]:
    return await ended(
        await gateway.requests.start(GenerateJob(PROMPT, Limits(n, ignore_eos=True), HOT))
    )


def fresh(digest: str, n: int = 8) -> list[int]:
    """The answer of an engine that never had other weights."""
    spec = mock_spec(max_model_len=4096)
    base = VersionedForward(spec, num_blocks=256, block_size=16)
    forward = base.with_weights(WeightVersion(1, "x", digest, digest)) if digest else base
    engine = make_engine(forward, "alone")
    engine.submit(Generate("r", pack_tokens(PROMPT), Limits(n, ignore_eos=True), HOT), "g")
    tokens: list[int] = []
    while engine.has_work:
        for frame in engine.step().frames.values():
            tokens += [token for update in frame.updates for token in update.tokens]
    return tokens


async def test_answers_that_are_not_done_in_time_are_told() -> None:
    async with scene(workers=2) as s:
        job = GenerateJob(PROMPT, Limits(3000, ignore_eos=True), HOT)
        streams = [await gateway.requests.start(job) for gateway in s.gateways]
        answers = [
            asyncio.create_task(ended(stream, await anext(aiter(stream)))) for stream in streams
        ]
        await s.change("v1", "one", drain_s=0.0)
        for answer in answers:
            tokens, last = await answer
            assert isinstance(last.error, WeightsChanged), last
            assert tokens == fresh("", len(tokens)), "a mix"
            assert last.weights == ("base", "v1")
        assert (await ask(s.gateways[1]))[0] == fresh("one")


async def test_capsules_of_old_weights_are_stale_at_every_gateway() -> None:
    async with scene(workers=2) as s:
        kept = (await ended(await s.gateways[0].requests.start(PrefillJob(PROMPT))))[1].capsule
        left = (await ask(s.gateways[0]))[1].capsule
        assert kept is not None
        assert left is not None
        await s.change("v1", "one")
        for gateway, router in zip(s.gateways, s.routers, strict=True):
            await until(lambda router=router: len(router.workers()) == 2)
            for capsule in (kept, left):
                with pytest.raises(CapsuleStale) as told:
                    await gateway.requests.start(ForkJob(capsule, [as_tokens([1])], Limits(4), HOT))
                assert told.value.fields["made_by"] == "base"
                assert told.value.fields["serving"] == "v1"
        assert (await s.gateways[0].capsules.show(kept, COMMON)).is_stale
        with pytest.raises(CapsuleStale):  # this gateway never knew its text
            await s.gateways[1].capsules.show(kept, COMMON)
        again = (await ended(await s.gateways[0].requests.start(PrefillJob(PROMPT))))[1].capsule
        assert again is not None
        assert not (await s.gateways[0].capsules.show(again, COMMON)).is_stale


async def test_weights_that_cant_be_loaded_leave_the_old_ones_and_say_why() -> None:
    async with scene(workers=2) as s:
        found = await s.change("v1", "missing")
        assert {w["state"] for w in found["workers"]} == {"failed"}
        assert "missing is not there" in found["workers"][0]["error"]
        assert found["serving"] == "base"
        assert (await ask(s.gateways[0]))[0] == fresh("")
        assert (await s.change("v1b", "one"))["serving"] == "v1b"
        with pytest.raises(InvalidParameter, match="another label"):
            await s.change("v1b", "two")
        assert (await s.change("v1b", "one"))["number"] == 1, "asked again"
        # A change without a path keeps the weights, and no KV.
        await ask(s.gateways[0])
        await s.change("v2")
        tokens, last = await ask(s.gateways[0])
        assert (tokens, last.prefill_tokens) == (fresh("one"), len(PROMPT))


async def test_weights_written_in_part_serve_nothing_and_their_process_is_replaced() -> None:
    """Health says so, with the reason; the other worker has the new ones."""
    async with scene(workers=2) as s:
        s.sources["w0"].fails_midway = True
        await s.change("v1", "one", wait_s=0.0)
        torn, other = (s.sources[name].host for name in ("w0", "w1"))
        await until(lambda: torn.tasks.failure is not None)
        assert "one can't be read any more" in str(torn.tasks.failure)
        assert not torn.healthy()
        assert not torn.workers
        await until(lambda: other.workers and s.routers[0].weights.label == "v1")
        stream = await s.gateways[0].requests.start(
            GenerateJob(PROMPT, Limits(8, ignore_eos=True), HOT)
        )
        assert stream.worker == "w1"
        assert (await ended(stream))[0] == fresh("one")


async def test_a_worker_that_lags_behind_or_restarts_gets_nothing_until_it_has_followed() -> None:
    async with scene(workers=2) as s:
        slow = s.sources["w1"]
        slow.may_load.clear()
        await s.change("v1", "one", wait_s=0.0)
        await until(lambda: all(router.weights.label == "v1" for router in s.routers))
        for gateway in s.gateways * 2:
            stream = await gateway.requests.start(GenerateJob(PROMPT, Limits(4), HOT))
            assert stream.worker == "w0"
            await ended(stream)
        assert {w.worker: w.state for w in s.routers[1].all_workers()}["w1"] == "outdated"
        slow.may_load.set()
        await until(lambda: all(len(router.workers()) == 2 for router in s.routers))
        # One that comes new has the weights that it was configured with; gateways have it follow.
        await s.add_worker("w2")
        await until(lambda: all(len(router.workers()) == 3 for router in s.routers))
        assert {w.weight_version for w in s.routers[0].workers()} == {"v1"}


async def test_two_changes_at_once_end_with_one_version_everywhere() -> None:
    async with scene(workers=3) as s:
        first, second = s.gateways
        await asyncio.gather(
            first.operator.change_weights("a", path="one", drain_s=1.0, wait_s=0.0),
            second.operator.change_weights("b", path="two", drain_s=1.0, wait_s=0.0),
        )
        await until(
            lambda: all(
                {w.weight_version for w in router.workers()} == {"b"} and len(router.workers()) == 3
                for router in s.routers
            )
        )
        assert (await ask(first))[0] == fresh("two")


async def test_no_answer_mixes_versions_while_weights_change() -> None:
    """Two gateways, two workers, a stream of requests, three changes."""
    versions = {"base": "", "v1": "one", "v2": "two", "v3": "three"}
    seen: set[str] = set()
    is_over = asyncio.Event()

    async def client(gateway: Gateway) -> None:
        while not is_over.is_set():
            tokens, last = await ask(gateway, 40)
            start, end = last.weights
            assert last.finish == "error" or start == end
            assert tokens == fresh(versions[start], 40)[: len(tokens)], last
            seen.add(start)

    async with scene() as s:
        clients = [asyncio.create_task(client(g)) for g in s.gateways * 2]
        for label in ("v1", "v2", "v3"):
            found = await s.change(label, versions[label])
            assert {w["state"] for w in found["workers"]} == {"serving"}, found
        await until(lambda: "v3" in seen)
        is_over.set()
        await asyncio.gather(*clients)
        assert seen >= {"base", "v3"}


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


class DiskScene(LiveFleet):
    """One worker over a disk in `folder` that writes and opens its catalogue when it may."""

    def __init__(self, folder: Path) -> None:
        writes, looks = self.writes, self.looks = Gate(), Gate()

        class Slow(Directory):
            def sync(self, identity: int) -> None:
                writes.passed()
                super().sync(identity)

            def connect(self) -> sqlite3.Connection:
                looks.passed()
                return super().connect()

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
        async for delta in await self.gateways[0].requests.start(PrefillJob(PROMPT)):
            last = delta
        assert last.capsule is not None
        return last.capsule

    async def begin_change(self, label: str) -> None:
        await self.gateways[0].operator.change_weights(label, path=label, drain_s=0.05, wait_s=0.0)


@asynccontextmanager
async def disk_scene(folder: Path) -> AsyncIterator[DiskScene]:
    made = DiskScene(folder)
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
    async with disk_scene(tmp_path) as s:
        capsule = await s.keep()
        s.writes.hold()
        demoted = asyncio.create_task(s.gateways[0].capsules.demote(capsule, DISK, COMMON))
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
        found = await s.gateways[0].capsules.demote(await s.keep(), DISK, COMMON)
        assert found.status is not None
        assert found.status.tier == "disk", "the next life has the volume"


@pytest.mark.parametrize("limit", ["MAX_END_S", "MAX_MAKE_S"])
async def test_a_life_that_does_not_end_or_begin_in_time_fails_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """The task is the host's: health says so, and the process is replaced. Nothing waits for ever.

    Files are read and written beside the loop, in which this test waits.
    """
    monkeypatch.setattr(changes, limit, 0.2)
    async with disk_scene(tmp_path) as s:
        capsule = await s.keep()
        waits: list[asyncio.Task[Any]] = []
        if limit == "MAX_END_S":
            s.writes.hold()
            waits.append(asyncio.create_task(s.gateways[0].capsules.demote(capsule, DISK, COMMON)))
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
