"""Moves of blocks between tiers, as values, and the movers that carry them out.

The engine's thread starts moves and takes their results between steps; a mover may copy meanwhile. Until
a move is done the blocks and slots that it names belong to it: its starter holds them.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from mallee.protocol.errors import CorruptExport, IncompatibleCapsule, MalleeError, WorkerLost
from mallee.worker.kv.pool import runs
from mallee.worker.kv.tiers.peers import Ask, Lender, Loan
from mallee.worker.kv.watch import KVMemory, Rows

DEVICE: Final = 0
HOST: Final = 1
DISK: Final = 2
PEER: Final = 3  # another worker: it lends, nothing is put there

TIER_NAMES: Final = ("device", "host", "disk", "peer")

STAGED_BLOCKS: Final = 16
"""Blocks that pass between device and disk, or a peer, at once; their bytes are in memory twice."""

NUM_LANES: Final = {HOST: 1, DISK: 1, PEER: 4}
"""Threads of each tier: one peer that answers late does not hold up what others lend."""
NUM_ASKING: Final = 4
"""Threads for questions to peers alone. One may wait until another loan is over: pulls go on meanwhile."""


class Source(NamedTuple):
    """Bytes of the block `key` in this process: in a device block, or (block -1) in a slot of host memory."""

    key: int
    block: int
    slot: int = -1


class Restore(NamedTuple):
    """Fill device `blocks` with those of `keys`, from `slots` of host memory; without slots from disk."""

    number: int
    keys: tuple[int, ...]
    blocks: tuple[int, ...]
    slots: tuple[int, ...] = ()

    @property
    def tier(self) -> int:
        return HOST if self.slots else DISK

    @property
    def num_blocks(self) -> int:
        return len(self.keys)


class Park(NamedTuple):
    """Copy device `blocks` into `slots` of host memory."""

    number: int
    keys: tuple[int, ...]
    blocks: tuple[int, ...]
    slots: tuple[int, ...]

    @property
    def tier(self) -> int:
        return HOST

    @property
    def num_blocks(self) -> int:
        return len(self.keys)


class Spill(NamedTuple):
    """Write `sources` to disk, as far as they are not there. With a `name` that is a capsule's: `record`
    is committed after them, and they stay while it does."""

    number: int
    sources: tuple[Source, ...]
    name: str = ""
    record: bytes = b""
    keys: tuple[int, ...] = ()  # of all the capsule's blocks
    owner: str = ""  # whose budget it counts in
    is_kept: bool = True

    @property
    def tier(self) -> int:
        return DISK

    @property
    def num_blocks(self) -> int:
        return len(self.sources)


class Forget(NamedTuple):
    """Drop the record of capsule `name` from disk; its blocks stay as cache while there is room."""

    number: int
    name: str

    @property
    def tier(self) -> int:
        return DISK

    @property
    def num_blocks(self) -> int:
        return 0


class Recall(NamedTuple):
    """Ask a peer for a loan. It goes by `number` until it is repaid; `num_blocks` of `Moved` are lent."""

    number: int
    ask: Ask

    @property
    def tier(self) -> int:
        return PEER

    @property
    def num_blocks(self) -> int:
        return 0


class Pull(NamedTuple):
    """Fill device `blocks` with those at rising `places` of `loan`, one after another.

    `is_foreign`: their bytes may be anything. What holds others than numbers does not arrive.
    """

    number: int
    loan: int
    places: tuple[int, ...]
    blocks: tuple[int, ...]
    is_foreign: bool = False

    @property
    def tier(self) -> int:
        return PEER

    @property
    def num_blocks(self) -> int:
        return len(self.places)


class Repay(NamedTuple):
    """End `loan`."""

    number: int
    loan: int

    @property
    def tier(self) -> int:
        return PEER

    @property
    def num_blocks(self) -> int:
        return 0


Move: TypeAlias = Restore | Park | Spill | Forget | Recall | Pull | Repay


class Moved(NamedTuple):
    """The end of a move: of its blocks the first `num_blocks` arrived; `error` says why not all did.

    `evicted` and `lost` are capsules and blocks that the disk gave up for it, or found damaged; `record`
    is that of the capsule that a loan is of.
    """

    move: Move
    num_blocks: int
    seconds: float
    error: MalleeError | None = None
    evicted: tuple[int, ...] = ()
    lost: tuple[str, ...] = ()
    record: bytes = b""


class Read(Protocol):
    """The outcome of reading: so many leading blocks are whole; the reason why the next is not."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def error(self) -> MalleeError | None: ...


class Record(Protocol):
    """A capsule's record."""

    @property
    def payload(self) -> bytes: ...


class Lost(Protocol):
    """Blocks and capsules that are not stored any more."""

    @property
    def keys(self) -> Sequence[int]: ...

    @property
    def capsules(self) -> Sequence[str]: ...


