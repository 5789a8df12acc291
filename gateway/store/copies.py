"""Buckets of whose values this gateway keeps copies."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Generic, TypeVar
from weakref import WeakValueDictionary

from mallee.gateway.store.store import Bucket, Entry
from mallee.protocol.errors import Contended, StoreAway
from mallee.protocol.ids import Scope

T = TypeVar("T")

MAX_TRIES: Final = 16  # of a change, beside those of others


class CopiedBucket(Generic[T]):
    """A bucket, and copies of the values that were used here last, of at most `max_nbytes`.

    A copy saves decoding while the store is up, and is what is read while it is away.
    """

    def __init__(self, bucket: Bucket[T], max_nbytes: int) -> None:
        self.bucket: Final = bucket
        self._max_nbytes = max_nbytes
        self._copies: OrderedDict[tuple[Scope, str], Entry[T]] = OrderedDict()
        self._nbytes = 0
        self._turns: WeakValueDictionary[tuple[Scope, str], asyncio.Lock] = WeakValueDictionary()

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
        async with self._turns.setdefault((scope, name), asyncio.Lock()):
            for _ in range(MAX_TRIES):
                entry = await self.get(scope, name)
                if entry is None:
                    return None
                value = change(entry.value)
                if await self.put(scope, name, value, at=entry.revision) is not None:
                    return value
        raise Contended(name, MAX_TRIES)

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
