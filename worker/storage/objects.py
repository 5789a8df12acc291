"""Files of a volume as objects of any store that fsspec knows (S3, GCS, its memory and local ones)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import EIO
from typing import Any, Final

from mallee.worker.storage.files import FOLDERS
from mallee.worker.storage.format import Piece

_AT_ONCE: Final = 1000  # headers asked for in one call


class ObjectStore:
    """A prefix of an fsspec file system, which one worker uses.

    An object is put whole by one call, and durable when the call is back: nothing is synced, whatever the
    policy. Stores have no locks: two workers on one prefix write valid files, and delete each other's.
    """

    def __init__(self, filesystem: Any, root: str) -> None:
        self._filesystem = filesystem
        self._root = root.rstrip("/")

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
            for folder in FOLDERS:
                self._filesystem.makedirs(f"{self._root}/{folder}", exist_ok=True)

    def release(self) -> None:
        self._filesystem.invalidate_cache()

    def sizes(self, folder: str) -> dict[str, int]:
        with _as_os_error():
            self._filesystem.invalidate_cache()
            try:
                found = self._filesystem.ls(f"{self._root}/{folder}", detail=True)
            except FileNotFoundError:  # stores without folders, before the first file
                return {}
        files = (each for each in found if each["type"] == "file")
        return {f"{folder}/{each['name'].rpartition('/')[2]}": each["size"] for each in files}

    def heads(self, names: Sequence[str], nbytes: int) -> Iterator[bytes | OSError]:
        for i in range(0, len(names), _AT_ONCE):
            some = names[i : i + _AT_ONCE]
            paths = [f"{self._root}/{name}" for name in some]
            with _as_os_error():  # stores that can ask for all of them at once
                heads = self._filesystem.cat_ranges(paths, 0, nbytes, on_error="return")
            for head in heads:
                match head:
                    case Exception():
                        yield _os_error(head)
                    case _:
                        yield bytes(head)

    def write(self, name: str, pieces: Sequence[Piece], *, is_durable: bool) -> None:
        path = f"{self._root}/{name}"
        try:
            with _as_os_error():
                self._filesystem.pipe_file(path, b"".join(pieces))
        except OSError:
            with suppress(OSError):  # of a local one a part may be there
                self.remove(name, is_durable=False)
            raise

    def sync(self, names: Sequence[str]) -> None:
        """Nothing to do."""

    def read(self, name: str, offset: int, into: Sequence[memoryview]) -> Iterator[int]:
        end = offset + sum(map(len, into))
        if end == offset:  # stores refuse an empty range
            return
        with _as_os_error():
            data = memoryview(self._filesystem.cat_file(f"{self._root}/{name}", offset, end))
        left = data
        for piece in into:
            some = left[: len(piece)]
            piece[: len(some)] = some
            left = left[len(some) :]
        yield len(data)

    def remove(self, name: str, *, is_durable: bool) -> None:
        with _as_os_error(), suppress(FileNotFoundError):
            self._filesystem.rm_file(f"{self._root}/{name}")


@contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # stores raise what their own libraries do
        raise _os_error(error) from error


def _os_error(error: Exception) -> OSError:
    if isinstance(error, OSError):
        return error
    return OSError(EIO, f"{type(error).__name__}: {error}")
