"""Files that are there whole or not at all."""

import gzip
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, cast

from mallee.protocol.errors import ConfigError
from mallee.traces.packed import zstandard

STDOUT = "-"


@contextmanager
def whole_file(path: Path | str) -> Iterator[IO[bytes]]:
    """What is written becomes file `path` at the end; if anything fails, there is no file, or the old one.

    `.gz` and `.zst` are packed, "-" is standard output; what is no plain file (a pipe, a device) is
    written as it comes. Equal content gives equal bytes. Raises ConfigError if it can't be written.
    """
    try:
        if str(path) == STDOUT:
            sys.stdout.flush()
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
            return
        target = Path(path).resolve()  # the file behind a link is what changes
        if target.is_dir():
            raise ConfigError(f"{path}: is a folder; give a file to write")
        if target.exists() and not target.is_file():
            with target.open("wb") as file, _packing(file, target.suffix) as packing:
                yield packing
            return
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        with ExitStack() as undo:
            undo.callback(part.unlink, missing_ok=True)
            with part.open("wb") as file, _packing(file, target.suffix) as packing:
                yield packing
            part.replace(target)
            undo.pop_all()
    except OSError as error:
        raise ConfigError(f"{path}: can't be written ({error.strerror or error})") from error


@contextmanager
def _packing(file: IO[bytes], suffix: str) -> Iterator[IO[bytes]]:
    if suffix == ".gz":
        with gzip.GzipFile("", "wb", 6, file, mtime=0) as packing:
            yield cast(IO[bytes], packing)
    elif suffix == ".zst":
        packer = zstandard().ZstdCompressor(level=6)
        with packer.stream_writer(file, closefd=False) as packing:
            yield packing
    else:
        yield file
