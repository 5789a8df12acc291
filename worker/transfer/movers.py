"""Carries out moves, in threads beside the steps or at once: copies blocks batch by batch between any two
places, and asks peers for loans.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Final

from mallee.protocol.errors import (
    BlocksMissing,
    CorruptExport,
    IncompatibleCapsule,
    MalleeError,
)
from mallee.worker.kv.pool import runs
from mallee.worker.kv.watch import KVMemory, Rows
from mallee.worker.transfer.disk import DiskStore, Record
from mallee.worker.transfer.values import (
    BATCH_BLOCKS,
    DEVICE,
    DISK,
    HOST,
    PEER,
    TIER_NAMES,
    Adopt,
    Ask,
    Forget,
    Lender,
    Loan,
    Move,
    Moved,
    Question,
    Transfer,
)

NUM_LANES: Final = {HOST: 1, DISK: 1, PEER: 4}
"""Threads of each tier: one peer that answers late does not hold up what others lend."""
NUM_ASKING: Final = 4
"""Threads for questions to peers alone. One may wait until another loan is over: pulls go on meanwhile."""


class Pace:
    """Has those who move bytes wait, so that together they move at most `bytes_s` (0: any) a second."""

    def __init__(
        self, bytes_s: float, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        self._bytes_s = bytes_s
        self._clock = clock
        self._sleep = sleep
        self._free_at = 0.0
        self._lock = Lock()

    def spent(self, nbytes: int) -> None:
        """So many bytes were moved: return when more may be."""
        if not self._bytes_s:
            return
        with self._lock:
            now = self._clock()
            self._free_at = max(now, self._free_at) + nbytes / self._bytes_s
            wait_s = self._free_at - now
        self._sleep(wait_s)


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
        evicted, lost = self._disk.take_lost()
        return Moved(move, num, seconds, error, tuple(evicted), tuple(lost), record=record)

    def _ask(self, ask: Ask) -> Loan:
        assert self.peers is not None, "there are no peers"
        loan, nbytes = self.peers.lend(ask), self.memory.block_nbytes
        if loan.num_blocks and loan.block_nbytes != nbytes:
            loan.close()
            sizes = ("bytes of a block", str(loan.block_nbytes), str(nbytes))
            raise IncompatibleCapsule(ask.holder.capsule, [sizes])
        return loan

    def _copy(self, move: Transfer) -> tuple[int, MalleeError | None]:
        """The number of leading blocks that have arrived, and the reason why not all have.

        Raises MalleeError: none has.
        """
        (tier, ids, *_), (target, there, *_) = move.source, move.target
        if (tier, target) == (DEVICE, HOST):
            self._unfilled.update(there)
            for slots, blocks, rows in self._in_memory(there, ids):
                self.memory.read(blocks, rows, move.after)
                self._unfilled.difference_update(slots)
        elif (tier, target) == (HOST, DEVICE):
            if missing := self._unfilled.intersection(ids):
                raise BlocksMissing(len(missing), len(ids), min(missing))
            for _, blocks, rows in self._in_memory(ids, there):
                self.memory.write(blocks, rows, move.after)
        else:
            return self._copy_staged(move)
        return move.num_blocks, None

    def _in_memory(
        self, slots: tuple[int, ...], blocks: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], Rows]]:
        """Slots, blocks, and the rows of the slots, batch by batch: those whose slots adjoin pass at once."""
        pairs = sorted(zip(slots, blocks, strict=True))
        for part in runs([slot for slot, _ in pairs], BATCH_BLOCKS):
            own, there = zip(*pairs[part], strict=True)
            yield own, there, self.arena[own[0] : own[-1] + 1]
            self._pause(len(own))

    def _copy_staged(self, move: Transfer) -> tuple[int, MalleeError | None]:
        """As `_copy`, to or from disk, or from a peer. Raises nothing before the record."""
        source, target, done = move.source, move.target, 0
        with self._staged() as staged:
            for i in range(0, move.num_blocks, BATCH_BLOCKS):
                ids, there = source.ids[i : i + BATCH_BLOCKS], target.ids[i : i + BATCH_BLOCKS]
                rows = staged[: len(ids)]
                try:
                    num, error = self._get(move, ids, there, rows)
                    if target.tier == DISK:
                        own = [self.arena[slot] for slot in ids] if source.tier == HOST else rows
                        self._disk.put(there, [row.data for row in own])
                    elif num:
                        self.memory.write(there[:num], rows[:num], move.after)
                except MalleeError as failure:
                    return done, failure
                done += num
                if num < len(ids):
                    return done, error
                self._pause(num)
        if move.record is not None:
            name, payload, keys, owner, is_kept = move.record
            self._disk.commit(name, payload, keys, owner=owner, is_kept=is_kept)
        return done, None

    def _get(
        self, move: Transfer, ids: tuple[int, ...], there: tuple[int, ...], rows: Rows
    ) -> tuple[int, MalleeError | None]:
        """Fill the first of `rows` for `there`: how many, and the reason why not the next.

        Raises MalleeError.
        """
        tier, _, loan, is_foreign = move.source
        if tier == DISK:
            return self._disk.get(ids, [row.data for row in rows])
        if tier == DEVICE:
            self.memory.read(ids, rows, move.after)
        if loan is not None:
            loan.read(ids, rows)
            assert move.target.tier == DEVICE, "a loan goes to the device"
            if is_foreign and not self.memory.are_numbers(there, rows):
                return 0, CorruptExport("a block", "it has values that are no numbers")
        return len(ids), None  # of host memory they are in its own rows

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


class Mover:
    """Carries out each move before `start` returns: for one thread, and for what must be alike.

    Others do so beside the steps; those of host memory, and of disk, in order.
    """

    is_beside = False
    """Whether evictions take their time beside the steps."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._done: deque[Moved] = deque()
        self._notify: Callable[[], None] = lambda: None

    def start(self, move: Move) -> Moved | None:
        """The outcome of an eviction, if it is there at once: the next needs the room. Else `done` has it."""
        moved = self._carrier.carry_out(move)
        if isinstance(move, Transfer) and move.is_eviction:
            return moved
        self._done.append(moved)
        return None

    def done(self) -> Sequence[Moved]:
        """The moves that ended since the last call."""
        return [self._done.popleft() for _ in range(len(self._done))]

    @property
    def has_done(self) -> bool:
        """Whether `done` would return any."""
        return bool(self._done)

    def notify(self, call: Callable[[], None]) -> None:
        """Have `call` made, from any thread, whenever a move ends that went on beside its starter."""
        self._notify = call

    def close(self) -> None:
        """Give up what has not begun, wait for what has, and end the loans that nobody took."""
        for moved in self._done:
            if moved.loan is not None:
                moved.loan.close()


