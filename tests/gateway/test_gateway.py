"""Gateway, transport, worker host and engine together in one process (bus in memory, mocked model)."""

import time
from contextlib import AbstractAsyncContextManager
from functools import partial

import pytest

from bench.doubles.bus import LocalBus
from bench.doubles.forward import linear_tokens
from mallee.gateway.requests.deltas import DeltaQueue
from mallee.mocker.passes import mock_spec
from mallee.protocol.errors import SlowReader, StoreFull
from mallee.protocol.hashing import as_tokens
from mallee.protocol.ids import COMMON, branch_seed
from mallee.protocol.messages import Limits, Sampling
from mallee.router.config import RouterConfig
from mallee.router.dispatch.jobs import ForkJob, GenerateJob, PrefillJob, QueueTerms
from support.live_fleet import LiveFleet, collect, running
from support.waiting import elapse, until

SPEC = mock_spec(max_model_len=4096)
PROMPT = as_tokens([i % 61 for i in range(200)])
HOT = Sampling(temperature=1.0, seed=9)
BLOCK = 16


def fleet(
    workers: int, gateways: int = 1, *, num_blocks: int = 256
) -> AbstractAsyncContextManager[LiveFleet]:
    made = LiveFleet(SPEC, RouterConfig(block_size=BLOCK), num_blocks=num_blocks)
    return running(made, workers, gateways)


def expect(prompt: list[int], n: int, branch: int = 0) -> list[int]:
    return linear_tokens(SPEC, prompt, n, sampling=HOT, seed=branch_seed(HOT.seed, branch))


async def test_capsules_are_dated_by_the_gateways_wall_clock() -> None:
    dates: list[float] = []
    made_fleet = LiveFleet(
        SPEC, RouterConfig(block_size=BLOCK), wall_clock=lambda: 1e6 + time.monotonic()
    )
    async with running(made_fleet, workers=1) as f:
        gateway = f.gateways[0]
        for _ in range(2):
            ((_, made),) = (
                await collect(await gateway.requests.start(PrefillJob(PROMPT)))
            ).values()
            dates.append((await gateway.capsules.show(made.capsule, COMMON)).created)
            await elapse(30.0)
        assert dates[0] == pytest.approx(1e6 + time.monotonic() - 60.0, abs=1.0)
        assert dates[1] - dates[0] == pytest.approx(30.0, abs=0.5)


async def test_a_full_store_is_told_until_it_takes_something_again() -> None:
    """X8, part: requests go on meanwhile."""
    async with fleet(workers=1) as f:
        gateway = f.gateways[0]
        bucket = gateway.store.bucket("texts", bytes, version=1, ttl_s=60.0)
        assert gateway.operator.health()["store"] == "up"
        f.hub.kept.is_full = True
        for _ in range(2):
            with pytest.raises(StoreFull):
                await bucket.put(COMMON, "name", b"value")
            health = gateway.operator.health()
            assert [health[each] for each in ("status", "broker", "store")] == [
                *("degraded", "up", "full")
            ]
            answers = await collect(await gateway.requests.start(GenerateJob(PROMPT, Limits(2))))
            assert len(answers[0][0]) == 2
        f.hub.kept.is_full = False
        await bucket.put(COMMON, "name", b"value")
        assert gateway.operator.health()["status"] == "ok"
        f.hub.set_up(False)
        assert gateway.operator.health()["store"] == "down"


async def test_a_fault_of_the_file_of_keys_is_in_the_health() -> None:
    """Requests go on: the keys before it hold."""
    async with fleet(workers=1) as f:
        operator = f.gateways[0].operator
        assert operator.health()["keys"] == "ok"
        operator.key_fault = lambda: "keys.yaml: no YAML, line 3"
        health = operator.health()
        assert (health["status"], health["keys"]) == ("degraded", "keys.yaml: no YAML, line 3")
        assert operator.is_serving


async def test_with_the_broker_gone_requests_still_work_and_the_index_converges_after() -> None:
    """K7, X8, part: routing goes on without the broker; afterwards the index equals what is held."""
    async with fleet(workers=2, gateways=2) as f:
        await collect(await f.gateways[0].requests.start(GenerateJob(PROMPT, Limits(2), HOT)))
        f.hub.set_up(False)
        assert f.gateways[0].operator.health()["status"] == "degraded"
        for i in range(4):
            prompt = as_tokens([i + 5] * 64)
            answers = await collect(
                await f.gateways[i % 2].requests.start(GenerateJob(prompt, Limits(2), HOT))
            )
            assert answers[0][0] == expect([i + 5] * 64, 2)
        f.hub.set_up(True)
        held = sum(len(engine._tree.held_hashes()) for engine in f.engines.values())
        assert held > 12
        await until(
            lambda: all(sum(w.indexed_blocks for w in r.workers()) == held for r in f.routers)
        )


