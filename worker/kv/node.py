"""The pieces of the branch tree: a run of tokens with its blocks, and where the next tokens go."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mallee.worker.kv.text import Text

BlockTable = npt.NDArray[np.int32]


class WindowBlocks:
    """The blocks of a node in one window group: those after the first `num_gone`, as far as `Node.blocks`."""

    __slots__ = ("blocks", "idle", "num_gone")

    def __init__(self) -> None:
        self.num_gone = 0  # leading blocks that were given up: no layer reads them again
        self.blocks: list[int] = []
        self.idle = 0  # leading ones of `blocks` that no holder reads again: cache


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
        "low",
        "num_copying",
        "num_low",
        "parent",
        "rank",
        "salt",
        "stamp",
        "tokens",
        "window_flats",
        "windows",
    )

    def __init__(self, parent: "Node | None", base: int, salt: str, tokens: Text) -> None:
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
        self.is_copying = (
            False  # its first slots are still to be copied from the parent's last block
        )
        self.num_copying = 0  # children that are
        self.flat: BlockTable | None = None  # block ids of the whole sequence, while they are true
        # Of models with sliding windows alone (`windows.py`):
        self.windows: tuple[WindowBlocks, ...] = ()  # empty if there are none; then, unset, too:
        self.window_flats: tuple[BlockTable, ...] | None
        self.low: int  # the least end of all held nodes at or below it, in blocks
        self.num_low: int  # children that have it, if the node is not held itself

    @property
    def end(self) -> int:
        """Committed tokens of the whole sequence."""
        return self.base + len(self.tokens)

    def __repr__(self) -> str:
        return f"Node({self.base}..{self.end}, holders={self.holders}, {len(self.children)} below)"


class BlockCopy(NamedTuple):
    """Copy the first `num_slots` token slots (keys and values) of block src to dst.

    In all layers of the full group; `windows` has (src, dst) for each window group; empty: the same.
    """

    src: int
    dst: int
    num_slots: int
    windows: tuple[tuple[int, int], ...] = ()


class Spare(NamedTuple):
    """A block outside of the tree, for the token after a shared sequence, and the copy that it needs."""

    block: int
    copy: BlockCopy | None


class Reservation(NamedTuple):
    """Room for the next tokens: the branch's node (a new one after a fork) and the copy it needs."""

    node: Node
    copy: BlockCopy | None
