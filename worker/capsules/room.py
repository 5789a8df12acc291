"""The room of kept capsules: their budget on the device, and what they hold of it.

What a kept capsule holds can't be evicted, so there is a limit to it. Knows capsules as weights; doesn't
know which are kept, or why.
"""

from collections.abc import Callable
from typing import NamedTuple

from mallee.protocol.errors import CapsulesFull
from mallee.protocol.ids import CapsuleId
from mallee.worker.capsules.capsule import Capsule
from mallee.worker.kv.node import Node
from mallee.worker.kv.paths import with_ancestors
from mallee.worker.kv.text import Text
from mallee.worker.kv.tree import BranchTree


class _Kept(NamedTuple):
    """The weight of a kept capsule: blocks, those of `node`, that only its release gives back."""

    node: Node | None  # None: the device can do without its blocks
    num_blocks: int  # as if it shared none


class KeptRoom:
    """Weights of kept capsules by id, and the blocks that others were promised."""

    def __init__(self, tree: BranchTree, *, max_blocks: int, row_blocks: int) -> None:
        """`row_blocks`: blocks that the logits of a kept capsule are worth in bytes."""
        self.num_refused = 0
        self._tree = tree
        self._max_blocks = max_blocks
        self._row_blocks = row_blocks
        self._kept: dict[CapsuleId, _Kept] = {}
        self._num_blocks = 0  # of kept capsules, shared ones counted for each
        self._promised: dict[str, int] = {}  # request -> blocks that its capsule will add, at most

    def put(self, capsule: Capsule) -> None:
        """`capsule` is kept from now on, or lies elsewhere than before."""
        self.take(capsule.id)
        kept = self._kept[capsule.id] = self._weighed(capsule)
        self._num_blocks += kept.num_blocks

    def take(self, key: CapsuleId) -> None:
        """The capsule `key` is not kept any more, if it was."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._num_blocks -= kept.num_blocks

    def promise(self, request: str, tokens: Text, salt: str) -> None:
        """There will be room to keep a capsule of `tokens`, until `request` ends (`forgo`).

        What it shares with other kept capsules is not counted again; that is looked at only if everything
        would not fit without. O(kept capsules) then, and of tokens. Raises CapsulesFull.
        """

        def beside(nodes: set[Node]) -> int:
            hashes = self._tree.notation.hashes(tokens, self._tree.block_size, salt=salt)
            return needed - self._tree.overlap(hashes, nodes)

        needed = self._tree.weight(len(tokens)) + self._row_blocks
        self._promised[request] = self._check_fits(needed, beside)

    def forgo(self, request: str) -> None:
        """`request` has made its capsule, or won't."""
        self._promised.pop(request, None)

    def check_fits(self, capsule: Capsule) -> None:
        """Raises CapsulesFull if `capsule`, which is not kept, may not be. O(kept capsules) if close."""
        node, needed = self._weighed(capsule)

        def beside(nodes: set[Node]) -> int:
            if node is None:
                return needed
            own = with_ancestors([node]) - nodes
            return sum(len(node.blocks) for node in own) + self._row_blocks

        self._check_fits(needed, beside)

    def _check_fits(self, needed: int, beside: Callable[[set[Node]], int]) -> int:
        """The blocks that one more kept capsule needs. Raises CapsulesFull if that is too many.

        `needed` counts all of it; if that is too much, `beside` counts it beside the nodes that are kept.
        """
        promised = sum(self._promised.values())
        kept = self._num_blocks
        if kept + promised + needed > self._max_blocks:
            held = [each.node for each in self._kept.values() if each.node is not None]
            nodes = with_ancestors(held)
            kept = sum(len(node.blocks) for node in nodes) + len(held) * self._row_blocks
            needed = beside(nodes)
        if kept + promised + needed > self._max_blocks:
            self.num_refused += 1
            raise CapsulesFull(needed, kept + promised, self._max_blocks)
        return needed

    def _weighed(self, capsule: Capsule) -> _Kept:
        if capsule.node is None or capsule.below is not None:
            return _Kept(None, 0)
        return _Kept(capsule.node, self._tree.weight(capsule.boundary) + self._row_blocks)

    def __len__(self) -> int:
        return len(self._kept)

    def check(self, kept: dict[CapsuleId, Capsule]) -> None:
        """Raise AssertionError unless the weights are those of `kept`."""
        found = {key: self._weighed(capsule) for key, capsule in kept.items()}
        assert self._kept == found, f"kept capsules misweighed: {self._kept}, are {found}"
        num_blocks = sum(each.num_blocks for each in found.values())
        assert self._num_blocks == num_blocks, f"kept blocks {self._num_blocks}, are {num_blocks}"
