"""Books of the tiers below the device, and whether blocks are fetched from there or computed."""

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from bench.doubles.forward import MockForward
from mallee.mocker.passes import mock_spec
from mallee.protocol.errors import WorkerLost
from mallee.protocol.messages import Holder
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.watch import Rows
from mallee.worker.transfer.host import HostSlots
from mallee.worker.transfer.lower import Part
from mallee.worker.transfer.movers import NUM_ASKING, NUM_LANES, Carrier, ThreadedMover
from mallee.worker.transfer.prices import LATENCY_S, MeasuredPrices
from mallee.worker.transfer.values import (
    DEVICE,
    DISK,
    HOST,
    PEER,
    Ask,
    Loan,
    Moved,
    Place,
    Question,
    Transfer,
)
from support.tiers import make_tiers

FORWARD = MockForward(mock_spec(), num_blocks=64, block_size=4)


def test_blocks_that_are_on_disk_too_give_way_first() -> None:
    host = HostSlots(4)
    for key in (1, 2, 3, 4):
        host.put(key)
    host.hold((1, 2))
    host.release((1, 2), are_oldest=True)
    assert host.oldest(4) == [1, 2, 3, 4]
    host.hold((1,))
    host.release((1,))
    assert host.oldest(4) == [2, 3, 4, 1]


class Failing:
    """A `Loan` that is slow, and breaks after the first pass."""

    record = b""
    num_blocks = 32

    def __init__(self, clock: list[float], nbytes: int) -> None:
        self._clock = clock
        self.block_nbytes = nbytes

    def read(self, places: Sequence[int], rows: Rows) -> None:
        if places[0]:
            self._clock[0] += 30
            raise WorkerLost("peer", "it lends nothing in time")

    def close(self) -> None:
        """Nothing is held."""


class OneLender:
    """A lender of one loan."""

    def __init__(self, loan: Loan) -> None:
        self._loan = loan

    def lend(self, ask: Ask) -> Loan:
        return self._loan


def test_a_pull_that_fails_teaches_no_price() -> None:
    """Or one silent peer would keep a worker from all others."""
    clock = [0.0]
    prices = MeasuredPrices(64)
    peers = OneLender(Failing(clock, FORWARD.block_nbytes))
    make = make_tiers(prices=prices, peers=peers, clock=lambda: clock[0])
    lower = make(Journal(), FORWARD)
    asked: list[Moved] = []
    lower.ask(Ask(Holder("w", 1, "", 128), (), ""), asked.append)
    lower.take_ended()
    before = prices.fetch_s(PEER, 32)
    ends: list[int] = []
    part = Part(Place(PEER, tuple(range(32)), asked[0].loan), range(32))
    assert lower.fetch([part], lambda: range(32), ends.append)
    lower.take_ended()
    assert ends == [16]
    assert lower.stats().num_failed == 1
    assert prices.fetch_s(PEER, 32) == before


class Crowded:
    """A lender of one loan at a time: another question waits for its end."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._room = threading.BoundedSemaphore(1)

    def lend(self, ask: Ask) -> Loan:
        if not self._room.acquire(timeout=10):
            raise WorkerLost("peer", "no room")
        return GivenBack(self._room.release, self._nbytes)


class GivenBack(Failing):
    """A loan whose end makes room."""

    def __init__(self, release: Callable[[], None], nbytes: int) -> None:
        super().__init__([0.0], nbytes)
        self._release = release

    def close(self) -> None:
        self._release()


def test_questions_that_wait_hold_up_no_loan_that_others_have() -> None:
    """More questions than there are threads wait for room, which is made once a loan has ended."""
    peers = Crowded(FORWARD.block_nbytes)
    carrier = Carrier(FORWARD, np.zeros((0, 0), np.uint8), None, time.monotonic, peers=peers)
    mover, num = ThreadedMover(carrier, "test"), 1 + NUM_LANES[PEER] + NUM_ASKING
    came = threading.Event()
    mover.notify(came.set)
    for number in range(num):
        mover.start(Question(number, Ask(Holder("w", 1, "", 4), (), "")))
    num_ended = 0
    while num_ended < num:
        assert came.wait(5), f"{num_ended} of {num} loans came and went"
        came.clear()
        for moved in mover.done():
            assert moved.error is None
            match moved.move:
                case Question(number=number):
                    assert moved.loan is not None
                    pulled = Place(PEER, (0,), moved.loan)
                    mover.start(Transfer(num + number, pulled, Place(DEVICE, (0,))))
                case Transfer(source=Place(loan=GivenBack() as loan)):
                    loan.close()
                    num_ended += 1
    mover.close()


def test_a_tier_that_was_never_measured_is_tried() -> None:
    """K15, part: or a guess that is too low would keep it from ever being measured."""
    prices = MeasuredPrices(1000)
    lower = make_tiers(prices=prices)(Journal(), FORWARD)
    prices.computed(100, 100 * 1e-4)
    assert lower.is_cheaper([Part(Place(HOST, tuple(range(10))), ())], 40)
    assert prices.fetch_s(DISK, 10) == LATENCY_S[DISK]
    prices.moved(HOST, 10, LATENCY_S[HOST] + 10 * 1000 * 1e-6)
    assert prices.fetch_s(HOST, 10) == pytest.approx(LATENCY_S[HOST] + 10 * 1000 * 1e-6)
    assert not lower.is_cheaper([Part(Place(HOST, tuple(range(10))), ())], 40)


def test_a_tier_that_was_slow_is_tried_again() -> None:
    """K15, part: one fetch in 64 is done although it is dearer; once it was quick, all are."""
    prices = MeasuredPrices(1000)
    prices.computed(100, 100 * 1e-4)
    prices.moved(HOST, 10, 1.0)
    lower, asked = (
        make_tiers(prices=prices)(Journal(), FORWARD),
        [Part(Place(HOST, tuple(range(10))), ())],
    )
    tried = [lower.is_cheaper(asked, 40) for _ in range(128)]
    assert [i for i, is_done in enumerate(tried) if is_done] == [63, 127]
    assert lower.stats().num_declined == 126 * 10
    for _ in range(40):
        prices.moved(HOST, 10, 1e-4)
    assert all(lower.is_cheaper(asked, 40) for _ in range(10))
