"""The tree against a model that keeps every sequence as a plain list."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mallee.protocol.errors import PoolExhausted
from mallee.protocol.hashing import block_hashes
from mallee.worker.kv.audit import check_tree
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.node import Node
from mallee.worker.kv.pool import BlockPool
from mallee.worker.kv.tree import BranchTree
from support.examples import examples

SIZE = 4
BLOCKS = 24
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=11)


class TreeMachine(RuleBasedStateMachine):
    """Branches grow, fork and end at random; block contents are modelled slot by slot."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = BranchTree(BlockPool(BLOCKS), SIZE, Journal())
        self.branches: list[tuple[Node, list[int]]] = []
        self.slots: dict[tuple[int, int], int] = {}  # (block, slot) -> token

    def write(self, node: Node, tokens: list[int]) -> Node:
        node, copy = self.tree.reserve(node, len(tokens))
        if copy is not None:
            for slot in range(copy.num_slots):
                self.slots[copy.dst, slot] = self.slots[copy.src, slot]
        table = self.tree.table(node)
        for i, token in enumerate(tokens, start=node.end):
            self.slots[int(table[i // SIZE]), i % SIZE] = token
        self.tree.commit(node, tokens)
        return node

    @rule(tokens=TOKENS)
    def open(self, tokens: list[int]) -> None:
        usable = (len(tokens) - 1) // SIZE * SIZE
        node = self.tree.attach(block_hashes(tokens[:usable], SIZE, salt=""), "")
        try:
            node = self.write(node, tokens[node.end :])
        except PoolExhausted:
            self.tree.release(node)
        else:
            self.branches.append((node, tokens))

    @precondition(lambda self: self.branches)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        node, tokens = data.draw(st.sampled_from(self.branches))
        self.tree.hold(node)
        self.branches.append((node, tokens))

    @precondition(lambda self: self.branches)
    @rule(data=st.data(), tokens=TOKENS)
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        i = data.draw(st.integers(0, len(self.branches) - 1))
        node, before = self.branches[i]
        try:
            node = self.write(node, tokens)
        except PoolExhausted:
            return
        self.branches[i] = (node, before + tokens)

    @precondition(lambda self: self.branches)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.branches) - 1))
        node, _ = self.branches.pop(i)
        self.tree.release(node)

    @invariant()
    def all_is_well(self) -> None:
        """D30: invariants after every operation; every branch reads back its own tokens."""
        check_tree(self.tree)
        for node, tokens in self.branches:
            table = self.tree.table(node)
            read = [self.slots[int(table[i // SIZE]), i % SIZE] for i in range(node.end)]
            assert read == tokens
            hashes = block_hashes(tokens, SIZE, salt="")
            assert self.tree.path_hashes(node).tolist() == hashes.tolist()

    def teardown(self) -> None:
        for node, _ in self.branches:
            self.tree.release(node)
        check_tree(self.tree)
        assert self.tree.num_available == BLOCKS


TreeMachine.TestCase.settings = settings(examples(60), stateful_step_count=40)
TestTree = TreeMachine.TestCase
