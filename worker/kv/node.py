"""The pieces of the branch tree: a run of tokens with its blocks, and where the next tokens go."""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mallee.worker.kv.text import Text

BlockTable = npt.NDArray[np.int32]


class SidePart(Protocol):
    """A node's KV in one side group (`sides/group.py`)."""

    def table(self, node: "Node", place: int, block_size: int) -> BlockTable:
        """The places that a pass reads and writes here for the text of `node`, whose part `place` this is."""
        ...


class Node:
    """A run of tokens and the blocks that hold them. Only `BranchTree` writes to it."""

    __slots__ = (
        "__weakref__",
        "base",
        "blocks",
        "children",
        "flat",
        "hashes",
        "holders",
        "is_copying",
        "live",
        "num_copying",
        "parent",
        "rank",
        "salt",
        "sides",
        "stamp",
        "tokens",
    )

    def __init__(
        self,
        parent: "Node | None",
        base: int,
        salt: str,
        tokens: Text,
        sides: tuple[SidePart, ...] = (),
    ) -> None:
        self.parent = parent
        self.base = base  # position of tokens[0]; a multiple of the block size
        self.salt = salt
        self.tokens = tokens
        self.blocks: list[int] = []  # may run ahead of tokens: reserved for the step in flight
        self.hashes: list[int] = []  # chain hashes of the full blocks; none if nothing is cached
        self.holders = 0
        self.live = 0  # (holders > 0) + children that are live; 0: the blocks are only cache
        self.stamp = 0  # when it was last needed, as a count; 0 while it is, and once it is gone
        self.rank = 0  # of its last block, while it is dead and a leaf
        self.children: set[Node] = set()
        # It still needs of its parent the first slots of its last block, or its state.
        self.is_copying = False
        self.num_copying = 0  # children that are
        self.flat: BlockTable | None = None  # block ids of the whole sequence, while they are true
        self.sides = sides  # its KV in each side group

    @property
    def end(self) -> int:
        """Committed tokens of the whole sequence."""
        return self.base + len(self.tokens)

    def __repr__(self) -> str:
        return f"Node({self.base}..{self.end}, holders={self.holders}, {len(self.children)} below)"


class BlockCopy(NamedTuple):
    """Copy the first `num_slots` token slots (keys and values) of block src to dst.

    In all layers of the full group; `sides` has (src, dst) for each side group, None where nothing is copied;
    empty: there is none.
    """

    src: int
    dst: int
    num_slots: int
    sides: tuple[tuple[int, int] | None, ...] = ()


class Spare(NamedTuple):
    """A block outside of the tree, for the token after a shared sequence, and the copy that it needs."""

    block: int
    copy: BlockCopy | None


class Reservation(NamedTuple):
    """Room for the next tokens: the branch's node (a new one after a fork) and the copy it needs."""

    node: Node
    copy: BlockCopy | None
