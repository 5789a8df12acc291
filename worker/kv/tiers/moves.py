"""Moves of blocks between tiers, as values, and the movers that carry them out.

The engine's thread starts moves and takes their results between steps; a mover may copy meanwhile. Until
a move is done the blocks and slots that it names belong to it: its starter holds them.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from mallee.protocol.errors import MalleeError
from mallee.worker.kv.watch import KVMemory, Row

DEVICE: Final = 0
HOST: Final = 1
DISK: Final = 2

TIER_NAMES: Final = ("device", "host", "disk")

STAGED_BLOCKS: Final = 16
"""Blocks that pass between device and disk at once; their bytes are in memory twice."""


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


Move: TypeAlias = Restore | Park | Spill | Forget


class Moved(NamedTuple):
    """The end of a move: of its blocks the first `num_blocks` arrived; `error` says why not all did.

    `evicted` and `lost` are capsules and blocks that the disk gave up for it, or found damaged.
    """

    move: Move
    num_blocks: int
    seconds: float
    error: MalleeError | None = None
    evicted: tuple[int, ...] = ()
    lost: tuple[str, ...] = ()


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
    """Carries out moves, beside the steps if it can; those of one tier in order."""

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
    """Carries out one move at a time: what every mover of real bytes does."""

    memory: KVMemory
    arena: npt.NDArray[np.uint8]  # [slots, block_nbytes]
    disk: DiskStore | None
    clock: Callable[[], float]
    pause: Callable[[int], None] = lambda nbytes: None
    """Called after every `STAGED_BLOCKS` blocks with their bytes: it bounds the bandwidth."""
    _staging: npt.NDArray[np.uint8] | None = field(default=None, init=False)

    def carry_out(self, move: Move) -> Moved:
        """Do all of `move`; what fails comes back as its `error`."""
        began = self.clock()
        num = 0
        error: MalleeError | None = None
        try:
            match move:
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
            return Moved(move, num, seconds, error)
        lost = self.disk.take_lost()
        return Moved(move, num, seconds, error, tuple(lost.keys), tuple(lost.capsules))

    def _park(self, move: Park) -> int:
        for i in range(0, len(move.blocks), STAGED_BLOCKS):
            part = slice(i, i + STAGED_BLOCKS)
            self.memory.read(move.blocks[part], [self.arena[slot] for slot in move.slots[part]])
            self._pause(len(move.blocks[part]))
        return len(move.blocks)

    def _restore(self, move: Restore) -> int:
        for i in range(0, len(move.blocks), STAGED_BLOCKS):
            part = slice(i, i + STAGED_BLOCKS)
            self.memory.write(move.blocks[part], [self.arena[slot] for slot in move.slots[part]])
            self._pause(len(move.blocks[part]))
        return len(move.blocks)

    def _read(self, move: Restore) -> tuple[int, MalleeError | None]:
        assert self.disk is not None, "nothing is on disk"
        done = 0
        while done < len(move.keys):
            keys = move.keys[done : done + STAGED_BLOCKS]
            rows = self._rows(len(keys))
            got = self.disk.get(keys, [row.data for row in rows])
            self.memory.write(move.blocks[done : done + got.num_blocks], rows[: got.num_blocks])
            done += got.num_blocks
            if got.num_blocks < len(keys):
                return done, got.error
            self._pause(len(keys))
        return done, None

    def _spill(self, move: Spill) -> None:
        assert self.disk is not None, "there is no disk"
        for i in range(0, len(move.sources), STAGED_BLOCKS):
            part = move.sources[i : i + STAGED_BLOCKS]
            staged = self._rows(len(part))
            rows = [staged[k] if s.slot < 0 else self.arena[s.slot] for k, s in enumerate(part)]
            on_device = [k for k, source in enumerate(part) if source.slot < 0]
            self.memory.read([part[k].block for k in on_device], [rows[k] for k in on_device])
            self.disk.put([source.key for source in part], [row.data for row in rows])
            self._pause(len(part))
        if move.name:
            self.disk.commit(
                move.name, move.record, move.keys, owner=move.owner, is_kept=move.is_kept
            )

    def _rows(self, n: int) -> list[Row]:
        if self._staging is None:
            self._staging = np.empty((STAGED_BLOCKS, self.memory.block_nbytes), dtype=np.uint8)
        return list(self._staging[:n])

    def _pause(self, num_blocks: int) -> None:
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
    """A mover with a thread for host memory and one for disk, each of which does its moves in order."""

    def __init__(self, copier: Copier, name: str) -> None:
        self._copier = copier
        self._done: deque[Moved] = deque()
        self._notify: Callable[[], None] = lambda: None
        self._lanes = {
            tier: ThreadPoolExecutor(1, thread_name_prefix=f"{TIER_NAMES[tier]} of {name}")
            for tier in (HOST, DISK)
        }
        self._failure: BaseException | None = None

    def start(self, move: Move) -> None:
        self._lanes[move.tier].submit(self._carry_out, move)

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
        for lane in self._lanes.values():
            lane.shutdown(wait=True, cancel_futures=True)
