"""Rows with Mooncake's fields: one request a line, its text named by prefix-chained block ids.

Plain rows stream in the order of the file. Rows with the agentic fields (`protocol.workload`) are read
as a whole and put into an order in which nobody waits for what comes later. In files that name sessions
but no dependencies (one agent's turns) each row waits for the row of its session before.

Every answer has a token at least, also where none was recorded.

Mooncake's published timestamps are cut to ticks of three seconds, so that a whole tick arrives at once
and queues for no reason; the rows of such a tick are spread over it evenly.
"""

import heapq
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec
import numpy as np

from mallee.traces.lines import MAX_TOKENS, bad_line, decode_line, numbered_lines
from mallee.traces.workload import Request, Runs

TICK_MS: Final = 3000.0
ID_TOKENS: Final = (512, 256, 128, 64, 32, 16)
_FEWEST_TICKS: Final = 8  # fewer may be whole seconds by chance
_LONG_IDS: Final = 32

_Name: TypeAlias = str | int
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
_Some: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
_Id: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]  # times 512 tokens below 2**62


class Row(msgspec.Struct, kw_only=True):
    """`WorkloadRow` as files have it: names may be numbers, and lengths are checked."""

    timestamp: float
    input_length: _Some
    output_length: _Count
    hash_ids: list[_Id] = []
    session_id: _Name | None = None
    request_id: _Name | None = None
    wait_for: list[_Name] = []
    tool_wait_ms: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    branches: _Some = 1
    prefix_reset: bool = False

    @property
    def is_plain(self) -> bool:
        return (
            self.session_id is None
            and self.request_id is None
            and not self.wait_for
            and self.branches == 1
            and not self.tool_wait_ms
        )


decoder: Final = msgspec.json.Decoder(Row)


def guess_id_tokens(rows: Sequence[Row]) -> int | None:
    """The largest size at which no row names more ids than its input has blocks, the last one partial.

    None if not even the smallest fits.
    """
    for size in ID_TOKENS:
        if not any(is_over(row, size) for row in rows):
            return size
    return None


