"""Bookings of other gateways, message by message."""

import pytest

from mallee.protocol.bookings import Booked, BookingBatch, BookingOp, BookingSnapshot, Freed
from mallee.router.sync.replicas import Replicas
from support.books import Books


class Bench:
    """Gateway g0, which hears of g1."""

    def __init__(self, **options: int) -> None:
        self.now = 0.0
        self.books = Books({"w0": 1})
        self.replicas = Replicas(
            self.books, gateway="g0", clock=lambda: self.now, lease_s=3.0, **options
        )

    def hear(self, first_seq: int, *ops: BookingOp, gateway: str = "g1", life: int = 1) -> bool:
        needs = self.replicas.on_batch(BookingBatch(gateway, life, first_seq, ops))
        self.replicas.check()
        return needs

    def retell(self, next_seq: int, *bookings: Booked, life: int = 1) -> bool:
        needs = self.replicas.on_snapshot(BookingSnapshot("g1", life, next_seq, bookings))
        self.replicas.check()
        return needs


def booking(request: str, life: int = 1, *, prefill_tokens: int = 32) -> Booked:
    return Booked(request, "w0", life, bytes(8), 2, 1, prefill_tokens, 1, 8)


A, B = booking("a"), booking("b")


def test_our_own_messages_are_ignored_and_counted() -> None:
    """K10: own events are not applied twice."""
    bench = Bench()
    assert not bench.hear(7, A, gateway="g0")
    assert not bench.books.booked
    assert bench.replicas.stats().own_messages == 1
    assert bench.replicas.stats().gateways == 0


def test_a_gateway_that_falls_silent_books_nothing_any_more() -> None:
    """K10: a replica's crash expires its load."""
    bench = Bench()
    bench.hear(0, A)
    bench.now = 2.9
    assert bench.replicas.expire() == []
    bench.hear(1)
    bench.now = 5.8
    assert bench.replicas.expire() == []
    bench.now = 5.9
    assert bench.replicas.expire() == ["g1"]
    bench.replicas.check()
    assert not bench.books.booked
    assert bench.hear(1)  # it was only cut off: a snapshot brings everything back
    bench.retell(1, A)
    assert bench.books.booked == {"a": A}


def test_echoes_of_a_past_life_keep_nobody_alive() -> None:
    bench = Bench()
    bench.hear(0, A, life=2)
    bench.now = 2.0
    bench.hear(0, B, life=1)
    bench.now = 3.0
    assert bench.replicas.expire() == ["g1"]


def test_memory_is_bounded_in_gateways_and_in_bookings_of_each() -> None:
    bench = Bench(max_gateways=1, max_bookings=2)
    bench.hear(0, A, B, booking("c"))
    bench.hear(0, booking("d"), gateway="g2")
    assert set(bench.books.booked) == {"a", "b"}
    stats = bench.replicas.stats()
    assert (stats.bookings, stats.refused, stats.strangers) == (2, 1, 1)
    bench.hear(3, Freed("c"), Freed("a"), booking("e"))
    assert set(bench.books.booked) == {"b", "e"}


def test_a_lease_of_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="lease_s=0"):
        Replicas(Books({}), gateway="g", clock=lambda: 0.0, lease_s=0)
