"""Load of each worker, as far as gateways booked it.

A booking names the full blocks of its prompt by the waypoints of their path (`router.load.paths`). Paths are
counted per worker, so a prefix shared by a hundred branches weighs once. Blocks that can't be shared
(answers, partial blocks) are plain counts. Nothing here waits for a worker: a booking counts at once,
which keeps simultaneous arrivals from choosing the same one.

Outstanding prefill shrinks with time as it is predicted to be computed, but not below a quarter of what
no first token has confirmed: a worker that has stalled must not look idle. A booking that is not touched
for `booking_s` is dropped: its gateway lost it. What a worker reports beyond all bookings
(of gateways that this one gets no messages of) is added to its load until the next report.
"""

from collections import OrderedDict
from collections.abc import Set

import msgspec
import numpy as np

from mallee.protocol.events import FetchPrices
from mallee.protocol.hashing import Hashes
from mallee.protocol.ids import RequestId
from mallee.router.load import layout
from mallee.router.load.kernels import Loads, count_booking, count_end
from mallee.router.load.paths import STRIDE, CountedPaths

_PADDING = 24


class _Booking(msgspec.Struct, gc=False):
    worker: int
    waypoints: Hashes
    num_blocks: int
    own_blocks: int
    prefill_tokens: int
    rows: int
    touched_at: float


