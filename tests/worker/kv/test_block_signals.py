"""The four signals of a block manager, told in the verbs of our tree, against a model that keeps lists.

Dynamo's block manager moves blocks between an active pool (counted users) and an inactive one (least
recently used) on four signals. In the words of the tree:

    use      `attach` (or `hold`): blocks that are held get a user more, whether they had any (active) or
             were cache (inactive); then `reserve`: absent ones are taken from the free blocks, and if
             those run out from the cache, oldest first. Nothing evictable: PoolExhausted, no change.
    promote  `commit`: a block that became full is sealed and found by its hash. Event: Stored, once
             however many blocks of that hash there are.
    deref    `release`: the text's blocks lose a user, the last one first. Who had its last: full blocks
             become cache, youngest of all, a partial one is free at once (it had no name: no event).
    destroy  eviction inside `reserve`. Event: Removed, when the last block of that hash goes.
"""

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
from mallee.worker.kv.audit import check_tree
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.node import Node
from mallee.worker.kv.pool import BlockPool
from mallee.worker.kv.tree import BranchTree
from support.examples import examples

SIZE = 2
BLOCKS = 9
News = list[tuple[str, int]]


class Block:
    """One block of the model; `name` is its hash once it is full."""

    def __init__(self, parent: "Block | None") -> None:
        self.parent = parent
        self.name: int | None = None
        self.users = 0


class ListPool:
    """Active blocks counted, inactive ones in a list, oldest first; what it would publish in `news`."""

    def __init__(self, num_blocks: int) -> None:
        self.num_free = num_blocks
        self.inactive: list[Block] = []
        self.named: dict[int, list[Block]] = {}  # the first of each list is the one that is found
        self.news: News = []

    def find(self, names: list[int]) -> list[Block]:
        """The longest held beginning, as one path."""
        held = [name for name in names if name in self.named]
        assert held == names[: len(held)], "a block is held without those before it"
        path: list[Block] = []
        block = self.named[held[-1]][0] if held else None
        while block is not None:
            path.append(block)
            block = block.parent
        return path[::-1]

    def use(self, blocks: list[Block]) -> None:
        for block in blocks:
            if block in self.inactive:
                self.inactive.remove(block)
            block.users += 1

    def use_absent(self, text: list[Block], n: int) -> bool:
        """n new blocks at the end of `text`; False, and nothing changed, if they can't be had."""
        if n > self.num_free + len(self.inactive):
            return False
        while self.num_free < n:
            self.destroy(self.inactive.pop(0))
        for _ in range(n):
            block = Block(text[-1] if text else None)
            block.users = 1
            text.append(block)
        self.num_free -= n
        return True

    def promote(self, block: Block, name: int) -> None:
        block.name = name
        if name not in self.named:
            self.news.append(("stored", name))
        self.named.setdefault(name, []).append(block)

    def deref(self, text: list[Block]) -> None:
        for block in reversed(text):
            block.users -= 1
            if not block.users and block.name is not None:
                self.inactive.append(block)
            elif not block.users:
                self.num_free += 1

    def destroy(self, block: Block) -> None:
        assert block.name is not None
        found = self.named[block.name]
        if found[0] is block and len(found) > 1:
            found[0] = found.pop()
        else:
            found.remove(block)
        if not found:
            del self.named[block.name]
            self.news.append(("removed", block.name))
        self.num_free += 1


