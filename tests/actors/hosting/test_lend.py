"""Loans that other threads ask an engine's thread for, which come, come late, or never come."""

import asyncio
import gc
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from bench.doubles.forward import MockForward
from mallee.actors.hosting import engine as hosting
from mallee.actors.hosting.engine import EngineThread, _Item
from mallee.mocker.passes import mock_spec
from mallee.protocol.errors import IncompatibleCapsule, UnknownCapsule, WorkerLost
from mallee.protocol.messages import Demote, Fork, Limits, Prefill, Promote, Release, pack_tokens
from mallee.worker.capsules.record import decode_record
from mallee.worker.records import EngineConfig, StepResult
from mallee.worker.transfer.values import DISK, Ask, Loan
from support.lending import holder
from support.live_fleet import make_engine
from support.tiers import DictDisk, LateMover, make_tiers
from support.waiting import until

TEXT = [3 + i * 5 % 59 for i in range(18)]  # five blocks, of which the last is not full
AT_ONCE_S = 3.0  # far below the limit of a wait


class Reasons:
    """The `Results` of a thread whose engine has no clients."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def deliver(self, result: StepResult, next_seq: int) -> None: ...

    def dropped(self, gateway: str) -> None: ...

    def fail(self, reason: str) -> None:
        self.failed.append(reason)


class Lending:
    """An engine's thread. Its capsule `p.0` lies on disk alone, and is brought back when a test says so."""

    def __init__(self) -> None:
        movers: list[LateMover] = []
        self.engine = make_engine(
            MockForward(mock_spec(max_model_len=128), num_blocks=24, block_size=4),
            "w0",
            config=EngineConfig(max_answer_capsules=0),
            below=make_tiers(disk=DictDisk(), movers=movers),
        )
        (self.mover,) = movers
        self.run(Prefill("p", pack_tokens(TEXT)))
        self.run(Demote("d", "p.0", DISK))
        for token in (1, 2):  # other texts, which leave no room on the device
            self.run(Prefill(f"f{token}", pack_tokens([token] * 92)))
            self.run(Release(f"f{token}.0"))
        self.results = Reasons()
        self.thread = EngineThread(self.engine, self.results, clock=time.monotonic)
        self.thread.start()

    def run(self, command: Any) -> None:
        """Before the thread starts."""
        assert self.engine.submit(command, "g") is None
        while self.engine.has_work or self.mover.num_under_way:
            self.engine.step()
            self.mover.advance(100)

    def lend(self, capsule: str = "p.0") -> asyncio.Task[Loan]:
        ask = Ask(holder(self.engine, capsule=capsule), (), self.engine.spec.identity)
        return asyncio.create_task(asyncio.to_thread(self.thread.lend, ask))

    async def waiting(self) -> asyncio.Task[Loan]:
        """A loan that is asked for, and waits for the disk."""
        asked = self.lend()
        await until(lambda: self.mover.num_under_way > 0)
        return asked

    async def bring_until(self, claim: Callable[[], bool]) -> None:
        """Moves are carried out, by the engine's thread, until `claim` holds."""

        def is_so() -> bool:
            self.thread._put(_Item(before_step=lambda: self.mover.advance(100)))
            return claim()

        await until(is_so)

    async def until_nothing_is_lent(self, num_loans: int) -> None:
        def is_so() -> bool:
            self.thread._look()
            return self.engine.stats().lending[:2] == (0, num_loans)

        await until(is_so)

    async def stop(self) -> None:
        assert await self.thread.stop(RuntimeError("the test is over"))


async def test_a_loan_waits_until_its_capsule_has_come_from_disk() -> None:
    """X6, part: asked for by two threads at once; it is over when it is closed."""
    lending = Lending()
    asked = await lending.waiting(), lending.lend()
    await lending.bring_until(lambda: all(task.done() for task in asked))
    for loan in [await task for task in asked]:
        assert decode_record(loan.record).tokens == pack_tokens(TEXT)
        assert loan.num_blocks == 5
        rows = np.zeros((5, loan.block_nbytes), np.uint8)
        loan.read(range(5), rows)
        assert rows.any(axis=1).all()
        loan.close()
    await lending.until_nothing_is_lent(num_loans=2)
    with pytest.raises(UnknownCapsule):
        await lending.lend("gone.0")
    await lending.stop()


@pytest.mark.parametrize("way", ["stopped", "raises"])
async def test_an_engine_that_has_ended_refuses_a_loan_that_waits_at_once(way: str) -> None:
    """X6, part: and those that are asked for later, before its worker has heard of it."""
    lending = Lending()
    asked = await lending.waiting()

    def fail() -> None:
        raise RuntimeError("broken")

    async with asyncio.timeout(AT_ONCE_S):
        if way == "stopped":
            await lending.stop()
        else:
            lending.thread._put(_Item(before_step=fail))
        for task in (asked, lending.lend()):
            with pytest.raises(WorkerLost, match="its engine has ended"):
                await task
        if way == "raises":
            await until(lambda: lending.results.failed == ["RuntimeError: broken"])
            await lending.stop()


async def test_a_loan_that_comes_too_late_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """X6, part: the wait has a limit, and the next one gets what has come."""
    monkeypatch.setattr(hosting, "LEND_TIMEOUT_S", 0.05)
    lending = Lending()
    with pytest.raises(WorkerLost, match=r"it lent nothing within 0\.05 s"):
        await (await lending.waiting())
    monkeypatch.undo()
    await lending.bring_until(lambda: lending.engine.stats().lending.num_loans == 1)
    await lending.until_nothing_is_lent(num_loans=1)
    loan = await lending.lend()
    assert loan.num_blocks == 5
    loan.close()
    await lending.until_nothing_is_lent(num_loans=2)
    await lending.stop()


async def test_a_refused_loan_that_was_made_ahead_leaves_no_question_behind() -> None:
    """Another model asks for it, or one that means another life: nothing waits for an answer any more."""
    lending = Lending()
    lending.run(Promote("u", "p.0"))
    lending.run(Fork("f", "p.0", (b"",), Limits(1), loans=2))
    ask = Ask(holder(lending.engine, capsule="p.0"), (), "another model")

    def num_questions() -> int:
        gc.collect()
        return sum(type(each) is Future for each in gc.get_objects())  # proxies of gone ones raise

    before = num_questions()
    for _ in range(3):
        with pytest.raises(IncompatibleCapsule):
            lending.thread.lend(ask)
    assert num_questions() == before
    await lending.stop()
