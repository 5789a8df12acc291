"""A gateway whose workers are full: who waits, where they go, what becomes of them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest

from mallee.actors.gateway.service import BranchStream
from mallee.actors.telemetry.metrics import GatewayMetrics
from mallee.mocker.passes import mock_spec
from mallee.protocol.codec import encode
from mallee.protocol.errors import (
    CapsuleLost,
    DeadlineExceeded,
    Overloaded,
    TenantQueueFull,
    Unavailable,
)
from mallee.protocol.events import EventBatch, Lease, Stored, pack_hashes
from mallee.protocol.hashing import as_tokens, block_hashes
from mallee.protocol.ids import Incarnation, RequestId, WorkerId, capsule_id
from mallee.protocol.messages import Cancel, Command, Frame, Limits, Release, Update
from mallee.protocol.subjects import Subjects
from mallee.router.config import RouterConfig
from mallee.router.dispatch.jobs import ForkJob, GenerateJob, PrefillJob, QueueTerms
from mallee.router.dispatch.queue import AdmissionConfig
from mallee.router.router import Router
from mallee.testing.bus import LocalBus, LocalHub
from support.live_fleet import make_gateway
from support.waiting import until

SPEC = mock_spec(max_model_len=4096)
BLOCK = 16
ROWS = 2
SUBJECTS = Subjects.of("test")
PROMPT = as_tokens([i % 61 for i in range(200)])


class Scripted:
    """A worker and the link to it: keeps its commands, answers when told."""

    def __init__(self, name: str, life: int) -> None:
        self.name = name
        self.life = life
        self.commands: list[Command] = []
        self.on_frame: Callable[[Frame], None] = lambda frame: None
        self.on_lost: Callable[[str], None] = lambda reason: None

    def send(self, command: Command) -> None:
        self.commands.append(command)

    async def close(self) -> None:
        self.on_frame = lambda frame: None

    def say(self, request: str) -> None:
        """The request's only branch says a token and goes on."""
        self.on_frame(Frame(1, (Update(request, 0, (1,), None, 0, 5),)))

    def finish(self, request: str, capsule: str | None = None) -> None:
        """The request's only branch says one token and ends."""
        update = Update(request, 0, (1,), "stop", 0, 5, capsule)
        self.on_frame(Frame(1, (update,)))


class Scene:
    """One gateway, scripted workers, a clock that only the test moves."""

    def __init__(self) -> None:
        self.hub = LocalHub()
        self.bus = LocalBus(self.hub)
        self.fleet = LocalBus(self.hub)
        self.workers: dict[str, Scripted] = {}
        self.now = 100.0
        self.lives = count(1)

    async def open(self, admission: AdmissionConfig) -> None:
        await self.bus.connect()
        await self.fleet.connect()
        self.router = Router(RouterConfig(block_size=BLOCK, lease_s=1e6), clock=lambda: self.now)
        self.metrics = GatewayMetrics()
        self.gateway = make_gateway(
            "g0",
            self.bus,
            self,
            self.router,
            SPEC,
            metrics=self.metrics,
            admission=admission,
            clock=lambda: self.now,
        )
        await self.gateway.start_up()

    def link(
        self,
        worker: WorkerId,
        incarnation: Incarnation,
        address: str,
        on_frame: Any,
        on_lost: Any,
    ) -> Scripted:
        scripted = self.workers[worker]
        scripted.on_frame, scripted.on_lost = on_frame, on_lost
        return scripted

    async def join(self, name: str) -> Scripted:
        worker = self.workers[name] = Scripted(name, next(self.lives))
        address = f"{name}#{worker.life}"
        lease = Lease(
            name, worker.life, address, SPEC.name, SPEC.fingerprint, BLOCK, 256, ROWS, 4096, 0
        )
        self.fleet.publish(SUBJECTS.lease(name), encode(lease))
        await until(lambda: any(view.worker == name for view in self.router.workers()))
        await turns(4)
        return worker

    def ask(self, prompt: int = 0, **terms: Any) -> "asyncio.Task[BranchStream]":
        job = GenerateJob(as_tokens([prompt] * 40), Limits(4), terms=QueueTerms(**terms))
        return asyncio.create_task(self.gateway.start(job))

    async def fill(self) -> list[BranchStream]:
        """Every row of every worker is taken."""
        return [await self.ask(i) for i in range(ROWS * len(self.workers))]

    @property
    def num_waiting(self) -> int:
        return self.gateway._dispatcher.num_waiting

    def check_empty(self) -> None:
        self.gateway.check()
        self.router.check()
        assert self.num_waiting == 0
        assert not self.gateway._answers
        assert all(view.rows == 0 for view in self.router.workers())


