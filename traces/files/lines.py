"""Lines of a trace file, plain, gzip or zstd, with their numbers."""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar, cast

import msgspec

from mallee.protocol.errors import CodecError, ConfigError
from mallee.traces.files.packed import PackedError, ZstdReader
from mallee.traces.files.problems import Problems

T = TypeVar("T")

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
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
    """The lines of a trace file. Malformed ones are counted in `problems`, or errors without it."""

    path: Path
    problems: Problems | None = None

    def numbered(self) -> Iterator[tuple[int, bytes]]:
        """(number from 1, line) of each line that is not blank.

        Damaged gzip or zstd: raises CodecError, or ends there if there are `problems` to say so.
        """
        number = 0
        with open_trace(self.path) as lines:
            try:
                for number, line in enumerate(lines, 1):
                    if number == 1:
                        line = line.removeprefix(_BOM)
                    if line and not line.isspace():
                        yield number, line
            except (gzip.BadGzipFile, EOFError, zlib.error, PackedError) as error:
                what = f"{self.path}: damaged after line {number}: {error}"
                self.report(CodecError(what, line=number + 1, field=""))

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
