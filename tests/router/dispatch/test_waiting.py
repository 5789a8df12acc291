"""Waiting for a worker: who is let in, in which order, and what is left when nobody waits any more."""

import contextlib
import random
from typing import Any

import pytest

from mallee.protocol.errors import (
    DeadlineExceeded,
    KVMemoryExceeded,
    MalleeError,
    NoWorker,
    Saturated,
    Unavailable,
    UnknownCapsule,
    WorkerLost,
)
from mallee.protocol.hashing import NO_HASHES, as_tokens
from mallee.protocol.ids import RequestId, WorkerId
from mallee.protocol.messages import Limits
from mallee.router.dispatch import waiting
from mallee.router.dispatch.jobs import GenerateJob, QueueTerms
from mallee.router.dispatch.queue import AdmissionConfig
from mallee.router.dispatch.shards import Dispatch, RequestState
from mallee.router.dispatch.waiting import Waiting

W0, W1 = WorkerId("w0"), WorkerId("w1")
PROMPT = as_tokens([1])


class Desk:
    """Waiting over workers that are nothing but a number of free rows."""

    def __init__(
        self, config: AdmissionConfig | None = None, recheck_s: float | None = 0.02, **free: int
    ) -> None:
        self.free = {WorkerId(worker): n for worker, n in free.items()}
        self.now = 0.0
        self.step = 0.0  # by which time goes on whenever somebody looks
        self.waiting = Waiting(
            config or AdmissionConfig(),
            place=self.place,
            placed=lambda dispatch: None,
            failed=self.fail,
            has_workers=lambda: bool(self.free),
            has_room=lambda: any(rows > 0 for rows in self.free.values()),
            clock=self.clock,
            recheck_s=recheck_s,
        )
        self.placed: list[str] = []
        self.open: dict[str, tuple[WorkerId, int]] = {}
        self.failed: dict[str, MalleeError] = {}
        self.num_tries = 0
        self.fault: MalleeError | None = None

    def clock(self) -> float:
        self.now += self.step
        return self.now

    def place(self, dispatch: Dispatch, may_wait: bool) -> float:
        self.num_tries += 1
        worker, rows = dispatch.lane, len(dispatch.branches)
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
        self.placed.append(dispatch.state.id)
        self.open[dispatch.state.id] = (chosen, rows)
        self.waiting.note(chosen)
        return 1.0

    def fail(self, dispatch: Dispatch, error: MalleeError) -> None:
        self.failed[dispatch.state.id] = error

    def ask(
        self,
        request: str,
        worker: WorkerId | None = None,
        rows: int = 1,
        *,
        is_moved: bool = False,
        **terms: Any,
    ) -> Dispatch:
        """It waits by now, or was let in. Raises what the queue raises, and NoWorker."""
        job = GenerateJob(PROMPT, Limits(1), n=rows, terms=QueueTerms(**terms))
        state = RequestState(RequestId(request), job, self.now)
        dispatch = Dispatch(state, job, range(rows), NO_HASHES, num_moves=int(is_moved))
        dispatch.lane = worker
        if self.waiting.is_free(worker):
            try:
                self.place(dispatch, True)
            except Saturated:
                pass
            else:
                return dispatch
        self.waiting.add(dispatch, 1.0)
        self.waiting.pump()
        return dispatch

    def end(self, request: str, *, is_silent: bool = False) -> None:
        worker, rows = self.open.pop(request)
        self.free[worker] += rows
        if not is_silent:
            self.wake(worker)

    def wake(self, worker: WorkerId) -> None:
        self.waiting.wake(worker)
        self.waiting.pump()

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.waiting.on_time()

    def check_empty(self) -> None:
        self.waiting.check()
        assert len(self.waiting) == 0
        assert self.waiting.next_time() is None


def test_each_freed_row_lets_in_the_fair_next() -> None:
    """One tenant floods, another comes late with one request, and is let in second."""
    desk = Desk(w0=2)
    for i in range(8):
        desk.ask(f"flood{i}", tenant="flood")
    desk.ask("late", tenant="late")
    desk.ask("urgent", tenant="flood", priority=5)
    assert desk.placed == ["flood0", "flood1"]
    assert len(desk.waiting) == 8
    for name in ("flood0", "flood1"):
        desk.end(name)
    assert desk.placed[2:] == ["urgent", "late"]
    while desk.open:
        desk.end(next(iter(desk.open)))
    assert desk.placed[4:] == [f"flood{i}" for i in range(2, 8)]
    desk.check_empty()


@pytest.mark.parametrize("worker", [None, W0])
def test_who_comes_while_others_wait_does_not_push_in(worker: WorkerId | None) -> None:
    desk = Desk(w0=1)
    desk.ask("first")
    desk.ask("second")
    desk.end("first", is_silent=True)
    desk.ask("third", worker)  # comes before the waiting one is looked at
    assert "third" not in desk.placed
    desk.wake(W0)
    desk.later(1.0)
    desk.end(desk.placed[-1])
    desk.later(1.0)
    assert sorted(desk.placed) == ["first", "second", "third"]


def test_one_whose_worker_was_lost_goes_before_those_who_have_nothing_yet() -> None:
    """X4, part: its client waits in the middle of an answer; no limit refuses it."""
    desk = Desk(AdmissionConfig(max_waiting=3), w0=1)
    desk.ask("now")
    for i in range(3):
        desk.ask(f"new{i}", priority=100)
    desk.ask("moved", is_moved=True)
    desk.end("now")
    assert desk.placed == ["now", "moved"]


