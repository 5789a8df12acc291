"""Azure's LLM inference traces: when a request came and how long it was; nothing about shared text."""

import csv
import io
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Final, NamedTuple

from mallee.protocol.errors import CodecError
from mallee.traces.lines import MAX_TOKENS, bad_line, read_lines
from mallee.traces.problems import Problems
from mallee.traces.workload import Request

COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def is_header(line: bytes) -> bool:
    """Whether `line` is the first of such a file."""
    return [cell.strip() for cell in line.decode(errors="replace").lstrip("\ufeff").split(",")] == [
        *COLUMNS
    ]


class _Cells(NamedTuple):
    at: datetime
    prompt: int
    answer: int


def read_azure(path: Path, problems: Problems | None = None) -> Iterator[Request]:
    """Every prompt is text of its own. Raises CodecError with line and column."""
    last: datetime | None = None

    def read(number: int, line: bytes) -> _Cells | None:
        if is_header(line):
            return None
        cells = _cells(path, number, line)
        if last is not None and cells.at < last:
            what = "TIMESTAMP goes back; sort the rows by it"
            raise bad_line(path, number, what, field=COLUMNS[0])
        return cells

    first: datetime | None = None
    number = 0
    for _, row in read_lines(path, read, problems):
        if row is not None:
            last, first = row.at, first or row.at
            arrival_s = (row.at - first).total_seconds()
            yield Request(number, arrival_s, (), row.prompt, row.answer)
            number += 1


def _cells(path: Path, number: int, line: bytes) -> _Cells:
    cells = next(csv.reader(io.StringIO(line.decode(errors="replace"))))
    if len(cells) != len(COLUMNS):
        what = f"{len(cells)} columns; give {', '.join(COLUMNS)}"
        raise bad_line(path, number, what, field="")
    return _Cells(
        _time(path, number, cells[0]),
        _count(path, number, COLUMNS[1], cells[1]),
        _count(path, number, COLUMNS[2], cells[2]),
    )


def _time(path: Path, line_number: int, cell: str) -> datetime:
    whole, _, fraction = cell.strip().partition(".")
    try:  # seven digits of a second; datetime takes six
        return datetime.fromisoformat(f"{whole}.{fraction[:6]:0<6}")
    except ValueError as error:
        raise bad_line(path, line_number, f"TIMESTAMP: {error}", field=COLUMNS[0]) from error


def _count(path: Path, line_number: int, column: str, cell: str) -> int:
    try:
        count = int(cell)
    except ValueError as error:
        what = f"{column}={cell!r}: not a whole number"
        raise bad_line(path, line_number, what, field=column) from error
    if not 1 <= count <= MAX_TOKENS:
        what = f"{column}={count}: must be 1 to {MAX_TOKENS}"
        raise bad_line(path, line_number, what, field=column)
    return count


def check_header(path: Path, line: bytes) -> None:
    """Raises CodecError if `line` is another header."""
    if not is_header(line):
        raise CodecError(f"{path}, line 1: columns must be {', '.join(COLUMNS)}", line=1)
