"""Transfers of blocks between two places, as values, and their one outcome.

The engine's thread starts transfers and takes their outcomes between steps; a mover may copy meanwhile.
Until then the blocks and slots that a transfer names stay as they are: its starter holds them.
"""

from typing import Final, NamedTuple, TypeAlias

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


class Place(NamedTuple):
    """Blocks in one tier, in order.

    By their numbers on the device, where rows of side groups have some too (`kv.sides`), by slots of host
    memory, by keys on disk, or by rising places in a `loan`. `is_foreign`: it may have other than numbers.
    """

    tier: int
    ids: tuple[int, ...]
    loan: Loan | None = None
    is_foreign: bool = False


class Record(NamedTuple):
    """The record of the capsule `name`, to be durable once its blocks, `keys`, are on disk."""

    name: str
    payload: bytes
    keys: tuple[int, ...]
    owner: str  # whose budget it counts in
    is_kept: bool


class Transfer(NamedTuple):
    """Copy the blocks of `source` to those of `target`, in order, batch by batch; then write `record`.

    Disk takes those that it lacks. `after`: a mark of the device (`KVMemory.mark`), behind which it takes its
    place there. `is_eviction`: the device gives the blocks up, and needs them for others.
    """

    number: int
    source: Place
    target: Place
    record: Record | None = None
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
