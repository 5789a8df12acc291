"""The disk as transfers see it: blocks by key, and records of capsules that name them."""

from collections.abc import Sequence
from typing import Any, Protocol

from mallee.protocol.errors import MalleeError


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

    @property
    def keys(self) -> Sequence[int]: ...

    @property
    def owner(self) -> str: ...


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

    def unreadable(self) -> Sequence[MalleeError]:
        """The reason for each other record that was there from the start."""
        ...

    def load(self, capsule: str) -> Record | None:
        """The record of a capsule, verified."""
        ...

    def take(self, other: Any, capsule: str) -> Record | None:
        """Move a capsule of `other` here: its record; None if it was here already."""
        ...

    def clear(self) -> None:
        """Remove all blocks that no record names."""
        ...

    def keys(self) -> Sequence[int]:
        """Every block that is there."""
        ...

    def take_lost(self) -> Lost:
        """Losses since the last call: evicted, or found damaged."""
        ...

    def close(self) -> None: ...
