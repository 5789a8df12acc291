"""Transfers of blocks between two places, as values, and their one outcome.

The engine's thread starts transfers and takes their outcomes between steps; a mover may copy meanwhile.
Until then the blocks and slots that a transfer names stay as they are: its starter holds them.
"""

from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple, TypeAlias

from mallee.protocol.errors import MalleeError
from mallee.worker.transfer.disk import DiskStore
from mallee.worker.transfer.disk import Record as StoredRecord
from mallee.worker.transfer.peers import Ask, Loan

DEVICE: Final = 0
HOST: Final = 1
DISK: Final = 2
PEER: Final = 3  # another worker: it lends, nothing is put there

TIER_NAMES: Final = ("device", "host", "disk", "peer")

BATCH_BLOCKS: Final = 16
"""Blocks that pass at once; between the device and disk, or a peer, their bytes are in memory twice."""


@dataclass(frozen=True, slots=True)
class _End:
    """One end of a transfer: its blocks by numbers of its own, in order."""

    ids: tuple[int, ...]
    tier: ClassVar[int]


@dataclass(frozen=True, slots=True)
class Device(_End):
    """Blocks of the device, or rows of its window blocks (`kv.windows`)."""

    tier = DEVICE


@dataclass(frozen=True, slots=True)
class Host(_End):
    """Slots of host memory."""

    tier = HOST


class Record(NamedTuple):
    """The record of the capsule `name`, to be durable once its blocks, `keys`, are on disk."""

    name: str
    payload: bytes
    keys: tuple[int, ...]
    owner: str  # whose budget it counts in
    is_kept: bool


@dataclass(frozen=True, slots=True)
class Disk(_End):
    """Blocks of the disk by key. As a target they are written as far as they are not there."""

    tier = DISK
    record: Record | None = None


@dataclass(frozen=True, slots=True)
class Peer(_End):
    """Blocks at rising places of a loan. `is_foreign`: others than numbers may be in them."""

    tier = PEER
    loan: Loan
    is_foreign: bool = False


class Transfer(NamedTuple):
    """Copy the blocks of `source` to those of `target`, in order, batch by batch.

    `after`: a mark of the device (`KVMemory.mark`), behind which it takes its place there. `is_eviction`: the
    device gives the blocks up, and needs them for others.
    """

    number: int
    source: Device | Host | Disk | Peer
    target: Device | Host | Disk
    after: object = None
    is_eviction: bool = False

    @property
    def num_blocks(self) -> int:
        return len(self.source.ids)

    @property
    def tier(self) -> int:
        """The lower one of the two ends."""
        return max(self.source.tier, self.target.tier)


class Forget(NamedTuple):
    """Drop the record of capsule `name` from disk; its blocks stay as cache while there is room."""

    number: int
    name: str
    num_blocks: int = 0
    tier: int = DISK


class Adopt(NamedTuple):
    """Move the capsule `name` here from `other`, the disk of a worker that is gone."""

    number: int
    other: DiskStore
    name: str
    num_blocks: int = 0
    tier: int = DISK


class Question(NamedTuple):
    """Ask a peer for a loan, which is in the outcome."""

    number: int
    ask: Ask
    num_blocks: int = 0
    tier: int = PEER


Move: TypeAlias = Transfer | Forget | Adopt | Question


class Moved(NamedTuple):
    """The end of a move: of its blocks the first `num_blocks` arrived; `error` says why not all did.

    `evicted` and `lost` are blocks and capsules that the disk gave up for it, or found damaged. `record`: of
    a capsule that was adopted.
    """

    move: Move
    num_blocks: int
    seconds: float
    error: MalleeError | None = None
    evicted: tuple[int, ...] = ()
    lost: tuple[str, ...] = ()
    loan: Loan | None = None
    record: StoredRecord | None = None
