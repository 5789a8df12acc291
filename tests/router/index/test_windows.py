"""Credit where sliding windows have given blocks up, against a search through everything held."""

import random
from typing import Literal

import numpy as np
import pytest

from mallee.protocol.events import Snapshot, pack_hashes
from mallee.protocol.hashing import block_hashes
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.model import GroupSpec
from mallee.router.index.windows import WindowIndex
from mallee.router.sync.holdings import Holdings
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.node import Node
from mallee.worker.kv.pool import BlockPool
from mallee.worker.kv.sides.group import RowSpan, SideGroup
from mallee.worker.kv.sides.states import StateGroup
from mallee.worker.kv.sides.windows import WindowGroup
from mallee.worker.kv.tree import BranchTree

SIZE = 4


def goes_on(held: list[set[int]], windows: tuple[int, ...], path: list[int], end: int) -> bool:
    reaches = [max(0, end * SIZE - window + 1) // SIZE for window in windows]
    return all(set(path[reach:end]) <= group for reach, group in zip(reaches, held, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_workers_are_credited_up_to_the_last_place_that_goes_on(seed: int) -> None:
    rng = random.Random(seed)
    path = block_hashes(list(range(160)), SIZE, salt="")
    models: list[tuple[int, ...]] = [(), (9,), (9,), (6, 17), (6, 17)]
    index = WindowIndex(len(models), 1 << 24)
    held: list[list[set[int]]] = [[set() for _ in windows] for windows in models]
    counts = np.array([[rng.randrange(41) for _ in models]] * 2, dtype=np.int32)
    expected = counts[0].tolist()
    for worker, windows in enumerate(models):
        index.begin(worker, windows)
        for g in range(len(windows)):
            gone = {rng.randrange(40) for _ in range(rng.randrange(8))}
            own = np.array([h for i, h in enumerate(path) if i not in gone], dtype=np.uint64)
            index.store(worker, own, g + 1)
            held[worker][g].update(own.tolist())
        values = path.tolist()
        while not goes_on(held[worker], windows, values, expected[worker]):
            expected[worker] -= 1
    index.limit(counts, path, SIZE)
    assert counts.tolist() == [expected, expected]
    index.check()


def make_side(window: int | None, journal: Journal) -> SideGroup:
    """A group of layers with a window, or, without one, with states."""
    span = RowSpan(1, 80, 1)
    if window is None:
        return StateGroup(BlockPool(5), span, block_size=SIZE, journal=journal)
    return WindowGroup(window, BlockPool(12), span, block_size=SIZE, journal=journal)


class Worker:
    """A tree with a side group, whose events go to a router's holdings."""

    def __init__(self, window: int | None) -> None:
        self.journal = Journal()
        side = make_side(window, self.journal)
        kind: Literal["state", "window"] = "state" if window is None else "window"
        reach = GroupSpec(kind=kind, layers=(1,), nbytes=1, window=window).reach
        self.tree = BranchTree(BlockPool(80), SIZE, self.journal, sides=[side])
        self.holdings = Holdings(1, max_capsules=8, max_nbytes=1 << 24, clock=lambda: 0.0)
        self.holdings.index.set_prefix_closed(0, True)
        self.holdings.windows.begin(0, (reach,))

    def compute(self, text: list[int]) -> Node:
        hashes = block_hashes(text, SIZE, salt="")
        node = self.tree.attach(hashes[: (len(text) - 1) // SIZE], "")
        node, _ = self.tree.reserve(node, len(text) - node.end)
        self.tree.commit(node, text[node.end :])
        self.holdings.apply(0, WorkerId("w"), self.journal.drain())
        return node

    def credit(self, text: list[int]) -> int:
        hashes = block_hashes(text, SIZE, salt="")
        held = self.holdings.index.match(hashes)[None, :]
        self.holdings.windows.limit(held, hashes, SIZE)
        return int(held[0, 0])


def test_the_credit_is_what_the_worker_finds_also_after_a_snapshot() -> None:
    worker = Worker(window=9)
    texts = [[100 * i + j for j in range(4 * n)] for i, n in enumerate([8, 6, 7, 5, 9])]
    for text in texts:
        worker.tree.release(worker.compute(text))
        for each in texts:
            hashes = block_hashes(each, SIZE, salt="")
            assert worker.credit(each) == worker.tree.find(hashes)
    assert [worker.credit(text) for text in texts] == [0, 0, 0, 5, 9]
    assert worker.holdings.index.match(block_hashes(texts[0], SIZE, salt=""))[0] == 8
    before = [worker.credit(text) for text in texts]
    snapshot = Snapshot(
        WorkerId("w"),
        Incarnation(1),
        0,
        pack_hashes(worker.tree.held_hashes()),
        (),
        windows=tuple(map(pack_hashes, worker.tree.held_in_sides())),
    )
    worker.holdings.replace(0, WorkerId("w"), snapshot, asked_at=0.0)
    assert [worker.credit(text) for text in texts] == before
    hashes = block_hashes(texts[4], SIZE, salt="")
    assert worker.holdings.repair(0, hashes[3:]) == 6
    assert worker.credit(texts[4]) < 9
    assert worker.holdings.index.match(hashes)[0] == 9
    worker.holdings.check()


def test_the_credit_of_a_model_with_states_is_where_one_was_left() -> None:
    worker = Worker(window=None)
    text = [*range(4 * 9)]
    node = worker.compute(text[: 4 * 3])
    node, _ = worker.tree.reserve(node, 4 * 4)  # a chunk: the state before it stays
    worker.tree.commit(node, text[4 * 3 : 4 * 7])
    worker.tree.release(node)
    worker.holdings.apply(0, WorkerId("w"), worker.journal.drain())
    found = []
    for end in range(4, 4 * 9, 4):
        hashes = block_hashes(text[:end], SIZE, salt="")
        assert worker.credit(text[:end]) == worker.tree.find(hashes)
        found.append(worker.tree.find(hashes))
    assert found == [0, 0, 3, 3, 3, 3, 7, 7]