class DiskStore(Protocol):
    """Blocks and capsule records on disk (`worker.storage`). Called from one thread; its methods may block.

    They raise MalleeError, and go on after it.
    """

    @property
    def budget_nbytes(self) -> int:
        """The bytes that it may hold; any thread may ask. 0 where blocks have none."""
        ...

    def put(self, keys: Sequence[int], rows: Sequence[memoryview]) -> int:
        """Store blocks as far as they are not there; not yet durable."""
        ...

    def get(self, keys: Sequence[int], rows: Sequence[memoryview]) -> Read:
        """Fill `rows` with the leading blocks of `keys`. Never raises."""
        ...

    def commit(
        self, capsule: str, payload: bytes, keys: Sequence[int], *, owner: str, is_kept: bool
    ) -> None:
        """Make the capsule durable: on return it outlives this process, and a power cut."""
        ...

    def drop(self, capsule: str) -> bool:
        """Forget the capsule's record; whether there was one."""
        ...

    def capsules(self) -> Sequence[str]:
        """Every capsule that is durable and of this model."""
        ...

    def load(self, capsule: str) -> Record | None:
        """The record of a capsule, verified."""
        ...

    def keys(self) -> Sequence[int]:
        """Every block that is there."""
        ...

    def take_lost(self) -> Lost:
        """Losses since the last call: evicted, or found damaged."""
        ...

    def close(self) -> None: ...


class Mover(Protocol):
    """Carries out moves, beside the steps if it can; those of host memory, and of disk, in order."""

    def start(self, move: Move) -> None: ...

    def done(self) -> Sequence[Moved]:
        """The moves that ended since the last call."""
        ...

    @property
    def has_done(self) -> bool:
        """Whether `done` would return any."""
        ...

    def notify(self, call: Callable[[], None]) -> None:
        """Have `call` made, from any thread, whenever a move ends that went on beside its starter."""
        ...

    def close(self) -> None:
        """Give up what has not begun, and wait for what has."""
        ...


@dataclass(slots=True)
class Copier:
    """Carries out moves, of peers several at a time: what every mover of real bytes does."""

    memory: KVMemory
    arena: npt.NDArray[np.uint8]  # [slots, block_nbytes]
    disk: DiskStore | None
    clock: Callable[[], float]
    pause: Callable[[int], None] = lambda nbytes: None
    """Called with their bytes after at most `STAGED_BLOCKS` blocks, while moves give way."""
    peers: Lender | None = None
    gives_way: bool = field(default=False, init=False)  # answers are drawn meanwhile
    _loans: dict[int, Loan] = field(default_factory=dict, init=False)
    _staging: list[npt.NDArray[np.uint8]] = field(default_factory=list, init=False)  # in no use

    def carry_out(self, move: Move) -> Moved:
        """Do all of `move`; what fails comes back as its `error`."""
        began = self.clock()
        num = 0
        record = b""
        error: MalleeError | None = None
        try:
            match move:
                case Recall():
                    loan = self._recall(move)
                    num, record = loan.num_blocks, loan.record
                case Pull():
                    num, error = self._pull(move)
                case Repay():
                    self._repay(move.loan)
                case Park():
                    num = self._park(move)
                case Restore() if move.slots:
                    num = self._restore(move)
                case Restore():
                    num, error = self._read(move)
                case Spill():
                    self._spill(move)
                    num = move.num_blocks
                case Forget():
                    assert self.disk is not None, "nothing is on disk"
                    self.disk.drop(move.name)
        except MalleeError as failure:
            num, error = 0, failure
        seconds = self.clock() - began
        if move.tier != DISK or self.disk is None:
            return Moved(move, num, seconds, error, record=record)
        lost = self.disk.take_lost()
        return Moved(move, num, seconds, error, tuple(lost.keys), tuple(lost.capsules))

    def close(self) -> None:
        """End all loans, also those that are read just now. From any thread."""
        for loan in list(self._loans):
            self._repay(loan)

    def _recall(self, move: Recall) -> Loan:
        assert self.peers is not None, "there are no peers"
        loan, nbytes = self.peers.lend(move.ask), self.memory.block_nbytes
        if loan.num_blocks and loan.block_nbytes != nbytes:
            loan.close()
            sizes = ("bytes of a block", str(loan.block_nbytes), str(nbytes))
            raise IncompatibleCapsule(move.ask.holder.capsule, [sizes])
        self._loans[move.number] = loan
        return loan

    def _repay(self, loan: int) -> None:
        found = self._loans.pop(loan, None)
        if found is not None:
            found.close()

    def _pull(self, move: Pull) -> tuple[int, MalleeError | None]:
        loan, done = self._loans.get(move.loan), 0
        if loan is None:
            return 0, WorkerLost("peer", "the loan was ended")
        with self._staged() as staging:
            while done < len(move.places):
                places = move.places[done : done + STAGED_BLOCKS]
                rows = staging[: len(places)]
                try:
                    loan.read(places, list(rows))
                except MalleeError as error:
                    return done, error
                if move.is_foreign and not self.memory.are_numbers(rows):
                    return done, CorruptExport("a block", "it has values that are no numbers")
                self.memory.write(move.blocks[done : done + len(places)], rows)
                done += len(places)
                self._pause(len(places))
        return done, None

    def _park(self, move: Park) -> int:
        for part in runs(move.slots, STAGED_BLOCKS):
            self.memory.read(move.blocks[part], self._slots(move.slots[part]))
            self._pause(part.stop - part.start)
        return len(move.blocks)

    def _restore(self, move: Restore) -> int:
        for part in runs(move.slots, STAGED_BLOCKS):
            self.memory.write(move.blocks[part], self._slots(move.slots[part]))
            self._pause(part.stop - part.start)
        return len(move.blocks)

    def _slots(self, slots: Sequence[int]) -> Rows:
        """Slots in a row."""
        return self.arena[slots[0] : slots[-1] + 1]

    def _read(self, move: Restore) -> tuple[int, MalleeError | None]:
        assert self.disk is not None, "nothing is on disk"
        done = 0
        with self._staged() as staging:
            while done < len(move.keys):
                keys = move.keys[done : done + STAGED_BLOCKS]
                rows = staging[: len(keys)]
                got = self.disk.get(keys, [row.data for row in rows])
                here = slice(done, done + got.num_blocks)
                self.memory.write(move.blocks[here], rows[: got.num_blocks])
                done += got.num_blocks
                if got.num_blocks < len(keys):
                    return done, got.error
                self._pause(len(keys))
        return done, None

    def _spill(self, move: Spill) -> None:
        assert self.disk is not None, "there is no disk"
        with self._staged() as staged:
            for i in range(0, len(move.sources), STAGED_BLOCKS):
                part = move.sources[i : i + STAGED_BLOCKS]
                rows = [staged[k] if s.slot < 0 else self.arena[s.slot] for k, s in enumerate(part)]
                for k, source in enumerate(part):
                    if source.slot < 0:
                        self.memory.read([source.block], staged[k : k + 1])
                self.disk.put([source.key for source in part], [row.data for row in rows])
                self._pause(len(part))
        if move.name:
            self.disk.commit(
                move.name, move.record, move.keys, owner=move.owner, is_kept=move.is_kept
            )

    @contextmanager
    def _staged(self) -> Iterator[npt.NDArray[np.uint8]]:
        """Rows for the blocks of one pass, the caller's alone."""
        try:
            rows = self._staging.pop()
        except IndexError:
            rows = np.empty((STAGED_BLOCKS, self.memory.block_nbytes), dtype=np.uint8)
        try:
            yield rows
        finally:
            self._staging.append(rows)

    def _pause(self, num_blocks: int) -> None:
        if self.gives_way:
            self.pause(num_blocks * self.memory.block_nbytes)


