"""Buckets of whose values this gateway keeps copies."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Generic, TypeVar
from weakref import WeakValueDictionary

from mallee.gateway.store.store import Bucket, ChangeLock, Entry
from mallee.protocol.errors import StoreAway
from mallee.protocol.ids import Scope

T = TypeVar("T")


class CopiedBucket(Generic[T]):
    """A bucket, and copies of the values that were used here last, of at most `max_nbytes`.

    A copy saves decoding while the store is up, and is what is read while it is away.
    """

    def __init__(self, bucket: Bucket[T], max_nbytes: int) -> None:
        self.bucket: Final = bucket
        self._max_nbytes = max_nbytes
        self._copies: OrderedDict[tuple[Scope, str], Entry[T]] = OrderedDict()
        self._nbytes = 0
        self._turns: WeakValueDictionary[tuple[Scope, str], ChangeLock] = WeakValueDictionary()

    async def get(self, scope: Scope, name: str) -> Entry[T] | None:
        """The value as it is now. Raises as `Bucket.get`, but for a copy."""
        known = self._copies.get((scope, name))
        try:
            entry = await self.bucket.get(scope, name, known)
        except StoreAway:
            if known is None:
                raise
            return known
        self._keep(scope, name, entry)
        return entry

    async def put(
        self, scope: Scope, name: str, value: T, *, at: int | None = None
    ) -> Entry[T] | None:
        """As `Bucket.put`."""
        entry = await self.bucket.put(scope, name, value, at=at)
        if entry is not None:
            self._keep(scope, name, entry)
        return entry

    async def change(self, scope: Scope, name: str, change: Callable[[T], T]) -> T | None:
        """The value after `change`, which is called again where others were faster. None: there is none.

        Those of this gateway follow each other. Raises Contended, StoreFull, and as `Bucket.put`.
        """

        async def changed(value: T | None) -> T | None:
            return None if value is None else change(value)

        async with self._turns.setdefault((scope, name), ChangeLock()).hold():
            known = self._copies.get((scope, name))
            if known is not None and not known.revision:  # it was not in the store yet
                known = None
            entry = await self.bucket.change(scope, name, changed, known)
            self._keep(scope, name, entry)
        return None if entry is None else entry.value

    async def delete(self, scope: Scope, name: str) -> None:
        """As `Bucket.delete`."""
        await self.bucket.delete(scope, name)
        self._keep(scope, name, None)

    def _keep(self, scope: Scope, name: str, entry: Entry[T] | None) -> None:
        """Copy `entry`; None: it is gone."""
        before = self._copies.pop((scope, name), None)
        if before is not None:
            self._nbytes -= before.nbytes
        if entry is None or entry.nbytes > self._max_nbytes:
            return
        self._copies[scope, name] = entry  # now the last used
        self._nbytes += entry.nbytes
        while self._nbytes > self._max_nbytes:
            self._nbytes -= self._copies.popitem(last=False)[1].nbytes
