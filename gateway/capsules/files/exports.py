"""Capsules on their way out: borrowed from their workers, read ahead of their readers by a run of blocks."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import Executor, Future
from contextlib import suppress
from threading import Lock
from typing import Final

import numpy as np

from mallee.gateway.capsules.files.record import SENT_AS, as_sent, identity_of
from mallee.protocol.codec import encode
from mallee.protocol.errors import CorruptKV, Unavailable
from mallee.protocol.messages import Holder
from mallee.protocol.model import ModelSpec
from mallee.worker.capsules.record import decode_record
from mallee.worker.storage.export import export_nbytes, write_export
from mallee.worker.storage.format import Rows
from mallee.worker.transfer.values import Ask, Lender, Loan

MAX_EXPORTS: Final = 8
RUN_NBYTES: Final = 4 << 20
MAX_RUN_BLOCKS: Final = 64


class Exports:
    """The exports of one gateway. Belongs to its event loop; `pool` reads."""

    def __init__(self, lender: Lender, pool: Executor, *, most: int = MAX_EXPORTS) -> None:
        """`lender` is the way to the workers."""
        self._lender = lender
        self._pool = pool
        self._most = most
        self._open: set[Export] = set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def begin(self, holder: Holder, model: ModelSpec, block_size: int) -> "Export":
        """The export of the capsule that `holder` names, whose first bytes are here.

        Raises Unavailable if there are as many as may be; what the lender refuses with.
        """
        if len(self._open) >= self._most:
            raise Unavailable(f"{self._most} capsules are being exported already; retry later")
        export = Export(self, self._lender, Ask(holder, (), model.identity), model, block_size)
        self._open.add(export)
        try:
            await export.begin(self._pool)
        except BaseException:
            export.close()
            raise
        return export

    def ended(self, export: "Export") -> None:
        """It is closed."""
        self._open.discard(export)


class Export:
    """One capsule as the bytes of a file. Belongs to one event loop; `close` must follow.

    `nbytes`: of all of it.
    """

    def __init__(
        self, exports: Exports, lender: Lender, ask: Ask, model: ModelSpec, block_size: int
    ) -> None:
        self._exports = exports
        self._lender = lender
        self._ask = ask
        self._model = model
        self._block_size = block_size
        self._lock = Lock()  # of the loan, which one thread at a time uses
        self._loan: Loan | None = None
        self._is_closed = False
        self._pieces: Iterator[bytes] = iter(())
        self._next: Future[bytes] | None = None
        self._pool: Executor | None = None
        self.nbytes = 0

    async def begin(self, pool: Executor) -> None:
        """Borrow the capsule, and read its first bytes."""
        self._pool = pool
        self._next = pool.submit(self._open)
        await asyncio.shield(asyncio.wrap_future(self._next))

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """All bytes, once. Raises MalleeError: what follows doesn't come."""
        assert self._next is not None, "begin comes first"
        assert self._pool is not None
        while piece := await asyncio.shield(asyncio.wrap_future(self._next)):
            self._next = self._pool.submit(self._read)
            yield piece

    def close(self) -> None:
        """End the loan, after the read that is under way. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._exports.ended(self)
            if self._pool is not None:
                with suppress(RuntimeError):  # the gateway is closed: its borrower ends all loans
                    self._pool.submit(self._end)

    def _open(self) -> bytes:
        with self._lock:
            if self._is_closed:
                return b""
            self._loan = self._lender.lend(self._ask)
            self._pieces = self._runs(self._loan)
            return next(self._pieces, b"")

    def _read(self) -> bytes:
        with self._lock:
            return b"" if self._is_closed else next(self._pieces, b"")

    def _end(self) -> None:
        with self._lock:
            if self._loan is not None:
                self._loan.close()

    def _runs(self, loan: Loan) -> Iterator[bytes]:
        """The record, then runs of blocks."""
        record, size = decode_record(loan.record), loan.block_nbytes
        if size != self._model.block_nbytes(self._block_size):
            raise CorruptKV(f"blocks of {size} bytes are no KV of {self._model.name}", [])
        payload = encode(as_sent(record))
        identity = identity_of(self._model, self._block_size)
        batch = max(1, min(MAX_RUN_BLOCKS, RUN_NBYTES // size))
        self.nbytes = export_nbytes(
            identity,
            size,
            capsule=SENT_AS,
            payload=payload,
            num_blocks=loan.num_blocks,
            batch=batch,
        )

        def rows() -> Iterator[Rows]:
            for begin in range(0, loan.num_blocks, batch):
                places = range(begin, min(begin + batch, loan.num_blocks))
                run = np.empty((len(places), size), np.uint8)
                loan.read(places, run)
                yield run

        stream = write_export(
            identity,
            size,
            capsule=SENT_AS,
            payload=payload,
            keys=range(loan.num_blocks),
            rows=rows(),
        )
        waiting: list[bytes] = []
        held = 0
        for piece in stream:
            waiting.append(bytes(piece))
            held += len(piece)
            if held >= RUN_NBYTES:
                yield b"".join(waiting)
                waiting, held = [], 0
        if waiting:
            yield b"".join(waiting)
