"""Programs that run side by side, as one stream of requests by arrival."""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

from mallee.traces.trace import NO_SESSION
from mallee.traces.workload import NO_PARENT, Request


class Draft(NamedTuple):
    """A request of a program; others are named by their places in it, which are before its own."""

    tokens: int  # of its whole prompt; of a fork what it adds
    output_tokens: int
    cls: str
    parent: int = NO_PARENT
    waits: tuple[int, ...] = ()
    tool_wait_s: float = 0.0
    since_s: float = 0.0  # from the begin of its program to its arrival
    ids: Sequence[int] = ()
    branches: int = 1
    session: int = 0  # number in its program, or NO_SESSION


class Program(NamedTuple):
    """A program that begins with the first of its drafts."""

    begin_s: float
    drafts: Sequence[Draft]


class _Running:
    """A program on its way: drafts become requests."""

    def __init__(self, name: str, drafts: Sequence[Draft]) -> None:
        self._name = name
        self._drafts = drafts
        self._children = Counter(draft.parent for draft in drafts)
        self._numbers = [NO_PARENT] * len(drafts)  # in the workload

    def request(self, place: int, number: int, arrival_s: float) -> Request:
        """The draft at `place` as request `number`."""
        draft, numbers = self._drafts[place], self._numbers
        numbers[place] = number
        session = f"{self._name}.{draft.session}" if draft.session else self._name
        return Request(
            number=number,
            arrival_s=arrival_s,
            ids=draft.ids,
            input_tokens=draft.tokens,
            output_tokens=draft.output_tokens,
            session="" if draft.session == NO_SESSION else session,
            cls=draft.cls,
            wait_for=tuple(sorted(numbers[place] for place in draft.waits)),
            tool_wait_s=draft.tool_wait_s,
            branches=draft.branches,
            parent=NO_PARENT if draft.parent == NO_PARENT else numbers[draft.parent],
            num_children=self._children[place],
        )


def merged(programs: Iterable[Program], left: int, speedup: float) -> Iterator[Request]:
    """Requests by arrival, `left` of them in all, of `programs`, which come by their begin.

    The last program is cut. All times are divided by `speedup`.
    """
    waiting: list[tuple[float, int, int, _Running]] = []  # by arrival, program, place
    numbers = count()

    def until(time_s: float) -> Iterator[Request]:
        while waiting and waiting[0][0] < time_s:
            arrival_s, _, place, program = heapq.heappop(waiting)
            yield program.request(place, next(numbers), arrival_s)

    for rank, (begin_s, drafts) in enumerate(programs):
        begin_s /= speedup
        yield from until(begin_s)
        program = _Running(f"p{rank}", drafts[:left])
        for place, draft in enumerate(drafts[:left]):
            heapq.heappush(waiting, (begin_s + draft.since_s / speedup, rank, place, program))
        left -= len(drafts)
        if left <= 0:
            break
    yield from until(float("inf"))
