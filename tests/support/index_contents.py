"""All that a prefix index holds, read from its tables: O(index)."""

import numpy as np

from mallee.protocol.hashing import Hashes
from mallee.router.index.index import NUM_TIERS, PrefixIndex
from mallee.router.index.kernels import layout
from mallee.router.load.paths import STRIDE


def contents(index: PrefixIndex) -> list[list[set[int]]]:
    """The blocks of each worker and tier."""
    found: list[list[set[int]]] = [
        [set() for _ in range(NUM_TIERS)] for _ in range(index.num_workers)
    ]
    columns, plane = index._columns, index._tier_columns
    holders: dict[int, list[set[int]]] = {}
    for key, value in index._table.entries().items():
        ref = value & layout.LOW
        if ref not in holders:
            places = [divmod(at, plane) for at in index._sets.members(ref)]
            holders[ref] = [
                found[columns.worker(column)][tier]
                for tier, column in places
                if columns.is_live(column)
            ]
        for blocks in holders[ref]:
            blocks.add(key & (1 << 64) - 1)
    return found


def held(index: PrefixIndex, worker: int, tier: int = 0) -> set[int]:
    """The blocks of one worker and tier."""
    return contents(index)[worker][tier]


def match_tiers(index: PrefixIndex, hashes: Hashes) -> np.ndarray:
    """Leading blocks in the tiers up to each one: int32[NUM_TIERS, num_workers]."""
    return np.stack([index.match(hashes, tier) for tier in range(NUM_TIERS)])


def waypoints_of(hashes: Hashes, stride: int = STRIDE) -> Hashes:
    """Every `stride`-th of `hashes`, and the last."""
    return np.concatenate(
        [hashes[stride - 1 :: stride], hashes[-1:] if len(hashes) % stride else hashes[:0]]
    )
