"""Two gateways' stores over one broker that goes away, fills up, loses answers and is set back.

The oracle is a set of the values that each name may have: one, but after a write whose answer was lost.
"""

import asyncio
from collections.abc import Awaitable
from copy import deepcopy
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bench.doubles.bus import LocalBus, LocalHub
from mallee.gateway.store.copies import CopiedBucket
from mallee.gateway.store.store import PART_NBYTES, Bucket, Store, StoreTerms
from mallee.protocol.errors import StoreAway, StoreFull
from mallee.protocol.ids import Scope

T = TypeVar("T")

SCOPES = (Scope("a1"), Scope("b2"))
NAMES = ("x", "y.z")
places = st.tuples(st.sampled_from(SCOPES), st.sampled_from(NAMES))
gateways = st.integers(0, 1)
lengths = st.sampled_from((1, PART_NBYTES + 1))


class StoreMachine(RuleBasedStateMachine):
    """`_may[place]` has the values that a read may find; None: there is none."""

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self._hub = LocalHub()
        self._may: dict[tuple[Scope, str], set[bytes | None]] = {}
        self._number = 0
        self._buckets: list[Bucket[bytes]] = []
        self._copied: list[CopiedBucket[bytes]] = []
        self._stores: list[Store] = []
        self._do(self._start())

    async def _start(self) -> None:
        for _ in range(2):
            bus = LocalBus(self._hub)
            await bus.connect()
            store = Store(bus, StoreTerms("f"))
            self._stores.append(store)
            made = store.bucket("texts", bytes, version=1, ttl_s=1e9, max_nbytes=1 << 40)
            self._buckets.append(made)
            self._copied.append(CopiedBucket(made, 1 << 30))

    def _do(self, work: Awaitable[T]) -> T:
        async def run() -> T:
            return await work

        return self._runner.run(run())

    def _new(self, length: int) -> bytes:
        self._number += 1
        return (b"%d" % self._number).ljust(length, b".")

    def _values(self, place: Any) -> set[bytes | None]:
        return self._may.setdefault(place, {None})

    @rule(gateway=gateways, place=places, length=lengths)
    def put(self, gateway: int, place: Any, length: int) -> None:
        value = self._new(length)
        try:
            self._do(self._buckets[gateway].put(*place, value))
        except StoreAway:
            if self._hub.is_up:  # its answer was lost
                self._values(place).add(value)
        except StoreFull:
            assert self._hub.kept.is_full
        else:
            self._may[place] = {value}

    @rule(gateway=gateways, place=places, length=lengths)
    def change(self, gateway: int, place: Any, length: int) -> None:
        """Replace a value that was read, which one of two that try does."""
        bucket, value = self._buckets[gateway], self._new(length)
        try:
            entry = self._do(bucket.get(*place))
            at = 0 if entry is None else entry.revision
            first = self._do(bucket.put(*place, value, at=at))
            assert first is not None
            self._may[place] = {value}
            assert self._do(self._buckets[1 - gateway].put(*place, b"late", at=at)) is None
        except StoreAway:
            if self._hub.is_up:
                self._values(place).add(value)
        except StoreFull:
            assert self._hub.kept.is_full

    @rule(gateway=gateways, place=places)
    def delete(self, gateway: int, place: Any) -> None:
        try:
            self._do(self._buckets[gateway].delete(*place))
        except StoreAway:
            if self._hub.is_up:
                self._values(place).add(None)
        else:
            self._may[place] = {None}

    @rule(gateway=gateways, place=places, is_copied=st.booleans())
    def read(self, gateway: int, place: Any, is_copied: bool) -> None:
        """A copy is what is stored, while the broker is there to say so."""
        bucket = (self._copied if is_copied else self._buckets)[gateway]
        try:
            entry = self._do(bucket.get(*place))
        except StoreAway:
            assert not self._hub.is_up
            return
        if not self._hub.is_up:
            return
        found = None if entry is None else entry.value
        assert found in self._values(place)
        self._may[place] = {found}

    @rule(gateway=gateways, place=places, length=lengths, is_away=st.booleans())
    def put_in_the_background(self, gateway: int, place: Any, length: int, is_away: bool) -> None:
        """Read here at once, and everywhere once the broker is there."""
        self._hub.kept.is_full = self._hub.kept.loses_answers = False
        self._hub.set_up(not is_away)
        bucket, values = self._buckets[gateway], [self._new(length) for _ in range(3)]

        async def write() -> Any:
            for value in values:
                bucket.put_soon(*place, value)
            found = await bucket.get(*place)
            self._hub.set_up(True)
            assert await self._stores[gateway].flush(5.0)
            return found

        entry = self._do(write())
        assert entry.value == values[-1]
        self._may[place] = {values[-1]}

    @rule(is_up=st.booleans(), is_full=st.booleans(), loses=st.booleans())
    def fail(self, is_up: bool, is_full: bool, loses: bool) -> None:
        self._hub.set_up(is_up)
        self._hub.kept.is_full, self._hub.kept.loses_answers = is_full, loses

    @rule()
    def save(self) -> None:
        kept = self._hub.kept
        self._saved = deepcopy((kept.buckets, kept.revision, self._may))

    @rule()
    def set_back(self) -> None:
        """The broker has an older state, as of a backup, and gives later revisions anew."""
        if hasattr(self, "_saved"):
            kept = self._hub.kept
            kept.buckets, kept.revision, self._may = deepcopy(self._saved)

    @rule(gateway=gateways, scope=st.sampled_from(SCOPES))
    def list(self, gateway: int, scope: Scope) -> None:
        try:
            names = set(self._do(self._buckets[gateway].names(scope)))
        except StoreAway:
            assert not self._hub.is_up
            return
        for name in NAMES:
            values = self._values((scope, name))
            assert name in names or None in values
            assert name not in names or values != {None}

    @invariant()
    def nothing_waits(self) -> None:
        assert [store.num_waiting for store in self._stores] == [0, 0]

    def teardown(self) -> None:
        self._hub.set_up(False)
        for store in self._stores:
            self._do(store.close(0.0))
        self._runner.close()


TestStore = StoreMachine.TestCase
TestStore.settings = settings(stateful_step_count=30)
