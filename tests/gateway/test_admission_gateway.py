"""A gateway whose workers are full: who waits, and what becomes of them."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from mallee.api.serve import prefill
from mallee.gateway.requests.request import RunningRequest
from mallee.mocker.passes import mock_spec
from mallee.protocol.errors import DeadlineExceeded, Overloaded, TenantQueueFull, Unavailable
from mallee.protocol.hashing import as_tokens
from mallee.protocol.ids import COMMON, RequestId
from mallee.protocol.messages import Limits
from mallee.router.config import RouterConfig
from mallee.router.dispatch.jobs import ForkJob, GenerateJob, Job, PrefillJob, QueueTerms
from mallee.router.dispatch.queue import AdmissionConfig
from support.live_fleet import LiveFleet, collect, running
from support.waiting import elapse, until

SPEC = mock_spec(max_model_len=4096)
ROUTING = RouterConfig(block_size=16, lease_s=1e6)
ROWS = 2
PROMPT = as_tokens([i % 61 for i in range(200)])


class Full(LiveFleet):
    """Workers of two rows each, which answers take that go on; the gateway's clock may jump."""

    def __init__(self, **limits: Any) -> None:
        self.jump_s = 0.0
        super().__init__(
            SPEC,
            ROUTING,
            rows=ROWS,
            admission=AdmissionConfig(**limits),
            clock_of=lambda name: lambda: time.monotonic() + self.jump_s * (name == "g0"),
        )
        self.streams: list[RunningRequest] = []
        self.num_kept = 0  # capsules that may stay

    def start(self, job: Job) -> "asyncio.Task[RunningRequest]":
        return asyncio.create_task(self.gateways[0].requests.start(job))

    def ask(self, **terms: Any) -> "asyncio.Task[RunningRequest]":
        return self.start(GenerateJob(PROMPT, Limits(4), terms=QueueTerms(**terms)))

    async def fill(self) -> None:
        while len(self.streams) < ROWS * len(self.hosts):
            prompt = as_tokens([len(self.streams)] * 40)
            job = GenerateJob(prompt, Limits(3000, ignore_eos=True))
            self.streams.append(await self.start(job))

    async def free(self, worker: str = "w0") -> None:
        """A row of that worker."""
        stream = next(each for each in self.streams if each.worker == worker)
        self.streams.remove(stream)
        await stream.aclose()

    async def waiting(self, num: int) -> None:
        await until(lambda: self.gateways[0].shell.dispatcher.num_waiting == num)


@asynccontextmanager
async def full(workers: int = 1, **limits: Any) -> AsyncIterator[Full]:
    made = Full(**limits)
    async with running(made, workers):
        await made.fill()
        yield made
        for stream in made.streams:
            await stream.aclose()
        await until(lambda: made.is_clean(made.num_kept))


async def test_a_tenants_and_the_whole_queues_limit_refuse_with_429_and_503() -> None:
    """F30, part, I26, part: refused before anything is kept or sent; who leaves is never sent."""
    async with full(max_waiting=3, max_waiting_per_tenant=2) as f:
        waits = [f.ask(tenant="a"), f.ask(tenant="a")]
        await f.waiting(2)
        with pytest.raises(TenantQueueFull):
            await f.ask(tenant="a")
        waits.append(f.ask(tenant="b"))
        await f.waiting(3)
        with pytest.raises(Overloaded):
            await f.ask(tenant="c")
        told = f.gateways[0].operator.metrics()
        assert b'mallee_admission_refusals_total{reason="overloaded"} 1.0' in told
        for task in waits:
            task.cancel()
        await f.waiting(0)
        await f.free()
        await elapse(0.03)
        assert f.engines["w0"].stats().jobs == ROWS - 1


async def test_a_wait_counts_in_the_first_tokens_time_and_ends_at_its_deadline() -> None:
    """I23, part: queue wait."""
    async with full() as f:
        late, patient = f.ask(deadline_s=3.0), f.ask()
        await f.waiting(2)
        f.jump_s = 3.0
        with pytest.raises(DeadlineExceeded):
            await late
        life = f.gateways[0].operator.decisions(RequestId("g0-r2"), 1, 1)["life"]
        assert life["branches"][0]["state"] == "refused"
        assert life["branches"][0]["end_s"] == pytest.approx(3.0, abs=0.1)
        f.jump_s = 7.0
        await f.free()
        assert (await collect(await patient))[0][1].finish is not None
        read = f.gateways[0].context.metrics.registry.get_sample_value
        assert read("mallee_admission_wait_seconds_sum") == pytest.approx(7.0, abs=0.5)
        assert (read("mallee_time_to_first_token_seconds_sum") or 0) > 7.0


async def test_a_client_that_leaves_as_it_is_sent_leaves_nothing_at_the_worker() -> None:
    """I26, part: at whatever moment; only prefills that were read leave a capsule."""
    job = GenerateJob(PROMPT, Limits(3000, ignore_eos=True))
    async with full() as f:
        gateway, num_made = f.gateways[0], 0
        for i in range(60):
            name = gateway.requests.new_name(COMMON)
            asking: tuple[asyncio.Task[Any], ...] = (
                f.start(job),
                asyncio.create_task(prefill(gateway, PrefillJob(PROMPT), 0.0, name)),
            )
            await f.waiting(2)
            await f.free()
            await f.free()
            await elapse(i / 20_000)
            for task in asking:
                task.cancel()
            stream, last = await asyncio.gather(*asking, return_exceptions=True)
            if not isinstance(stream, BaseException):
                await stream.aclose()
            num_made += not isinstance(last, BaseException)
            await f.fill()
        stats = f.engines["w0"].stats
        await until(lambda: stats().jobs == ROWS and stats().capsules.kept == num_made)
        assert num_made < 60
        f.num_kept = num_made


async def test_a_fork_waits_for_its_owner_and_holds_up_nobody_else() -> None:
    made = Full()
    async with running(made, 2):
        stream = await made.start(PrefillJob(PROMPT))
        ((_, kept),) = (await collect(stream)).values()
        assert kept.capsule is not None
        await made.fill()
        owner, other = sorted(("w0", "w1"), key=lambda name: name != stream.worker)
        fork = made.start(ForkJob(kept.capsule, [as_tokens([1])], Limits(4)))
        await made.waiting(1)
        await made.free(other)
        assert (await made.ask()).worker == other
        assert not fork.done()
        await made.free(owner)
        assert (await fork).worker == owner


async def test_closing_the_gateway_ends_the_waits() -> None:
    async with running(Full(), 1) as f:
        assert isinstance(f, Full)
        await f.fill()
        waits = [f.ask() for _ in range(3)]
        await f.waiting(3)
        await f.gateways[0].close()
        for task in (*waits, f.ask()):
            with pytest.raises(Unavailable, match="shutting down"):
                await task
