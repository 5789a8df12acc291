"""Several real engines in one host: shared streams, one that fails, lives that are over. K21, part."""

from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest

from bench.doubles.bus import LocalBus
from bench.doubles.forward import MockForward
from mallee.actors.hosting.host import LEASES_PER_MESSAGE
from mallee.mocker.passes import mock_spec
from mallee.protocol.codec import encode
from mallee.protocol.errors import WorkerLost
from mallee.protocol.events import (
    AskSnapshot,
    decode_leases,
    decode_snapshot,
    encode_host_ask,
    unpack_hashes,
)
from mallee.protocol.ids import WorkerId
from mallee.protocol.messages import Cancel, Prefill, Update, pack_tokens
from mallee.protocol.parcels import LEAVING, Parcel, Report, decode_reports
from support.reading import Reader, generate
from support.waiting import until

SPEC = mock_spec()


@pytest.fixture
def crowd(rig: Any) -> Callable[..., Any]:
    """A host with so many engines, each in its thread."""

    def make(n: int, **options: Any) -> Any:
        made = rig(host="h0", **options)
        for i in range(1, n):
            made.add(f"w{i}", 1, MockForward(SPEC, num_blocks=256, block_size=4))
        return made

    return make


def of_workers(reports: list[Report]) -> dict[str, list[Update]]:
    found: dict[str, list[Update]] = {report.worker: [] for report in reports}
    for report in reports:
        found[report.worker].extend(report.frame.updates)
    return found


async def test_an_engine_that_fails_takes_only_its_own_along(
    crowd: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with crowd(2) as c, aclosing(Reader(c.host, "g")) as frames:
        await anext(frames)
        c.forward.is_broken = True
        parcels = [Parcel(f"w{i}", 1, (generate(f"r{i}", 8),)) for i in range(2)]
        await frames.submit(encode(parcels))
        found = await frames.reports(1)
        by_worker = of_workers(found)
        (lost,) = [report for report in found if report.lost is not None]
        assert lost.worker == "w0"
        assert "fell off the bus" in str(lost.lost)
        assert by_worker["w0"] == []
        assert by_worker["w1"][-1].finish == "length"
        assert c.host.healthy()
        assert not c.host.stats().is_failed
        await frames.submit(encode([Parcel("w0", 1, (generate("late"),))]))
        late = decode_reports(await anext(frames))
        assert [(r.worker, "fell off the bus" in str(r.lost)) for r in late] == [("w0", True)]
    assert caplog.records


async def test_commands_for_a_life_that_is_over_are_answered_with_its_loss(crowd: Any) -> None:
    async with crowd(1) as c, aclosing(Reader(c.host, "g")) as frames:
        await anext(frames)
        batch = [
            Parcel("w0", 7, (generate("a"),)),
            Parcel("w9", 1, (Cancel("x"),)),
            Parcel("w9", 2, (), True),  # given up by its gateway, which asks for no answer
            Parcel("w0", 1, (generate("b"),)),
        ]
        await frames.submit(encode(batch))
        found = await frames.reports(1)
        by_worker = of_workers(found)
        lost = [(r.worker, r.incarnation) for r in found if r.lost is not None]
        assert lost == [("w0", 7), ("w9", 1)]
        assert {u.request for u in by_worker["w0"]} == {"b"}


async def test_a_gateway_that_gives_one_worker_up_keeps_the_others(crowd: Any) -> None:
    async with crowd(2) as c, aclosing(Reader(c.host, "g")) as frames:
        await anext(frames)
        parcels = [Parcel(f"w{i}", 1, (generate(f"r{i}", 40),)) for i in range(2)]
        await frames.submit(encode(parcels))
        await frames.submit(encode([Parcel("w0", 1, (), True)]))
        by_worker = of_workers(await frames.reports(1))
        assert by_worker["w1"][-1].finish == "length"
        assert all(u.finish is None for u in by_worker.get("w0", ()))
        assert c.host.stats().open_requests == 0
        c.host.check()


async def test_a_worker_that_is_removed_or_crashes_is_gone_for_gateways_at_once(crowd: Any) -> None:
    async with crowd(3) as c, aclosing(Reader(c.host, "g")) as frames:
        await anext(frames)
        await c.host.crash(WorkerId("w0"), "it crashed")
        await c.host.remove(WorkerId("w1"))
        lost = [(r.worker, r.lost) for _ in range(2) for r in decode_reports(await anext(frames))]
        assert lost == [("w0", "it crashed"), ("w1", LEAVING)]
        c.add("w0", 2, MockForward(SPEC, num_blocks=256, block_size=4))
        await frames.submit(encode([Parcel("w0", 2, (generate("a"),))]))
        by_worker = of_workers(await frames.reports(1))
        assert by_worker["w0"][-1].finish == "length"


async def test_leases_of_a_host_share_messages_and_name_it(crowd: Any) -> None:
    n = LEASES_PER_MESSAGE + 4
    made = crowd(n, lease_period_s=60.0)
    async with made.listen() as listener:
        await listener.to("mallee.test.lease.*")
        async with made:
            await until(lambda: len(listener.heard) == 2)
            leases = [lease for raw in listener.heard for lease in decode_leases(raw)]
            assert {lease.worker for lease in leases} == {f"w{i}" for i in range(n)}
            assert {(lease.host, lease.address, lease.incarnation) for lease in leases} == {
                ("h0", "a0", 1)
            }
            sizes = {(lease.block_size, lease.num_blocks, lease.max_rows) for lease in leases}
            assert sizes == {(4, 256, 64)}
        await until(lambda: len(listener.heard) == 4)
        left = [lease for raw in listener.heard[2:] for lease in decode_leases(raw)]
        assert all(lease.is_leaving for lease in left)
        assert not any(lease.is_leaving for lease in leases)
        with pytest.raises(WorkerLost, match="shutting down"):
            Reader(made.host, "g")


async def test_a_late_gateway_gets_every_workers_snapshot_from_the_host(crowd: Any) -> None:
    """K8, part: one subject answers for all workers of a process."""
    async with crowd(3, lease_period_s=0.05) as c, aclosing(Reader(c.host, "g")) as frames:
        await anext(frames)
        prompts = [pack_tokens(range(i, i + 9 + 4 * i)) for i in range(3)]
        parcels = [Parcel(f"w{i}", 1, (Prefill(f"p{i}", p),)) for i, p in enumerate(prompts)]
        await frames.submit(encode(parcels))
        await frames.reports(3)
        bus = LocalBus(c.hub)
        await bus.connect()
        for i in range(3):
            asked = encode_host_ask(AskSnapshot(WorkerId(f"w{i}")))
            snapshot = decode_snapshot(await bus.request("mallee.test.host.h0", asked, 1.0))
            assert (snapshot.worker, len(unpack_hashes(snapshot.hashes))) == (f"w{i}", 2 + i)
        asked = encode_host_ask(AskSnapshot(WorkerId("w7")))
        with pytest.raises(TimeoutError):  # of nobody
            await bus.request("mallee.test.host.h0", asked, 0.05)
        refused = await bus.request("mallee.test.host.h0", b'{"verb": "list"}', 1.0)
        assert b"mocked alone" in refused