class Text:
    """A text that is in use: in the tree and in the model."""

    def __init__(self, node: Node, blocks: list[Block], tokens: list[int]) -> None:
        self.node, self.blocks, self.tokens = node, blocks, tokens


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class SignalMachine(RuleBasedStateMachine):
    """A tree and the model under the same signals."""

    def __init__(self) -> None:
        super().__init__()
        self.journal = Journal()
        self.tree = BranchTree(BlockPool(BLOCKS), SIZE, self.journal)
        self.model = ListPool(BLOCKS)
        self.texts: list[Text] = []
        self.told: News = []

    @rule(tokens=TOKENS)
    def use(self, tokens: list[int]) -> None:
        """A prompt comes: what is held gets a user, the rest is taken and filled."""
        names = block_hashes(tokens, SIZE, salt="").tolist()
        found = self.model.find(names)
        node = self.tree.attach(block_hashes(tokens, SIZE, salt=""), "")
        assert node.end == len(found) * SIZE
        self.model.use(found)
        text = Text(node, found, tokens[: node.end])
        if self.write(text, tokens[node.end :]):
            self.texts.append(text)
        else:
            self.model.deref(text.blocks)
            self.tree.release(text.node)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def use_active(self, data: st.DataObject) -> None:
        """A text that ends with a block is shared by one more, who may go on in its own way."""
        text = data.draw(st.sampled_from(self.texts))
        if len(text.tokens) % SIZE:
            return  # a partial block is copied at once: test_windows
        self.tree.hold(text.node)
        self.model.use(text.blocks)
        self.texts.append(Text(text.node, list(text.blocks), list(text.tokens)))

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), tokens=TOKENS)
    def promote(self, data: st.DataObject, tokens: list[int]) -> None:
        """A text grows: its partial block fills up, then the next one, or there is no room."""
        self.write(data.draw(st.sampled_from(self.texts)), tokens)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def deref(self, data: st.DataObject) -> None:
        text = self.texts.pop(data.draw(st.integers(0, len(self.texts) - 1)))
        self.tree.release(text.node)
        self.model.deref(text.blocks)

    @precondition(lambda self: self.model.num_free == 0 and self.model.inactive)
    @rule()
    def destroy(self) -> None:
        """The next block costs exactly the oldest cached block."""
        oldest = self.model.inactive[0]
        text = Text(self.tree.attach(block_hashes([], SIZE), ""), [], [])
        assert self.write(text, [9])
        self.texts.append(text)
        assert oldest not in self.model.inactive

    def write(self, text: Text, tokens: list[int]) -> bool:
        """Reserve, commit; False if there is no room, which must have changed nothing."""
        before = len(text.tokens)
        needed = -(-(before + len(tokens)) // SIZE) - len(text.blocks)
        has_room = self.model.use_absent(text.blocks, needed)
        if not tokens:
            return True
        if not has_room:
            with pytest.raises(PoolExhausted):
                self.tree.reserve(text.node, len(tokens))
            return False
        node, copy = self.tree.reserve(text.node, len(tokens))
        assert copy is None, "nothing partial is shared here"
        self.tree.commit(node, tokens)
        text.node, text.tokens = node, text.tokens + tokens
        names = block_hashes(text.tokens, SIZE, salt="").tolist()
        for i in range(before // SIZE, len(names)):
            self.model.promote(text.blocks[i], names[i])
        return True

    @invariant()
    def both_agree(self) -> None:
        check_tree(self.tree)
        for event in self.journal.drain():
            assert isinstance(event, Stored | Removed)
            kind = "stored" if isinstance(event, Stored) else "removed"
            self.told += [(kind, name) for name in unpack_hashes(event.hashes).tolist()]
        assert self.told == self.model.news
        assert self.tree.pool.num_free == self.model.num_free
        assert self.tree.stats().cached_blocks == len(self.model.inactive)
        assert set(self.tree.held_hashes().tolist()) == set(self.model.named)
        users = sum(1 for names in self.model.named.values() for block in names if block.users)
        partial = len({b for t in self.texts for b in t.blocks if b.name is None})
        assert BLOCKS - self.tree.num_available == users + partial


def test_blocks_are_used_kept_and_evicted_as_by_a_pool_of_lists() -> None:
    """K13, K14: use of active, inactive and absent blocks, promote, deref, destroy; strict LRU."""
    bounds = settings(examples(150), stateful_step_count=30)
    run_state_machine_as_test(SignalMachine, settings=bounds)
