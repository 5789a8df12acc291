"""The tree, with side groups and without, against a model that keeps every sequence as a plain list."""

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
from mallee.worker.kv.node import BlockCopy, Node
from mallee.worker.kv.paths import side_tables
from mallee.worker.kv.pool import BlockPool
from mallee.worker.kv.sides.group import Reason, RowSpan, SideGroup
from mallee.worker.kv.sides.states import NO_STATE, StateGroup, StatePart
from mallee.worker.kv.sides.windows import WindowGroup, WindowPart
from mallee.worker.kv.tree import BranchTree
from support.examples import examples

SIZE = 4
REASONS: tuple[Reason | None, ...] = (None, "answer", "named", "end")
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=11)


class Bench:
    """A tree with side groups, over slots that say which token, or which text's state, was written last."""

    def __init__(self, windows: dict[int, int], num_states: int, *, num_blocks: int = 24) -> None:
        """`windows`: blocks by window; with some `num_states` there is a state group after these."""
        self.journal = Journal()
        self.windows = [
            WindowGroup(
                window,
                BlockPool(num),
                RowSpan(group, 100 * group, 1),
                block_size=SIZE,
                journal=self.journal,
            )
            for group, (window, num) in enumerate(windows.items(), start=1)
        ]
        sides: list[SideGroup] = [*self.windows]
        self.states: StateGroup | None = None
        if num_states:
            self.states = StateGroup(
                BlockPool(num_states),
                RowSpan(len(sides) + 1, 1000, 1),
                block_size=SIZE,
                journal=self.journal,
                every_blocks=2,
            )
            sides.append(self.states)
        self.tree = BranchTree(BlockPool(num_blocks), SIZE, self.journal, sides=sides)
        self.reach = (None, *windows)  # by group, the full one first
        self.slots: dict[tuple[int, int, int], int] = {}  # (group, block, slot) -> token
        self.folded: dict[int, list[int]] = {
            NO_STATE: []
        }  # by slot, the text that it is a state of
        self.told: list[set[int]] = [set() for _ in range(1 + len(sides))]  # as events say

    def attach(self, tokens: list[int]) -> tuple[list[int], Node]:
        usable = (len(tokens) - 1) // SIZE * SIZE
        return tokens, self.tree.attach(block_hashes(tokens[:usable], SIZE, salt=""), "")

    def open(self, tokens: list[int]) -> Node:
        _, node = self.attach(tokens)
        try:
            return self.write(node, tokens[node.end :])
        except PoolExhausted:
            self.tree.release(node)
            raise

    def write(self, node: Node, tokens: list[int]) -> Node:
        """`tokens` are computed in a step of their own."""
        node, copy = self.tree.reserve(node, len(tokens))
        self.compute([(node, tokens, copy)])
        return node

    def compute(self, rows: list[tuple[Node, list[int], BlockCopy | None]]) -> None:
        """A step over nodes that have room for these tokens: every one reads all that it has to."""
        for _, _, copy in rows:
            if copy is not None:
                self.copy(copy)
        for node, tokens, _ in rows:
            for g, table in enumerate(self.tables(node)):
                for i, token in enumerate(tokens, start=node.end):
                    self.slots[g, int(table[i // SIZE]), i % SIZE] = token
            if self.states is not None:
                read, written = side_tables(node, SIZE)[-1].tolist()
                assert self.folded[read] == self.texts(node), "the state of another text"
                self.folded[written] = self.texts(node) + tokens
        for node, tokens, _ in rows:
            whole = self.texts(node) + tokens
            for position in range(node.end, len(whole)):
                self.check_reads(node, whole, position)
        for node, tokens, _ in rows:
            self.tree.commit(node, tokens, reason=REASONS[sum(tokens) % len(REASONS)])

    def copy(self, copy: BlockCopy) -> None:
        for g, pair in enumerate([copy[:2], *copy.sides]):
            if pair is not None:
                for slot in range(copy.num_slots):
                    self.slots[g, pair[1], slot] = self.slots[g, pair[0], slot]

    def tables(self, node: Node) -> list[list[int]]:
        """Blocks by group of those that have any for tokens."""
        every = (self.tree.table(node), *side_tables(node, SIZE))
        return [table.tolist() for table in every[: len(self.reach)]]

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
        for side in self.windows:
            path = side.path_blocks(node)
            needed = range(max(0, num_tokens - side.window + 1), num_tokens)
            if any(path[i // SIZE] < 0 for i in needed):
                return False
        return self.states is None or num_tokens == 0 or num_tokens in self.resumable(node)

    def resumable(self, node: Node | None) -> set[int]:
        """The places on the path of `node` that have a state."""
        if node is None:
            return set()
        part = node.sides[-1]
        assert isinstance(part, StatePart)
        return {*part.states, *self.resumable(node.parent)}

    def in_use(self) -> list[int]:
        every = [*self.windows, self.states]
        return [side.in_use for side in every if side is not None]

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
        for g in range(len(self.windows)):
            held = set()
            for node in nodes:
                part = node.sides[g]
                assert isinstance(part, WindowPart)
                held |= {*node.hashes[part.num_gone :]}
            assert self.told[g + 1] == held
        self.check_states()

    def check_states(self) -> None:
        """All that is told of can be gone on from, and every state is that of its text."""
        if self.states is None:
            return
        known = set()
        for node in self.tree.nodes():
            part, text = node.sides[-1], self.texts(node)
            assert isinstance(part, StatePart)
            for at, state in part.states.items():
                assert self.folded[state.slot] == text[:at]
                if at % SIZE == 0:
                    known.add(int(block_hashes(text[:at], SIZE, salt="")[-1]))
        assert self.told[-1] <= known


class SideMachine(RuleBasedStateMachine):
    """Branches grow, fork at ends and inside, and end at random."""

    windows: ClassVar[dict[int, int]] = {}
    num_states: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(self.windows, self.num_states)
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
    @rule(data=st.data(), tokens=TOKENS, opened=TOKENS)
    def step(self, data: st.DataObject, tokens: list[int], opened: list[int]) -> None:
        """Room for several, among them one that begins with what others have; then all compute."""
        places = st.integers(0, len(self.branches) - 1)
        rows = []
        for i in data.draw(st.lists(places, min_size=1, max_size=4, unique=True)):
            node, before = self.branches[i]
            with suppress(PoolExhausted):
                node, copy = self.bench.tree.reserve(node, len(tokens))
                rows.append((node, tokens, copy))
                self.branches[i] = (node, before + tokens)
        _, text = data.draw(st.sampled_from(self.branches))
        whole, node = self.bench.attach([*text, *opened])
        try:
            node, copy = self.bench.tree.reserve(node, len(whole) - node.end)
        except PoolExhausted:
            self.bench.tree.release(node)
        else:
            rows.append((node, whole[node.end :], copy))
            self.branches.append((node, whole))
        check_tree(self.bench.tree)
        self.bench.compute(rows)

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


class WindowMachine(SideMachine):
    windows: ClassVar[dict[int, int]] = {5: 14, 10: 16}


class StateMachine(SideMachine):
    num_states: ClassVar[int] = 12


class HybridMachine(SideMachine):
    windows: ClassVar[dict[int, int]] = {5: 14}
    num_states: ClassVar[int] = 9


@pytest.mark.parametrize("machine", [SideMachine, WindowMachine, StateMachine, HybridMachine])
def test_every_branch_reads_back_its_own_tokens(machine: type[SideMachine]) -> None:
    """D30: invariants after every operation."""
    bounds = settings(examples(60), stateful_step_count=40)
    run_state_machine_as_test(machine, settings=bounds)
