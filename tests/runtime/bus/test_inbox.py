"""The queue between the bus and the router, with a clock that handlers move by hand."""

import asyncio
from typing import Any

import pytest

from mallee.runtime.bus.inbox import Pump


class Bench:
    """A pump whose messages cost what they say, in tenths of a millisecond."""

    def __init__(self, **options: Any) -> None:
        self.now = 0.0
        self.taken: list[bytes] = []
        self.lags: list[tuple[float, int]] = []
        self.dropped: list[int] = []
        self.house_left = 0
        self.pump = Pump(
            work=self.work,
            clock=lambda: self.now,
            on_turn=lambda lag_s, queued: self.lags.append((round(lag_s, 6), queued)),
            on_drop=self.dropped.append,
            **options,
        )

    def work(self) -> bool:
        self.now += 0.0001
        self.house_left = max(0, self.house_left - 1)
        return self.house_left > 0

    def take(self, raw: bytes) -> None:
        self.now += 0.0001
        self.taken.append(raw)

    def put(self, *raws: bytes, is_loose: bool = True) -> None:
        for raw in raws:
            self.pump.put(self.take, raw, is_loose=is_loose)
            if not self.pump.num_dropped:
                self.pump.check()


async def test_messages_are_taken_in_order_a_few_a_turn() -> None:
    """K2: order is kept, and events never hold up the loop for longer than a turn."""
    bench = Bench(turn_s=0.00025)
    names = [b"%d" % i for i in range(8)]
    bench.put(*names)
    assert bench.taken == []  # nothing is done in the bus's callback
    turns = []
    while bench.pump.is_busy:
        await asyncio.sleep(0)
        turns.append(len(bench.taken))
    assert bench.taken == names
    assert turns[:3] == [3, 6, 8]
    bench.pump.check()


async def test_a_slow_loop_makes_turns_longer_within_a_bound() -> None:
    """K2, part: a gateway at its limit keeps up with its fleet, whose leases would run out."""
    bench = Bench(turn_s=0.00025)
    bench.put(*[b""] * 200)
    taken = []
    for held_up_s in (0.0, 0.005, 5.0):
        bench.now += held_up_s
        before = len(bench.taken)
        await asyncio.sleep(0)
        taken.append(len(bench.taken) - before)
    assert taken == pytest.approx([3, 10, 100], abs=1)


async def test_housekeeping_gets_its_share_of_every_turn_and_may_have_the_rest() -> None:
    bench = Bench(turn_s=0.00025)
    bench.house_left = 10
    bench.put(*[b""] * 6)
    await asyncio.sleep(0)
    assert (len(bench.taken), bench.house_left) == (3, 9)
    settled = asyncio.create_task(bench.pump.drain())
    while not settled.done():  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert (len(bench.taken), bench.house_left) == (6, 0)


async def test_a_full_queue_drops_the_oldest_that_may_be_missed() -> None:
    bench = Bench(max_messages=4)
    bench.put(b"lease", is_loose=False)
    bench.now = 0.5
    bench.put(b"1", b"2", b"3", b"4")
    bench.pump.check()
    await bench.pump.drain()
    assert bench.taken == [b"lease", b"3", b"4"]
    assert bench.lags == [(0.5, 3)]  # how long the oldest waited, and the queue
    assert bench.dropped == [2]
    assert bench.pump.num_dropped == 2
    # One that is full of what must not be missed is still bounded.
    bench.put(*[b"%d" % i for i in range(9)], is_loose=False)
    bench.pump.check()
    assert len(bench.pump._queue) <= 4


async def test_bytes_are_bounded_but_one_message_always_fits() -> None:
    bench = Bench(max_nbytes=100)
    bench.put(bytes(60), bytes(60))
    bench.pump.check()
    assert bench.pump._nbytes == 60
    bench.put(bytes(500))
    bench.pump.check()
    assert bench.pump._nbytes == 500


async def test_a_patient_message_waits_for_others_unless_one_is_in_a_hurry() -> None:
    bench = Bench()
    bench.pump.put(bench.take, b"lease", is_patient=True)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert bench.taken == []
    bench.put(b"events")
    await asyncio.sleep(0)
    assert bench.taken == [b"lease", b"events"]
    bench.pump.put(bench.take, b"again", is_patient=True)
    await bench.pump.drain()
    assert bench.taken[-1] == b"again"


async def test_a_handler_that_raises_holds_up_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def fail(raw: bytes) -> None:
        raise RuntimeError(raw)

    bench = Bench()
    bench.pump.put(fail, b"bad")
    bench.put(b"good")
    await asyncio.sleep(0)
    assert bench.taken == [b"good"]
    assert bench.pump.num_failed == 1
    assert "was not taken in" in caplog.text


async def test_a_closed_pump_takes_nothing_and_keeps_nobody_waiting() -> None:
    bench = Bench()
    bench.put(b"a")
    waiting = asyncio.create_task(bench.pump.drain())
    await asyncio.sleep(0)
    bench.pump.put(bench.take, b"b", is_patient=True)
    bench.pump.close()
    bench.pump.close()
    await waiting
    bench.put(b"c")
    await asyncio.sleep(0)
    assert bench.taken == [b"a"]
    bench.pump.check()
