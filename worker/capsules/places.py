"""The places of capsules: on the device, in a tier below it, or in both.

A capsule in both gives up its blocks on the device where room is needed (`drop`). Holds the nodes and the
copies below of all capsules that are here; doesn't know which of them are kept.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from mallee.protocol.hashing import NO_HASHES
from mallee.protocol.ids import CapsuleId
from mallee.worker.capsules.capsule import Below, Capsule, CutText, copy_of, cut_text
from mallee.worker.kv.node import Node
from mallee.worker.kv.tree import BranchTree
from mallee.worker.transfer.lower import LowerTiers
from mallee.worker.transfer.values import DEVICE, HOST


class CapsulePlaces:
    """Capsules by id. A capsule is a value: one that changes its place is another one under its id."""

    def __init__(self, tree: BranchTree, lower: LowerTiers | None) -> None:
        self._tree = tree
        self._lower = lower
        self._capsules: dict[CapsuleId, Capsule] = {}
        self._in_both: OrderedDict[CapsuleId, None] = OrderedDict()  # the least recently used first

    # Reading

    def __getitem__(self, key: CapsuleId) -> Capsule:
        return self._capsules[key]

    def __contains__(self, key: CapsuleId) -> bool:
        return key in self._capsules

    def __iter__(self) -> Iterator[CapsuleId]:
        return iter(self._capsules)

    def __len__(self) -> int:
        return len(self._capsules)

    def get(self, key: CapsuleId) -> Capsule | None:
        """The capsule, if it is here. From any thread."""
        return self._capsules.get(key)

    def in_both(self) -> Iterator[CapsuleId]:
        """The capsules that can do without their place on the device, the least recently used first."""
        return iter(self._in_both)

    def is_in_both(self, key: CapsuleId) -> bool:
        return key in self._in_both

    def tier(self, capsule: Capsule) -> int | None:
        """The tier where the last of its KV lies; None: its text is here, but some of its KV is gone."""
        below = capsule.below
        if capsule.node is not None or below is None:
            return DEVICE
        if below.is_held or below.is_durable:
            return below.tier
        assert self._lower is not None, "a copy below, without tiers"
        full = np.array(below.keys[: len(below.tokens) // self._tree.block_size], np.uint64)
        rest = below.all_keys[self._tree.find(full) :]  # the others are still cached on the device
        return self._lower.tier_of(rest) if rest else DEVICE

    def holds(self) -> dict[Node, int]:
        """The number of capsules that hold each node."""
        return dict(Counter(c.node for c in self._capsules.values() if c.node is not None))

    def matchers(self) -> Iterator[object]:
        """The grammar states of capsules inside a constrained text; some may hold the same."""
        return (c.matcher for c in self._capsules.values() if c.matcher is not None)

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        capsules = self._capsules.values()
        assert all(c.node.holders > 0 for c in capsules if c.node is not None), "nothing is held"
        assert all(c.node is not None or c.below is not None for c in capsules), "one is nowhere"
        twice = {c.id for c in capsules if c.node is not None and c.below is not None}
        assert twice == set(self._in_both), "capsules in both places miscounted"

    # Capsules that come and go

    def put(self, capsule: Capsule) -> None:
        """The new `capsule`, whose holds pass to this."""
        assert capsule.id not in self._capsules, f"capsule {capsule.id} made twice"
        self._capsules[capsule.id] = capsule
        if capsule.node is not None:
            self._tree.seal(capsule.node)

    def remove(self, key: CapsuleId) -> None:
        """The capsule is gone from all places."""
        found = self._capsules.pop(key)
        self._in_both.pop(key, None)
        if found.node is not None:
            self._tree.release(found.node)
        if found.below is not None:
            self._let_go(key, found.below, None)

    def use(self, key: CapsuleId) -> None:
        """The capsule is the most recently used one from now on. Raises CorruptKV, if checked."""
        if key in self._in_both:
            self._in_both.move_to_end(key)
        node = self._capsules[key].node
        if node is not None:
            self._tree.verify(node)

    def forget_logits(self, key: CapsuleId) -> Capsule:
        """The capsule without its logits: forks compute its last tokens again, a block of them at most."""
        found = self._capsules[key] = replace(self._capsules[key], logits=None)
        return found

    # Moves from place to place

    def sink(self, capsule: Capsule, below: Below) -> Capsule:
        """`capsule` has a copy `below`, and gives up its place on the device, if it has one."""
        key, old = capsule.id, capsule.below
        self._in_both.pop(key, None)
        self._capsules[key] = replace(capsule, node=None, below=below)
        if capsule.node is not None:
            self._tree.release(capsule.node)
        if old is not None:
            self._let_go(key, old, below)
        return self._capsules[key]

    def leave_below(self, key: CapsuleId) -> bool:
        """Whether the capsule, whose room is needed, stays as a text, with what is below of it."""
        found = self._capsules[key]
        if self._lower is None or not self._lower.has_host or found.node is None:
            return False
        copy = copy_of(self._tree, found.node)
        keys, num_full = copy.all_keys, len(copy.tokens) // self._tree.block_size
        if copy.more:  # windows are given up before the rest is evicted: it goes down as one
            self._tree.offload(keys[:num_full], copy.blocks[:num_full])
        self._tree.offload(keys[num_full:], copy.blocks[num_full:], are_full=False)
        below = Below(
            HOST,
            copy.tokens,
            found.salt,
            copy.keys,
            is_durable=False,
            is_held=False,
            more=copy.more,
        )
        self.sink(found, below)
        return True

    def lift(self, capsule: Capsule, node: Node, logits: object | None) -> Capsule:
        """`capsule` is on the device again, with `logits`, and stays below; the hold on `node` passes."""
        key = capsule.id
        assert capsule.node is None, f"{key} is on the device"
        lifted = self._capsules[key] = replace(capsule, node=node, logits=logits)
        self._in_both[key] = None
        self._tree.seal(node)
        return lifted

    def drop(self, key: CapsuleId) -> None:
        """Give up the place on the device of a capsule that is in both."""
        found = self._capsules[key]
        assert found.node is not None, f"{key} is below alone"
        del self._in_both[key]
        self._capsules[key] = replace(found, node=None)
        self._tree.release(found.node)

    def lost(self, key: CapsuleId) -> None:
        """The durable record of a capsule is gone: what is left of it below is cache."""
        found = self._capsules.get(key)
        if found is not None and found.below is not None and found.below.is_durable:
            below = found.below._replace(is_durable=False)
            self._capsules[key] = replace(found, below=below)

    def cut(self, capsule: Capsule, at: int) -> CutText:
        """The first `at` tokens of `capsule`, held where it lies."""
        if capsule.node is not None:
            return cut_text(self._tree, capsule.node, capsule.pending, at)
        below, size = capsule.below, self._tree.block_size
        assert below is not None, "a capsule that is nowhere"
        num = len(below.tokens)
        base = num if at >= num else at - at % size
        if not base:
            rest = tuple(capsule.text(self._tree.notation, 0, at))
            return CutText(self._tree.attach(NO_HASHES, below.salt, 0), rest)
        keys = below.keys[: -(-base // size)]
        more = self._tree.side_keys(keys, base)
        is_held = below.is_held and self._lower is not None and self._lower.hold((*keys, *more))
        if below.is_held and not is_held and more:  # its own windows went on elsewhere
            more = ()
            is_held = self._lower is not None and self._lower.hold(keys)
        cut = Below(below.tier, below.tokens[:base], below.salt, keys, False, is_held, more)
        return CutText(None, tuple(capsule.text(self._tree.notation, base, at)), cut)

    def give_back(self, cut: CutText) -> None:
        """Let go of what `cut` holds."""
        if cut.node is not None:
            self._tree.release(cut.node)
        elif cut.below is not None and cut.below.is_held:
            assert self._lower is not None, "a copy below, without tiers"
            self._lower.release(cut.below.all_keys)

    def _let_go(self, key: CapsuleId, old: Below, new: Below | None) -> None:
        """The copy `old` of a capsule is replaced by `new`, or gone."""
        assert self._lower is not None, "a copy below, without tiers"
        if old.is_held:
            self._lower.release(old.all_keys)
        if old.is_durable and (new is None or not new.is_durable):
            self._lower.forget(key)
