"""Capsules' files on this machine: written whole or not at all, and read in pieces; bytes are told."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias

File: TypeAlias = str | os.PathLike[str] | BinaryIO
"""A path, or a file that is open for bytes."""

Progress: TypeAlias = Callable[[int, int | None], None]
"""Called with the bytes so far, and of the whole where that is known."""

PIECE_NBYTES: Final = 1 << 20


class Counted:
    """Counts bytes that pass."""

    def __init__(self, total: int | None, progress: Progress | None) -> None:
        self.nbytes = 0
        self._total = total
        self._progress = progress

    def add(self, nbytes: int) -> None:
        self.nbytes += nbytes
        if self._progress is not None:
            self._progress(self.nbytes, self._total)


@contextmanager
def written(target: File) -> Iterator[BinaryIO]:
    """`target`, to write to; a path has its file only when all of it is written."""
    if not isinstance(target, str | os.PathLike):
        yield target
        return
    path = Path(target)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            part.unlink()
        raise


@contextmanager
def opened(source: File) -> Iterator[BinaryIO]:
    """`source`, to read from."""
    if not isinstance(source, str | os.PathLike):
        yield source
        return
    with Path(source).open("rb") as file:
        yield file


def length(file: BinaryIO) -> int | None:
    """Bytes from its position on; None if that can't be known."""
    try:
        return os.fstat(file.fileno()).st_size - file.tell()
    except (OSError, AttributeError):
        return None


def file_headers(total: int | None) -> dict[str, str]:
    """Headers of a request whose body is a file of so many bytes."""
    headers = {"Content-Type": "application/octet-stream"}
    return headers if total is None else {**headers, "Content-Length": str(total)}


def file_nbytes(headers: Mapping[str, str]) -> int | None:
    """Bytes of the file that an answer with `headers` is."""
    declared = headers.get("content-length", "")
    return int(declared) if declared.isdecimal() else None
