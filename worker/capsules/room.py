"""The room of kept capsules: their budgets, and what they hold of them.

What a kept capsule holds can't be evicted, so there is a limit to it. On the device it holds blocks. One that
lies below can do without them, but its text, keys and state are in this process's memory: bytes, which are
counted as they are stored. Knows capsules as weights; doesn't know which are kept, or why.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from mallee.protocol.codec import encode
from mallee.protocol.errors import CapsulesFull
from mallee.protocol.ids import CapsuleId
from mallee.worker.capsules.capsule import Capsule
from mallee.worker.kv.node import Node
from mallee.worker.kv.paths import with_ancestors
from mallee.worker.kv.text import Text
from mallee.worker.kv.tree import BranchTree
from mallee.worker.transfer.values import DEVICE

CAPSULE_NBYTES: Final = 1024
"""Of a capsule below: its objects and its places in tables, about."""
TOKEN_NBYTES: Final = 4
KEY_NBYTES: Final = 44  # an integer and its place in a tuple


class _Weight(NamedTuple):
    """The weight of a kept capsule, which only its release gives back: blocks of `node`, or bytes."""

    node: Node | None  # None: the device can do without its blocks
    num_blocks: int  # as if it shared none
    nbytes: int  # of this process's memory, if it lies below
    tier: int  # the lowest where it lies
    kv_blocks: int  # there, as if it shared none


class KeptRoom:
    """Weights of kept capsules by id, and the room that others were promised."""

    def __init__(
        self,
        tree: BranchTree,
        *,
        max_blocks: int,
        row_blocks: int,
        max_nbytes_below: int,
        row_nbytes: int,
    ) -> None:
        """`row_blocks`: blocks that the logits of a kept capsule are worth in bytes, `row_nbytes`."""
        self.num_refused = 0
        self.nbytes_below = 0
        self._max_nbytes_below = max_nbytes_below
        self._row_nbytes = row_nbytes
        self._descending_nbytes = 0  # promised to capsules on their way down
        self._tree = tree
        self.max_blocks = max_blocks
        self._row_blocks = row_blocks
        self._kept: dict[CapsuleId, _Weight] = {}
        self._num_blocks = 0  # of kept capsules, shared ones counted for each
        self.num_by_tier = [0, 0, 0]
        self.blocks_by_tier = [0, 0, 0]  # as if they shared none
        self._promised: dict[str, int] = {}  # request -> blocks that its capsule will add, at most

    def put(self, capsule: Capsule) -> None:
        """`capsule` is kept from now on, or lies elsewhere than before."""
        self.take(capsule.id)
        kept = self._kept[capsule.id] = self._weight(capsule)
        self._count(kept, 1)

    def take(self, key: CapsuleId) -> None:
        """The capsule `key` is not kept any more, if it was."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._count(kept, -1)

    def _count(self, kept: _Weight, sign: int) -> None:
        self._num_blocks += sign * kept.num_blocks
        self.nbytes_below += sign * kept.nbytes
        self.num_by_tier[kept.tier] += sign
        self.blocks_by_tier[kept.tier] += sign * kept.kv_blocks

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
        weight = self._weight(capsule)
        node, needed, nbytes = weight.node, weight.num_blocks, weight.nbytes
        self._check_fits_below(nbytes)

        def beside(nodes: set[Node]) -> int:
            if node is None:
                return needed
            own = with_ancestors([node]) - nodes
            return sum(len(node.blocks) for node in own) + self._row_blocks

        self._check_fits(needed, beside)

    def promise_below(self, capsule: Capsule) -> int:
        """There will be room for `capsule` as it will lie below: bytes, to be given back by `forgo_below`.

        Raises CapsulesFull.
        """
        old = self._kept.get(capsule.id)
        nbytes = max(0, self._weight(capsule).nbytes - (0 if old is None else old.nbytes))
        self._check_fits_below(nbytes)
        self._descending_nbytes += nbytes
        return nbytes

    def forgo_below(self, nbytes: int) -> None:
        """A capsule that had so many bytes promised has come down, or won't."""
        self._descending_nbytes -= nbytes

    def has_room_below(self, capsule: Capsule) -> bool:
        """Whether `capsule`, which is new and lies below, fits there."""
        taken = self.nbytes_below + self._descending_nbytes
        return taken + self._weight(capsule).nbytes <= self._max_nbytes_below

    def _check_fits_below(self, nbytes: int) -> None:
        taken = self.nbytes_below + self._descending_nbytes
        if nbytes and taken + nbytes > self._max_nbytes_below:
            self.num_refused += 1
            raise CapsulesFull(nbytes, taken, self._max_nbytes_below, unit="bytes")

    def _check_fits(self, needed: int, beside: Callable[[set[Node]], int]) -> int:
        """The blocks that one more kept capsule needs. Raises CapsulesFull if that is too many.

        `needed` counts all of it; if that is too much, `beside` counts it beside the nodes that are kept.
        """
        promised = sum(self._promised.values())
        kept = self._num_blocks
        if kept + promised + needed > self.max_blocks:
            held = [each.node for each in self._kept.values() if each.node is not None]
            nodes = with_ancestors(held)
            kept = sum(len(node.blocks) for node in nodes) + len(held) * self._row_blocks
            needed = beside(nodes)
        if kept + promised + needed > self.max_blocks:
            self.num_refused += 1
            raise CapsulesFull(needed, kept + promised, self.max_blocks)
        return needed

    def _weight(self, capsule: Capsule) -> _Weight:
        below = capsule.below
        kv_blocks = -(-capsule.num_computed // self._tree.block_size)
        if below is None:
            num_blocks = self._tree.weight(capsule.boundary) + self._row_blocks
            return _Weight(capsule.node, num_blocks, 0, DEVICE, kv_blocks)
        nbytes = CAPSULE_NBYTES + TOKEN_NBYTES * capsule.boundary + KEY_NBYTES * len(below.all_keys)
        nbytes += len(encode(capsule.continuation)) + len(encode(capsule.grammar))
        nbytes += self._row_nbytes if capsule.logits is not None else 0
        return _Weight(None, 0, nbytes, below.tier, kv_blocks)

    def __len__(self) -> int:
        return len(self._kept)

    def check(self, kept: dict[CapsuleId, Capsule]) -> None:
        """Raise AssertionError unless the weights are those of `kept`."""
        found = {key: self._weight(capsule) for key, capsule in kept.items()}
        assert self._kept == found, f"kept capsules misweighed: {self._kept}, are {found}"
        num_blocks = sum(each.num_blocks for each in found.values())
        assert self._num_blocks == num_blocks, f"kept blocks {self._num_blocks}, are {num_blocks}"
        nbytes = sum(each.nbytes for each in found.values())
        assert self.nbytes_below == nbytes, f"kept bytes {self.nbytes_below}, are {nbytes}"
        tiers = [each.tier for each in found.values()]
        assert self.num_by_tier == [tiers.count(tier) for tier in range(3)], "kept, by tier"
        assert self._descending_nbytes >= 0, "given back, but never promised"
