"""Waiting for a worker: who is let in, in which order, and what is left when nobody waits any more."""

import asyncio
import random
from typing import Any

import pytest

from mallee.actors.gateway import admission
from mallee.actors.gateway.admission import Admission, Admitted, PendingRequest
from mallee.actors.gateway.jobs import QueueTerms
from mallee.actors.telemetry.metrics import GatewayMetrics
from mallee.protocol.errors import (
    KVMemoryExceeded,
    NoWorker,
    Saturated,
    Unavailable,
    UnknownCapsule,
    WorkerLost,
)
from mallee.protocol.ids import RequestId, WorkerId
from mallee.router.dispatch.queue import AdmissionConfig

W0, W1 = WorkerId("w0"), WorkerId("w1")


class Answer:
    """A placed request: holds rows of its worker until it ends."""

    def __init__(self, desk: "Desk", request: str, worker: WorkerId, rows: int) -> None:
        self.desk = desk
        self.request = request
        self.worker = worker
        self.rows = rows
        self.is_open = True

    async def aclose(self) -> None:
        self.end()

    def end(self, *, is_silent: bool = False) -> None:
        if self.is_open:
            self.is_open = False
            self.desk.free[self.worker] += self.rows
            if not is_silent:
                self.desk.admission.poke(self.worker)


class Desk:
    """An admission over workers that are nothing but a number of free rows."""

    def __init__(self, config: AdmissionConfig | None = None, **free: int) -> None:
        self.free = {WorkerId(worker): n for worker, n in free.items()}
        self.now = 0.0
        self.step = 0.0  # by which time goes on whenever somebody looks
        self.metrics = GatewayMetrics()
        self.admission = Admission(
            config or AdmissionConfig(),
            has_worker=lambda: bool(self.free),
            metrics=self.metrics,
            clock=self.clock,
        )
        self.placed: list[str] = []
        self.answers: list[Answer] = []
        self.tasks: list[asyncio.Task[Answer]] = []
        self.num_tries = 0
        self.fault: Exception | None = None

    def clock(self) -> float:
        self.now += self.step
        return self.now

    def place(
        self, request: str, worker: WorkerId | None, rows: int, cost: float, may_wait: bool = True
    ) -> Admitted[Answer]:
        self.num_tries += 1
        if self.fault is not None:
            raise self.fault
        if worker is not None and worker not in self.free:
            raise UnknownCapsule("c")
        if not self.free:
            raise NoWorker("none is alive")
        chosen = worker or max(self.free, key=lambda w: self.free[w])
        if may_wait and self.free[chosen] < rows:
            raise Saturated(2, 2)
        self.free[chosen] -= rows
        self.placed.append(request)
        self.answers.append(Answer(self, request, chosen, rows))
        return Admitted(self.answers[-1], cost)

    def ask(
        self, request: str, worker: WorkerId | None = None, rows: int = 1, **terms: Any
    ) -> "asyncio.Task[Answer]":
        wanted = PendingRequest(
            RequestId(request),
            QueueTerms(**terms),
            worker,
            rows,
            1.0,
            lambda may_wait: self.place(request, worker, rows, 1.0, may_wait),
        )
        self.tasks.append(asyncio.create_task(self.admission.admit(wanted)))
        return self.tasks[-1]

    async def asked(self, *args: Any, **terms: Any) -> "asyncio.Task[Answer]":
        """The request waits by now, or was let in or refused."""
        task = self.ask(*args, **terms)
        await turns(2)
        return task

    def sample(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)

    async def close(self) -> None:
        """Refuse all that wait, and let each of them hear it."""
        self.admission.close()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def check_empty(self) -> None:
        self.admission.check()
        assert len(self.admission._queue) == 0
        assert not self.admission._waiters
        assert self.sample("mallee_requests_waiting") == 0


async def turns(n: int) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


async def test_with_room_nobody_waits_not_even_for_a_turn_of_the_loop() -> None:
    desk = Desk(w0=1)
    ask = PendingRequest(
        RequestId("r"), QueueTerms(), None, 1, 1.0, lambda _: desk.place("r", None, 1, 1.0)
    )
    with pytest.raises(StopIteration) as done:
        desk.admission.admit(ask).send(None)
    assert done.value.value.worker == W0
    desk.check_empty()
    assert not desk.admission._queue._num_offered


