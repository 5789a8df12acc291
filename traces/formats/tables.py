"""Tables of requests as Mooncake's rows: CSV, or JSON objects with other names, types and units.

Lengths may be strings, or floats without a fraction; times numbers or ISO 8601; ids strings. Rows without
times arrive by chance. Azure's and BurstGPT's files, and what `vllm bench serve` saves, are such tables.
"""

import csv
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from functools import reduce
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import xxhash

from mallee.protocol.errors import ConfigError
from mallee.traces.files.lines import MAX_TOKENS, TraceFile
from mallee.traces.formats.rows import Row

_UNITS_S: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_SINCE_1970_S: Final = (1e9, 4e9)  # from 2001 to 2096
_FIELDS: Final = {
    "timestamp": "timestamp",
    "input": "input_length",
    "output": "output_length",
    "session": "session_id",
    "ids": "hash_ids",
}
_LEAST: Final = {"input_length": 1, "output_length": 0}
_object: Final = msgspec.json.Decoder(dict[str, Any])


class Columns(NamedTuple):
    """Names of a table's columns, by the fields of a row that they give."""

    of: Mapping[str, str]
    unit: str = ""  # of times that are numbers; "": they have to be since 1970, which tells it
    is_sure: bool = False  # numbers that may be since 1970 are of `unit`, too


def _named(timestamp: str, input_length: str, output_length: str, *session: str) -> dict[str, str]:
    lengths = {"input_length": input_length, "output_length": output_length}
    return {"timestamp": timestamp, **lengths, **dict(zip(("session_id",), session, strict=False))}


_OWN: Final = {name: name for name in Row.__struct_fields__}
KNOWN: Final = {
    "azure": Columns(_named("TIMESTAMP", "ContextTokens", "GeneratedTokens")),
    "burstgpt": Columns(
        _named("Timestamp", "Request tokens", "Response tokens", "Session ID"), "s"
    ),
    "mooncake": Columns(_OWN, "ms"),
    "openai": Columns(_OWN, "s"),
    "vllm": Columns(_OWN, "s", is_sure=True),
}


def columns_of(given: str) -> Columns:
    """Columns from `timestamp_ms=ts,input=prompt_tokens,...`. Raises ConfigError."""
    of, unit = {}, ""
    for pair in given.split(","):
        field, _, column = pair.partition("=")
        name, _, ending = field.strip().partition("_")
        if not column or name not in _FIELDS or (ending and name != "timestamp"):
            raise ConfigError(f"columns {pair!r}: give {', '.join(_FIELDS)}, each as FIELD=COLUMN")
        if ending and ending not in _UNITS_S:
            raise ConfigError(f"columns {pair!r}: a time is in {', '.join(_UNITS_S)}")
        of[_FIELDS[name]] = column.strip()
        unit = ending or unit
    if missing := {"input", "output"} - {name for name, field in _FIELDS.items() if field in of}:
        raise ConfigError(f"columns {given!r}: say also which is {' and '.join(sorted(missing))}")
    return Columns(of, unit, is_sure=bool(unit))


def kind_of_header(line: bytes) -> str | None:
    """The known table that begins with this line of CSV, if any."""
    found = {cell.strip() for cell in line.decode(errors="replace").split(",")}
    return next((kind for kind in ("azure", "burstgpt") if _needed(KNOWN[kind]) <= found), None)


def _needed(columns: Columns) -> set[str]:
    return {column for field, column in columns.of.items() if field != "session_id"}


class Clock:
    """Times of one reading, as ms since the first; by chance where there are none."""

    def __init__(self, columns: Columns, seed: int, per_hour: float) -> None:
        self.note = ""
        self._columns = columns
        self._draws = np.random.default_rng(seed)
        self._by_chance = f"rows without times arrive by chance, {per_hour:g} an hour (seed {seed})"
        self._mean_ms = 3_600_000 / per_hour
        self._last_ms = 0.0
        self._first: datetime | float | None = None

    def ms(self, value: Any) -> float:
        """Raises ValueError."""
        if value in (None, ""):
            if self._first is not None:
                raise ValueError("no time, but rows before have one")
            self.note = self._by_chance
            self._last_ms += self._draws.exponential(self._mean_ms)
            return self._last_ms
        at, scale = self._number(value)
        if self.note == self._by_chance:
            raise ValueError("rows before have no time")
        self._first = at if self._first is None else self._first
        try:
            since = at - self._first  # type: ignore[operator]  # of one kind, or a TypeError
        except TypeError as error:
            raise ValueError("rows before have another kind of time") from error
        if isinstance(since, timedelta):
            return since / timedelta(milliseconds=1)
        return float(round(1000 * scale * since, 6))

    def _number(self, value: Any) -> tuple[datetime | float, float]:
        """The time, and how many seconds its unit has."""
        if isinstance(value, str):
            try:
                value = float(value) if "." in value or "e" in value else int(value)
            except ValueError:
                self.note = "times by ISO 8601"
                return datetime.fromisoformat(value.strip()), 1.0
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError("give a number or an ISO 8601 time")
        low, high = _SINCE_1970_S
        unit = next((unit for unit, s in _UNITS_S.items() if low <= value * s < high), "")
        unit = self._columns.unit if self._columns.is_sure or not unit else unit
        if not unit:
            raise ValueError("of which unit? name it, as --columns timestamp_ms=COLUMN")
        self.note = f"times in {unit}"
        return value, _UNITS_S[unit]


