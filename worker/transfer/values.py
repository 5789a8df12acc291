"""Transfers of blocks between two places, as values, and their one outcome.

The engine's thread starts transfers and takes their outcomes between steps; a mover may copy meanwhile.
Until then the blocks and slots that a transfer names stay as they are: its starter holds them.
"""

from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple, Protocol, TypeAlias

from msgspec import Meta

from mallee.protocol.errors import MalleeError
from mallee.protocol.messages import Holder
from mallee.worker.kv.watch import Rows
from mallee.worker.transfer.disk import DiskStore
from mallee.worker.transfer.disk import Record as StoredRecord

DEVICE: Final = 0
HOST: Final = 1
DISK: Final = 2
PEER: Final = 3  # another worker: it lends, nothing is put there

TIER_NAMES: Final = ("device", "host", "disk", "peer")

BATCH_BLOCKS: Final = 16
"""Blocks that pass at once; between the device and disk, or a peer, their bytes are in memory twice."""


# KV of other workers.
#
# A lender holds the blocks of a loan until it ends, so they can be read from any thread, beside its steps. A
# loan from another process has the same methods, over a socket (`actors.kv_transfer`). Another mover of bytes
# between processes, as NIXL, takes its place there by a `Lender` and a `Loan` of its own.


class Ask(NamedTuple):
    """A question for blocks: those of the capsule that `holder` names, else the leading ones of `keys`.

    `identity` is the asker's model with its weights (`ModelSpec.identity`): KV of another is of no use.
    """

    holder: Holder
    keys: tuple[Annotated[int, Meta(ge=0)], ...]
    identity: str


class Loan(Protocol):
    """Blocks that stay where they are until it is closed."""

    @property
    def record(self) -> bytes:
        """The capsule's record; empty if none was asked for."""
        ...

    @property
    def num_blocks(self) -> int:
        """Of a capsule all of its blocks (`CapsuleRecord.keys`, then rows of windows), else the leading
        ones of the keys that are here."""
        ...

    @property
    def block_nbytes(self) -> int:
        """Bytes of each block, as rows hold them."""
        ...

    def read(self, places: Sequence[int], rows: Rows) -> None:
        """Fill `rows` with the blocks at rising `places` among those lent. From any thread.

        Raises MalleeError.
        """
        ...

    def close(self) -> None:
        """End the loan. Idempotent; from any thread."""
        ...


class Lender(Protocol):
    """Lends blocks: a worker, or the way to one."""

    def lend(self, ask: Ask) -> Loan:
        """May block, for a bounded time; from any thread but the lender's own.

        Raises UnknownCapsule, IncompatibleCapsule, WorkerLost: that life is over, or can't be reached.
        """
        ...


# Moves.


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
