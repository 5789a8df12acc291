"""One worker's event stream, mangled by a broker, against a model of the worker itself."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.events import (
    Cleared,
    Event,
    EventBatch,
    Lease,
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


def lease(next_seq: int, life: int = 1) -> Lease:
    return Lease("w", life, "addr", "m", "f", 16, 100, 8, 1024, next_seq)


def snapshot(next_seq: int, *blocks: int, life: int = 1) -> Snapshot:
    return Snapshot("w", life, next_seq, pack_hashes(run(*blocks)), ())


A, B, C, D = stored(1), stored(2), stored(3), stored(4)


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


@dataclass
class Truth:
    """A worker as it is, and every message it ever sent."""

    life: int = 1
    seq: int = 0
    held: set[int] = field(default_factory=set)
    sent: list[EventBatch | Lease | Snapshot] = field(default_factory=list)

    def step(self, verb: str, blocks: list[int]) -> None:
        # Names carry the life: a block of a dead life is recognisable wherever it turns up.
        hashes = [self.life * 100 + block for block in blocks]
        if verb == "restart":
            self.life, self.seq, self.held = self.life + 1, 0, set()
        elif verb == "lease":
            self.sent.append(lease(self.seq, self.life))
        elif verb == "snapshot":
            self.sent.append(snapshot(self.seq, *self.held, life=self.life))
        else:
            events = self._change(verb, hashes)
            self.sent.append(EventBatch("w", self.life, self.seq, events))
            self.seq += len(events)

    def _change(self, verb: str, hashes: list[int]) -> tuple[Event, ...]:
        if verb == "clear":
            self.held.clear()
            return (Cleared(),)
        kept, gone = hashes[::2], hashes[1::2]
        self.held = (self.held | set(kept)) - set(gone)
        return (Stored(pack_hashes(run(*kept))), Removed(pack_hashes(run(*gone))))


def obey(todo: Todo, index: PrefixIndex) -> None:
    if todo.clear:
        index.clear(0)
    if todo.snapshot is not None:
        index.clear(0)
        index.store(0, unpack_hashes(todo.snapshot.hashes))
    for event in todo.events:
        match event:
            case Stored():
                index.store(0, unpack_hashes(event.hashes))
            case Removed():
                index.remove(0, unpack_hashes(event.hashes))
            case Cleared():
                index.clear(0)
            case _:
                raise AssertionError(event)


def deliver(sync: StreamSync, message: EventBatch | Lease | Snapshot) -> Todo:
    match message:
        case EventBatch():
            return sync.on_batch(message)
        case Lease():
            return sync.on_mention(message.incarnation, message.next_seq)
        case Snapshot():
            return sync.on_snapshot(message)


verbs = st.sampled_from(["change"] * 5 + ["clear", "lease", "snapshot", "restart"])
steps = st.lists(st.tuples(verbs, st.lists(st.integers(0, 9), max_size=4)), max_size=40)


@examples(300)
@given(steps, st.data())
def test_index_converges_whatever_the_broker_does(
    script: list[tuple[str, list[int]]], data: st.DataObject
) -> None:
    """K2, X5: loss, repeats, reordering, restarts, late join; one lease and snapshot heal it all."""
    truth = Truth()
    for verb, blocks in script:
        truth.step(verb, blocks)
    sync, index = StreamSync(max_buffered=4), PrefixIndex(1)
    youngest = 0
    order = data.draw(st.lists(st.sampled_from(truth.sent), max_size=60)) if truth.sent else []
    for message in order:
        obey(deliver(sync, message), index)
        sync.check()
        youngest = max(youngest, message.incarnation)
        assert {block // 100 for block in held(index, 0)} <= {youngest}
    obey(sync.on_mention(truth.life, truth.seq), index)
    if not sync.is_whole:
        obey(sync.on_snapshot(snapshot(truth.seq, *truth.held, life=truth.life)), index)
    assert sync.is_whole
    assert held(index, 0) == truth.held


@examples(100)
@given(steps, st.data())
def test_a_stream_delivered_whole_but_shuffled_needs_no_snapshot(
    script: list[tuple[str, list[int]]], data: st.DataObject
) -> None:
    """K2: in whatever order all batches of one life arrive, the index ends equal to the worker."""
    truth = Truth()
    for verb, blocks in script:
        if verb in ("change", "clear"):
            truth.step(verb, blocks)
    sync, index = StreamSync(), PrefixIndex(1)
    for message in data.draw(st.permutations(truth.sent)):
        todo = deliver(sync, message)
        assert todo.snapshot is None
        obey(todo, index)
    assert sync.is_whole
    assert held(index, 0) == truth.held