def test_room_that_nobody_told_of_is_found() -> None:
    """Another gateway's request ended: nothing wakes the queue, and yet the wait ends."""
    desk = Desk(w0=1)
    desk.ask("first")
    desk.ask("second")
    desk.ask("pinned", W0)
    for _ in range(2):
        desk.end(desk.placed[-1], is_silent=True)
        at = desk.waiting.next_time()
        assert at is not None
        assert at <= desk.now + waiting.RECHECK_S
        desk.later(waiting.RECHECK_S)
    assert sorted(desk.placed) == ["first", "pinned", "second"]
    desk.check_empty()


def test_common_and_pinned_requests_take_turns_at_a_worker() -> None:
    """Neither starves the other, whichever came first."""
    desk = Desk(w0=1)
    desk.ask("now")
    for i in range(20):
        desk.ask(f"common{i}")
    for i in range(4):
        desk.ask(f"pinned{i}", W0)
    for _ in range(9):
        desk.end(desk.placed[-1])
    assert {f"pinned{i}" for i in range(4)} <= set(desk.placed)


@pytest.mark.parametrize("worker", [None, W0])
def test_a_request_of_many_rows_is_passed_by_a_bounded_number_of_small_ones(
    worker: WorkerId | None,
) -> None:
    """Rows come free one by one: in the end it goes in beyond the limit, once, and not at once."""
    desk = Desk(w0=4)
    for i in range(4):
        desk.ask(f"r{i}")
    desk.ask("wide", worker, 4, tenant="wide")
    while "wide" not in desk.placed:
        desk.ask(f"small{desk.num_tries}")
        desk.end(next(iter(desk.open)))
    passed = desk.placed.index("wide") - 4
    assert waiting.MAX_PASSED <= passed <= waiting.MAX_PASSED + 2
    assert desk.free[W0] < 0
    while desk.open:
        desk.end(next(iter(desk.open)))
    desk.check_empty()
    assert desk.free == {W0: 4}


def test_a_call_tries_a_bounded_number_of_requests() -> None:
    desk = Desk(w0=0)
    for i in range(200):
        desk.ask(f"r{i}", tenant=f"t{i}")
    desk.num_tries = 0
    desk.wake(W0)
    assert desk.num_tries <= waiting.MAX_REFUSED
    desk.free[W0] = 150
    desk.num_tries = 0
    desk.wake(W0)
    assert desk.num_tries <= waiting.MAX_PLACED
    while desk.waiting.next_time() == desk.now:  # at once again: others had their turn
        desk.waiting.on_time()
    assert len(desk.placed) == 150


def test_a_deadline_ends_a_wait_and_no_other() -> None:
    desk = Desk(w0=0)
    desk.ask("late", deadline_s=5.0)
    desk.ask("patient")
    desk.now, desk.step = 4.5, 0.25  # over when it is tried, not when deadlines are looked at
    desk.wake(W0)
    desk.step = 0.0
    desk.later(1.0)
    assert isinstance(desk.failed["late"], DeadlineExceeded)
    desk.free[W0] = 1
    desk.wake(W0)
    assert desk.placed == ["patient"]
    desk.check_empty()


@pytest.mark.parametrize(
    ("fault", "is_final"),
    [(WorkerLost("w0", "it was restarted just now"), False), (KVMemoryExceeded(9, 4, 16), True)],
)
def test_a_failure_is_that_requests_own(fault: MalleeError, is_final: bool) -> None:
    """An unreachable choice is tried again, everything else ends this request and no other."""
    desk = Desk(w0=0)
    desk.ask("waits")
    desk.fault = fault
    desk.wake(W0)
    desk.fault = None
    desk.free[W0] = 1
    desk.wake(W0)
    assert (desk.failed.get("waits") is fault) == is_final
    assert (desk.placed == ["waits"]) == (not is_final)
    desk.check_empty()


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_in_whatever_order_nothing_is_left_behind(seed: int) -> None:
    """Rows never overdrawn, everybody answered, no ticket and no row lost."""
    rng = random.Random(seed)
    desk = Desk(AdmissionConfig(max_waiting=30, max_waiting_per_tenant=12), w0=3, w1=2)
    asked: dict[str, Dispatch] = {}
    gone: set[str] = set()
    for i in range(600):
        match rng.randrange(6):
            case 0 | 1 | 2:
                worker = rng.choice([None, None, W0, W1])
                patience = rng.choice([None, None, 3.0])
                terms = {"tenant": rng.choice("abc"), "priority": rng.randrange(3)}
                with contextlib.suppress(Unavailable):
                    asked[f"r{i}"] = desk.ask(f"r{i}", worker, deadline_s=patience, **terms)
            case 3 if asked:
                name = rng.choice(list(asked))
                if name not in desk.placed:
                    desk.waiting.cancel(asked[name])
                    gone.add(name)
            case 4:
                for name in list(desk.open)[-2:]:
                    desk.end(name, is_silent=rng.random() < 0.2)
            case 5:
                desk.later(rng.random())
        assert min(desk.free.values()) >= 0
        desk.waiting.check()
    while desk.open or len(desk.waiting):
        for name in list(desk.open):
            desk.end(name)
        desk.later(0.001)
    for name in asked:
        assert (name in desk.placed) + (name in desk.failed) == 1 or name in gone
    desk.check_empty()
    assert desk.free == {W0: 3, W1: 2}
