"""Lines of a trace file, plain or gzip, with their numbers."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TypeVar, cast

import msgspec

from mallee.protocol.errors import CodecError, ConfigError

T = TypeVar("T")

_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"  # some editors begin UTF-8 with it

MAX_TOKENS = 100_000_000
"""Of a prompt or an answer: more is a slip in the file, and its blocks would not fit into memory."""


def open_trace(path: Path) -> IO[bytes]:
    """The file's bytes, unpacked if it is gzip. Raises ConfigError if it can't be opened."""
    if not path.is_file():
        if not path.exists():
            raise ConfigError(f"trace {path}: no such file; give a .jsonl or .csv, .gz or not")
        raise ConfigError(
            f"trace {path}: no plain file, and traces are read more than once; write a pipe's content"
            " into a file, of a folder give one of its files"
        )
    try:
        with path.open("rb") as file:
            is_packed = file.read(2) == _GZIP
        return cast(IO[bytes], gzip.open(path)) if is_packed else path.open("rb")
    except OSError as error:
        raise ConfigError(f"trace {path}: can't be read ({error.strerror})") from error


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) of each line that is not blank. Raises CodecError for damaged gzip."""
    number = 0
    with open_trace(path) as lines:
        try:
            for number, line in enumerate(lines, 1):
                if number == 1:
                    line = line.removeprefix(_BOM)
                if line and not line.isspace():
                    yield number, line
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise CodecError(f"{path}: damaged after line {number}: {error}") from error


def bad_line(path: Path, number: int, what: object) -> CodecError:
    """The error for line `number`, to be raised."""
    return CodecError(f"{path}, line {number}: {what}", line=number)


def decode_line(path: Path, number: int, line: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    """Raises CodecError with file, line and field."""
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise bad_line(path, number, error) from error