class Table:
    """Unrolls the lines of a table to rows."""

    def __init__(self, columns: Columns, clock: Clock) -> None:
        self.clock = clock
        self._columns = columns
        self._is_json = columns.of is _OWN
        self._header: list[str] | None = None  # of CSV, once it was read

    def __call__(self, file: TraceFile, number: int, line: bytes) -> Iterator[dict[str, Any]]:
        if self._header is None:
            self._is_json |= line.lstrip().startswith(b"{")
            if self._is_json:
                yield self.row(file, number, file.decode(number, line, _object))
                return
            self._header = [name.strip() for name in _cells(file, number, line)]
            if missing := _needed(self._columns) - set(self._header):
                what = f"no column {', '.join(sorted(missing))} among {', '.join(self._header)}"
                raise ConfigError(f"{file.path}, line {number}: {what}")
            return
        cells = _cells(file, number, line)
        if len(cells) != len(self._header):
            what = f"{len(cells)} columns; give {', '.join(self._header)}"
            raise file.bad(number, what, "")
        yield self.row(file, number, dict(zip(self._header, cells, strict=True)))

    def row(self, file: TraceFile, number: int, entry: dict[str, Any]) -> dict[str, Any]:
        """The row that `entry` is. Raises CodecError naming the column."""
        found: dict[str, Any] = {}
        for field, column in self._columns.of.items():
            value = (
                reduce(_below, column.split("."), entry) if column not in entry else entry[column]
            )
            try:
                if field == "timestamp":
                    found[field] = self.clock.ms(value)
                elif field in _LEAST:
                    found[field] = _count(value, _LEAST[field])
                elif field == "hash_ids":
                    found[field] = [_id(each) for each in value or ()]
                elif value not in (None, ""):
                    found[field] = value
            except (ValueError, TypeError) as error:
                raise file.bad(number, f"{column}: {value!r}: {error}", column) from error
        return found


def unroll_bench(table: Table, file: TraceFile, number: int, line: bytes) -> Iterator[Any]:
    """Rows of one result of `vllm bench serve`, by their times; requests that failed are reported."""
    result = file.decode(number, line, _object)
    names = ("input_lens", "output_lens", "start_times", "errors")
    inputs, outputs, starts, errors = (result.get(name) or [] for name in names)
    if not inputs or len(inputs) != len(outputs):
        what = "no lengths of each request; save it with --save-result --save-detailed"
        raise file.bad(number, what, "input_lens")
    order = sorted(range(len(inputs)), key=starts.__getitem__) if starts else range(len(inputs))
    for i in order:
        if i < len(errors) and errors[i]:
            file.report(file.bad(number, f"request {i} failed: {errors[i]!s:.80}", "errors"))
            continue
        entry = {"input_length": inputs[i], "output_length": outputs[i]}
        yield table.row(file, number, entry | ({"timestamp": starts[i]} if starts else {}))


def _cells(file: TraceFile, number: int, line: bytes) -> list[str]:
    try:
        return next(csv.reader([line.decode(errors="replace").rstrip("\r\n")]))
    except csv.Error as error:
        raise file.bad(number, error, "") from error


def _below(entry: Any, name: str) -> Any:
    """The value of a dotted column's part."""
    return entry.get(name) if isinstance(entry, dict) else None


def _count(value: Any, least: int) -> int:
    number = float(value) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, int | float) or number % 1:
        raise ValueError("not a whole number")
    if not least <= number <= MAX_TOKENS:
        raise ValueError(f"must be {least} to {MAX_TOKENS}")
    return int(number)


def _id(value: Any) -> int:
    """A number for an id; strings are hashed."""
    return (
        xxhash.xxh3_64_intdigest(value.encode())
        if isinstance(value, str)
        else _count(value, -(1 << 64))
    )
