"""The tree, with sliding windows and without, against a model that keeps every sequence as a plain list."""

from contextlib import suppress
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mallee.protocol.errors import PoolExhausted
from mallee.protocol.events import Removed, Stored, unpack_hashes
from mallee.protocol.hashing import block_hashes
from mallee.worker.kv.audit import check_tree, find_leaks
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.node import Node
from mallee.worker.kv.paths import flatten_windows
from mallee.worker.kv.pool import BlockPool
from mallee.worker.kv.tree import BranchTree
from mallee.worker.kv.windows import WindowGroup
from support.examples import examples

SIZE = 4
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=11)


class WindowBench:
    """A tree with window groups, over slots that say which token was written to them last."""

    def __init__(self, windows: dict[int, int], *, num_blocks: int = 24) -> None:
        """`windows`: blocks by window."""
        groups = [WindowGroup(window, BlockPool(num)) for window, num in windows.items()]
        self.journal = Journal()
        self.tree = BranchTree(BlockPool(num_blocks), SIZE, self.journal, windows=groups)
        self.windows = self.tree.windows
        self.reach = (None, *windows)  # by group, the full one first
        self.slots: dict[tuple[int, int, int], int] = {}  # (group, block, slot) -> token
        self.told: list[set[int]] = [set() for _ in self.reach]  # by group, as events say

    def open(self, tokens: list[int]) -> Node:
        usable = (len(tokens) - 1) // SIZE * SIZE
        node = self.tree.attach(block_hashes(tokens[:usable], SIZE, salt=""), "")
        try:
            return self.write(node, tokens[node.end :])
        except PoolExhausted:
            self.tree.release(node)
            raise

    def write(self, node: Node, tokens: list[int]) -> Node:
        """`tokens` are computed: every one reads all that its window has."""
        before = self.texts(node)
        node, copy = self.tree.reserve(node, len(tokens))
        if copy is not None:
            for g, (src, dst) in enumerate([copy[:2], *copy.windows]):
                for slot in range(copy.num_slots):
                    self.slots[g, dst, slot] = self.slots[g, src, slot]
        for g, table in enumerate(self.tables(node)):
            for i, token in enumerate(tokens, start=node.end):
                self.slots[g, int(table[i // SIZE]), i % SIZE] = token
        whole = before + tokens
        for position in range(len(before), len(whole)):
            self.check_reads(node, whole, position)
        self.tree.commit(node, tokens)
        return node

    def tables(self, node: Node) -> list[list[int]]:
        every = (self.tree.table(node), *flatten_windows(node, SIZE))
        return [table.tolist() for table in every]

    def texts(self, node: Node) -> list[int]:
        above = [] if node.parent is None else self.texts(node.parent)[: node.base]
        return above + list(node.tokens)

    def check_reads(self, node: Node, text: list[int], position: int) -> None:
        """The token at `position` reads in each group what was written there."""
        for g, table in enumerate(self.tables(node)):
            window = self.reach[g]
            first = 0 if window is None else max(0, position - window + 1)
            read = [self.slots[g, table[i // SIZE], i % SIZE] for i in range(first, position + 1)]
            assert read == text[first : position + 1], f"group {g} at {position}"

    def can_resume(self, node: Node, num_tokens: int) -> bool:
        """By brute force, over all blocks of the path."""
        for g, window in enumerate(self.reach[1:]):
            assert self.windows is not None
            path = self.windows._path_blocks(node, g)
            assert window is not None
            needed = range(max(0, num_tokens - window + 1), num_tokens)
            if any(path[i // SIZE] < 0 for i in needed):
                return False
        return True

    def in_use(self) -> list[int]:
        if self.windows is None:
            return []
        return [self.windows.in_use(g) for g in range(len(self.windows.groups))]

    def check(self) -> None:
        check_tree(self.tree)
        assert not find_leaks(self.tree, self.tree.holds())
        for event in self.journal.drain():
            assert isinstance(event, Stored | Removed)
            values = set(unpack_hashes(event.hashes).tolist())
            told = self.told[event.group]
            assert values.isdisjoint(told) if isinstance(event, Stored) else values <= told
            told ^= values
        assert self.told[0] == set(self.tree.held_hashes().tolist())
        nodes = self.tree.nodes()
        for g in range(len(self.reach) - 1):
            held = {v for n in nodes for v in n.hashes[n.windows[g].num_gone :]}
            assert self.told[g + 1] == held


class WindowMachine(RuleBasedStateMachine):
    """Branches grow, fork at ends and inside, and end at random."""

    windows: ClassVar[dict[int, int]] = {5: 14, 10: 16}

    def __init__(self) -> None:
        super().__init__()
        self.bench = WindowBench(self.windows)
        self.branches: list[tuple[Node, list[int]]] = []

    @rule(tokens=TOKENS)
    def open(self, tokens: list[int]) -> None:
        with suppress(PoolExhausted):
            self.branches.append((self.bench.open(tokens), tokens))

    @precondition(lambda self: self.branches)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        node, tokens = data.draw(st.sampled_from(self.branches))
        self.bench.tree.hold(node)
        self.branches.append((node, tokens))

    @precondition(lambda self: self.branches)
    @rule(data=st.data())
    def fork_inside(self, data: st.DataObject) -> None:
        tree = self.bench.tree
        node, tokens = data.draw(st.sampled_from(self.branches))
        wanted = data.draw(st.integers(0, len(tokens) // SIZE)) * SIZE
        found = tree.resume_point(node, wanted)
        points = [n for n in range(0, wanted + 1, SIZE) if self.bench.can_resume(node, n)]
        assert found == points[-1]
        if found:
            self.branches.append((tree.hold_prefix(node, found), tokens[:found]))

    @precondition(lambda self: self.branches)
    @rule(data=st.data(), tokens=TOKENS)
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        i = data.draw(st.integers(0, len(self.branches) - 1))
        node, before = self.branches[i]
        try:
            node = self.bench.write(node, tokens)
        except PoolExhausted:
            return
        self.branches[i] = (node, before + tokens)

    @precondition(lambda self: self.branches)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.branches) - 1))
        node, _ = self.branches.pop(i)
        self.bench.tree.release(node)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=4, max_size=24))
    def look_up(self, tokens: list[int]) -> None:
        """D30, part: nothing is found that can't be gone on from, and what ends found paths can be."""
        tree, hashes = self.bench.tree, block_hashes(tokens, SIZE, salt="")
        held = tree.index.count_leading(hashes)
        ends = [tree.index.find(int(value)) for value in hashes[:held]]
        points = [n for n, node in enumerate(ends, 1) if self.bench.can_resume(node, n * SIZE)]
        assert tree.find(hashes) == (points[-1] if points else 0)

    @invariant()
    def all_is_well(self) -> None:
        """D30: invariants after every operation; every branch can go on from its own end."""
        self.bench.check()
        for node, tokens in self.branches:
            assert self.bench.texts(node) == tokens
            assert self.bench.can_resume(node, len(tokens))
            hashes = block_hashes(tokens, SIZE, salt="")
            assert self.bench.tree.path_hashes(node).tolist() == hashes.tolist()

    def teardown(self) -> None:
        for node, _ in self.branches:
            self.bench.tree.release(node)
        self.bench.check()
        assert not any(self.bench.in_use())
        assert self.bench.tree.num_available == 24


class PlainMachine(WindowMachine):
    """Without windows."""

    windows: ClassVar[dict[int, int]] = {}


@pytest.mark.parametrize("machine", [WindowMachine, PlainMachine])
def test_every_branch_reads_back_its_own_tokens(machine: type[WindowMachine]) -> None:
    """D30: invariants after every operation."""
    bounds = settings(examples(60), stateful_step_count=40)
    run_state_machine_as_test(machine, settings=bounds)
