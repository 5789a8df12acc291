"""Lines of a trace file, plain, gzip or zstd, with their numbers."""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeAlias, TypeVar, cast

import msgspec

from mallee.protocol.errors import CodecError, ConfigError
from mallee.traces.files.packed import PackedError, ZstdReader
from mallee.traces.files.problems import Problems

T = TypeVar("T")

Unroll: TypeAlias = Callable[["TraceFile", int, bytes], Iterator[Any]]
"""Makes, of a numbered line of another form, any number of JSON objects of a form that is read."""

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_document = msgspec.json.Decoder(list[msgspec.Raw] | dict[str, Any])
_BOM = b"\xef\xbb\xbf"  # some editors begin UTF-8 with it

MAX_TOKENS = 100_000_000
"""Longest prompt or answer: more is an error in the file, and its blocks would not fit into memory."""

MAX_BRANCHES = 1 << 16
"""Most answers to one prompt: more is an error in the file."""

MAX_ID_TOKENS = 1 << 16
"""Most tokens of one id: more is an error, since an id is cut into blocks and written as text."""

MAX_MS = 1e15
"""Bound of times, either way: 30,000 years, which a float resolves to about a microsecond."""


def open_trace(path: Path) -> IO[bytes]:
    """The file's bytes, unpacked if it is gzip or zstd. Raises ConfigError if it can't be opened."""
    try:
        if not path.is_file():
            raise ConfigError(f"trace {path}: {_why_no_file(path)}")
        with path.open("rb") as file:
            magic = file.read(4)
        if magic[:2] == _GZIP:
            return cast(IO[bytes], gzip.open(path))
        if magic == _ZSTD:
            return io.BufferedReader(ZstdReader(path), 1 << 20)
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"trace {path}: can't be read ({error.strerror})") from error


def _why_no_file(path: Path) -> str:
    if path.exists():
        return (
            "no plain file, and traces are read more than once; write a pipe's content into a file,"
            " of a folder give one of its files"
        )
    if str(path) == "-":
        return "standard input can't be read, for traces are read more than once; give a file"
    return "no such file; give a .jsonl or .csv, packed or not"


@dataclass(frozen=True, slots=True)
class TraceFile:
    """The lines of a trace file. Malformed ones are counted in `problems`, or errors without it.

    A file that is one JSON document has its array's entries, or its object, as lines.
    """

    path: Path
    problems: Problems | None = None
    limit: int | None = None  # so many rows are wanted
    sorts: bool = False  # rows by their times; else a time that goes back is an error
    unroll: Callable[[], Unroll] | None = None  # of a new reading; None: lines are as they are

    def numbered(self) -> Iterator[tuple[int, bytes]]:
        """(number from 1, line) of each line that is not blank, or of what it is unrolled to."""
        lines = self._lines()
        if self.unroll is None:
            yield from lines
            return
        unroll = self.unroll()
        for number, line in lines:
            try:
                for made in unroll(self, number, line):
                    yield number, msgspec.json.encode(made)
            except CodecError as error:
                self.report(error)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Damaged gzip or zstd: raises CodecError, or ends there if there are `problems` to say so."""
        number, is_first = 0, True
        with open_trace(self.path) as lines:
            try:
                for number, line in enumerate(lines, 1):
                    if number == 1:
                        line = line.removeprefix(_BOM)
                    if not line or line.isspace():
                        continue
                    if is_first and (line.lstrip()[:1] == b"[" or line.strip() == b"{"):
                        yield from self._document(number, line + lines.read())
                        return
                    is_first = False
                    yield number, line
            except (gzip.BadGzipFile, EOFError, zlib.error, PackedError) as error:
                what = f"{self.path}: damaged after line {number}: {error}"
                self.report(CodecError(what, line=number + 1, field=""))

    def _document(self, number: int, text: bytes) -> Iterator[tuple[int, bytes]]:
        """Entries of the document that begins on line `number`, each with its own first line's number.

        The lines, if it is none.
        """
        try:
            found = _document.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            lines = enumerate(text.splitlines(), number)
            yield from ((at, line) for at, line in lines if not line.isspace() and line)
            return
        at = 0
        for entry in map(bytes, found if isinstance(found, list) else [text.strip()]):
            begin = text.index(entry, at)
            number += text.count(b"\n", at, begin)
            at = begin
            yield number, entry

    def by_time(self, rows: Iterator[tuple[int, T]], time_of: Callable[[T], float]) -> Iterator[T]:
        """Rows, from (line, row), in the order of time: as they come, or sorted.

        Raises CodecError at a row that goes back, with or without `problems`: leaving such rows out could
        leave most of them out.
        """
        if self.sorts:
            yield from sorted((row for _, row in islice(rows, self.limit)), key=time_of)
            return
        last = float("-inf")
        for number, row in rows:
            at = time_of(row)
            if at < last:
                what = f"timestamp {at} is before the line above's {last}; sort the rows by it, as"
                raise self.bad(number, f"{what} `mallee trace convert` does", "timestamp")
            last = at
            yield row

    def read(self, read: Callable[[int, bytes], T]) -> Iterator[tuple[int, T]]:
        """(number from 1, what `read` makes of it) of each line; its CodecErrors are reported."""
        for number, line in self.numbered():
            try:
                value = read(number, line)
            except CodecError as error:
                self.report(error)
                continue
            yield number, value

    def decode(self, number: int, line: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
        """Raises CodecError with file, line and field."""
        try:
            return decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self.bad(number, error) from error

    def bad(self, number: int, what: object, field: str | None = None) -> CodecError:
        """The error for line `number`, to be raised. `field`: the field at fault, if `what` names none."""
        more = {} if field is None else {"field": field}
        return CodecError(f"{self.path}, line {number}: {what}", line=number, **more)

    def report(self, error: CodecError, *, is_skipped: bool = True) -> None:
        """Count `error`, or raise it where problems are not wanted."""
        if self.problems is None:
            raise error
        self.problems.add(error, is_skipped=is_skipped)
