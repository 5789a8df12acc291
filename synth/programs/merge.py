"""Programs that run side by side as one stream of requests by arrival."""

import heapq
from collections.abc import Generator, Iterable, Iterator
from typing import Protocol, TypeAlias

from mallee.traces.workload import Request


class Running(Protocol):
    """A program that is on its way, with at least one request to come."""

    @property
    def rank(self) -> int:
        """Its place among all, which breaks ties."""
        ...

    @property
    def next_s(self) -> float:
        """Arrival of its next request; never before the one before."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether it has no more requests."""
        ...

    def request(self, number: int) -> Request:
        """Its next request, which is `number` in the workload."""
        ...


_Heap: TypeAlias = list[tuple[float, int, Running]]


def merged(programs: Iterable[Running]) -> Iterator[Request]:
    """Requests of `programs`, which come by the time of their first ones."""
    running: _Heap = []
    number = 0
    for program in programs:
        while running and running[0][0] < program.next_s:
            number = yield from _some(running, program.next_s, number)
        heapq.heappush(running, (program.next_s, program.rank, program))
    while running:
        number = yield from _some(running, float("inf"), number)


def _some(running: _Heap, until_s: float, number: int) -> Generator[Request, None, int]:
    """Requests of the program that is next, until another is, or `until_s`; returns the next number."""
    _, rank, program = heapq.heappop(running)
    if running:
        until_s = min(until_s, running[0][0])
    while True:
        yield program.request(number)
        number += 1
        if program.is_over:
            return number
        if program.next_s >= until_s:
            heapq.heappush(running, (program.next_s, rank, program))
            return number
