"""Leases, slots of the table, and lives that are over."""

from mallee.protocol.ids import Incarnation, WorkerId
from mallee.router.sync.members import Registry


def registry(capacity: int = 2) -> Registry:
    return Registry(capacity, lease_s=3.0, max_buffered=4)


def test_a_buried_life_and_all_before_it_are_past() -> None:
    members, worker = registry(), WorkerId("a")
    assert not members.is_past(worker, Incarnation(1))
    members.bury(worker, Incarnation(5))
    members.bury(worker, Incarnation(3))
    assert members.is_past(worker, Incarnation(5))
    assert not members.is_past(worker, Incarnation(6))


def test_memory_of_past_lives_is_bounded() -> None:
    members = registry(1)
    for i in range(5):
        members.bury(WorkerId(f"w{i}"), Incarnation(1))
    assert not members.is_past(WorkerId("w0"), Incarnation(1))
    assert members.is_past(WorkerId("w4"), Incarnation(1))