async def test_each_freed_row_lets_in_the_fair_next() -> None:
    """One tenant floods, another comes late with one request, and is let in second."""
    desk = Desk(w0=2)
    flood = [await desk.asked(f"flood{i}", tenant="flood") for i in range(8)]
    late = await desk.asked("late", tenant="late")
    urgent = await desk.asked("urgent", tenant="flood", priority=5)
    assert desk.placed == ["flood0", "flood1"]
    assert desk.sample("mallee_requests_waiting") == 8
    for task in (flood[0], flood[1]):
        (await task).end()
        await turns(3)
    assert desk.placed[2:] == ["urgent", "late"]
    assert urgent.done()
    assert late.done()
    while not all(task.done() for task in flood):
        for task in [*flood, urgent, late]:
            if task.done():
                task.result().end()
        await turns(3)
    assert desk.placed[4:] == [f"flood{i}" for i in range(2, 8)]
    desk.check_empty()
    assert desk.sample("mallee_admission_wait_seconds_count") == 8


@pytest.mark.parametrize("worker", [None, W0])
async def test_who_comes_while_others_wait_does_not_push_in(worker: WorkerId | None) -> None:
    desk = Desk(w0=1)
    first = await desk.asked("first")
    second = desk.ask("second")
    await turns(2)
    third = desk.ask("third", worker)  # its task runs before the waiting one is looked at
    first.result().end()
    await turns(3)
    assert desk.placed == ["first", "second"]
    second.result().end()
    await turns(3)
    assert third.result().request == "third"


async def test_room_that_nobody_told_of_is_found() -> None:
    """Another gateway's request ended: no poke, and yet the wait ends."""
    desk = Desk(w0=1)
    first = await desk.asked("first")
    second = desk.ask("second")
    pinned = desk.ask("pinned", W0)
    await turns(2)
    first.result().end(is_silent=True)
    (await second).end(is_silent=True)
    assert (await pinned).worker == W0
    desk.check_empty()


async def test_common_and_pinned_requests_take_turns_at_a_worker() -> None:
    """Neither starves the other, whichever came first."""
    desk = Desk(w0=1)
    await desk.asked("now")
    for i in range(20):
        await desk.asked(f"common{i}")
    for i in range(4):
        await desk.asked(f"pinned{i}", W0)
    for _ in range(9):
        desk.answers[-1].end()
        await turns(3)
    assert {f"pinned{i}" for i in range(4)} <= set(desk.placed)
    await desk.close()


@pytest.mark.parametrize("worker", [None, W0])
async def test_a_request_of_many_rows_is_passed_by_a_bounded_number_of_small_ones(
    worker: WorkerId | None,
) -> None:
    """Rows come free one by one: in the end it goes in beyond the limit, once, and not at once."""
    desk = Desk(w0=4)
    for i in range(4):
        await desk.asked(f"r{i}")
    wide = await desk.asked("wide", worker, 4, tenant="wide")
    while not wide.done():
        await desk.asked(f"small{desk.num_tries}")
        next(answer for answer in desk.answers if answer.is_open).end()
        await turns(3)
    passed = desk.placed.index("wide") - 4
    assert admission.MAX_PASSED <= passed <= admission.MAX_PASSED + 2
    assert desk.free[W0] < 0
    while desk.free[W0] < 4:
        for answer in desk.answers:
            answer.end()
        await turns(3)
    desk.check_empty()
    assert desk.free == {W0: 4}


async def test_a_wake_tries_a_bounded_number_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "RECHECK_S", 60.0)
    desk = Desk(w0=0)
    for i in range(200):
        desk.ask(f"r{i}", tenant=f"t{i}")
    await turns(4)
    desk.num_tries = 0
    desk.admission.poke(W0)
    await turns(2)
    assert desk.num_tries <= admission.MAX_REFUSED
    desk.free[W0] = 150
    desk.admission.poke(W0)
    desk.num_tries = 0
    await turns(1)
    assert desk.num_tries <= admission.MAX_PLACED
    await turns(20)
    assert len(desk.placed) == 150
    await desk.close()


