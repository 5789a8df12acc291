"""KV that workers lend each other: what is asked for, and the loans that hold it meanwhile.

A lender holds the blocks of a loan until it ends, so they can be read from any thread, beside its steps. A
loan from another process has the same methods, over a socket (`actors.kv_transfer`). Another mover of bytes
between processes, as NIXL, takes its place there by a `Lender` and a `Loan` of its own.
"""

from collections.abc import Sequence
from typing import Annotated, NamedTuple, Protocol

from msgspec import Meta

from mallee.protocol.messages import Holder
from mallee.worker.kv.watch import Rows


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
