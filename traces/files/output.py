"""Files that are there whole or not at all."""

import gzip
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, cast

from mallee.protocol.errors import ConfigError
from mallee.traces.files.packed import zstandard

STDOUT = "-"


@contextmanager
def whole_file(path: Path | str, *, packs: bool = True) -> Iterator[IO[bytes]]:
    """A file that replaces `path` at the end; after a failure there is no file, or the old one.

    `.gz` and `.zst` are packed, unless `packs` is False. "-" is standard output; what is no plain file
    (a pipe, a device) is written as it comes. Equal content gives equal bytes. Raises ConfigError if it
    can't be written, BrokenPipeError if the reader of a pipe has gone.
    """
    try:
        if str(path) == STDOUT:
            sys.stdout.flush()
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
            return
        given = Path(path)
        with suppress(FileNotFoundError):
            given.stat()  # raises for links in a circle, unlike the calls below
        if given.is_dir():
            raise ConfigError(f"{path}: is a folder; give a file to write")
        if given.exists() and not given.is_file():
            with given.open("wb") as file, _packing(file, given.suffix if packs else "") as packing:
                yield packing
            return
        target = given.resolve()  # the file behind a link is what changes
        # Two writers of one file have a part each; the last to end wins.
        part = target.with_name(f".{target.name[:40]}.{secrets.token_hex(8)}.part")
        with ExitStack() as undo:
            undo.callback(part.unlink, missing_ok=True)
            with part.open("xb") as file, _packing(file, target.suffix if packs else "") as packing:
                yield packing
            if target.exists():
                shutil.copymode(target, part)  # keeps the permissions
            part.replace(target)
            undo.pop_all()
    except BrokenPipeError:
        raise
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
