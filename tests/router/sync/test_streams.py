"""One worker's event stream: its order, and lives that are over."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.events import (
    Cleared,
    Event,
    EventBatch,
    Removed,
    Snapshot,
    Stored,
    pack_hashes,
    unpack_hashes,
)
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.router.index.index import PrefixIndex
from mallee.router.sync.members import Registry, Todo
from mallee.router.sync.streams import StreamSync
from support.examples import examples
from support.index_contents import held


def run(*blocks: int) -> np.ndarray:
    return np.array(blocks, dtype=np.uint64)


def stored(*blocks: int) -> Stored:
    return Stored(pack_hashes(run(*blocks)))


def batch(first_seq: int, *events: Event, life: int = 1) -> EventBatch:
    return EventBatch("w", life, first_seq, events)


def snapshot(next_seq: int, *blocks: int, life: int = 1) -> Snapshot:
    return Snapshot("w", life, next_seq, pack_hashes(run(*blocks)), ())


A, B, C = stored(1), stored(2), stored(3)


def test_a_younger_life_clears_the_old_and_the_old_stays_dead() -> None:
    """X5: after the first message of a new life nothing of the old one is taken in."""
    sync = StreamSync()
    sync.on_batch(batch(0, A, life=1))
    assert sync.on_batch(batch(0, B, life=2)) == Todo(clear=True, events=(B,))
    assert sync.on_batch(batch(1, C, life=1)) == Todo()
    assert sync.on_snapshot(snapshot(9, 7, life=1)) == Todo()
    assert sync.on_mention(1, 9) == Todo()
    assert sync.stale_messages == 3


def test_lives_that_were_over_before_are_ignored_from_the_start() -> None:
    sync = StreamSync(oldest=5)
    assert sync.on_batch(batch(0, A, life=4)) == Todo()
    assert sync.on_batch(batch(0, A, life=5)).events == (A,)


def test_a_buried_life_and_all_before_it_are_past_in_a_bounded_memory() -> None:
    members, life = Registry(1, lease_s=3.0, max_buffered=4), Incarnation(5)
    assert not members.is_past(WorkerId("w0"), Incarnation(1))
    members.bury(WorkerId("w0"), life)
    members.bury(WorkerId("w0"), Incarnation(3))
    assert members.is_past(WorkerId("w0"), life)
    assert not members.is_past(WorkerId("w0"), Incarnation(6))
    for i in range(1, 5):
        members.bury(WorkerId(f"w{i}"), life)
    assert not members.is_past(WorkerId("w0"), life)
    assert members.is_past(WorkerId("w4"), life)


changes = st.lists(st.lists(st.integers(1, 9), max_size=4), max_size=40)


@examples(100)
@given(changes, st.data())
def test_a_stream_delivered_whole_but_shuffled_needs_no_snapshot(
    script: list[list[int]], data: st.DataObject
) -> None:
    """K2: in whatever order all batches of one life arrive, the index ends equal to the worker.

    Each change stores some blocks and removes others; none: all are cleared.
    """
    truth, sent, seq = set[int](), list[EventBatch](), 0
    for blocks in script:
        kept, gone = blocks[::2], blocks[1::2]
        events: tuple[Event, ...] = (stored(*kept), Removed(pack_hashes(run(*gone))))
        if not blocks:
            truth, events = set(), (Cleared(),)
        truth = (truth | set(kept)) - set(gone)
        sent.append(batch(seq, *events))
        seq += len(events)
    sync, index = StreamSync(), PrefixIndex(1)
    for message in data.draw(st.permutations(sent)):
        todo = sync.on_batch(message)
        sync.check()
        assert todo.snapshot is None
        for event in todo.events:
            match event:
                case Stored():
                    index.store(0, unpack_hashes(event.hashes))
                case Removed():
                    index.remove(0, unpack_hashes(event.hashes))
                case _:
                    index.clear(0)
    assert sync.is_whole
    assert held(index, 0) == truth