def is_over(row: Row, size: int = ID_TOKENS[-1]) -> bool:
    """Whether `row` names more ids of `size` tokens than its input has."""
    return len(row.hash_ids) > -(-row.input_length // size)


def has_ticks(rows: Sequence[Row]) -> bool:
    """Whether all timestamps are Mooncake's ticks, to a millisecond."""
    ticks = {row.timestamp for row in rows}
    on_ticks = all(abs(tick - TICK_MS * round(tick / TICK_MS)) <= 1.0 for tick in ticks)
    return on_ticks and _FEWEST_TICKS <= len(ticks) < len(rows)


def read_plain(
    path: Path, id_tokens: int, *, spread_ticks: bool, seed: int = 0
) -> Iterator[Request]:
    """Rows without dependencies, as they come. Raises CodecError with line and field.

    Rows of a tick are spread over it evenly with seed 0, else at random places.
    """
    rng = np.random.default_rng(seed) if seed else None
    tick: list[Row] = []
    first_ms: float | None = None
    number = 0
    for row in _plain_rows(path, id_tokens):
        if first_ms is None:
            first_ms = row.timestamp
        if not spread_ticks:
            yield _plain(number, (row.timestamp - first_ms) / 1000, row)
            number += 1
            continue
        if tick and row.timestamp != tick[0].timestamp:
            yield from _spread(number, tick, first_ms, rng)
            number += len(tick)
            tick = []
        tick.append(row)
    if tick and first_ms is not None:
        yield from _spread(number, tick, first_ms, rng)


def _plain_rows(path: Path, id_tokens: int) -> Iterator[Row]:
    """The file's rows, checked: in order of time, and nobody waits for anybody."""
    last_ms = float("-inf")
    for line_number, line in numbered_lines(path):
        row = decode_line(path, line_number, line, decoder)
        _check_ids(path, line_number, row, id_tokens)
        if not row.is_plain:
            raise bad_line(
                path,
                line_number,
                "sessions, dependencies or branches, but the rows at the begin have none;"
                " read it as --kind agentic",
            )
        if row.timestamp < last_ms:
            raise bad_line(
                path,
                line_number,
                f"timestamp {row.timestamp} is before the line above's {last_ms};"
                " sort the rows by timestamp",
            )
        last_ms = row.timestamp
        yield row


def read_agentic(path: Path, id_tokens: int) -> list[Request]:
    """All rows, each after those it waits for. Raises CodecError with line and field."""
    rows: list[Row] = []
    lines: list[int] = []
    for line_number, line in numbered_lines(path):
        row = decode_line(path, line_number, line, decoder)
        _check_ids(path, line_number, row, id_tokens)
        rows.append(row)
        lines.append(line_number)
    waits = _waits(path, rows, lines)
    order = _order(path, rows, waits, lines)
    place = {index: number for number, (_, index) in enumerate(order)}
    first_ms = order[0][0] if order else 0.0
    return [
        Request(
            number=place[index],
            arrival_s=(at_ms - first_ms) / 1000,
            ids=_compact(row.hash_ids),
            input_tokens=row.input_length,
            output_tokens=max(1, row.output_length),
            session="" if row.session_id is None else str(row.session_id),
            cls=_class(row),
            wait_for=tuple(sorted(place[other] for other in waits[index])),
            tool_wait_s=row.tool_wait_ms / 1000,
            branches=row.branches,
            name="" if row.request_id is None else str(row.request_id),
        )
        for at_ms, index, row in ((at_ms, index, rows[index]) for at_ms, index in order)
    ]


def _plain(number: int, arrival_s: float, row: Row) -> Request:
    return Request(number, arrival_s, row.hash_ids, row.input_length, max(1, row.output_length))


def _spread(
    number: int, tick: Sequence[Row], first_ms: float, rng: np.random.Generator | None
) -> Iterator[Request]:
    places = np.arange(len(tick)) / len(tick) if rng is None else np.sort(rng.random(len(tick)))
    arrivals = (tick[0].timestamp - first_ms + TICK_MS * places) / 1000
    for i, (row, arrival_s) in enumerate(zip(tick, arrivals.tolist(), strict=True)):
        yield _plain(number + i, arrival_s, row)


def _check_ids(path: Path, line_number: int, row: Row, id_tokens: int) -> None:
    if is_over(row, id_tokens):
        raise bad_line(
            path,
            line_number,
            f"{len(row.hash_ids)} hash_ids of {id_tokens} tokens for an input_length of"
            f" {row.input_length}: at most {-(-row.input_length // id_tokens)}",
        )


def _class(row: Row) -> str:
    if row.branches > 1:
        return "fan-out"
    if len(row.wait_for) > 1:
        return "join"
    return "request" if row.session_id is None else "turn"


def _compact(ids: list[int]) -> Sequence[int]:
    """Long lists as runs, or as machine words where they have few."""
    if len(ids) < _LONG_IDS:
        return ids
    breaks = np.flatnonzero(np.diff(np.asarray(ids)) != 1) + 1
    if len(breaks) > len(ids) // 4:
        return array("q", ids)
    begins = [0, *breaks.tolist()]
    ends = [*breaks.tolist(), len(ids)]
    return Runs([(ids[a], b - a) for a, b in zip(begins, ends, strict=True)])


def _waits(path: Path, rows: Sequence[Row], lines: Sequence[int]) -> list[set[int]]:
    """Per row the rows it waits for."""
    names: dict[str, int] = {}
    for index, row in enumerate(rows):
        if row.request_id is not None and names.setdefault(str(row.request_id), index) != index:
            raise bad_line(path, lines[index], f"request_id {row.request_id!r} is there twice")
    if not names and not any(row.wait_for for row in rows):
        return _turns(rows)
    waits: list[set[int]] = []
    for index, row in enumerate(rows):
        unknown = [name for name in row.wait_for if str(name) not in names]
        if unknown:
            raise bad_line(
                path, lines[index], f"wait_for names {unknown[0]!r}, which no row has as request_id"
            )
        waits.append({names[str(name)] for name in row.wait_for})
    return waits


def _turns(rows: Sequence[Row]) -> list[set[int]]:
    """Each row waits for its session's row before."""
    last: dict[_Name, int] = {}
    waits: list[set[int]] = [set() for _ in rows]
    for index in sorted(range(len(rows)), key=lambda i: rows[i].timestamp):
        session = rows[index].session_id
        if session is not None:
            if session in last:
                waits[index].add(last[session])
            last[session] = index
    return waits


def _order(
    path: Path, rows: Sequence[Row], waits: Sequence[set[int]], lines: Sequence[int]
) -> list[tuple[float, int]]:
    """(arrival, row) by timestamp and place in the file, but nobody before whom it waits for."""
    followers: list[list[int]] = [[] for _ in rows]
    for index, others in enumerate(waits):
        for other in others:
            followers[other].append(index)
    missing = [len(others) for others in waits]
    ready = [(row.timestamp, index) for index, row in enumerate(rows) if not missing[index]]
    heapq.heapify(ready)
    order: list[tuple[float, int]] = []
    while ready:
        at_ms, index = heapq.heappop(ready)
        order.append((at_ms, index))
        for follower in followers[index]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, (max(at_ms, rows[follower].timestamp), follower))
    if len(order) < len(rows):
        stuck = next(index for index, count in enumerate(missing) if count)
        raise bad_line(path, lines[stuck], "wait_for: this row waits, in a circle, for itself")
    return order
