"""Carries out moves: copies blocks batch by batch between any two places, and reads loans of peers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from mallee.protocol.errors import (
    BlocksMissing,
    CorruptExport,
    IncompatibleCapsule,
    MalleeError,
)
from mallee.worker.kv.pool import runs
from mallee.worker.kv.watch import KVMemory, Rows
from mallee.worker.transfer.disk import DiskStore, Record
from mallee.worker.transfer.peers import Ask, Lender, Loan
from mallee.worker.transfer.values import (
    BATCH_BLOCKS,
    DISK,
    Adopt,
    Device,
    Disk,
    Forget,
    Host,
    Move,
    Moved,
    Peer,
    Question,
    Transfer,
)


@dataclass(slots=True)
class Carrier:
    """Every mover of real bytes has one, and calls it from several threads: at most one for host memory, one
    for the disk, any number for peers.
    """

    memory: KVMemory
    arena: Rows  # [slots, block_nbytes]
    disk: DiskStore | None
    clock: Callable[[], float]
    pause: Callable[[int], None] = lambda nbytes: None
    """Called with its bytes after each batch, while moves give way."""
    peers: Lender | None = None
    gives_way: bool = field(default=False, init=False)  # answers are drawn meanwhile
    _loans: set[Loan] = field(default_factory=set, init=False)
    _staging: list[Rows] = field(default_factory=list, init=False)  # in no use
    _unfilled: set[int] = field(default_factory=set, init=False)  # slots, by a copy that failed

    def carry_out(self, move: Move) -> Moved:
        """Do all of `move`; what fails comes back as its `error`."""
        began, num = self.clock(), 0
        error: MalleeError | None = None
        loan: Loan | None = None
        record: Record | None = None
        try:
            match move:
                case Transfer():
                    num, error = self._copy(move)
                case Question(ask=ask):
                    loan = self._ask(ask)
                    num = loan.num_blocks
                case Forget(name=name):
                    self._disk.drop(name)
                case Adopt(other=other, name=name):
                    record = self._disk.take(other, name)
        except MalleeError as failure:
            error = failure
        seconds = self.clock() - began
        if move.tier != DISK:
            return Moved(move, num, seconds, error, loan=loan)
        lost = self._disk.take_lost()
        gone = tuple(lost.keys), tuple(lost.capsules)
        return Moved(move, num, seconds, error, *gone, record=record)

    def end_loan(self, loan: Loan) -> None:
        """Nothing more is read of `loan`. From any thread."""
        self._loans.discard(loan)
        loan.close()

    def close(self) -> None:
        """End all loans, also those that are read just now. From any thread."""
        for loan in list(self._loans):
            self.end_loan(loan)

    def _ask(self, ask: Ask) -> Loan:
        assert self.peers is not None, "there are no peers"
        loan, nbytes = self.peers.lend(ask), self.memory.block_nbytes
        if loan.num_blocks and loan.block_nbytes != nbytes:
            loan.close()
            sizes = ("bytes of a block", str(loan.block_nbytes), str(nbytes))
            raise IncompatibleCapsule(ask.holder.capsule, [sizes])
        self._loans.add(loan)
        return loan

    def _copy(self, move: Transfer) -> tuple[int, MalleeError | None]:
        """The number of leading blocks that have arrived, and the reason why not all have.

        Raises MalleeError: none has.
        """
        match move:
            case Transfer(source=Device(blocks), target=Host(slots)):
                self._unfilled.update(slots)
                for filled, own, rows in self._in_memory(slots, blocks):
                    self.memory.read(own, rows, move.after)
                    self._unfilled.difference_update(filled)
            case Transfer(source=Host(slots), target=Device(blocks)):
                if missing := self._unfilled.intersection(slots):
                    raise BlocksMissing(len(missing), len(slots), min(missing))
                for _, own, rows in self._in_memory(slots, blocks):
                    self.memory.write(own, rows, move.after)
            case Transfer(target=Disk() as disk):
                self._write(move, disk)
            case _:
                return self._fetch(move)
        return move.num_blocks, None

    def _in_memory(
        self, slots: tuple[int, ...], blocks: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], Rows]]:
        """Slots, blocks, and the rows of the slots, batch by batch: those whose slots adjoin pass at once."""
        pairs = sorted(zip(slots, blocks, strict=True))
        for part in runs([slot for slot, _ in pairs], BATCH_BLOCKS):
            own, there = zip(*pairs[part], strict=True)
            yield own, there, self.arena[own[0] : own[-1] + 1]
            self._pause(part.stop - part.start)

    def _write(self, move: Transfer, disk: Disk) -> None:
        """Have the blocks of `move` on disk, and then the record."""
        with self._staged() as staged:
            for part in _batches(move):
                match move.source:
                    case Host(slots):
                        rows = [self.arena[slot] for slot in slots[part]]
                    case source:
                        rows = list(staged[: part.stop - part.start])
                        self.memory.read(source.ids[part], staged[: len(rows)], move.after)
                self._disk.put(disk.ids[part], [row.data for row in rows])
                self._pause(len(rows))
        if (record := disk.record) is not None:
            name, payload, keys, owner, is_kept = record
            self._disk.commit(name, payload, keys, owner=owner, is_kept=is_kept)

    def _fetch(self, move: Transfer) -> tuple[int, MalleeError | None]:
        """As `_copy`, from disk or from a peer to the device. Raises nothing."""
        done = 0
        with self._staged() as staged:
            for part in _batches(move):
                rows = staged[: part.stop - part.start]
                try:
                    num, error = self._get(move.source, move.source.ids[part], rows)
                    if num:
                        there = move.target.ids[part.start : part.start + num]
                        self.memory.write(there, rows[:num], move.after)
                except MalleeError as failure:
                    return done, failure
                done += num
                if num < len(rows):
                    return done, error
                self._pause(num)
        return done, None

    def _get(
        self, source: Device | Host | Disk | Peer, ids: tuple[int, ...], rows: Rows
    ) -> tuple[int, MalleeError | None]:
        """Fill the first of `rows`: how many, and the reason why not the next. Raises MalleeError."""
        if not isinstance(source, Peer):
            got = self._disk.get(ids, [row.data for row in rows])
            return got.num_blocks, got.error
        source.loan.read(ids, rows)
        if source.is_foreign and not self.memory.are_numbers(rows):
            return 0, CorruptExport("a block", "it has values that are no numbers")
        return len(ids), None

    def _pause(self, num_blocks: int) -> None:
        if self.gives_way:
            self.pause(num_blocks * self.memory.block_nbytes)

    @property
    def _disk(self) -> DiskStore:
        assert self.disk is not None, "there is no disk"
        return self.disk

    @contextmanager
    def _staged(self) -> Iterator[Rows]:
        """Rows for the blocks of one batch, the caller's alone."""
        try:
            rows = self._staging.pop()
        except IndexError:
            rows = self.memory.new_rows(BATCH_BLOCKS)
        try:
            yield rows
        finally:
            self._staging.append(rows)


def _batches(move: Transfer) -> Iterator[slice]:
    """Blocks of `move` that pass at once."""
    for i in range(0, move.num_blocks, BATCH_BLOCKS):
        yield slice(i, min(i + BATCH_BLOCKS, move.num_blocks))
