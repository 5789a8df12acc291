"""Statistics of the tree's blocks: shared ones, and those that every reader would take alone."""

from collections.abc import Container, Mapping
from typing import NamedTuple

from mallee.worker.kv.node import Node
from mallee.worker.kv.tree import BranchTree


class TreeUsage(NamedTuple):
    """Counts of the blocks in use; those that are only cache are not in them."""

    readers: int  # branches and capsules
    live_blocks: int
    shared_blocks: int  # of those, the ones that several readers have in their page tables
    references: int  # entries of all readers' page tables: blocks needed if nothing were shared
    live_slots: int  # token slots of the live blocks that are filled
    total_blocks: int  # of the pool
    block_size: int

    @property
    def share_ratio(self) -> float:
        """Share of the live blocks that several readers use."""
        return self.shared_blocks / self.live_blocks if self.live_blocks else 0.0

    @property
    def fill_ratio(self) -> float:
        """Share of the live blocks' token slots that are filled."""
        slots = self.live_blocks * self.block_size
        return self.live_slots / slots if slots else 0.0

    @property
    def pages_per_reader(self) -> float:
        """Entries of a branch's or a capsule's page table, on average."""
        return self.references / self.readers if self.readers else 0.0

    @property
    def pool_ratio(self) -> float:
        """Share of the pool that is live."""
        return self.live_blocks / self.total_blocks


def tree_usage(tree: BranchTree, readers: Mapping[Node, int]) -> TreeUsage:
    """`readers`: branches and capsules that read up to the end of a node. O(readers x depth)."""
    size = tree.block_size
    below: dict[Node, int] = {}
    references = 0
    for node, n in readers.items():
        references += n * -(-node.end // size)
        walk: Node | None = node
        while walk is not None:
            below[walk] = below.get(walk, 0) + n
            walk = walk.parent
    live = [node for node in tree.nodes() if node.live]
    return TreeUsage(
        readers=sum(readers.values()),
        live_blocks=sum(len(node.blocks) for node in live),
        shared_blocks=sum(len(node.blocks) for node in live if below.get(node, 0) > 1),
        references=references,
        live_slots=sum(len(node.tokens) for node in live),
        total_blocks=tree.pool.num_blocks,
        block_size=size,
    )


def sole_blocks(holds: Mapping[Node, int], kept: Container[Node] = ()) -> int:
    """Blocks that would be free or only cache without these holds; those of nodes in `kept` don't count.

    O(nodes held, and those above them that nothing else needs).
    """
    left: dict[Node, int] = {}  # what keeps a node live, without `holds`
    num_blocks = 0
    for node, n in holds.items():
        walk: Node | None = node if node.holders == n else None
        while walk is not None and walk not in kept:
            left[walk] = left.get(walk, walk.live) - 1
            if left[walk]:
                break
            num_blocks += len(walk.blocks)
            walk = walk.parent
    return num_blocks
