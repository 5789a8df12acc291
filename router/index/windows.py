"""Sliding windows in the index: a worker's overlap counts as far as each of its groups of layers can go on.

A worker of such a model tells the blocks of each window group apart. After n blocks its layers read the
blocks of the window before, so n is credited where all those are held; else the next lower place is tried.
Workers of other models cost nothing here.
"""

from collections.abc import Sequence

import numpy as np

from mallee.protocol.hashing import Hashes
from mallee.protocol.model import first_read
from mallee.router.index.index import PrefixIndex
from mallee.router.index.kernels.layout import Counts


class WindowIndex:
    """Blocks in the window groups of workers 0 .. num_workers - 1; `max_nbytes` is each group's limit."""

    __slots__ = ("_groups", "_max_nbytes", "_num_workers", "by_worker")

    def __init__(self, num_workers: int, max_nbytes: int) -> None:
        self._num_workers = num_workers
        self._max_nbytes = max_nbytes
        self._groups: list[PrefixIndex] = []
        self.by_worker: dict[int, tuple[int, ...]] = {}  # tokens by group, of those that have any

    def begin(self, worker: int, windows: Sequence[int]) -> None:
        """A life of `worker` begins, whose model has these windows."""
        self.clear(worker)
        self.by_worker.pop(worker, None)
        if windows:
            self.by_worker[worker] = tuple(windows)
        while len(self._groups) < len(windows):
            self._groups.append(PrefixIndex(self._num_workers, max_nbytes=self._max_nbytes))

    def store(self, worker: int, hashes: Hashes, group: int) -> None:
        """Note that `worker` holds these blocks in `group`, 1 or more; ignored if its model has none such."""
        if group <= len(self.by_worker.get(worker, ())):
            self._groups[group - 1].store(worker, hashes)

    def remove(self, worker: int, hashes: Hashes, group: int) -> None:
        if group <= len(self.by_worker.get(worker, ())):
            self._groups[group - 1].remove(worker, hashes)

    def forget(self, worker: int, hashes: Hashes) -> int:
        """`worker` could not go on after these blocks: no group of it has them, until it stores them again.

        Returns how many they were, of the group that had the most.
        """
        counts = [0]
        for group in self._groups[: len(self.by_worker.get(worker, ()))]:
            before = group.num_held(worker)
            group.remove(worker, hashes)
            counts.append(before - group.num_held(worker))
        return max(counts)

    def clear(self, worker: int) -> None:
        """Forget all blocks of `worker`."""
        for group in self._groups[: len(self.by_worker.get(worker, ()))]:
            group.clear(worker)

    def limit(self, held: Counts, hashes: Hashes, block_size: int) -> None:
        """Lower `held` to places that can be gone on from.

        int32[tiers, num_workers]: leading blocks of `hashes` that each worker holds.
        """
        for windows in set(self.by_worker.values()):
            workers = np.array([w for w, own in self.by_worker.items() if own == windows])
            counts = held[0, workers]
            before = None
            while before is None or (counts != before).any():
                before = counts.copy()
                for window, group in zip(windows, self._groups, strict=False):
                    for end in np.unique(counts).tolist():
                        reach = first_read(window, end * block_size, block_size)
                        if reach < end:
                            found = group.match(hashes[reach:end])[workers]
                            misses = (counts == end) & (found < end - reach)
                            counts[misses] = reach + found[misses]
            held[:, workers] = counts

    def work(self) -> bool:
        """Sweep a little. True: there is more to do."""
        return sum(group.work() for group in self._groups) > 0

    def check(self) -> None:
        """Raises AssertionError on a broken invariant of an index."""
        for group in self._groups:
            group.check()
