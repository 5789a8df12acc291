"""Tiers as workers have them: host memory, a volume in a folder, and threads that copy."""

import time
from collections.abc import Callable
from pathlib import Path

from mallee.worker.engine import MakeTiers
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.watch import KVMemory
from mallee.worker.storage.files import Directory
from mallee.worker.storage.volume import Volume, VolumeConfig
from mallee.worker.transfer.lower import LowerTiers
from mallee.worker.transfer.movers import Carrier, ThreadedMover
from mallee.worker.transfer.prices import MeasuredPrices
from mallee.worker.transfer.values import Lender

ROOMY = VolumeConfig(1 << 30)


def volume_tiers(
    folder: Path | None,
    *,
    host_blocks: int = 0,
    config: VolumeConfig = ROOMY,
    files: Callable[[Path], Directory] = Directory,
    peers: Lender | None = None,
) -> MakeTiers:
    """Tiers that always fetch. Without a `folder` there is no disk."""

    def make(journal: Journal, memory: KVMemory) -> LowerTiers:
        arena = memory.new_rows(host_blocks)
        disk = None
        if folder is not None:
            disk = Volume.open(files(folder), {"weights": "test"}, memory.block_nbytes, config)
        carrier = Carrier(memory, arena, disk, time.monotonic, peers=peers)
        return LowerTiers(
            journal,
            carrier,
            prices=MeasuredPrices(memory.block_nbytes),
            mover=ThreadedMover(carrier, "test"),
            always_fetches=True,
        )

    return make