class InlineMover:
    """A mover that has done each move before `start` returns: for one thread, and for what must be alike."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._done: list[Moved] = []

    def start(self, move: Move) -> None:
        self._done.append(self._copier.carry_out(move))

    def done(self) -> Sequence[Moved]:
        done, self._done = self._done, []
        return done

    @property
    def has_done(self) -> bool:
        return bool(self._done)

    def notify(self, call: Callable[[], None]) -> None:
        """Nothing goes on beside its starter."""

    def close(self) -> None:
        """Nothing goes on."""


class ThreadedMover:
    """A mover with threads for each tier (`NUM_LANES`), and some for questions to peers (`NUM_ASKING`).

    Those of host memory and disk do theirs in order. A tier without moves has none.
    """

    def __init__(self, copier: Copier, name: str) -> None:
        self._copier = copier
        self._done: deque[Moved] = deque()
        self._notify: Callable[[], None] = lambda: None
        self._lanes = {
            tier: ThreadPoolExecutor(num, thread_name_prefix=f"{TIER_NAMES[tier]} of {name}")
            for tier, num in NUM_LANES.items()
        }
        self._asking = ThreadPoolExecutor(
            NUM_ASKING, thread_name_prefix=f"questions to peers of {name}"
        )
        self._failure: BaseException | None = None

    def start(self, move: Move) -> None:
        lane = self._asking if isinstance(move, Recall) else self._lanes[move.tier]
        lane.submit(self._carry_out, move)

    def _carry_out(self, move: Move) -> None:
        try:
            self._done.append(self._copier.carry_out(move))
        except BaseException as failure:  # our bug: told where the engine takes its results
            self._failure = failure
        self._notify()

    def done(self) -> Sequence[Moved]:
        if self._failure is not None:
            raise self._failure
        return [self._done.popleft() for _ in range(len(self._done))]

    @property
    def has_done(self) -> bool:
        return bool(self._done) or self._failure is not None

    def notify(self, call: Callable[[], None]) -> None:
        self._notify = call

    def close(self) -> None:
        for lane in (self._asking, *self._lanes.values()):
            lane.shutdown(wait=True, cancel_futures=True)
