"""The files of a volume as objects of any store that fsspec knows (S3, GCS, its memory and local ones).

The catalogue is in this process's memory, and is put whole whenever a capsule becomes durable or ceases to
be: about a hundred bytes for each block of the volume. What was cached since then is lost with a process that
is killed.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import EIO
from typing import Any, Final

from mallee.worker.storage.files import ASIDE, CATALOGUE, EARLIER
from mallee.worker.storage.format import Piece

_BLOCKS: Final = "blocks"
_AT_ONCE: Final = 16  # blocks asked for in one call


class ObjectStore:
    """A prefix of an fsspec file system, which one worker uses.

    An object is put whole, and is durable when the call is back. Stores have no locks: two workers on one
    prefix overwrite each other's.
    """

    def __init__(self, filesystem: Any, root: str) -> None:
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self._catalogue: sqlite3.Connection | None = None
        self._numbers = [0]  # of the catalogues that may be there, of which the last one counts

    @classmethod
    def at(cls, url: str, **options: Any) -> "ObjectStore":
        """The store behind `url` (`s3://bucket/prefix`, `memory://prefix`). Needs fsspec."""
        import fsspec  # brings asyncio, and is needed for object stores only

        filesystem, root = fsspec.url_to_fs(url, **options)
        return cls(filesystem, root)

    @property
    def place(self) -> str:
        return str(self._filesystem.unstrip_protocol(self._root))

    def acquire(self) -> None:
        with _as_os_error():
            for folder in (CATALOGUE, _BLOCKS):
                self._filesystem.makedirs(f"{self._root}/{folder}", exist_ok=True)

    def release(self) -> None:
        if self._catalogue is not None:
            self._catalogue.close()
        self._filesystem.invalidate_cache()

    def connect(self) -> sqlite3.Connection:
        catalogue = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._catalogue = catalogue
        self._numbers = sorted(int(name, 16) for name in self._names(CATALOGUE)) or [0]
        if self._numbers[-1]:
            with _as_os_error():
                data = self._filesystem.cat_file(self._newest)
            stored = sqlite3.connect(":memory:")
            try:
                stored.deserialize(data)
                stored.backup(catalogue)
            finally:
                stored.close()
        return catalogue

    def save(self, catalogue: sqlite3.Connection) -> None:
        self._numbers.append(self._numbers[-1] + 1)
        with _as_os_error():
            self._filesystem.pipe_file(self._newest, catalogue.serialize())
        while len(self._numbers) > 1:
            with suppress(OSError), _as_os_error():
                self._filesystem.rm_file(self._catalogue_path(self._numbers.pop(0)))

    def set_aside(self) -> None:
        with _as_os_error():
            self._filesystem.mv(self._newest, f"{self._root}/{ASIDE}")
        self._remove_blocks("")

    def earlier(self) -> list[str]:
        return [f"{self.place}/{EARLIER}/{name}" for name in sorted(self._names(EARLIER))]

    def write(self, identity: int, slots: Sequence[int], rows: Sequence[Piece]) -> None:
        paths = [self._path(identity, slot) for slot in slots]
        with _as_os_error():
            self._filesystem.pipe(dict(zip(paths, map(bytes, rows), strict=True)))

    def sync(self, identity: int) -> None:
        """Nothing to do."""

    def read(
        self, identity: int, slots: Sequence[int], into: Sequence[memoryview]
    ) -> Iterator[int | OSError]:
        for i in range(0, len(slots), _AT_ONCE):
            paths = [self._path(identity, slot) for slot in slots[i : i + _AT_ONCE]]
            with _as_os_error():
                found = self._filesystem.cat(paths, on_error="return")
            for path, row in zip(paths, into[i : i + _AT_ONCE], strict=True):
                match found[path]:
                    case FileNotFoundError():
                        yield 0
                    case Exception() as error:
                        yield _os_error(error)
                    case data:
                        row[: len(data)] = data[: len(row)]
                        yield len(data)

    def remove(self, identity: int) -> None:
        self._remove_blocks(f"{identity}-")

    def _remove_blocks(self, prefix: str) -> None:
        names = [name for name in self._names(_BLOCKS) if name.startswith(prefix)]
        with _as_os_error():
            if names:
                self._filesystem.rm([f"{self._root}/{_BLOCKS}/{name}" for name in names])

    @property
    def _newest(self) -> str:
        return self._catalogue_path(self._numbers[-1])

    def _catalogue_path(self, number: int) -> str:
        return f"{self._root}/{CATALOGUE}/{number:016x}"

    def _path(self, identity: int, slot: int) -> str:
        return f"{self._root}/{_BLOCKS}/{identity}-{slot:08x}"

    def _names(self, folder: str) -> list[str]:
        """The names of the objects in a folder."""
        with _as_os_error():
            self._filesystem.invalidate_cache()
            try:
                found = self._filesystem.ls(f"{self._root}/{folder}", detail=False)
            except FileNotFoundError:  # stores without folders, before the first object
                return []
        return [name.rpartition("/")[2] for name in found if not name.endswith("/")]


@contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # stores raise what their own libraries do
        raise _os_error(error) from error


def _os_error(error: Exception) -> OSError:
    if isinstance(error, OSError):
        return error
    return OSError(EIO, f"{type(error).__name__}: {error}")
