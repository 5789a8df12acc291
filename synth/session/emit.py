"""Rows of periods become requests, in order of arrival."""

from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise, starmap
from typing import Final

import numpy as np

from mallee.synth.session.period import Period
from mallee.synth.session.texts import Texts
from mallee.synth.session.walk import spell_out
from mallee.traces.numbers import Ints
from mallee.traces.workload import NO_PARENT, Request

_CHUNK_BLOCKS: Final = 1 << 20  # ids that are spelled out at a time


class _Open:
    """A period of which some rows are still to be taken."""

    def __init__(self, period: Period) -> None:
        self.period = period
        self.order = np.lexsort((period.turn, period.at_s))
        self.at_s = period.at_s[self.order]
        self.taken = 0
        self.numbers = np.full(len(period), -1, np.int64)


class Queue:
    """Takes rows of several periods by time. Memory: the periods that have rows left."""

    def __init__(self, classes: Sequence[str], texts: Texts) -> None:
        self._classes = classes
        self._texts = texts
        self._open: list[_Open] = []
        self.num_taken = 0

    def add(self, period: Period) -> None:
        """Periods come in their order; rows of a later one may still come before rows of this one."""
        self._open.append(_Open(period))

    def take(self, limit: int, until_s: float) -> Iterator[Request]:
        """Rows before `until_s` by time, as long as no more than `limit` are taken in all."""
        ends = [int(np.searchsorted(each.at_s, until_s)) for each in self._open]
        parts = [
            (each, each.order[each.taken : end]) for each, end in zip(self._open, ends, strict=True)
        ]
        rows = np.concatenate([part for _, part in parts])
        which = np.repeat(np.arange(len(parts)), [len(part) for _, part in parts])
        at_s = np.concatenate([each.period.at_s[part] for each, part in parts])
        turn = np.concatenate([each.period.turn[part] for each, part in parts])
        order = np.lexsort((turn, at_s))[: limit - self.num_taken]
        for each, end in zip(self._open, ends, strict=True):
            each.taken = end
        yield from self._requests(rows[order], which[order])
        self._open = [each for each in self._open if each.taken < len(each.period)]

    def _requests(self, rows: Ints, which: Ints) -> Iterator[Request]:
        """Requests of `rows` of the periods `which`."""
        forest_starts, forest = self._texts.flat()
        low = 0
        while low < len(rows):
            size = self._chunk(rows, which, low)
            yield from self._chunk_requests(
                rows[low : low + size], which[low : low + size], forest_starts, forest
            )
            low += size

    def _chunk(self, rows: Ints, which: Ints, low: int) -> int:
        """Number of rows from `low` on that are spelled out together."""
        some = slice(low, low + (1 << 14))
        blocks = np.empty(len(rows[some]), np.int64)
        for k, each in enumerate(self._open):
            mine = which[some] == k
            blocks[mine] = each.period.paths.blocks[rows[some][mine]]
        return max(1, int(np.searchsorted(np.cumsum(blocks), _CHUNK_BLOCKS)))

    def _chunk_requests(
        self, rows: Ints, which: Ints, forest_starts: Ints, forest: Ints
    ) -> Iterator[Request]:
        made: list[tuple[Ints, list[Request]]] = []
        numbers = self.num_taken + np.arange(len(rows))
        self.num_taken += len(rows)
        for k, each in enumerate(self._open):
            mine = np.flatnonzero(which == k)
            each.numbers[rows[mine]] = numbers[mine]
            if len(mine):
                found = _made(each, rows[mine], numbers[mine], self._classes, forest_starts, forest)
                made.append((mine, found))
        if len(made) == 1:
            yield from made[0][1]
            return
        whole: list[Request | None] = [None] * len(rows)
        for mine, requests in made:
            for place, request in zip(mine.tolist(), requests, strict=True):
                whole[place] = request
        for each_request in whole:
            assert each_request is not None
            yield each_request


def _made(
    each: _Open,
    rows: Ints,
    numbers: Ints,
    classes: Sequence[str],
    forest_starts: Ints,
    forest: Ints,
) -> list[Request]:
    """Requests of one period's `rows`, all of whose numbers are known."""
    period = each.period
    starts, ids = spell_out(rows, period.paths, forest_starts, forest)
    words = array("q")
    words.frombytes(ids.tobytes())
    before = np.where(period.previous[rows] >= 0, period.previous[rows], period.parent[rows])
    other = np.where(before >= 0, each.numbers[np.maximum(before, 0)], -1)
    waits = np.where(other < numbers, other, -1).tolist()  # of equal times either may be first
    num_joined = np.diff(period.joined_starts)[rows].tolist()
    columns = zip(
        numbers.tolist(),
        period.at_s[rows].tolist(),
        (words[low:high] for low, high in pairwise(starts.tolist())),
        period.tokens[rows].tolist(),
        period.output[rows].tolist(),
        (f"s{session}" for session in period.session[rows].tolist()),
        (classes[cls] for cls in period.cls[rows].tolist()),
        (
            _waits(each, row, wait) if joins else (() if wait < 0 else (wait,))
            for row, wait, joins in zip(rows.tolist(), waits, num_joined, strict=True)
        ),
        period.think_s[rows].tolist(),
        period.branches[rows].tolist(),
        [NO_PARENT] * len(rows),
        [0] * len(rows),  # children: forked threads bring their whole prompts
        [""] * len(rows),
        period.is_reset[rows].tolist(),
        strict=True,
    )
    return list(starmap(Request, columns))


def _waits(each: _Open, row: int, wait: int) -> tuple[int, ...]:
    """The requests that a joining row waits for, of those that were taken already."""
    period = each.period
    joined = period.joined[period.joined_starts[row] : period.joined_starts[row + 1]]
    known = {int(number) for number in each.numbers[joined] if 0 <= number < each.numbers[row]}
    return tuple(sorted(known | ({wait} if wait >= 0 else set())))
