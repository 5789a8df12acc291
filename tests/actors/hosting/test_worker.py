"""One engine as a service: order, streams, leases, failure."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

import pytest

from mallee.protocol.errors import CodecError, WorkerLost
from mallee.protocol.events import Load, decode_lease
from mallee.protocol.messages import (
    Cancel,
    Generate,
    Limits,
    Prefill,
    pack_tokens,
)
from mallee.protocol.parcels import Report, decode_reports
from support.reading import Reader, batch, generate
from support.waiting import elapse, until


async def test_a_refused_id_in_use_leaves_its_running_request_open(rig: Any) -> None:
    async with rig() as r, aclosing(Reader(r.host, "g")) as frames:
        await frames.hello()
        await frames.submit(batch(generate("a", 900, n=2)))
        await frames.submit(batch(generate("a", n=9)))
        await frames.submit(batch(generate("b")))
        (ended,) = {u.request for u in await frames.updates(1) if u.finish is not None}
        assert ended == "b"
        assert r.host.stats().open_requests == 1
        await frames.submit(batch(Cancel("a")))
        assert {u.finish for u in await frames.updates(2)} >= {"cancelled"}
        assert r.host.stats().open_requests == 0


async def test_bytes_that_are_no_batch_are_refused_whole(rig: Any) -> None:
    async with rig() as r, aclosing(Reader(r.host, "g")) as frames:
        await frames.hello()
        with pytest.raises(CodecError):
            await frames.submit(batch(generate("a"))[:-3])
        assert r.host.stats().open_requests == 0


async def test_a_gateway_whose_stream_has_ended_may_not_submit(rig: Any) -> None:
    async with rig() as r:
        frames = Reader(r.host, "g")
        await frames.aclose()
        with pytest.raises(WorkerLost, match="has ended"):
            await frames.submit(batch(generate("a")))


def running(r: Any) -> int:
    jobs: int = r.engine.stats().jobs
    return jobs


async def test_a_second_stream_replaces_the_first(rig: Any) -> None:
    async with rig() as r:
        first = Reader(r.host, "g")
        await first.hello()
        await first.submit(batch(generate("old", 900)))
        async with aclosing(Reader(r.host, "g")) as second:
            await second.hello()
            await until(lambda: running(r) == 0)
            assert r.host.stats().open_requests == 0
            async with asyncio.timeout(5), aclosing(first):
                async for _ in first:
                    pass  # what was on its way, then the end
            await second.submit(batch(generate("new", 2)))
            assert {u.request for u in await second.updates(1)} == {"new"}


async def test_heartbeats_tell_how_far_a_busy_worker_is(rig: Any) -> None:
    """Chunks of a long prefill report nothing: without it they would look like a hang."""
    async with rig(heartbeat_s=0.01) as r, aclosing(Reader(r.host, "g")) as frames:
        r.forward.delay_s = 0.02
        await frames.hello()
        await frames.submit(batch(Generate("a", pack_tokens([7] * 400), Limits(1))))
        steps: list[int] = []
        async for raw in frames:
            (report,) = decode_reports(raw) or (None,)
            if report is None:
                continue
            if report.frame.updates:
                break
            steps.append(report.frame.step)
        assert len(set(steps)) > 3
        assert steps == sorted(steps)
        await until(lambda: r.host.stats().open_requests == 0)
        await anext(frames)
        await frames.hello()  # nothing is open any more


async def test_a_silent_gateway_is_cut_and_an_empty_batch_is_no_silence(rig: Any) -> None:
    async with rig(heartbeat_s=0.01) as r, aclosing(Reader(r.host, "g")) as frames:
        await frames.hello()
        r.now += 9
        await frames.submit(batch())
        r.now += 9
        for _ in range(4):  # it beats while the engine sleeps
            await frames.hello()
        assert (r.host.stats().steps, r.forward.num_passes) == (0, 0)
        await frames.submit(batch(generate("a", 900)))
        r.now += 11
        await until(lambda: running(r) == 0)
        async with asyncio.timeout(5):
            async for _ in frames:
                pass  # what was on its way, then the end
        assert r.host.stats().silent_gateways == 1


async def test_leases_say_how_busy_the_engine_is_and_wait_for_no_step(
    rig: Any,
) -> None:
    """K6, part: rows, waiting, blocks and prompt tokens as the engine counts them."""
    r = rig(lease_period_s=0.01)
    async with r.listen() as listener:
        await listener.to("mallee.test.lease.*")

        def load() -> Load | None:
            return decode_lease(listener.heard[-1]).load if listener.heard else None

        def is_idle() -> bool:
            last = load()
            return last is not None and not (last.rows or last.waiting or last.active_blocks)

        async with r, aclosing(Reader(r.host, "g")) as frames:
            await frames.hello()
            await until(is_idle)
            r.forward.delay_s = 0.2
            await frames.submit(batch(generate("a", 3, n=2)))
            num_leases = len(listener.heard)
            await until(lambda: len(listener.heard) > num_leases + 2, 0.5)
            await until(lambda: load() is not None and load().rows == 2)
            assert load().active_blocks >= 3
            r.forward.delay_s = 0.0
            await frames.updates(2)
            await until(is_idle)


async def test_a_broken_engine_is_lost_to_every_gateway_and_says_why(
    rig: Any, caplog: pytest.LogCaptureFixture
) -> None:
    r = rig(lease_period_s=0.01)
    async with r.listen() as listener, r:
        await listener.to("mallee.test.lease.w0")
        one, two = Reader(r.host, "g1"), Reader(r.host, "g2")
        await one.hello()
        await two.hello()
        await one.submit(batch(generate("a", 900, n=2), generate("b", 900)))
        await two.submit(batch(generate("c", 900)))
        r.forward.is_broken = True
        for frames in (one, two):
            last: Report | None = None
            async for raw in frames:
                last = decode_reports(raw)[-1]
            assert last is not None
            assert last.lost is not None
            assert "fell off the bus" in last.lost
            assert last.frame.updates == ()  # so that they go on elsewhere
        assert not r.host.healthy()
        assert r.host.stats().is_failed
        with pytest.raises(WorkerLost, match="fell off the bus"):
            await one.submit(batch(generate("d")))
        await until(lambda: decode_lease(listener.heard[-1]).is_leaving)
        assert any(rec.levelno == logging.ERROR for rec in caplog.records)


async def test_an_engine_that_hung_publishes_nothing_afterwards(rig: Any) -> None:
    r = rig(heartbeat_s=0.01, max_step_s=60.0)
    async with r.listen() as listener, r, aclosing(Reader(r.host, "g")) as frames:
        await listener.to("mallee.test.events.w0")
        await frames.hello()
        r.forward.delay_s = 0.1
        await frames.submit(batch(Prefill("p", pack_tokens(range(1, 11)))))
        runner = r.host.workers["w0"].runner
        await until(lambda: runner.turn_age(r.now + 1) > 0)
        r.now += 100.0
        await until(lambda: not runner.is_alive)  # told to end, it does after its step
        await elapse(0.01)
        assert not r.host.healthy()
        assert listener.heard == []
        assert r.host.stats().steps == 0


async def test_the_end_of_an_engine_ends_the_thread_of_its_masks(rig: Any) -> None:
    async with rig() as r:
        filler = r.engine._sampler._filler = ThreadPoolExecutor(1)
        filler.submit(int)
    with pytest.raises(RuntimeError, match="after shutdown"):
        filler.submit(int)
