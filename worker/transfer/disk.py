"""The disk as transfers see it: blocks by key, and records of capsules that name them."""

from collections.abc import Sequence
from typing import Any, Protocol

from mallee.protocol.errors import MalleeError


class Record(Protocol):
    """A capsule's record."""

    @property
    def payload(self) -> bytes: ...

    @property
    def keys(self) -> Sequence[int]: ...

    @property
    def owner(self) -> str: ...


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

    def get(
        self, keys: Sequence[int], rows: Sequence[memoryview]
    ) -> tuple[int, MalleeError | None]:
        """Fill `rows` with the leading blocks of `keys` that are whole: how many, and why not the next.

        Never raises.
        """
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

    def take_lost(self) -> tuple[Sequence[int], Sequence[str]]:
        """Blocks and capsules that were evicted, or found damaged, since the last call."""
        ...

    def close(self) -> None: ...
