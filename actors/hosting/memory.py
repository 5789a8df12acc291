"""The memory of a worker's process on its device: weights, KV, and the rest."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mallee.protocol.events import Load, MemoryUse

if TYPE_CHECKING:
    from mallee.worker.model.runner import MemoryStats

_STATM: Final = Path("/proc/self/statm")


def memory_use(stats: "MemoryStats", load: Load | None) -> MemoryUse | None:
    """The split of the device's memory, by its last `load`.

    In host memory a page of KV is there once it was used, and the rest is what the process has resident
    besides. None: this system doesn't say.
    """
    if stats.reserved is not None:
        known = stats.weights + stats.kv + stats.graphs
        return MemoryUse(stats.weights, stats.kv, max(0, stats.reserved - known), stats.graphs)
    if not _STATM.exists():
        return None
    resident = int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    use = None if load is None else load.use
    kv = 0 if use is None else stats.kv * use.used_blocks // use.total_blocks
    return MemoryUse(stats.weights, kv, max(0, resident - stats.weights - kv))
