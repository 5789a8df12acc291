"""Snapshots taken in by pieces, with events behind them, against sets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.events import (
    CapsuleReleased,
    CapsuleStored,
    Cleared,
    Event,
    Removed,
    Snapshot,
    Stored,
    pack_hashes,
)
from mallee.protocol.ids import WorkerId
from mallee.router.sync import holdings as module
from mallee.router.sync.holdings import Holdings, Watch
from support.index_contents import contents, match_tiers

PATH = list(range(1, 25))
TIERS = 3


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 3)
    monkeypatch.setattr(module, "_MAX_RECENT", 20)


def raw(blocks: list[int]) -> bytes:
    return pack_hashes(np.array(blocks, dtype=np.uint64))


def leading(held: set[int]) -> int:
    return next((i for i, block in enumerate(PATH) if block not in held), len(PATH))


class Told:
    """Holdings of three slots (0 never has holes) and what they were told of each, in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self.holdings = Holdings(3, max_capsules=100, max_nbytes=1 << 20, clock=lambda: self.now)
        self.holdings.index.set_prefix_closed(0, True)
        self.blocks = [[set[int]() for _ in range(TIERS)] for _ in range(3)]
        self.capsules = [set[str]() for _ in range(3)]
        self.before: list[list[set[int]] | None] = [None] * 3  # what the pieces are of
        self.random = np.random.default_rng(0)

    def event(self, slot: int, verb: str, a: int, b: int) -> Event:
        """Something that happened on a worker, as of the truth."""
        tier = b % TIERS if slot else 0
        held, capsules = self.blocks[slot], self.capsules[slot]
        match verb:
            case "stored":
                n = len(held[0])
                blocks = PATH[n : n + a % 5] if slot == 0 else PATH[a % 20 :][: b % 6]
                held[tier] |= set(blocks)
                return Stored(raw(blocks), tier)
            case "removed":
                blocks = PATH[::-1] if slot == 0 else PATH
                blocks = [each for each in blocks if each in held[tier]][: a % 4]
                held[tier] -= set(blocks)
                return Removed(raw(blocks), tier)
            case "capsule":
                capsules.add(f"{slot}-{a}")
                return CapsuleStored(f"{slot}-{a}", 16, raw([]))
            case "released":
                capsules.discard(f"{slot}-{a}")
                return CapsuleReleased(f"{slot}-{a}")
            case _:
                capsules.clear()
                for each in held:
                    each.clear()
                return Cleared()

    def replace(self, slot: int) -> None:
        self.now += 1.0
        held = self.blocks[slot]
        device, host, disk = (self.random.permutation(sorted(each)).tolist() for each in held)
        capsules = tuple(CapsuleStored(c, 16, raw([])) for c in sorted(self.capsules[slot]))
        snapshot = Snapshot(f"w{slot}", 1, 0, raw(device), capsules, raw(host), raw(disk))
        self.holdings.replace(slot, WorkerId(f"w{slot}"), snapshot, asked_at=self.now + 1)
        self.before[slot] = [set(each) for each in held]

    def forget(self, slot: int) -> None:
        self.holdings.forget(slot, WorkerId(f"w{slot}"))
        self.blocks[slot] = [set() for _ in range(TIERS)]
        self.capsules[slot] = set()

    def check(self) -> None:
        self.holdings.check()
        index, waiting = self.holdings.index, self.holdings._backlog
        tiers = match_tiers(index, np.array(PATH, dtype=np.uint64))
        found = contents(index)
        for slot, truth in enumerate(self.blocks):
            union = set[int]()
            for tier in range(TIERS):
                believed = found[slot][tier]
                union |= believed
                assert tiers[tier, slot] == leading(union)
                before = self.before[slot]
                if slot in waiting:
                    assert before is not None
                    assert believed <= before[tier]
                else:
                    assert believed == truth[tier]
        for slot, capsules in enumerate(self.capsules):
            if slot not in waiting:
                known = self.holdings.capsules._of_worker.get(WorkerId(f"w{slot}"), set())
                assert known == capsules


