"""Rows of generated traffic become requests, in order of arrival."""

from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise, repeat, starmap
from typing import Final, NamedTuple

import numpy as np

from mallee.synth.core.jit import kernel
from mallee.synth.session.texts import Texts
from mallee.traces.numbers import Bools, Floats, Int32s, Ints
from mallee.traces.workload import NO_PARENT, Request

_CHUNK_BLOCKS: Final = 1 << 20  # ids that are spelled out at a time


class Rows(NamedTuple):
    """Requests in no order, numbered as rows through the whole generation; -1: none."""

    at_s: Floats
    turn: Ints  # order of rows at one time: each after those it waits for
    number: Ints  # of the request, once it was taken
    tokens: Ints
    output: Ints
    think_s: Floats
    branches: Int32s
    cls: Int32s
    session: Ints
    previous: Ints  # row before it in its thread; of a thread's first row the one that spawned it
    join: Ints  # row that waits for it besides
    is_reset: Bools  # keeps nothing of its thread's context but the forest's text
    source: Ints  # row whose path it shares `shared` blocks of
    shared: Ints
    blocks: Ints
    first_id: Ints  # of the blocks after the shared ones
    text: Ints  # leading blocks that are of the forest's text, if not shared with `source`
    root: Ints  # number of that text


class Queue:
    """Takes rows by time. Memory: the periods that have rows left."""

    def __init__(self, classes: Sequence[str], texts: Texts) -> None:
        self._classes = classes
        self._texts = texts
        self._rows: Rows | None = None
        self._sizes: list[int] = []  # of the periods
        self._base = 0  # the first row that is kept
        self._joined: dict[int, list[int]] = {}  # by row: requests that it waits for besides
        self.num_taken = 0

    def add(self, period: Rows) -> None:
        """Periods come in their order; rows of a later one may still come before rows of this one."""
        self._sizes.append(len(period.at_s))
        parts = [period] if self._rows is None else [self._rows, period]
        self._rows = Rows._make(map(np.concatenate, zip(*parts, strict=True)))

    def take(self, limit: int, until_s: float) -> Iterator[Request]:
        """Rows before `until_s` by time, as long as no more than `limit` are taken in all."""
        rows = self._rows
        assert rows is not None, "no period was added"
        due = np.flatnonzero((rows.number < 0) & (rows.at_s < until_s))
        due = due[np.lexsort((rows.turn[due], rows.at_s[due]))][: limit - self.num_taken]
        rows.number[due] = self.num_taken + np.arange(len(due))
        self.num_taken += len(due)
        chunk = np.cumsum(rows.blocks[due]) // _CHUNK_BLOCKS
        forest = self._texts.flat()
        for part in np.split(due, np.flatnonzero(np.diff(chunk)) + 1):
            yield from self._requests(rows, part, *forest)
        while self._sizes and (rows.number[: self._sizes[0]] >= 0).all():
            done = self._sizes.pop(0)
            rows = self._rows = Rows._make(column[done:] for column in rows)
            self._base += done

    def _requests(
        self, rows: Rows, picked: Ints, forest_starts: Ints, forest: Ints
    ) -> Iterator[Request]:
        starts, ids = spell_out(picked, rows, self._base, forest_starts, forest)
        words = array("q")
        words.frombytes(ids.tobytes())
        waits = self._waits(rows, picked)
        rows = Rows._make(column[picked] for column in rows)
        columns = zip(
            rows.number.tolist(),
            rows.at_s.tolist(),
            (words[low:high] for low, high in pairwise(starts.tolist())),
            rows.tokens.tolist(),
            rows.output.tolist(),
            (f"s{session}" for session in rows.session.tolist()),
            (self._classes[cls] for cls in rows.cls.tolist()),
            waits,
            rows.think_s.tolist(),
            rows.branches.tolist(),
            repeat(NO_PARENT),
            repeat(0),  # children: forked threads bring their whole prompts
            repeat(""),
            rows.is_reset.tolist(),
            strict=False,
        )
        yield from starmap(Request, columns)

    def _waits(self, rows: Rows, picked: Ints) -> Iterator[tuple[int, ...]]:
        """The requests that each of `picked` waits for, of those that were taken already."""
        before, numbers, joins = rows.previous[picked], rows.number[picked], rows.join[picked]
        other = np.where(before >= 0, rows.number[np.maximum(before - self._base, 0)], -1)
        waits = np.where(other < numbers, other, -1)  # of equal times either may be first
        keys, joined = self._base + picked, self._joined
        for row, number, wait, join in zip(
            keys.tolist(), numbers.tolist(), waits.tolist(), joins.tolist(), strict=True
        ):
            if join >= 0:
                joined.setdefault(join, []).append(number)
            known = (wait,) if wait >= 0 else ()
            yield tuple(sorted({*known, *joined.pop(row)})) if row in joined else known


@kernel
def spell_out(
    picked: Ints, rows: Rows, base: int, forest_starts: Ints, forest: Ints
) -> tuple[Ints, Ints]:
    """(starts, ids) of the `picked` rows' paths, one after another; `rows` begin with row `base`.

    A row has, after the `shared` blocks of its source, up to `text` blocks of the forest's path `root`, then
    `first_id`, `first_id` + 1 and so on. Without a source it has the forest's from the begin.
    """
    starts = np.zeros(len(picked) + 1, np.int64)
    for k in range(len(picked)):
        starts[k + 1] = starts[k] + rows.blocks[picked[k]]
    ids = np.empty(starts[-1], np.int64)
    for k in range(len(picked)):
        i = picked[k]
        high = rows.blocks[i]
        low = starts[k]
        while high > 0:
            keep = rows.shared[i] if rows.source[i] >= 0 else 0
            for b in range(max(keep, rows.text[i]), high):
                ids[low + b] = rows.first_id[i] + b - rows.shared[i]
            if rows.text[i] > keep:
                at = forest_starts[rows.root[i]]
                for b in range(keep, min(rows.text[i], high)):
                    ids[low + b] = forest[at + b]
            high = min(high, keep)
            i = rows.source[i] - base
    return starts, ids
