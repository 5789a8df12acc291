"""Rows with Mooncake's fields: one request a line, its text named by prefix-chained block ids.

Plain rows stream in the order of the file; `agentic` reads those that have the other fields. Every answer
has a token at least, also where none was recorded.

Mooncake's published timestamps are cut to ticks of three seconds, so that a whole tick arrives at once
and queues for no reason; the rows of such a tick are spread over it evenly.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Final, TypeAlias

import msgspec
import numpy as np

from mallee.traces.files.lines import MAX_BRANCHES, MAX_MS, MAX_TOKENS, TraceFile
from mallee.traces.workload import Request

TICK_MS: Final = 3000.0
ID_TOKENS: Final = (512, 256, 128, 64, 32, 16)
_FEWEST_TICKS: Final = 8  # fewer may be whole seconds by chance

Name: TypeAlias = str | int
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
UNTIMED: Final = float("-inf")
Some: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
Time: TypeAlias = Annotated[float, msgspec.Meta(ge=-MAX_MS, le=MAX_MS)]
Wait: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_MS)]

_LARGE: Final = 1 << 52  # times 512 tokens still below 2**62
LARGE_WITH_FORKS: Final = 1 << 32  # times 256 still below the names of what forks add (`paths`)


class Row(msgspec.Struct, kw_only=True, gc=False):
    """`WorkloadRow` as files have it: names may be numbers, and lengths are checked."""

    input_length: Some
    output_length: Count
    timestamp: Time = UNTIMED  # only behind another row of its session
    delay: Wait = 0.0  # aiperf's name of `tool_wait_ms`
    hash_ids: list[int] = []
    session_id: Name | None = None
    request_id: Name | None = None
    wait_for: list[Name] = []
    tool_wait_ms: Wait = 0.0
    branches: Annotated[int, msgspec.Meta(ge=1, le=MAX_BRANCHES)] = 1
    prefix_reset: bool = False
    fork_of: Name | None = None
    cls: str | None = None

    @property
    def is_plain(self) -> bool:
        return (
            self.session_id is None
            and self.request_id is None
            and not self.wait_for
            and self.branches == 1
            and not self.tool_wait_ms
            and not self.delay
            and self.fork_of is None
            and not self.prefix_reset
            and self.cls is None
        )


decoder: Final = msgspec.json.Decoder(Row)


class Ids:
    """Numbers for the ids of one reading: their own, but where they are hashes of 64 bits."""

    def __init__(self, *, are_hashes: bool) -> None:
        """With `are_hashes` all get numbers as they come, from 0; else only those that are too large."""
        self._first = 0 if are_hashes else _LARGE
        self._given: dict[int, int] = {}

    def named(self, ids: list[int]) -> list[int]:
        """Equal id, equal number below 2**53."""
        given, first = self._given, self._first
        if not first:
            return [given.setdefault(i, len(given)) for i in ids]
        if not are_hashes(ids):
            return ids
        return [i if 0 <= i < first else given.setdefault(i, first + len(given)) for i in ids]


def are_hashes(ids: Sequence[int], large: int = _LARGE) -> bool:
    """Whether any of `ids` is negative or `large`: a hash, not a number from 0."""
    return bool(ids) and (min(ids) < 0 or max(ids) >= large)


def guess_id_tokens(rows: Sequence[Row]) -> int | None:
    """The largest size at which no row names more ids than its input has blocks, the last one partial.

    None if not even the smallest fits.
    """
    for size in ID_TOKENS:
        if not any(is_over(row, size) for row in rows):
            return size
    return None


def usual_id_tokens(rows: Sequence[Row]) -> int | None:
    """The size at which most rows with several ids name just the blocks of their input, if there is one."""
    several = [row for row in rows if len(row.hash_ids) > 1]
    for size in ID_TOKENS:
        exact = sum(
            len(row.hash_ids) in (row.input_length // size, -(-row.input_length // size))
            for row in several
        )
        if 2 * exact > len(several):
            return size
    return None


def is_over(row: Row, size: int = ID_TOKENS[-1]) -> bool:
    """Whether `row` names more ids of `size` tokens than its input has."""
    return len(row.hash_ids) > -(-row.input_length // size)


def has_ticks(rows: Sequence[Row]) -> bool:
    """Whether all timestamps are Mooncake's ticks, to a millisecond."""
    ticks = {row.timestamp for row in rows}
    on_ticks = UNTIMED not in ticks and all(
        abs(tick - TICK_MS * round(tick / TICK_MS)) <= 1.0 for tick in ticks
    )
    return on_ticks and _FEWEST_TICKS <= len(ticks) < len(rows)


def read_plain(
    file: TraceFile, id_tokens: int, *, spread_ticks: bool, seed: int, has_hashes: bool
) -> Iterator[Request]:
    """Rows without dependencies, as they come. Raises CodecError with line and field.

    Rows of a tick are spread over it evenly with seed 0, else at random places.
    """
    rng = np.random.default_rng(seed) if seed else None
    tick: list[Row] = []
    first_ms: float | None = None
    number = 0
    for row in _plain_rows(file, id_tokens, Ids(are_hashes=has_hashes)):
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


def _plain_rows(file: TraceFile, id_tokens: int, ids: Ids) -> Iterator[Row]:
    """The file's rows by time, checked to be without dependencies."""

    def read(number: int, line: bytes) -> Row:
        row = read_row(file, number, line, id_tokens)
        if not row.is_plain:
            what = "sessions, dependencies or branches, but the rows at the begin have none"
            raise file.bad(number, f"{what}; read it as --kind agentic", "")
        return row

    for row in file.by_time(file.read(read), lambda row: row.timestamp):
        row.hash_ids = ids.named(row.hash_ids)
        yield row


def read_row(file: TraceFile, number: int, line: bytes, id_tokens: int) -> Row:
    """Raises CodecError, also for more ids than the prompt has blocks."""
    row = file.decode(number, line, decoder)
    if row.timestamp == UNTIMED and row.session_id is None:
        what = "no timestamp, and no session_id of a row before: give one of them"
        raise file.bad(number, what, "timestamp")
    if is_over(row, id_tokens):
        what = f"{len(row.hash_ids)} hash_ids of {id_tokens} tokens for an input_length of"
        what = f"{what} {row.input_length}: at most {-(-row.input_length // id_tokens)}"
        raise file.bad(number, what, "hash_ids")
    return row


def _plain(number: int, arrival_s: float, row: Row) -> Request:
    return Request(number, arrival_s, row.hash_ids, row.input_length, max(1, row.output_length))


def _spread(
    number: int, tick: Sequence[Row], first_ms: float, rng: np.random.Generator | None
) -> Iterator[Request]:
    places = np.arange(len(tick)) / len(tick) if rng is None else np.sort(rng.random(len(tick)))
    arrivals = (tick[0].timestamp - first_ms + TICK_MS * places) / 1000
    for i, (row, arrival_s) in enumerate(zip(tick, arrivals.tolist(), strict=True)):
        yield _plain(number + i, arrival_s, row)