class ThreadedMover(Mover):
    """A mover with threads for each tier (`NUM_LANES`), and some for questions to peers (`NUM_ASKING`).

    A tier without moves has none.
    """

    is_beside = True

    def __init__(self, carrier: Carrier, name: str) -> None:
        super().__init__(carrier)
        self._lanes = {
            tier: ThreadPoolExecutor(num, thread_name_prefix=f"{TIER_NAMES[tier]} of {name}")
            for tier, num in NUM_LANES.items()
        }
        self._asking = ThreadPoolExecutor(
            NUM_ASKING, thread_name_prefix=f"questions to peers of {name}"
        )
        self._failure: BaseException | None = None

    def start(self, move: Move) -> None:
        lane = self._asking if isinstance(move, Question) else self._lanes[move.tier]
        lane.submit(self._carry_out, move)

    def _carry_out(self, move: Move) -> None:
        try:
            self._done.append(self._carrier.carry_out(move))
        except BaseException as failure:  # our bug: raised where the engine takes its results
            self._failure = failure
        self._notify()

    def done(self) -> Sequence[Moved]:
        if self._failure is not None:
            raise self._failure
        return super().done()

    @property
    def has_done(self) -> bool:
        return bool(self._done) or self._failure is not None

    def close(self) -> None:
        for lane in (self._asking, *self._lanes.values()):
            lane.shutdown(wait=True, cancel_futures=True)
        super().close()
