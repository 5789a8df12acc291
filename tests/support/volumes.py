"""Tiers as workers have them: host memory, a volume in a folder, and threads that copy."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mallee.worker.engine import MakeTiers
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.tiers.lower import LowerTiers
from mallee.worker.kv.tiers.moves import Copier, ThreadedMover
from mallee.worker.kv.tiers.peers import Lender
from mallee.worker.kv.tiers.prices import MeasuredPrices
from mallee.worker.kv.watch import KVMemory
from mallee.worker.storage.files import Directory, Files
from mallee.worker.storage.volume import Volume, VolumeConfig

ROOMY = VolumeConfig(1 << 30)


def volume_tiers(
    folder: Path | None,
    *,
    host_blocks: int = 0,
    config: VolumeConfig = ROOMY,
    files: Callable[[Path], Files] = Directory,
    peers: Lender | None = None,
) -> MakeTiers:
    """Tiers that always fetch. Without a `folder` there is no disk."""

    def make(journal: Journal, memory: KVMemory) -> LowerTiers:
        arena = np.zeros((host_blocks, memory.block_nbytes), np.uint8)
        disk = None
        if folder is not None:
            disk = Volume.open(files(folder), {"weights": "test"}, memory.block_nbytes, config)
        copier = Copier(memory, arena, disk, time.monotonic, peers=peers)
        return LowerTiers(
            journal,
            copier,
            prices=MeasuredPrices(memory.block_nbytes),
            mover=ThreadedMover(copier, "test"),
            always_fetches=True,
        )

    return make
