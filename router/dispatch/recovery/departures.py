"""Workers that drain, and the capsules on them that are made again elsewhere before they leave."""

from collections import deque
from collections.abc import Iterable
from typing import Final

from mallee.protocol.ids import CapsuleId, RequestId, WorkerId

MAX_REBUILDS: Final = 4  # capsules of one worker that are made again at a time


class Departure:
    """One worker that drains: its capsules that wait to be made again, and those under way."""

    __slots__ = ("durable", "under_way", "unsecured", "waiting", "worker")

    def __init__(self, worker: WorkerId, capsules: Iterable[CapsuleId]) -> None:
        self.worker = worker
        self.waiting = deque(capsules)
        self.under_way: dict[RequestId, CapsuleId] = {}  # by the request that makes it
        self.durable: set[CapsuleId] = set()  # of those
        self.unsecured: set[CapsuleId] = set()  # made again, and not durable there yet

    @property
    def is_done(self) -> bool:
        return not (self.waiting or self.under_way or self.unsecured)


class Departures:
    """The workers that drain. Capsules are made again by requests of the gateway's own."""

    __slots__ = ("_by_request", "by_worker")

    def __init__(self) -> None:
        self.by_worker: dict[WorkerId, Departure] = {}  # not to be changed
        self._by_request: dict[RequestId, Departure] = {}  # their workers may be gone

    def begin(self, worker: WorkerId, capsules: Iterable[CapsuleId]) -> None:
        """`worker` drains; `capsules` are to be made again."""
        self.by_worker[worker] = Departure(worker, capsules)

    def next(self, worker: WorkerId) -> CapsuleId | None:
        """The next capsule of `worker` to be made again, unless enough of them are."""
        departure = self.by_worker.get(worker)
        if departure is None or len(departure.under_way) >= MAX_REBUILDS or not departure.waiting:
            return None
        return departure.waiting.popleft()

    def start(self, worker: WorkerId, capsule: CapsuleId, *, is_durable: bool) -> RequestId | None:
        """Name the request that makes `capsule` again.

        None: one that an earlier life of `worker` left does so already, and ends for this one.
        """
        departure = self.by_worker[worker]
        if is_durable:
            departure.durable.add(capsule)
        request = RequestId(f"rebuild-{capsule}-{worker}")
        before = self._by_request.get(request)
        if before is not None:
            del before.under_way[request]
        departure.under_way[request] = capsule
        self._by_request[request] = departure
        return request if before is None else None

    def end(self, request: RequestId) -> tuple[WorkerId, CapsuleId]:
        """The worker and the capsule of such a request, which is over."""
        departure = self._by_request.pop(request)
        return departure.worker, departure.under_way.pop(request)

    def must_secure(self, worker: WorkerId, capsule: CapsuleId) -> bool:
        """Whether `capsule`, made again, was durable on `worker`, which stays then until it is `secured`."""
        departure = self.by_worker.get(worker)
        if departure is None or capsule not in departure.durable:
            return False
        departure.unsecured.add(capsule)
        return True

    def secured(self, worker: WorkerId, capsule: CapsuleId) -> None:
        """`capsule` is durable elsewhere, or can't be."""
        if (departure := self.by_worker.get(worker)) is not None:
            departure.unsecured.discard(capsule)

    def requests_for(self, capsule: CapsuleId) -> list[RequestId]:
        """The requests under way that make `capsule` again."""
        return [r for r, departure in self._by_request.items() if departure.under_way[r] == capsule]

    @property
    def num_requests(self) -> int:
        """Requests under way that make capsules again."""
        return len(self._by_request)

    def clear(self) -> list[CapsuleId]:
        """Forget all workers. Returns their capsules that were not begun."""
        return [capsule for worker in list(self.by_worker) for capsule in self.forget(worker)]

    def is_done(self, worker: WorkerId) -> bool:
        """Whether `worker` drains and no capsule of it is to be made again."""
        departure = self.by_worker.get(worker)
        return departure is not None and departure.is_done

    def forget(self, worker: WorkerId) -> list[CapsuleId]:
        """`worker` is gone. Returns its capsules that were not begun."""
        departure = self.by_worker.pop(worker, None)
        if departure is None:
            return []
        left, departure.waiting = list(departure.waiting), deque()
        return left

    def capsules(self) -> set[CapsuleId]:
        """All that are to be made again, or are under way."""
        departures = {*self.by_worker.values(), *self._by_request.values()}
        return {c for d in departures for c in (*d.waiting, *d.under_way.values())}