@asynccontextmanager
async def scene(*workers: str, **limits: Any) -> AsyncIterator[Scene]:
    made = Scene()
    await made.open(AdmissionConfig(**limits))
    try:
        for worker in workers:
            await made.join(worker)
        yield made
    finally:
        await made.gateway.close()


async def turns(n: int) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


async def test_requests_wait_for_a_row_and_are_sent_in_fair_order() -> None:
    async with scene("w0") as s:
        w0 = s.workers["w0"]
        running = await s.fill()
        waiting = {f"flood{i}": s.ask(tenant="flood") for i in range(3)}
        await turns(2)
        waiting["urgent"] = s.ask(tenant="flood", priority=3)
        waiting["single"] = s.ask(tenant="single")
        await turns(2)
        assert (len(w0.commands), s.num_waiting) == (2, 5)
        order = []
        while running:
            w0.finish(running.pop(0).request)
            await turns(4)
            for name in [name for name, task in waiting.items() if task.done()]:
                running.append(waiting.pop(name).result())
                order.append(name)
            assert max(view.rows for view in s.router.workers()) <= ROWS
        assert order == ["urgent", "single", "flood0", "flood1", "flood2"]
        s.check_empty()


async def test_a_waiting_request_is_routed_by_what_is_known_when_its_turn_comes() -> None:
    """Re-scored at dequeue: meanwhile another worker got its prefix."""
    async with scene("w0", "w1") as s:
        running = await s.fill()
        job = GenerateJob(PROMPT, Limits(4))
        waits = asyncio.create_task(s.gateway.start(job))
        await turns(2)
        hashes = block_hashes(PROMPT, BLOCK, salt=SPEC.salt())
        batch = EventBatch("w1", s.workers["w1"].life, 0, (Stored(pack_hashes(hashes)),))
        s.fleet.publish(SUBJECTS.events("w1"), encode(batch))
        await until(lambda: max(v.indexed_blocks for v in s.router.workers()) == 12)
        for worker in ("w0", "w1"):  # both have room in the same turn
            first = next(stream for stream in running if stream.worker == worker)
            s.workers[worker].finish(first.request)
        assert (await waits).worker == "w1"


async def test_a_tenants_and_the_whole_queues_limit_refuse_with_429_and_503() -> None:
    """F30, part, I26, part: refused before anything is kept or sent."""
    async with scene("w0", max_waiting=3, max_waiting_per_tenant=2) as s:
        await s.fill()
        waiting = [s.ask(tenant="a"), s.ask(tenant="a")]
        await turns(2)
        with pytest.raises(TenantQueueFull):
            await s.ask(tenant="a")
        waiting.append(s.ask(tenant="b"))
        await turns(2)
        with pytest.raises(Overloaded):
            await s.ask(tenant="c")
        assert s.num_waiting == 3
        assert b'mallee_admission_refusals_total{reason="overloaded"} 1.0' in s.gateway.metrics()
        for task in waiting:
            task.cancel()
        await turns(2)
        assert s.num_waiting == 0


async def test_a_deadline_that_passes_while_waiting_ends_the_request() -> None:
    async with scene("w0") as s:
        running = await s.fill()
        waits, patient = s.ask(deadline_s=3.0), s.ask()
        await turns(2)
        s.now += 3.0
        with pytest.raises(DeadlineExceeded):
            await waits
        life = s.gateway.decisions(RequestId("g0-r2"), 1, 1)["life"]
        assert life["branches"][0]["state"] == "refused"
        assert life["branches"][0]["end_s"] == pytest.approx(3.0)
        s.workers["w0"].finish(running[0].request)
        await turns(4)
        assert patient.result().worker == "w0"
        assert len(s.workers["w0"].commands) == 3


