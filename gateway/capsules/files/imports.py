"""Capsules on their way in: verified as they come, spooled, and lent to the worker that gets them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from threading import Lock
from typing import Final, NamedTuple, TypeVar

from msgspec import structs

from mallee.gateway.capsules.files.record import (
    MAX_BLOCKS,
    MAX_PAYLOAD_NBYTES,
    check_numbers,
    identity_of,
    received,
)
from mallee.gateway.capsules.files.spool import Spool, SpoolReader, Spools
from mallee.protocol.codec import encode
from mallee.protocol.errors import IncompatibleCapsule, UnknownCapsule
from mallee.protocol.messages import Holder
from mallee.protocol.model import ModelSpec
from mallee.worker.capsules.record import CapsuleRecord
from mallee.worker.kv.watch import Rows
from mallee.worker.storage.export import ExportReader
from mallee.worker.transfer.values import Ask, Loan

LIFE: Final = 1  # of a gateway as a holder: its names of spools are never used again
T = TypeVar("T")


class Received(NamedTuple):
    """A capsule that has come whole: its record, where its KV is lent, and the bytes of its file."""

    record: CapsuleRecord
    holder: Holder
    nbytes: int


class SpoolLender:
    """The `Lender` of what imports hold, from any thread. `draw_name()` gives names that nobody can guess."""

    def __init__(self, draw_name: Callable[[], str]) -> None:
        self._draw_name = draw_name
        self._lock = Lock()
        self._lent: dict[str, _Lent] = {}

    def __len__(self) -> int:
        return len(self._lent)

    def lend(self, ask: Ask) -> Loan:
        """Raises UnknownCapsule: that import is over; IncompatibleCapsule: weights have changed since."""
        with self._lock:
            found = self._lent.get(ask.holder.capsule)
        if found is None:
            raise UnknownCapsule(ask.holder.capsule)
        if found.identity != ask.identity:
            told = ("fingerprint", found.identity, ask.identity)
            raise IncompatibleCapsule(ask.holder.capsule, [told])
        return SpoolLoan(found.record, found.num_blocks, found.block_nbytes, found.spool.reader())

    def add(self, lent: "_Lent") -> str:
        """Lend it; its name, until `remove`."""
        name = self._draw_name()
        with self._lock:
            self._lent[name] = lent
        return name

    def remove(self, name: str) -> None:
        with self._lock:
            self._lent.pop(name, None)


class Imports:
    """The imports of one gateway. Belongs to its event loop; `pool` verifies and writes.

    `address()` is where workers read from `lender`.
    """

    def __init__(
        self,
        gateway: str,
        spools: Spools,
        pool: Executor,
        *,
        max_nbytes: int,
        lender: SpoolLender,
        address: Callable[[], Awaitable[str]],
    ) -> None:
        """A file may have `max_nbytes`."""
        self.max_nbytes = max_nbytes
        self.gateway = gateway
        self.spools = spools
        self.pool = pool
        self.lender = lender
        self.address = address

    async def begin(self, model: ModelSpec, block_size: int) -> "Import":
        """Take in one more. Raises Unavailable if there are as many as may be, StorageFailed."""
        begun = Import(self, model, block_size)
        try:
            await begun.open()
        except BaseException:
            begun.close()
            raise
        return begun


class _Lent(NamedTuple):
    """A capsule that is lent."""

    record: bytes
    identity: str
    num_blocks: int
    block_nbytes: int
    spool: Spool


class SpoolLoan:
    """A `Loan` of what a spool holds."""

    def __init__(
        self, record: bytes, num_blocks: int, block_nbytes: int, reader: SpoolReader
    ) -> None:
        self.record = record
        self.num_blocks = num_blocks
        self.block_nbytes = block_nbytes
        self._reader = reader

    def read(self, places: Sequence[int], rows: Rows) -> None:
        for place, row in zip(places, rows, strict=True):
            self._reader.read(place * self.block_nbytes, row)

    def close(self) -> None:
        self._reader.close()


class Import:
    """One capsule that comes as the bytes of a file. Belongs to one event loop; `close` must follow."""

    def __init__(self, imports: Imports, model: ModelSpec, block_size: int) -> None:
        self._imports = imports
        self._spool: Spool | None = None
        self._model = model
        self._block_size = block_size
        self._lock = Lock()  # of the spool and the reader, which one thread at a time uses
        self._name = ""
        self._is_closed = False
        self._num_blocks = 0
        self._reader = ExportReader(
            identity_of(model, block_size),
            model.block_nbytes(block_size),
            max_payload_nbytes=MAX_PAYLOAD_NBYTES,
            max_blocks=MAX_BLOCKS,
        )
        self.nbytes = 0

    async def open(self) -> None:
        """Have a place for it. Raises Unavailable, StorageFailed."""
        await self._run(self._open)

    async def feed(self, data: bytes) -> None:
        """The next bytes. Raises CorruptExport, IncompatibleCapsule, StorageError."""
        self.nbytes += len(data)
        await self._run(lambda: self._feed(data))

    async def finish(self) -> Received:
        """The capsule, which is lent until this is closed. Raises as `feed`; ContextLengthExceeded."""
        record = await self._run(self._read)
        address = await self._imports.address()
        assert self._spool is not None, "open comes first"
        lent = _Lent(
            encode(structs.replace(record, fingerprint=self._model.identity)),
            self._model.identity,
            self._num_blocks,
            self._model.block_nbytes(self._block_size),
            self._spool,
        )
        self._name = self._imports.lender.add(lent)
        num = record.num_computed
        holder = Holder(self._imports.gateway, LIFE, address, num, self._name)
        return Received(record, holder, self.nbytes)

    def close(self) -> None:
        """Lend it no more, and free its room. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._imports.lender.remove(self._name)
            with suppress(
                RuntimeError
            ):  # the gateway is closed, and the file ends with its process
                self._imports.pool.submit(self._end)

    def _open(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._spool = self._imports.spools.open()

    def _feed(self, data: bytes) -> None:
        with self._lock:
            if self._is_closed:
                return
            assert self._spool is not None, "open comes first"
            for block in self._reader.feed(data):
                check_numbers(block.data, self._num_blocks, self._model)
                self._spool.append(block.data)
                self._num_blocks += 1

    def _read(self) -> CapsuleRecord:
        with self._lock:
            self._reader.finish()
            payload = self._reader.payload
            return received(payload, self._num_blocks, self._model, self._block_size)

    def _end(self) -> None:
        with self._lock:
            if self._spool is not None:
                self._spool.close()

    async def _run(self, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._imports.pool, work)
