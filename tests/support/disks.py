"""A disk in memory that loses power and fails on request, and blocks whose bytes follow from their key."""

import random
from collections.abc import Iterator, Sequence
from errno import EIO, ENOENT
from typing import Any

import numpy as np
import numpy.typing as npt

from mallee.worker.storage.files import FOLDERS
from mallee.worker.storage.format import Piece
from mallee.worker.storage.volume import Volume, VolumeConfig

BLOCK = 64
IDENTITY = {"weights": "abc", "weight_version": "1", "kv_dtype": "bf16", "rope": "10000"}
ROOMY = VolumeConfig(1 << 30)


def row(key: int, size: int = BLOCK) -> bytes:
    return random.Random(key).randbytes(size)


def rows(keys: Sequence[int], size: int = BLOCK) -> npt.NDArray[np.uint8]:
    found = np.empty((len(keys), size), np.uint8)
    for i, key in enumerate(keys):
        found[i] = np.frombuffer(row(key, size), np.uint8)
    return found


def read(volume: Volume, keys: Sequence[int]) -> tuple[int, Exception | None]:
    """`get`, with the bytes of the blocks that it says are good checked."""
    into = np.zeros((len(keys), BLOCK), np.uint8)
    num, error = volume.get(keys, into)
    assert (into[:num] == rows(keys[:num])).all(), "a wrong block was accepted"
    assert (error is None) == (num == len(keys))
    return num, error


def opened(files: Any, config: VolumeConfig = ROOMY, **changed: str) -> Volume:
    return Volume.open(files, {**IDENTITY, **changed}, BLOCK, config)


class Disk:
    """Files in memory. What was not made durable may be gone, cut or zeroed after `lose_power`."""

    def __init__(self, seed: int = 0) -> None:
        self.contents: dict[str, bytes] = {}
        self.durable: dict[str, bytes] = {}
        self.calls: list[str] = []
        self.fails: dict[int, int] = {}  # call by number -> errno
        self.refuses: dict[str, int] = {}  # operation -> errno
        self._random = random.Random(seed)

    place = "a disk in memory"

    def acquire(self) -> None:
        self._call("acquire")

    def release(self) -> None:
        """Nothing is kept out."""

    def sizes(self, folder: str) -> dict[str, int]:
        assert folder in FOLDERS
        return {
            name: len(data) for name, data in self.contents.items() if name.startswith(folder + "/")
        }

    def heads(self, names: Sequence[str], nbytes: int) -> Iterator[bytes | OSError]:
        for name in names:
            head = bytearray(min(nbytes, len(self.contents[name])))
            try:
                list(self.read(name, 0, [memoryview(head)]))
            except OSError as error:
                yield error
            else:
                yield bytes(head)

    def write(self, name: str, pieces: Sequence[Piece], *, is_durable: bool) -> None:
        assert name not in self.contents, "a file is written once"
        self._call("write")
        self.contents[name] = b"".join(pieces)
        if is_durable:
            self.durable[name] = self.contents[name]
            self._sync_folder(name)

    def sync(self, names: Sequence[str]) -> None:
        self._call("sync")
        for name in names:
            self.durable[name] = self.contents[name]
            self._sync_folder(name)

    def read(self, name: str, offset: int, into: Sequence[memoryview]) -> Iterator[int]:
        self._call("read")
        if name not in self.contents:
            raise FileNotFoundError(ENOENT, "it is not there", name)
        data = self.contents[name][offset:]
        done = 0
        for piece in into:
            some = data[done : done + len(piece)]
            piece[: len(some)] = some
            done += len(some)
            yield done

    def remove(self, name: str, *, is_durable: bool) -> None:
        self._call("remove")
        self.contents.pop(name, None)
        if is_durable:
            self._sync_folder(name)

    def _sync_folder(self, name: str) -> None:
        """Removals in the folder of `name` are durable too."""
        folder = name.partition("/")[0] + "/"
        for each in [n for n in self.durable if n.startswith(folder) and n not in self.contents]:
            del self.durable[each]

    def lose_power(self) -> None:
        names = sorted(self.contents.keys() | self.durable.keys())
        found = {name: self._after(name) for name in names}
        self.contents = {name: data for name, data in found.items() if data is not None}
        self.durable = dict(self.contents)

    def _after(self, name: str) -> bytes | None:
        old, new = self.durable.get(name), self.contents.get(name)
        if old is not None:
            is_removed = new is None and self._random.random() < 0.5
            return None if is_removed else old
        assert new is not None
        match self._random.randrange(4):
            case 0:
                return None
            case 1:
                return new[: self._random.randrange(len(new))]
            case 2:
                begin = self._random.randrange(len(new))
                return new[:begin] + bytes(len(new) - begin)
            case _:
                return new

    def _call(self, operation: str) -> None:
        self.calls.append(operation)
        errno = self.fails.get(len(self.calls) - 1, self.refuses.get(operation))
        if errno is not None:
            raise OSError(errno, "injected")

    def fail_next(self, errno: int = EIO, after: int = 0) -> None:
        self.fails[len(self.calls) + after] = errno