EVENTS = ("stored", "stored", "removed", "capsule", "released", "cleared")
operations = st.lists(
    st.tuples(
        st.sampled_from(["events", "events", "events", "replace", "work", "work", "forget"]),
        st.integers(0, 2),
        st.lists(
            st.tuples(st.sampled_from(EVENTS), st.integers(0, 30), st.integers(0, 30)), max_size=5
        ),
        st.integers(0, 12),
    ),
    max_size=30,
)


@given(operations)
def test_snapshots_in_pieces_and_events_behind_them_end_at_the_truth(
    stream: list[tuple[str, int, list[tuple[str, int, int]], int]],
) -> None:
    """K2, K8: events keep their order behind a backlog; until it is gone nothing is over-credited."""
    told = Told()
    for verb, slot, events, n in stream:
        if verb == "events":
            happened = [told.event(slot, *each) for each in events]
            told.holdings.apply(slot, WorkerId(f"w{slot}"), happened)
        elif verb == "replace":
            told.replace(slot)
        elif verb == "forget":
            told.forget(slot)
            assert slot not in told.holdings._backlog
        else:
            waiting = told.holdings.backlog_blocks
            told.holdings.work(n)
            assert waiting - told.holdings.backlog_blocks < n + module.CHUNK
        told.check()
    turns = 0
    while told.holdings.work(3):
        turns += 1
        told.check()
        assert turns < 500
    assert told.holdings.backlog_blocks == 0
    assert not told.holdings._backlog
    told.check()


def test_a_snapshot_in_pieces_is_walked_until_it_is_whole() -> None:
    """K9, part: a worker without holes may seem to have some, while pieces come in no order."""
    told = Told()
    told.blocks[0][0] = set(PATH)
    told.replace(0)
    assert told.holdings.backlog_blocks == len(PATH)
    while told.holdings.work(1) and told.holdings.backlog_blocks:
        assert told.holdings.index.stats().num_walked == 1
        told.check()
    while told.holdings.work(1):
        told.check()
    assert told.holdings.index.stats().num_walked == 0
    assert told.holdings.index.match(np.array(PATH, dtype=np.uint64)).tolist() == [24, 0, 0]


def test_a_watch_sees_what_was_stored_since_it_began() -> None:
    """K9, part: any number of watches, each from its own moment on; what is too long ago is not told."""

    def left(watch: Watch) -> list[int]:
        blocks = watch.not_stored(np.arange(1, 10, dtype=np.uint64))
        return [int(block) for block in blocks]

    told = Told()
    holdings, worker = told.holdings, WorkerId("w1")
    holdings.apply(1, worker, [Stored(raw([1]))])
    first = holdings.watch(1)
    holdings.apply(1, worker, [Stored(raw([2])), Stored(raw([3, 4]))])
    second = holdings.watch(1)
    holdings.apply(1, worker, [Removed(raw([2])), Stored(raw([5]))])
    holdings.apply(2, WorkerId("w2"), [Stored(raw([9]))])
    assert (left(first), left(second)) == ([1, 6, 7, 8, 9], [1, 2, 3, 4, 6, 7, 8, 9])
    holdings.unwatch(first)
    holdings.apply(1, worker, [Stored(raw([6]))])
    assert left(second) == [1, 2, 3, 4, 7, 8, 9]
    holdings.apply(1, worker, [Stored(raw(PATH))])
    assert left(second) == []  # who knows what was stored by then
    third = holdings.watch(1)
    assert left(third) == list(range(1, 10))  # a busy worker can be watched again
    holdings.unwatch(second)
    holdings.forget(1, worker)
    fourth = holdings.watch(1)
    holdings.unwatch(third)
    holdings.apply(1, worker, [Stored(raw([7]))])
    assert left(fourth) == [1, 2, 3, 4, 5, 6, 8, 9]
    holdings.unwatch(fourth)
    holdings.check()
