"""Azure's LLM inference traces: when a request came and how long it was; nothing about shared text."""

import csv
import io
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Final

from mallee.protocol.errors import CodecError
from mallee.traces.lines import MAX_TOKENS, bad_line, numbered_lines
from mallee.traces.workload import Request

COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def is_header(line: bytes) -> bool:
    """Whether `line` is the first of such a file."""
    return [cell.strip() for cell in line.decode(errors="replace").lstrip("\ufeff").split(",")] == [
        *COLUMNS
    ]


def read_azure(path: Path) -> Iterator[Request]:
    """Every prompt is text of its own. Raises CodecError with line and column."""
    lines = numbered_lines(path)
    next(lines, None)  # the header
    first: datetime | None = None
    arrival_s = 0.0
    for number, (line_number, line) in enumerate(lines):
        cells = next(csv.reader(io.StringIO(line.decode(errors="replace"))))
        if len(cells) != len(COLUMNS):
            raise bad_line(path, line_number, f"{len(cells)} columns; give {', '.join(COLUMNS)}")
        at = _time(path, line_number, cells[0])
        first = first or at
        last_s, arrival_s = arrival_s, (at - first).total_seconds()
        if arrival_s < last_s:
            raise bad_line(path, line_number, "TIMESTAMP goes back; sort the rows by it")
        prompt = _count(path, line_number, COLUMNS[1], cells[1])
        answer = _count(path, line_number, COLUMNS[2], cells[2])
        yield Request(number, arrival_s, (), prompt, answer)


def _time(path: Path, line_number: int, cell: str) -> datetime:
    whole, _, fraction = cell.strip().partition(".")
    try:  # seven digits of a second; datetime takes six
        return datetime.fromisoformat(f"{whole}.{fraction[:6]:0<6}")
    except ValueError as error:
        raise bad_line(path, line_number, f"TIMESTAMP: {error}") from error


def _count(path: Path, line_number: int, column: str, cell: str) -> int:
    try:
        count = int(cell)
    except ValueError as error:
        raise bad_line(path, line_number, f"{column}={cell!r}: not a whole number") from error
    if not 1 <= count <= MAX_TOKENS:
        raise bad_line(path, line_number, f"{column}={count}: must be 1 to {MAX_TOKENS}")
    return count


def check_header(path: Path, line: bytes) -> None:
    """Raises CodecError if `line` is another header."""
    if not is_header(line):
        raise CodecError(f"{path}, line 1: columns must be {', '.join(COLUMNS)}", line=1)
