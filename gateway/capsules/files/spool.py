"""Files that hold what is imported until its worker has it. Without a name, they end with their process."""

import errno
import os
import tempfile
from pathlib import Path
from threading import Lock
from typing import Final

from mallee.protocol.errors import StorageFailed, StorageFull, Unavailable
from mallee.worker.kv.watch import Row

MAX_SPOOLS: Final = 4
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_WHAT: Final = "the spool of imports (imports.folder, imports.spool_gib)"


class Spools:
    """The spools of a process, in `folder` (None: that of temporary files), of `max_nbytes` together.

    From any thread.
    """

    def __init__(self, folder: Path | None, max_nbytes: int, *, most: int = MAX_SPOOLS) -> None:
        self._folder = folder
        self._max_nbytes = max_nbytes
        self._most = most
        self._lock = Lock()
        self._num = self._nbytes = 0

    @property
    def num_open(self) -> int:
        return self._num

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return self._nbytes

    def open(self) -> "Spool":
        """An empty spool. Raises Unavailable if there are as many as may be, StorageFailed."""
        with self._lock:
            if self._num >= self._most:
                raise Unavailable(f"{self._most} capsules are being imported already; retry later")
            self._num += 1
        try:
            with tempfile.TemporaryFile(dir=self._folder, buffering=0) as unnamed:
                return Spool(self, os.dup(unnamed.fileno()))
        except OSError as error:
            with self._lock:
                self._num -= 1
            raise _failure("open", error, 0) from error

    def take(self, nbytes: int) -> None:
        """Reserve bytes. Raises StorageFull."""
        with self._lock:
            if self._nbytes + nbytes > self._max_nbytes:
                raise StorageFull(_WHAT, nbytes, self._nbytes, self._max_nbytes)
            self._nbytes += nbytes

    def give_back(self, nbytes: int) -> None:
        """One spool is closed, of so many bytes."""
        with self._lock:
            self._nbytes -= nbytes
            self._num -= 1


class Spool:
    """Bytes that are only ever appended. One thread appends; any may read."""

    def __init__(self, spools: Spools, descriptor: int) -> None:
        self._spools = spools
        self._descriptor = descriptor
        self._lock = Lock()
        self._is_closed = False
        self.nbytes = 0

    def append(self, data: bytes) -> None:
        """Raises StorageFull, StorageFailed."""
        self._spools.take(len(data))
        begin, self.nbytes = self.nbytes, self.nbytes + len(data)
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._descriptor, memoryview(data)[done:], begin + done)
        except OSError as error:
            raise _failure("write", error, len(data)) from error

    def reader(self) -> "SpoolReader":
        """A reader, which reads on also when this is closed."""
        with self._lock:
            if self._is_closed:
                raise StorageFailed("read", "an import", 0, "it is over")
            return SpoolReader(os.dup(self._descriptor))

    def close(self) -> None:
        """Idempotent. The room on disk is free when the last reader is closed, too."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            os.close(self._descriptor)
        self._spools.give_back(self.nbytes)


class SpoolReader:
    """Reads a spool. One thread reads; any may close it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = Lock()
        self._is_closed = False

    def read(self, begin: int, row: Row) -> None:
        """Fill `row` with the bytes from `begin` on. Raises StorageFailed."""
        view, done = row.data, 0
        with self._lock:
            if self._is_closed:
                raise StorageFailed("read", "an import", 0, "it is over")
            try:
                while done < len(view):
                    num = os.preadv(self._descriptor, [view[done:]], begin + done)
                    if not num:
                        raise StorageFailed("read", "an import", 0, "it ends too early")
                    done += num
            except OSError as error:
                raise _failure("read", error, 0) from error

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._descriptor)


def _failure(operation: str, error: OSError, nbytes: int) -> StorageFull | StorageFailed:
    if error.errno in _FULL:
        return StorageFull(_WHAT, nbytes)
    return StorageFailed(operation, "an import", error.errno or 0, error.strerror or str(error))
