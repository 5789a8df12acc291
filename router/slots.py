"""What each worker is busy with, as far as this router booked it.

A booking names the full blocks of its prompt by chain hash. They are reference counted per worker,
so a prefix shared by a hundred branches weighs once. The last chain hash names the whole path, so
bookings of one prompt share one path, and only the first and the last of them touch its blocks.
Blocks that nobody can share (answers, partial blocks) are plain counts. Nothing here waits for a
worker: a booking counts at once, which keeps simultaneous arrivals from choosing the same one.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mallee.protocol.hashing import Hashes
from mallee.protocol.ids import RequestId
from mallee.router.index import Counts, WorkerMasks, count_leading, unset

Amounts: TypeAlias = npt.NDArray[np.int64]


class Loads(NamedTuple):
    """Booked load per worker, each int64[num_workers]. Live views: read, don't write."""

    prefill_tokens: Amounts
    rows: Amounts
    active_blocks: Amounts  # unique shared blocks + own blocks


@dataclass(frozen=True, slots=True)
class SlotStats:
    """Bookings now, and calls for requests that were not booked (double or late), since birth."""

    num_requests: int
    active_blocks: int
    rows: int
    prefill_tokens: int
    unknown_frees: int
    unknown_prefills: int


@dataclass(slots=True)
class _Path:
    """One prompt's full blocks, used by `count` >= 1 bookings on one worker."""

    blocks: list[int]
    count: int


_PathKey: TypeAlias = tuple[int, int]  # last hash, number of blocks


@dataclass(slots=True)
class _Booking:
    worker: int
    path: _PathKey | None
    own_blocks: int
    prefill_tokens: int
    rows: int