@pytest.mark.parametrize("turn", range(5))
async def test_a_client_that_leaves_in_the_turn_that_lets_it_in_leaves_nothing(turn: int) -> None:
    desk = Desk(w0=1)
    first = await desk.asked("first")
    second = await desk.asked("second")
    first.result().end()
    await turns(turn)
    second.cancel()
    (result,) = await asyncio.gather(second, return_exceptions=True)
    if isinstance(result, Answer):
        result.end()
    await turns(2)
    desk.check_empty()
    assert desk.free == {W0: 1}


async def test_a_client_may_leave_between_its_deadline_and_the_news_of_it() -> None:
    desk = Desk(w0=0)
    late, patient = await desk.asked("late", deadline_s=5.0), await desk.asked("patient")
    desk.now, desk.step = 4.5, 0.25  # over when it is tried, not when deadlines are looked at
    desk.admission.poke(W0)
    await turns(1)
    assert not late.done()
    late.cancel()
    await turns(2)
    desk.free[W0] = 1
    assert (await patient).worker == W0
    desk.check_empty()


async def test_a_fleet_without_workers_keeps_those_who_wait() -> None:
    """A request that comes then is refused at once; one that waited is served by the next worker."""
    desk = Desk(w0=0)
    waits = await desk.asked("waits")
    desk.free.clear()
    desk.admission.poke(W0)
    await turns(4)
    assert not waits.done()
    desk.free[W1] = 1
    desk.admission.poke(W1)
    assert (await waits).worker == W1
    desk.free.clear()
    with pytest.raises(NoWorker):
        await desk.ask("comes late")


@pytest.mark.parametrize(
    ("fault", "is_final"),
    [
        (WorkerLost("w0", "it was restarted just now"), False),
        (KVMemoryExceeded(9, 4, 16), True),
        (RuntimeError("a bug"), True),
    ],
)
async def test_a_failure_is_that_requests_own(fault: Exception, is_final: bool) -> None:
    """An unreachable choice is tried again, everything else ends this request and no other."""
    desk = Desk(w0=0)
    waits = await desk.asked("waits")
    desk.fault = fault
    desk.admission.poke(W0)
    await turns(4)
    desk.fault = None
    desk.free[W0] = 1
    if is_final:
        with pytest.raises(type(fault)):
            await waits
    else:
        assert (await waits).worker == W0
    desk.check_empty()


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_happens_in_whatever_order_nothing_is_left_behind(seed: int) -> None:
    """Rows never overdrawn, everybody answered, no ticket and no row lost."""
    rng = random.Random(seed)
    desk = Desk(AdmissionConfig(max_waiting=30, max_waiting_per_tenant=12), w0=3, w1=2)
    tasks: list[asyncio.Task[Answer]] = []
    for i in range(600):
        match rng.randrange(6):
            case 0 | 1 | 2:
                worker = rng.choice([None, None, W0, W1])
                patience = rng.choice([None, None, 3.0])
                terms = {"tenant": rng.choice("abc"), "priority": rng.randrange(3)}
                tasks.append(desk.ask(f"r{i}", worker, 1, deadline_s=patience, **terms))
            case 3:
                rng.choice([*tasks, asyncio.create_task(turns(1))]).cancel()
            case 4:
                done = [t for t in tasks if t.done() and not t.cancelled() and not t.exception()]
                for task in done[-2:]:
                    task.result().end(is_silent=rng.random() < 0.2)
            case 5:
                desk.now += rng.random()
        if rng.random() < 0.5:
            await turns(rng.randrange(4))
        assert min(desk.free.values()) >= 0
        desk.admission.check()
    while not all(task.done() for task in tasks):
        for task in tasks:
            if task.done() and not task.cancelled() and not task.exception():
                task.result().end()
        await asyncio.sleep(0.001)
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Answer):
            result.end()
        else:
            assert isinstance(result, Unavailable | asyncio.CancelledError), result
    desk.check_empty()
    assert desk.free == {W0: 3, W1: 2}
