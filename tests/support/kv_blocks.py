"""A lender of made-up blocks, and a proxy that mangles what passes between it and a client."""

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from mallee.protocol.errors import IncompatibleCapsule, UnknownCapsule
from mallee.protocol.messages import Holder
from mallee.worker.kv.watch import Row, Rows
from mallee.worker.transfer.values import Ask

NBYTES = 1000
IDENTITY = "a model"
CAPSULE = "kept"
RECORD = b"its record"


def block(key: int, nbytes: int = NBYTES) -> Row:
    return np.random.default_rng(key).integers(0, 256, nbytes, np.uint8)


def ask(address: str, keys: Sequence[int], capsule: str = "", identity: str = IDENTITY) -> Ask:
    return Ask(Holder("w0", 1, address, 0, capsule), tuple(keys), identity)


class MadeBlocks:
    """Blocks of the keys asked for, each made from its key."""

    def __init__(self, lender: "MadeLender", keys: Sequence[int], record: bytes) -> None:
        self._lender = lender
        self._keys = keys
        self.record = record
        self.num_blocks = len(keys)
        self.block_nbytes = lender.nbytes

    def read(self, places: Sequence[int], rows: Rows) -> None:
        self._lender.before_read()
        for place, row in zip(places, rows, strict=True):
            row[:] = block(self._keys[place], self.block_nbytes)

    def close(self) -> None:
        self._lender.open.remove(self)


class MadeLender:
    """A `Lender` of any keys below 1000, and of one capsule, which has blocks 0 to 9."""

    def __init__(self, nbytes: int = NBYTES) -> None:
        self.nbytes = nbytes
        self.open: list[MadeBlocks] = []
        self.before_read: Callable[[], None] = lambda: None
        self.before_loan: Callable[[], None] = lambda: None

    def lend(self, ask: Ask) -> MadeBlocks:
        self.before_loan()
        if ask.identity != IDENTITY:
            raise IncompatibleCapsule(ask.holder.capsule, [("model", IDENTITY, ask.identity)])
        keys, record = ask.keys, b""
        if ask.holder.capsule:
            if ask.holder.capsule != CAPSULE:
                raise UnknownCapsule(ask.holder.capsule)
            keys, record = tuple(range(10)), RECORD
        loan = MadeBlocks(self, [key for key in keys if key < 1000], record)
        self.open.append(loan)
        return loan


Mangle = Callable[[bytes], bytes | None]
"""Bytes as they go on; None: the connection is cut."""


class Between:
    """Passes connections at `path` on to `target`, through `up` (to the server) and `down`."""

    def __init__(self, path: Path, target: str, up: Mangle, down: Mangle) -> None:
        self.address = f"node=n0;unix:{path}"
        self._target = target
        self._ways = up, down
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                one, _ = self._listener.accept()
                other = socket.socket(socket.AF_UNIX)
                other.connect(self._target)
                self._ends += (one, other)
                for ends, mangle in zip(((one, other), (other, one)), self._ways, strict=True):
                    thread = threading.Thread(target=self._pass, args=(*ends, mangle), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pass(self, source: socket.socket, target: socket.socket, mangle: Mangle) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if (passed := mangle(data)) is None:
                    break
                target.sendall(passed)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for end in (self._listener, *self._ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        for end in (self._listener, *self._ends):
            end.close()


def as_it_is(data: bytes) -> bytes:
    return data


class At:
    """Mangles the byte that comes `offset`-th: flips a bit of it, or cuts there."""

    def __init__(self, offset: int, *, is_cut: bool) -> None:
        self._left = offset
        self._is_cut = is_cut
        self.is_done = False

    def __call__(self, data: bytes) -> bytes | None:
        here, self._left = self._left, self._left - len(data)
        if not 0 <= here < len(data):
            return None if self.is_done and self._is_cut else data
        self.is_done = True
        if self._is_cut:
            return None
        return data[:here] + bytes([data[here] ^ 0x10]) + data[here + 1 :]


@contextmanager
def nothing_left() -> Iterator[None]:
    """Raises AssertionError if a thread or a file descriptor more is there at the end."""
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    yield
    left = [t for t in threading.enumerate() if t not in threads]
    for thread in left:
        thread.join(5)
    assert not [thread.name for thread in left if thread.is_alive()]
    assert len(os.listdir("/proc/self/fd")) == files