class SlotTracker:
    """Claims of requests on workers 0 .. num_workers - 1."""

    def __init__(self, num_workers: int) -> None:
        self._bookings: dict[RequestId, _Booking] = {}
        self._requests: list[set[RequestId]] = [set() for _ in range(num_workers)]
        self._paths: list[dict[_PathKey, _Path]] = [{} for _ in range(num_workers)]
        self._references: list[dict[int, int]] = [{} for _ in range(num_workers)]
        self._confirmed: list[set[int]] = [set() for _ in range(num_workers)]
        self._active: WorkerMasks = {}
        self._loads = Loads(*(np.zeros(num_workers, dtype=np.int64) for _ in range(3)))
        self._unknown_frees = 0
        self._unknown_prefills = 0

    @property
    def loads(self) -> Loads:
        return self._loads

    def __contains__(self, request: RequestId) -> bool:
        return request in self._bookings

    def requests(self, worker: int) -> frozenset[RequestId]:
        """Requests booked on `worker`."""
        return frozenset(self._requests[worker])

    def active_overlap(self, hashes: Hashes) -> Counts:
        """Leading blocks of `hashes` that booked requests use on each worker: int32[num_workers].

        They are there, or will be before anything booked later is computed.
        """
        return count_leading(self._active, hashes.tolist(), len(self._requests))

    def book(
        self,
        request: RequestId,
        worker: int,
        hashes: Hashes,
        *,
        own_blocks: int,
        prefill_tokens: int,
        rows: int,
    ) -> None:
        """`request` counts on `worker` until freed. Raises ValueError if it is booked already."""
        if request in self._bookings:
            raise ValueError(f"request {request} is booked already; free it first")
        before = len(self._references[worker])
        path = self._use_path(worker, hashes) if len(hashes) else None
        self._bookings[request] = _Booking(worker, path, own_blocks, prefill_tokens, rows)
        self._requests[worker].add(request)
        self._loads.prefill_tokens[worker] += prefill_tokens
        self._loads.rows[worker] += rows
        self._loads.active_blocks[worker] += own_blocks + len(self._references[worker]) - before

    def prefill_done(self, request: RequestId) -> bool:
        """Its prefill tokens are outstanding no more. False (and counted) if it is not booked."""
        booking = self._bookings.get(request)
        if booking is None:
            self._unknown_prefills += 1
            return False
        self._loads.prefill_tokens[booking.worker] -= booking.prefill_tokens
        booking.prefill_tokens = 0
        return True

    def free(self, request: RequestId) -> bool:
        """Its claim is gone. False (and counted) if it is not booked: freed before, or unknown."""
        booking = self._bookings.pop(request, None)
        if booking is None:
            self._unknown_frees += 1
            return False
        worker = booking.worker
        before = len(self._references[worker])
        if booking.path is not None:
            self._leave_path(worker, booking.path)
        self._requests[worker].discard(request)
        self._loads.prefill_tokens[worker] -= booking.prefill_tokens
        self._loads.rows[worker] -= booking.rows
        self._loads.active_blocks[worker] -= (
            booking.own_blocks + before - len(self._references[worker])
        )
        return True

    def drop_worker(self, worker: int) -> list[RequestId]:
        """Nothing counts on `worker`; returns the requests that did, sorted by id."""
        dropped = sorted(self._requests[worker])
        for request in dropped:
            del self._bookings[request]
        self._requests[worker].clear()
        for block in self._references[worker]:
            unset(self._active, block, worker)
        self._references[worker].clear()
        self._paths[worker].clear()
        self._confirmed[worker].clear()
        for amounts in self._loads:
            amounts[worker] = 0
        return dropped

    def confirm(self, worker: int, hashes: Iterable[int]) -> None:
        """`worker` reported that it holds these: those in use here are real until their last free."""
        references = self._references[worker]
        if references:
            self._confirmed[worker].update(references.keys() & hashes)

    def is_confirmed(self, worker: int, block: int) -> bool:
        """Whether `worker` reported `block` while a request booked here used it."""
        return block in self._confirmed[worker]

    def stats(self) -> SlotStats:
        loads = self._loads
        return SlotStats(
            num_requests=len(self._bookings),
            active_blocks=int(loads.active_blocks.sum()),
            rows=int(loads.rows.sum()),
            prefill_tokens=int(loads.prefill_tokens.sum()),
            unknown_frees=self._unknown_frees,
            unknown_prefills=self._unknown_prefills,
        )

    def check(self) -> None:
        """Raises AssertionError unless counts and sums follow from the bookings."""
        references: list[dict[int, int]] = [{} for _ in self._references]
        sums = Loads(*(np.zeros_like(amounts) for amounts in self._loads))
        users: list[Counter[_PathKey]] = [Counter() for _ in self._paths]
        for request, booking in self._bookings.items():
            assert request in self._requests[booking.worker], f"{request} is not listed"
            if booking.path is not None:
                users[booking.worker][booking.path] += 1
            sums.prefill_tokens[booking.worker] += booking.prefill_tokens
            sums.rows[booking.worker] += booking.rows
            sums.active_blocks[booking.worker] += booking.own_blocks
        for worker, paths in enumerate(self._paths):
            used = {key: path.count for key, path in paths.items()}
            assert used == users[worker], f"paths of {worker} differ from its bookings"
            for path in paths.values():
                for block in path.blocks:
                    references[worker][block] = references[worker].get(block, 0) + 1
        assert references == self._references, "reference counts differ from the paths"
        assert sum(map(len, self._requests)) == len(self._bookings), "stale request listed"
        masks: WorkerMasks = {}
        for worker, counts in enumerate(references):
            sums.active_blocks[worker] += len(counts)
            for block in counts:
                masks[block] = masks.get(block, 0) | 1 << worker
            assert self._confirmed[worker] <= counts.keys(), f"confirmed but unused on {worker}"
        assert masks == self._active, "active blocks differ from the references"
        for have, want in zip(self._loads, sums, strict=True):
            assert (have == want).all(), f"loads {have} differ from the bookings' {want}"

    def _use_path(self, worker: int, hashes: Hashes) -> _PathKey:
        key = (int(hashes[-1]), len(hashes))
        path = self._paths[worker].get(key)
        if path is not None:
            path.count += 1
            return key
        blocks = hashes.tolist()
        self._paths[worker][key] = _Path(blocks, 1)
        references, active, bit = self._references[worker], self._active, 1 << worker
        for block in blocks:
            count = references.get(block, 0)
            references[block] = count + 1
            if not count:
                active[block] = active.get(block, 0) | bit
        return key

    def _leave_path(self, worker: int, key: _PathKey) -> None:
        path = self._paths[worker][key]
        path.count -= 1
        if path.count:
            return
        del self._paths[worker][key]
        references = self._references[worker]
        for block in path.blocks:
            left = references[block] - 1
            if left:
                references[block] = left
            else:
                del references[block]
                unset(self._active, block, worker)
                self._confirmed[worker].discard(block)