class SlotTracker:
    """Claims of requests on workers 0 .. num_workers - 1.

    `loads` is float64[layout.NUM_LOADS, num_workers and some more], which `router.placement.kernels.score`
    reads; the rows that don't come from bookings are written by the router.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        prefill_token_s: float = 5e-5,
        booking_s: float = 600.0,
        stride: int = STRIDE,
    ) -> None:
        self.paths = CountedPaths(num_workers, stride=stride)
        # Rows a power of two apart would all fall into the same few lines of the CPU's cache.
        width = num_workers + _PADDING
        if width % 512 < _PADDING:
            width += _PADDING
        self.loads: Loads = np.zeros((layout.NUM_LOADS, width), dtype=np.float64)
        self._token_s = prefill_token_s
        self._booking_s = booking_s
        self.bookings: OrderedDict[RequestId, _Booking] = OrderedDict()  # by touched_at
        self._workers = range(num_workers)
        self.expired = 0  # bookings not touched for booking_s
        # Compile, as no request should have to.
        count_booking(self.loads, 0, 0, 0, 0, 0.0, 0.0, -1, 0, 0.0)
        count_end(self.loads, 0, 0, 0, 0, 0.0, 0.0)

    def requests(self, worker: int) -> frozenset[RequestId]:
        """Requests booked on `worker`. O(bookings)."""
        found = (request for request, each in self.bookings.items() if each.worker == worker)
        return frozenset(found)

    def book(
        self,
        request: RequestId,
        worker: int,
        waypoints: Hashes,
        *,
        num_blocks: int,
        own_blocks: int,
        prefill_tokens: int,
        rows: int,
        now: float,
        number: int = -1,
        brought: int = 0,
        expected: float = 0.0,
    ) -> None:
        """Book `request` on `worker` until freed. Raises ValueError if it is booked already.

        The youngest decision, if it is one of ours, has this `number`. Its prompt brings `brought` new blocks
        there, and its text is `expected` to bring more later; negative: so many were expected before. Texts
        end: old expectations fade away.
        """
        if request in self.bookings:
            raise ValueError(f"request {request} is booked already; free it first")
        fresh = self.paths.use(worker, waypoints, num_blocks)
        self.bookings[request] = _Booking(
            worker=worker,
            waypoints=waypoints,
            num_blocks=num_blocks,
            own_blocks=own_blocks,
            prefill_tokens=prefill_tokens,
            rows=rows,
            touched_at=now,
        )
        loads, blocks, token_s = self.loads, own_blocks + fresh, self._token_s
        count_booking(
            loads, worker, rows, blocks, prefill_tokens, now, token_s, number, brought, expected
        )

    def prefill_done(self, request: RequestId, now: float) -> bool:
        """End a booking's outstanding prefill. False if it is not booked."""
        booking = self.bookings.get(request)
        if booking is None:
            return False
        booking.touched_at = now
        self.bookings.move_to_end(request)
        self._end(booking, 0, 0, now)
        return True

    def free(self, request: RequestId, now: float) -> bool:
        """End a booking. False if there is none: freed before, or unknown."""
        booking = self.bookings.pop(request, None)
        if booking is None:
            return False
        self._release(booking, now)
        return True

    def drop_worker(self, worker: int) -> list[RequestId]:
        """Drop all bookings of `worker`; returns their requests, sorted by id."""
        dropped = sorted(self.requests(worker))
        for request in dropped:
            self._release(self.bookings.pop(request), 0.0)  # nothing of it is kept
        for row in (*layout.LOADS_BOOKED, *layout.LOADS_REPORTED, *layout.LOADS_FREED):
            self.loads[row, worker] = 0
        self.loads[layout.LOADS_FETCH, worker] = 0
        self.loads[layout.LOAD_GROWTH, worker] = 0
        return dropped

    def touch(self, request: RequestId, now: float) -> None:
        """Renew the booking of `request`. Ignored if it is not booked."""
        booking = self.bookings.get(request)
        if booking is not None:
            booking.touched_at = now
            self.bookings.move_to_end(request)

    def expire(self, now: float, *, keep: Set[RequestId] = frozenset()) -> list[RequestId]:
        """Drop bookings not touched for `booking_s`, but those in `keep`; oldest first."""
        found: list[RequestId] = []
        while self.bookings:
            request, booking = next(iter(self.bookings.items()))
            if booking.touched_at + self._booking_s > now:
                break
            if request in keep:
                self.touch(request, now)
                continue
            self.free(request, now)
            self.expired += 1
            found.append(request)
        return found

    def report(self, worker: int, *, rows: int, prefill_tokens: int, active_blocks: int) -> None:
        """Take in the load that `worker` reports: only the part beyond the bookings counts, until the next.

        The worker may have counted what was freed here since the report before: that is no extra.
        """
        loads, said = self.loads, (rows, active_blocks, prefill_tokens)
        for extra, booked, freed, num in zip(
            layout.LOADS_REPORTED, layout.LOADS_BOOKED, layout.LOADS_FREED, said, strict=True
        ):
            loads[extra, worker] = max(0.0, num - loads[booked, worker] - loads[freed, worker])
            loads[freed, worker] = 0.0

    def price_fetches(self, worker: int, prices: FetchPrices) -> None:
        """Price what lies below the device of `worker` by what it measured, from now on."""
        self.loads[layout.LOADS_FETCH, worker] = msgspec.structs.astuple(prices)

    def work(self) -> bool:
        """Sweep and rehash a little. True: there is more to do."""
        return self.paths.work()

    def check(self) -> None:
        """Raises AssertionError unless counts and sums follow from the bookings."""
        self.paths.check()
        stride = self.paths.stride
        sums: Loads = np.zeros_like(self.loads)
        used: list[dict[int, int]] = [{} for _ in self._workers]  # waypoint -> its blocks
        for request, booking in self.bookings.items():
            worker, n = booking.worker, booking.num_blocks
            sums[layout.LOAD_PREFILL, worker] += booking.prefill_tokens
            sums[layout.LOAD_ROWS, worker] += booking.rows
            sums[layout.LOAD_BLOCKS, worker] += booking.own_blocks
            assert len(booking.waypoints) == -(-n // stride), (
                f"{request} has a wrong number of waypoints"
            )
            for i, waypoint in enumerate(booking.waypoints.tolist()):
                used[worker][waypoint] = min(stride, n - i * stride)
        for worker, waypoints in enumerate(used):
            sums[layout.LOAD_BLOCKS, worker] += sum(waypoints.values())
            assert self.paths.num_used(worker) == len(waypoints), f"waypoints in use on {worker}"
        for row in layout.LOADS_BOOKED:
            assert (sums[row] == self.loads[row]).all(), f"load {row} differs from the bookings"

    def _release(self, booking: _Booking, now: float) -> None:
        gone = self.paths.leave(booking.worker, booking.waypoints, booking.num_blocks)
        self._end(booking, booking.rows, booking.own_blocks + gone, now)

    def _end(self, booking: _Booking, rows: int, blocks: int, now: float) -> None:
        tokens, booking.prefill_tokens = booking.prefill_tokens, 0
        count_end(self.loads, booking.worker, rows, blocks, tokens, now, self._token_s)