async def test_a_client_that_leaves_while_waiting_is_never_sent() -> None:
    """I26, part: a disconnect in the queue."""
    async with scene("w0") as s:
        running = await s.fill()
        gone = s.ask()
        await turns(2)
        gone.cancel()
        await turns(2)
        assert s.num_waiting == 0
        for stream in running:
            s.workers["w0"].finish(stream.request)
        await turns(4)
        assert len(s.workers["w0"].commands) == 2
        s.check_empty()


@pytest.mark.parametrize("turn", range(5))
@pytest.mark.parametrize("kind", ["generate", "prefill"])
async def test_a_client_that_leaves_as_it_is_sent_is_cancelled_at_the_worker(
    turn: int, kind: str
) -> None:
    async with scene("w0") as s:
        w0 = s.workers["w0"]
        running = await s.fill()
        job = GenerateJob(PROMPT, Limits(4)) if kind == "generate" else PrefillJob(PROMPT)
        task = asyncio.create_task(s.gateway.start(job))
        await turns(2)
        w0.finish(running[0].request)
        await turns(turn)
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if not isinstance(result, BaseException):
            await result.aclose()
        await turns(2)
        if len(w0.commands) > 2:
            request = RequestId("g0-r2")
            assert Cancel(request, None) in w0.commands
            assert Release(capsule_id(request)) in w0.commands, "it may have been made before"
        w0.finish(running[1].request)
        await turns(2)
        s.check_empty()


async def test_when_the_worker_dies_its_requests_and_those_who_wait_are_served_by_the_next() -> (
    None
):
    """X4, part: nothing is lost, and what had begun goes first."""
    async with scene("w0") as s:
        running = await s.fill()
        waits = [s.ask() for _ in range(2)]
        await turns(2)
        for stream in running:
            s.workers["w0"].say(stream.request)
        s.workers["w0"].on_lost("its process is gone")
        await turns(6)
        assert not any(task.done() for task in waits)
        w1 = await s.join("w1")
        assert [command.request for command in w1.commands] == ["g0-r0-1", "g0-r1-1"]
        assert not any(task.done() for task in waits)  # those that had begun went before them
        for stream in running:
            w1.finish(f"{stream.request}-1")
        assert [(await task).worker for task in waits] == ["w1", "w1"]
        for stream in running:
            (whole,) = [delta async for delta in stream]  # what waits for a reader is merged
            assert (whole.tokens, whole.finish) == ((1, 1), "stop")


async def test_a_fork_waits_for_its_owner_and_holds_up_nobody_else() -> None:
    async with scene("w0", "w1") as s:
        running = await s.fill()
        mine = next(stream for stream in running if stream.worker == "w0")
        capsule = capsule_id(mine.request)
        s.router.learn_capsule(capsule, WorkerId("w0"), 200, block_hashes(PROMPT, BLOCK))
        job = ForkJob(capsule, [as_tokens([1])], Limits(4))
        fork = asyncio.create_task(s.gateway.start(job))
        await turns(2)
        other = next(stream for stream in running if stream.worker == "w1")
        s.workers["w1"].finish(other.request)
        await turns(4)
        assert not fork.done()
        assert (await s.ask()).worker == "w1"
        doomed = asyncio.create_task(s.gateway.start(job))
        await turns(2)
        s.workers["w0"].finish(mine.request)
        assert (await fork).worker == "w0"
        s.workers["w0"].on_lost("its process is gone")
        with pytest.raises(CapsuleLost):  # its text was never seen here
            await doomed


async def test_closing_the_gateway_ends_the_waits() -> None:
    async with scene("w0") as s:
        await s.fill()
        waits = [s.ask() for _ in range(3)]
        await turns(2)
        await s.gateway.close()
        for task in waits:
            with pytest.raises(Unavailable, match="shutting down"):
                await task
        with pytest.raises(Unavailable, match="shutting down"):
            await s.ask()


async def test_time_to_first_token_counts_the_wait() -> None:
    """I23, part: queue wait."""
    async with scene("w0") as s:
        running = await s.fill()
        waits = s.ask()
        await turns(2)
        s.now += 7.0
        s.workers["w0"].finish(running[0].request)
        await turns(4)
        s.workers["w0"].finish(waits.result().request)
        read = s.metrics.registry.get_sample_value
        assert read("mallee_time_to_first_token_seconds_sum") == 14.0
        assert read("mallee_admission_wait_seconds_sum") == 7.0
