"""Mooncake's rows with the agentic fields (`protocol.workload`): sessions, dependencies, branches, forks.

They are read as a whole and ordered so that no row waits for a later one. In files that
name sessions but no dependencies (one agent's turns) each row waits for the row of its session before.
Where problems are counted, a row whose dependency is not there, or is in a circle, is read without it.
"""

import heapq
from collections import Counter
from collections.abc import Sequence

from mallee.traces.files.lines import TraceFile
from mallee.traces.formats.rows import UNTIMED, Ids, Name, Row, read_row
from mallee.traces.workload import NO_PARENT, Request, compact


def read_agentic(file: TraceFile, id_tokens: int, *, has_hashes: bool) -> list[Request]:
    """The file's first rows, as many as its limit, each after those it waits for.

    Rows behind them are read only for those that they wait for. Raises CodecError with line and field.
    """
    return _Rows(file, id_tokens, Ids(are_hashes=has_hashes)).requests(file.limit)


def class_of(*, is_fork: bool, branches: int, num_waits: int, has_session: bool) -> str:
    """Class of a row that names none."""
    if is_fork:
        return "fork"
    if branches > 1:
        return "fan-out"
    if num_waits > 1:
        return "join"
    return "turn" if has_session else "request"


class _Rows:
    """Rows of a file, by their place in it."""

    def __init__(self, file: TraceFile, id_tokens: int, ids: Ids) -> None:
        self._file = file
        self._rows: list[Row] = []
        self._ids: list[Sequence[int]] = []
        self._lines: list[int] = []
        self._names: dict[str, int] = {}
        self._last_ms: dict[Name | None, float] = {}  # timestamps of sessions' last rows
        ahead: set[str] = set()  # names that rows refer to and no row has yet
        for line, row in file.read(lambda n, raw: self._read(n, raw, id_tokens)):
            if row.request_id is not None:
                self._names[str(row.request_id)] = len(self._rows)
            self._ids.append(compact(ids.named(row.hash_ids)))
            row.hash_ids = []  # a list of numbers takes several times as much
            self._rows.append(row)
            self._lines.append(line)
            if file.limit is not None:
                ahead.discard(str(row.request_id))
                named = {str(name) for name in (*row.wait_for, row.fork_of) if name is not None}
                ahead |= named - self._names.keys()
                if len(self._rows) >= file.limit and not ahead:
                    break
        self._first_stuck = 0  # rows before it wait for none
        self._parents = [self._parent(index) for index in range(len(self._rows))]
        self._waits = self._dependencies()

    def _read(self, number: int, line: bytes, id_tokens: int) -> Row:
        row = read_row(self._file, number, line, id_tokens)
        if row.request_id is not None and str(row.request_id) in self._names:
            what = f"request_id {row.request_id!r} is there twice"
            raise self._file.bad(number, what, "request_id")
        row.tool_wait_ms = row.tool_wait_ms or row.delay
        if row.timestamp == UNTIMED:
            if row.session_id not in self._last_ms:
                what = f"no timestamp, and no row of session {row.session_id!r} before it: give one"
                raise self._file.bad(number, what, "timestamp")
            row.timestamp = self._last_ms[row.session_id] + row.delay
        self._last_ms[row.session_id] = row.timestamp
        return row

    def _mend(self, index: int, what: str, field: str) -> None:
        self._file.report(self._file.bad(self._lines[index], what, field), is_skipped=False)

    def _parent(self, index: int) -> int:
        """The row that this one forks, or NO_PARENT."""
        name = self._rows[index].fork_of
        if name is None:
            return NO_PARENT
        parent = self._names.get(str(name))
        if parent is None:
            self._mend(index, f"fork_of names {name!r}, which no row has as request_id", "fork_of")
            return NO_PARENT
        if self._own_tokens(index, parent) < 0:
            row, other = self._rows[index], self._rows[parent]
            what = f"input_length {row.input_length} is less than prompt and answer of {name!r}"
            what = f"{what}, which it forks ({other.input_length} + {other.output_length})"
            self._mend(index, what, "input_length")
            return NO_PARENT
        return parent

    def _own_tokens(self, index: int, parent: int) -> int:
        """Tokens that a fork's prompt adds to its parent's text."""
        other = self._rows[parent]
        return self._rows[index].input_length - other.input_length - other.output_length

    def _dependencies(self) -> list[tuple[int, ...]]:
        """Per row the rows it waits for."""
        if not self._names and not any(row.wait_for for row in self._rows):
            return self._turns()
        waits: list[tuple[int, ...]] = []
        for index, row in enumerate(self._rows):
            found = {self._parents[index]} - {NO_PARENT}
            for name in row.wait_for:
                if str(name) in self._names:
                    found.add(self._names[str(name)])
                else:
                    what = f"wait_for names {name!r}, which no row has as request_id"
                    self._mend(index, what, "wait_for")
            waits.append(tuple(sorted(found)))
        return waits

    def _turns(self) -> list[tuple[int, ...]]:
        """Each row waits for its session's row before."""
        last: dict[Name, int] = {}
        waits: list[tuple[int, ...]] = [()] * len(self._rows)
        for index in sorted(range(len(self._rows)), key=lambda i: self._rows[i].timestamp):
            session = self._rows[index].session_id
            if session is not None:
                if session in last:
                    waits[index] = (last[session],)
                last[session] = index
        return waits

    def _order(self) -> list[tuple[float, int]]:
        """(arrival, row) by timestamp and place in the file, each after the rows it waits for."""
        rows = self._rows
        followers: list[list[int]] = [[] for _ in rows]
        for index, others in enumerate(self._waits):
            for other in others:
                followers[other].append(index)
        missing = [len(others) for others in self._waits]
        ready = [(row.timestamp, index) for index, row in enumerate(rows) if not missing[index]]
        heapq.heapify(ready)
        order: list[tuple[float, int]] = []
        while len(order) < len(rows):
            if not ready:
                stuck = self._break_circle(missing)
                missing[stuck] = 0
                ready.append((max(rows[stuck].timestamp, order[-1][0] if order else 0.0), stuck))
            at_ms, index = heapq.heappop(ready)
            order.append((at_ms, index))
            for follower in followers[index]:
                missing[follower] -= 1
                if not missing[follower]:
                    heapq.heappush(ready, (max(at_ms, rows[follower].timestamp), follower))
        return order

    def _break_circle(self, missing: Sequence[int]) -> int:
        """A row of a circle, freed of its dependencies."""
        while missing[self._first_stuck] <= 0:  # for good
            self._first_stuck += 1
        stuck = self._first_stuck
        seen: set[int] = set()
        while stuck not in seen:  # from a row behind a circle into it
            seen.add(stuck)
            stuck = min(other for other in self._waits[stuck] if missing[other] > 0)
        stuck = self._first_of_circle(stuck, missing)
        self._mend(stuck, "wait_for: this row waits, in a circle, for itself", "wait_for")
        self._waits[stuck] = tuple(o for o in self._waits[stuck] if missing[o] <= 0)
        if self._parents[stuck] not in self._waits[stuck]:
            self._parents[stuck] = NO_PARENT
        return stuck

    def _first_of_circle(self, start: int, missing: Sequence[int]) -> int:
        circle = [start]
        while True:
            after = min(other for other in self._waits[circle[-1]] if missing[other] > 0)
            if after == start:
                return min(circle)
            circle.append(after)

    def requests(self, limit: int | None) -> list[Request]:
        order = self._order()[:limit]
        place = {index: number for number, (_, index) in enumerate(order)}
        kept = [index for _, index in order]
        children = Counter(self._parents[index] for index in kept)
        first_ms = order[0][0] if order else 0.0
        return [
            self._request(place, index, (at_ms - first_ms) / 1000, children[index])
            for at_ms, index in order
        ]

    def _request(
        self, place: dict[int, int], index: int, arrival_s: float, num_children: int
    ) -> Request:
        row, parent, waits = self._rows[index], self._parents[index], self._waits[index]
        is_fork = parent != NO_PARENT
        cls = row.cls or class_of(
            is_fork=is_fork,
            branches=row.branches,
            num_waits=len(waits),
            has_session=row.session_id is not None,
        )
        return Request(
            number=place[index],
            arrival_s=arrival_s,
            ids=() if is_fork else self._ids[index],
            input_tokens=self._own_tokens(index, parent) if is_fork else row.input_length,
            output_tokens=row.output_length if num_children else max(1, row.output_length),
            session="" if row.session_id is None else str(row.session_id),
            cls=cls,
            wait_for=tuple(sorted(place[other] for other in waits if other != parent)),
            tool_wait_s=row.tool_wait_ms / 1000,
            branches=row.branches,
            parent=place[parent] if is_fork else NO_PARENT,
            num_children=num_children,
            name="" if row.request_id is None else str(row.request_id),
            is_reset=row.prefix_reset,
        )