async def test_a_worker_whose_link_broke_is_met_again_at_its_next_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker lives: its requests wait for it and go on, then it serves again, capsules and all."""
    monkeypatch.setattr("mallee.gateway.fleet.links.RELINK_S", 0.1)
    async with fleet(workers=1) as f:
        gateway = f.gateways[0]
        ((_, made),) = (await collect(await gateway.requests.start(PrefillJob(PROMPT)))).values()
        stream = await gateway.requests.start(GenerateJob(PROMPT, Limits(3000), HOT))
        (host,) = f.hosts.values()
        host._streams.end("g0")
        await until(lambda: gateway.operator.health()["status"] == "unavailable")
        await f.ready(1)
        answers = await collect(stream)
        assert answers[0][0] == expect(PROMPT.tolist(), 3000)
        await until(lambda: gateway.operator.health()["status"] == "ok")
        fork = await gateway.requests.start(ForkJob(made.capsule, [as_tokens([])], Limits(3), HOT))
        assert (await collect(fork))[0][0] == expect(PROMPT.tolist(), 3)


async def test_an_answer_that_is_not_read_is_given_up_once_and_cancelled_on_its_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    queue = partial(DeltaQueue, 64, 128)
    monkeypatch.setattr("mallee.gateway.requests.request.DeltaQueue", queue)
    async with fleet(workers=1) as f:
        job = GenerateJob(PROMPT, Limits(3000, ignore_eos=True), HOT, n=3)
        stream = await f.gateways[0].requests.start(job)
        stats = f.engines["w0"].stats
        await until(lambda: stats().num_output_tokens > 0 and stats().jobs == 0)
        assert stats().num_output_tokens < 3 * 3000
        with pytest.raises(SlowReader):
            await anext(aiter(stream))
        await stream.aclose()
        said = f"{stream.request}: its client does not read, it is given up"
        assert [record.message for record in caplog.records] == [said]
        await until(f.is_clean)


async def test_fewer_workers_than_expected_show_in_health_and_in_metrics() -> None:
    async with fleet(workers=1) as f:
        gateway = f.gateways[0]
        assert gateway.operator.health()["status"] == "ok"
        gateway.operator.expect(3)
        assert gateway.operator.health()["status"] == "degraded"
        lines = gateway.context.metrics.render().decode().splitlines()
        assert "mallee_workers_expected 3.0" in lines
        assert "mallee_workers_alive 1.0" in lines


@pytest.mark.parametrize("mute", ["the gateway", "the workers"])
async def test_workers_whose_links_stand_get_requests_though_no_lease_arrives(mute: str) -> None:
    """X8, part: a broker that carries nothing and holds its connections is no death of anybody."""
    made = LiveFleet(SPEC, RouterConfig(block_size=BLOCK, lease_s=1.5))
    async with running(made, workers=2) as f:
        gateway, router = f.gateways[0], f.routers[0]
        buses = f.buses[:1] if mute == "the gateway" else f.buses[1:]
        for bus in buses:
            assert isinstance(bus, LocalBus)
            bus.is_mute = True
        await until(lambda: all(w.lease_age_s > 2.5 for w in router.all_workers()))
        assert router.stats().num_unleased == 2
        streams = [
            await gateway.requests.start(GenerateJob(as_tokens([i] * 100), Limits(4), HOT))
            for i in range(6)
        ]
        assert {s.worker for s in streams} == {"w0", "w1"}
        for i, stream in enumerate(streams):
            assert (await collect(stream))[0][0] == expect([i] * 100, 4)
        router.check()
        for bus in buses:
            bus.is_mute = False
        await until(lambda: not router.stats().num_unleased)


@pytest.mark.parametrize("seconds", [600.0, -600.0])
async def test_clocks_of_processes_need_not_agree(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases, bookings, deadlines and pins count the seconds of the process that keeps them."""
    now, true = {"g0": 0.0, "g1": seconds, "w0": -seconds, "w1": 1e6}, time.time
    made = LiveFleet(
        SPEC,
        RouterConfig(block_size=BLOCK, lease_s=0.5),
        syncs=True,
        clock_of=lambda process: lambda: time.monotonic() + now[process],
    )
    terms = QueueTerms(deadline_s=5.0)
    async with running(made, workers=2, gateways=2) as f:
        monkeypatch.setattr(time, "time", lambda: true() + seconds)  # jumps under all of them
        one, two = f.gateways
        running_there = await one.requests.start(GenerateJob(PROMPT, Limits(3000), HOT))
        await until(lambda: f.routers[1].stats().remote_requests == 1)
        (made_it,) = (await collect(await one.requests.start(PrefillJob(PROMPT)))).values()
        assert made_it[1].capsule is not None
        await one.capsules.pin(made_it[1].capsule, 30.0, COMMON)
        await elapse(1.2)  # more than two leases
        for gateway, router in zip(f.gateways, f.routers, strict=True):
            assert [w.state for w in router.all_workers()] == ["ready", "ready"]
            assert router.stats().num_unleased == 0
            answers = await collect(
                await gateway.requests.start(GenerateJob(PROMPT, Limits(4), HOT, terms=terms))
            )
            assert answers[0][0] == expect(PROMPT.tolist(), 4)
        fork = await two.requests.start(
            ForkJob(made_it[1].capsule, [as_tokens([1])], Limits(8), HOT)
        )
        assert (await collect(fork))[0][0] == expect([*PROMPT.tolist(), 1], 8)
        await running_there.aclose()
        await until(lambda: f.routers[1].stats().remote_requests == 0)
        for each in f.gateways:
            each.check()
