"""Azure's LLM inference traces: arrivals and lengths, nothing about shared text."""

import csv
import io
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Final, NamedTuple

from mallee.protocol.errors import CodecError
from mallee.traces.files.lines import MAX_TOKENS, TraceFile
from mallee.traces.workload import Request

COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
# Seven digits of a second in one year's files, six and a zone, or none of a whole one, in another's.
_TIME: Final = re.compile(r"([^.+Z]+)(?:\.(\d+))?(Z|[+-]\d\d:?\d\d)?")


def is_header(line: bytes) -> bool:
    """Whether `line` is the first of such a file."""
    return [cell.strip() for cell in line.decode(errors="replace").lstrip("\ufeff").split(",")] == [
        *COLUMNS
    ]


class _Cells(NamedTuple):
    at: datetime
    prompt: int
    answer: int


def read_azure(file: TraceFile) -> Iterator[Request]:
    """Every prompt is text of its own. Raises CodecError with line and column."""
    last: datetime | None = None

    def read(number: int, line: bytes) -> _Cells | None:
        if is_header(line):
            return None
        cells = _cells(file, number, line)
        if last is not None and (cells.at.tzinfo is None) != (last.tzinfo is None):
            what = "TIMESTAMP: some rows have a time zone, others don't"
            raise file.bad(number, what, COLUMNS[0])
        if last is not None and cells.at < last:
            what = "TIMESTAMP goes back; sort the rows by it"
            raise file.bad(number, what, COLUMNS[0])
        return cells

    first: datetime | None = None
    number = 0
    for _, row in file.read(read):
        if row is not None:
            last, first = row.at, first or row.at
            arrival_s = (row.at - first).total_seconds()
            yield Request(number, arrival_s, (), row.prompt, row.answer)
            number += 1


def _cells(file: TraceFile, number: int, line: bytes) -> _Cells:
    try:
        cells = next(csv.reader(io.StringIO(line.decode(errors="replace").rstrip("\r\n"))))
    except csv.Error as error:
        raise file.bad(number, error, "") from error
    if len(cells) != len(COLUMNS):
        what = f"{len(cells)} columns; give {', '.join(COLUMNS)}"
        raise file.bad(number, what, "")
    return _Cells(
        _time(file, number, cells[0]),
        _count(file, number, COLUMNS[1], cells[1], least=1),
        max(1, _count(file, number, COLUMNS[2], cells[2], least=0)),
    )


def _time(file: TraceFile, number: int, cell: str) -> datetime:
    found = _TIME.fullmatch(cell.strip())
    try:
        if found is None:
            raise ValueError(f"{cell!r} is no time")
        whole, fraction, zone = found.groups(default="")
        return datetime.fromisoformat(f"{whole}.{fraction[:6]:0<6}{zone}")
    except ValueError as error:
        raise file.bad(number, f"TIMESTAMP: {error}", COLUMNS[0]) from error


def _count(file: TraceFile, number: int, column: str, cell: str, *, least: int) -> int:
    try:
        count = int(cell)
    except ValueError as error:
        what = f"{column}={cell!r}: not a whole number"
        raise file.bad(number, what, column) from error
    if not least <= count <= MAX_TOKENS:
        what = f"{column}={count}: must be {least} to {MAX_TOKENS}"
        raise file.bad(number, what, column)
    return count


def check_header(file: TraceFile, line: bytes) -> None:
    """Raises CodecError if `line` is another header."""
    if not is_header(line):
        raise CodecError(f"{file.path}, line 1: columns must be {', '.join(COLUMNS)}", line=1)
