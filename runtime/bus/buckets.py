"""Values that a broker keeps beside the messages that it carries: by key in buckets, each with a revision."""

from collections.abc import AsyncGenerator
from typing import NamedTuple, Protocol

import xxhash


class WritesStopped(TimeoutError):
    """The broker answers, but not what is put: a full disk."""


class BucketSpec(NamedTuple):
    """A bucket and its bounds: a value goes `ttl_s` after it was put, and the oldest beyond `max_nbytes`."""

    name: str
    ttl_s: float
    max_nbytes: int
    is_in_memory: bool = False
    num_replicas: int = 1


class Stored(NamedTuple):
    """A value of a bucket; a later put of any of its values has a larger revision."""

    value: bytes
    revision: int

    @property
    def digest(self) -> int:
        """Of the value: a broker that was set back gives its revision to another one."""
        return xxhash.xxh3_64_intdigest(self.value)


class Buckets(Protocol):
    """Keys are of letters, digits, `-_=`, with dots between their parts.

    Every method raises ConnectionError (broker away) and TimeoutError.
    """

    async def get(self, bucket: BucketSpec, key: str) -> Stored | None: ...

    async def put(
        self, bucket: BucketSpec, key: str, value: bytes, revision: int | None = None
    ) -> int | None:
        """Its revision; None: nothing was put, as the value has not `revision` now (0: is not there).

        Raises StoreFull, WritesStopped.
        """
        ...

    async def delete(self, bucket: BucketSpec, key: str) -> None:
        """Forget `key`, and all whose first parts it is."""
        ...

    async def keys(self, bucket: BucketSpec, prefix: str) -> list[str]:
        """Those whose first parts are `prefix`, in no order."""
        ...

    def follow(self, bucket: BucketSpec, prefix: str) -> AsyncGenerator[tuple[str, Stored], None]:
        """The values whose keys' first parts are `prefix`, by revision: those there are, and those to come.

        Not what is deleted.
        """
        ...
