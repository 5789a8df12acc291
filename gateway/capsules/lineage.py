"""Capsules and the requests that went on from them, so that all below one can be found.

Of one gateway, in memory: for its newest requests.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Final

from mallee.protocol.ids import CapsuleId, RequestId, request_of

MAX_KEPT: Final = 1 << 16  # requests


class Lineage:
    """Requests by the capsules that they began with."""

    def __init__(self, max_kept: int = MAX_KEPT) -> None:
        self._max_kept = max_kept
        self._origins: OrderedDict[RequestId, CapsuleId] = OrderedDict()
        self._forks: dict[CapsuleId, set[RequestId]] = {}
        self._used: dict[RequestId, set[CapsuleId]] = {}  # capsules with forks, by their request

    def add(self, request: RequestId, capsule: CapsuleId) -> None:
        """`request` goes on from `capsule`."""
        self._origins[request] = capsule
        self._forks.setdefault(capsule, set()).add(request)
        for maker in _makers(capsule):
            self._used.setdefault(maker, set()).add(capsule)
        while len(self._origins) > self._max_kept:
            self._forget(*self._origins.popitem(last=False))

    def add_captured(self, request: RequestId, running: RequestId) -> None:
        """The capsule of `request` was taken of a branch of `running`, before that left one."""
        self.add(request, CapsuleId(f"{running}.captured"))

    def below(self, origins: Iterable[CapsuleId | RequestId]) -> list[RequestId]:
        """All requests that went on from one of these capsules, or from one that such a request left.

        A request among the origins stands for the capsules that it left.
        """
        found: dict[RequestId, None] = {}
        left: list[RequestId] = []
        for origin in origins:
            left += self._forks.get(CapsuleId(origin), ())
            for used in self._used.get(RequestId(origin), ()):
                left += self._forks[used]
        while left:
            request = left.pop()
            if request not in found:
                found[request] = None
                for used in self._used.get(request, ()):
                    left += self._forks[used]
        return list(found)

    def _forget(self, request: RequestId, capsule: CapsuleId) -> None:
        forks = self._forks[capsule]
        forks.discard(request)
        if forks:
            return
        del self._forks[capsule]
        for maker in _makers(capsule):
            used = self._used[maker]
            used.discard(capsule)
            if not used:
                del self._used[maker]


def _makers(capsule: CapsuleId) -> Iterator[RequestId]:
    """The request that left `capsule`, by its name and by that of the shard that it ran as."""
    name = request_of(capsule)
    yield name
    base, _, part = name.rpartition("-")
    if base and part.isdecimal():
        yield RequestId(base)
