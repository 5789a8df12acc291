"""Loans that are asked of an engine's thread while it ends."""

import asyncio
import time

import pytest

from mallee.actors.hosting.engine import LEND_TIMEOUT_S, EngineThread
from mallee.mocker.passes import mock_spec
from mallee.protocol.errors import WorkerLost
from mallee.protocol.messages import Demote, Holder, Prefill, pack_tokens
from mallee.testing.forward import MockForward
from mallee.worker.engine import Engine
from mallee.worker.kv.tiers.moves import DISK
from mallee.worker.kv.tiers.peers import Ask
from mallee.worker.records import StepResult
from support.live_fleet import make_engine
from support.tiers import DictDisk, LateMover, make_tiers
from support.waiting import until


class Results:
    """The `Results` of a thread whose answers nobody reads."""

    def deliver(self, result: StepResult, next_seq: int) -> None: ...

    def dropped(self, gateway: str) -> None: ...

    def fail(self, reason: str) -> None:
        raise AssertionError(reason)


def engine(disk: DictDisk, life: int, movers: list[LateMover] | None) -> Engine:
    forward = MockForward(mock_spec(), num_blocks=32, block_size=4)
    return make_engine(forward, "w", life, below=make_tiers(disk=disk, movers=movers))


async def test_a_question_that_waits_for_a_disk_ends_with_the_engine() -> None:
    """Not after its own limit: its borrower computes what it can't get."""
    disk, movers = DictDisk(), list[LateMover]()
    first = engine(disk, 1, None)
    prompt = pack_tokens(list(range(3, 20)))
    for command in (Prefill("p", prompt), Demote("d", "p.0", DISK)):
        assert first.submit(command, "g") is None
        while first.has_work:
            first.step()
    first.close()
    second = engine(disk, 2, movers)
    thread = EngineThread(second, Results(), clock=time.monotonic)
    thread.start()
    ask = Ask(Holder("w", 2, "", 17, "p.0"), (), second.spec.identity)
    asking = asyncio.create_task(asyncio.to_thread(thread.lend, ask))
    await until(lambda: movers[0].num_under_way > 0)
    began = time.monotonic()
    assert await thread.stop(WorkerLost("w", "it leaves"))
    with pytest.raises(WorkerLost, match="has ended"):
        await asking
    assert time.monotonic() - began < LEND_TIMEOUT_S / 2
    with pytest.raises(WorkerLost, match="has ended"):
        thread.lend(ask)
