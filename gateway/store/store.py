"""The store of all gateways: what clients can name, in buckets of the broker, by scope and name.

Every gateway reads and writes the same values, so none has to be asked which one has a thing. What a gateway
keeps beside them is a copy, which serves while the store is away and saves decoding: `Bucket.get` takes it.

A value carries the version of its layout: one of another version is refused by name, never misread. A large
one lies in parts beside its head, which is put after them, so that no reader sees half of it.

Writes that no answer waits for go by `put_soon` and `delete_soon`: in order for each name, the last one
alone if several wait, within `MAX_WAITING_NBYTES`. Those that wait while the store is away are sent once it
is back. A write that is waited for comes after those of its name that began before, and before later ones.
"""

import asyncio
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Container,
    Coroutine,
    Iterator,
)
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

import msgspec

from mallee.gateway.store.names import key_of, name_of
from mallee.protocol.codec import Decoder, encode
from mallee.protocol.errors import (
    CodecError,
    Contended,
    OtherLayout,
    StoreAway,
    StoreFull,
    Unreadable,
)
from mallee.protocol.ids import Scope
from mallee.protocol.subjects import Subjects
from mallee.runtime.bus.buckets import Buckets, BucketSpec, Stored, WritesStopped
from mallee.runtime.bus.bus import Bus
from mallee.runtime.tasks import Tasks

log = logging.getLogger(__name__)

T = TypeVar("T")

PART_NBYTES: Final = 512 << 10  # of one message: a broker takes 1 MiB by default
MAX_WAITING_NBYTES: Final = 64 << 20  # of writes that wait for the store
NUM_SENT: Final = 64  # writes under way at once
RETRY_S: Final = 0.2
FULL_S: Final = 10.0  # after a write that found no room
PARTS_S: Final = 60  # for which parts of a value that was put anew stay
TURN_S: Final = 2.0  # for earlier writes of a name
MAX_TRIES: Final = 64  # of a change, beside those of others
MAX_FAILED: Final = 2  # changes of a value, before those that wait behind them fail too
MAX_KEY: Final = 3500  # characters: a broker leaves a client that sends a line of 4 KiB
_OVERHEAD_NBYTES: Final = 256  # of a write that waits


class Entry(NamedTuple, Generic[T]):
    """A value as it is stored; `revision` changes with each put.

    A broker that was set back gives a revision again: with the same `digest` it is the same value.
    """

    value: T
    revision: int
    digest: int = 0
    nbytes: int = 0


class Write(NamedTuple):
    """A put that waits, or a delete. One that `is_new` replaces nothing."""

    spec: BucketSpec
    key: str
    raw: bytes | None
    is_new: bool = False

    @property
    def nbytes(self) -> int:
        """Of memory while it waits."""
        return _OVERHEAD_NBYTES + len(self.raw or b"")


class StoreTerms(NamedTuple):
    """Terms of the buckets at the broker, whose names begin with the store's."""

    name: str
    max_nbytes: int = 256 << 20  # of a bucket that has no bound of its own
    is_in_memory: bool = False
    num_replicas: int = 1


class Store:
    """The buckets of a gateway's broker. Belongs to its event loop."""

    def __init__(
        self,
        bus: Bus,
        terms: StoreTerms,
        answered: Callable[[str, float], None] = lambda how, seconds: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`answered(how, seconds)` is told of each read and each write that was waited for."""
        self._bus = bus
        self._answered = answered
        self._clock = clock
        self._subjects = Subjects.of(terms.name)
        self._terms = terms
        self._waiting: dict[tuple[str, str], Write] = {}  # by bucket and key, the oldest first
        self._sent: dict[tuple[str, str], Write] = {}  # under way
        self._awaited: Counter[tuple[str, str]] = Counter()  # the same, by callers that wait
        self._nbytes = 0  # of both
        self._settling: dict[tuple[str, str], asyncio.Event] = {}  # that are waited for
        self._num_changing = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._full_until = -math.inf
        self.num_refused = 0  # writes that found no room
        self.written_nbytes = 0
        self.tasks = Tasks("the gateways' store")

    @property
    def is_up(self) -> bool:
        return self._bus.is_up

    @property
    def is_full(self) -> bool:
        """Whether a write has found no room a moment ago, and none has since."""
        return self._clock() < self._full_until

    @property
    def num_waiting(self) -> int:
        """Writes that are not in the store yet."""
        return len(self._waiting) + len(self._sent) + self._num_changing

    @property
    def waiting_nbytes(self) -> int:
        return self._nbytes

    def bucket(
        self,
        name: str,
        kind: type[T],
        *,
        version: int,
        ttl_s: float,
        max_nbytes: int | None = None,
        is_json: bool = False,
    ) -> "Bucket[T]":
        """The bucket of values of one kind. `version` (below 256) is that of the kind's layout.

        `is_json`: they have parts that clients give, whose numbers may be longer than msgpack has.
        """
        spec = BucketSpec(
            name=self._subjects.bucket(name),
            ttl_s=ttl_s,
            max_nbytes=max_nbytes or self._terms.max_nbytes,
            is_in_memory=self._terms.is_in_memory,
            num_replicas=self._terms.num_replicas,
        )
        decode = Decoder(kind, f"a value of {name!r}", is_json=is_json)
        encoded = msgspec.json.encode if is_json else encode
        return Bucket(self, self._bus.buckets, spec, Layout(version, encoded, decode))

    @contextmanager
    def asking(self, how: Literal["read", "write"]) -> Iterator[None]:
        """Ask the broker. Raises StoreAway, and StoreFull if nothing is written."""
        begun = self._clock()
        try:
            yield
        except StoreFull:
            self.num_refused += 1
            raise
        except WritesStopped as error:
            self.num_refused += 1
            raise StoreFull(f"{error}; retry in {FULL_S:g} s", retry_after_s=FULL_S) from error
        except (ConnectionError, TimeoutError) as error:
            raise StoreAway(str(error)) from error
        finally:
            self._answered(how, self._clock() - begun)

    async def flush(self, wait_s: float) -> bool:
        """Wait until all writes are in the store; False: they were not within `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                await self._is_idle.wait()
        except TimeoutError:
            return False
        return True

    async def settled(self, spec: BucketSpec, key: str, wait_s: float) -> bool:
        """As `flush`, for the writes of one key."""
        try:
            async with asyncio.timeout(wait_s):
                while self.pending(spec, key) is not None:
                    await self._settling.setdefault((spec.name, key), asyncio.Event()).wait()
        except TimeoutError:
            return False
        return True

    @asynccontextmanager
    async def turn(self, spec: BucketSpec, key: str) -> AsyncIterator[None]:
        """Write a key: after all that wait by now, and before those to come. Raises as `asking`."""
        is_first = self.pending(spec, key) is None
        if not is_first and not (self.is_up and await self.settled(spec, key, TURN_S)):
            why = "earlier writes of the same name wait for it"
            raise StoreFull(why, retry_after_s=FULL_S) if self.is_full else StoreAway(why)
        place = spec.name, key
        self._awaited[place] += 1
        try:
            with self.asking("write"):
                yield
        finally:
            self._awaited[place] -= 1
            if not self._awaited[place]:
                del self._awaited[place]
                self._begin()

    async def close(self, wait_s: float = 2.0) -> None:
        """Send what waits, if the store takes it soon."""
        if not await self.flush(wait_s if self.is_up else 0.0):
            log.warning("%d writes did not reach the gateways' store", self.num_waiting)
        await self.tasks.close()

    def spawn(self, change: Coroutine[Any, Any, None], name: str) -> None:
        """Run what reads a value and puts it changed, which counts as a write that waits."""
        self._num_changing += 1
        self._is_idle.clear()
        self.tasks.spawn(change, name=name).add_done_callback(self._changed)

    def _changed(self, _: asyncio.Task[None]) -> None:
        self._num_changing -= 1
        self._begin()

    def pending(self, spec: BucketSpec, key: str) -> Write | None:
        """The last write of a key that is not known to be in the store yet."""
        place = spec.name, key
        return self._waiting.get(place) or self._sent.get(place)

    def pending_below(self, spec: BucketSpec, above: str) -> Iterator[Write]:
        """As `pending`, of all keys whose first parts are `above`."""
        for name, key in {**self._sent, **self._waiting}:
            write = self.pending(spec, key) if name == spec.name else None
            if write is not None and key.startswith(f"{above}."):
                yield write

    def write_soon(self, write: Write) -> None:
        place = write.spec.name, write.key
        if write.is_new and (last := self.pending(write.spec, write.key)) is not None:
            if last.raw is not None:
                return  # there is a value by then
            write = write._replace(is_new=False)  # of those before it
        if (before := self._waiting.pop(place, None)) is not None:
            self._nbytes -= before.nbytes
        if self._nbytes + write.nbytes > MAX_WAITING_NBYTES:
            self.num_refused += 1
            self._settle(place)
            self._begin()
            return
        self._nbytes += write.nbytes
        self._waiting[place] = write
        self._is_idle.clear()
        self._begin()

    def _begin(self) -> None:
        """Send the oldest that wait, as many at once as may be; those of one name follow each other."""
        while len(self._sent) < NUM_SENT:
            place = next((each for each in self._waiting if not self._is_written(each)), None)
            if place is None:
                break
            self._sent[place] = self._waiting.pop(place)
            self.tasks.spawn(self._send(place), name="a write to the store")
        if not self.num_waiting:
            self._is_idle.set()

    async def _send(self, place: tuple[str, str]) -> None:
        while not (self.is_up and await self._is_put(self._sent[place])):
            await asyncio.sleep(RETRY_S)
            if (newer := self._waiting.pop(place, None)) is not None:
                self._nbytes -= self._sent[place].nbytes
                self._sent[place] = newer
        self._nbytes -= self._sent.pop(place).nbytes
        self._settle(place)
        self._begin()

    async def put(
        self, spec: BucketSpec, key: str, raw: bytes | None, at: int | None
    ) -> Stored | None:
        """As `put_whole`."""
        try:
            stored = await put_whole(self._bus.buckets, spec, key, raw, at)
        except (StoreFull, WritesStopped):
            self._full_until = self._clock() + FULL_S
            raise
        if raw is not None and stored is not None:
            self._full_until = -math.inf
            self.written_nbytes += len(raw)
        return stored

    def _is_written(self, place: tuple[str, str]) -> bool:
        return place in self._sent or place in self._awaited

    def _settle(self, place: tuple[str, str]) -> None:
        """Wake what waits for a key's writes, if none is left."""
        if place in self._waiting or place in self._sent:
            return
        if (settling := self._settling.pop(place, None)) is not None:
            settling.set()

    async def _is_put(self, write: Write) -> bool:
        """Whether nothing is left to be done."""
        try:
            at = 0 if write.is_new else None
            await self.put(write.spec, write.key, write.raw, at)
        except StoreFull as error:
            self.num_refused += 1
            log.warning("the gateways' store took no value of %s: %s", write.spec.name, error)
        except (ConnectionError, TimeoutError):
            return False
        return True


class ChangeLock:
    """The order of one gateway's changes of a value: they follow each other.

    Once MAX_FAILED have got no answer of the store, those that wait behind them fail too: they would wait as
    long, one after the other.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._num_failed = 0
        self._failure: StoreAway | StoreFull | None = None  # the last one

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        before = self._num_failed
        async with self._lock:
            if self._failure is not None and self._num_failed >= before + MAX_FAILED:
                raise self._failure.with_traceback(None)
            try:
                yield
            except (StoreAway, StoreFull) as error:
                self._num_failed += 1
                self._failure = error
                raise


class Layout(NamedTuple, Generic[T]):
    """The form of a kind's values."""

    version: int
    encode: Callable[[T], bytes]
    decode: Decoder[T]


class Bucket(Generic[T]):
    """The values of one kind, of all scopes.

    Methods that wait raise StoreAway; those that read, OtherLayout and Unreadable.
    """

    def __init__(self, store: Store, buckets: Buckets, spec: BucketSpec, layout: Layout[T]) -> None:
        self._store = store
        self._buckets = buckets
        self._spec = spec
        self._layout = layout

    async def get(self, scope: Scope, name: str, known: Entry[T] | None = None) -> Entry[T] | None:
        """The value as it is now: `known` itself, if that is it still. None: there is none."""
        return await self._get(key_of(scope, name), known)

    async def put(
        self, scope: Scope, name: str, value: T, *, at: int | None = None
    ) -> Entry[T] | None:
        """Returns once it is stored. None: it is not at revision `at` (0: is there already).

        Raises StoreFull.
        """
        return await self._put(key_of(scope, name), value, at)

    async def change(
        self,
        scope: Scope,
        name: str,
        change: Callable[[T | None], Awaitable[T | None]],
        known: Entry[T] | None = None,
    ) -> Entry[T] | None:
        """Store the value after `change`, which is called again where others were faster.

        It is given None if there is no value, and stores nothing if it returns None. `known` is what may be
        there, not at all if its revision is 0; `change` may write into it. Raises Contended, StoreFull.
        """
        entry = known
        for _ in range(MAX_TRIES):
            if entry is None or entry.revision:
                entry = await self.get(scope, name, entry)
            value = await change(None if entry is None else entry.value)
            if value is None:
                return None
            at = 0 if entry is None else entry.revision
            if (stored := await self.put(scope, name, value, at=at)) is not None:
                return stored
            entry = None
        raise Contended(name, MAX_TRIES)

    async def delete(self, scope: Scope, name: str) -> None:
        """Returns once it is gone, with all below it."""
        key = key_of(scope, name)
        async with self._store.turn(self._spec, key):
            await self._buckets.delete(self._spec, key)

    def put_soon(self, scope: Scope, name: str, value: T, *, is_new: bool = False) -> None:
        """Store it in the background; one that `is_new`, unless there is a value by then."""
        write = Write(self._spec, key_of(scope, name), self._packed(value), is_new)
        self._store.write_soon(write)

    def delete_soon(self, scope: Scope, name: str) -> None:
        """Forget it, and all below it, in the background."""
        self._store.write_soon(Write(self._spec, key_of(scope, name), None))

    async def settled(self, scope: Scope, name: str, wait_s: float) -> bool:
        """Wait until all writes of a name are in the store; False: they were not within `wait_s`."""
        return await self._store.settled(self._spec, key_of(scope, name), wait_s)

    async def names(self, scope: Scope) -> list[str]:
        """All names of `scope`, in order."""
        return sorted(map(name_of, await self._keys(key_of(scope))))

    # Values below a name, in an order of their own: events, nodes of a tree

    async def append(self, scope: Scope, name: str, below: str, value: T) -> None:
        """Store a value below `name`, which goes with that."""
        await self._put(key_of(scope, name, below), value, None)

    def append_soon(self, scope: Scope, name: str, below: str, value: T) -> None:
        write = Write(self._spec, key_of(scope, name, below), self._packed(value))
        self._store.write_soon(write)

    async def follow(self, scope: Scope, name: str) -> AsyncGenerator[tuple[str, T], None]:
        """The values below `name`, as they were put: those there are, and those to come."""
        prefix = key_of(scope, name)
        depth = prefix.count(".") + 1
        try:
            async with aclosing(self._buckets.follow(self._spec, prefix)) as found:
                async for key, stored in found:
                    if key.count(".") != depth:
                        continue
                    if (entry := await self._whole(key, stored, None)) is not None:
                        yield name_of(key), entry.value
        except (ConnectionError, TimeoutError) as error:
            raise StoreAway(str(error)) from error

    def remove_soon(self, scope: Scope, name: str, below: str) -> None:
        """Forget one value below `name`, in the background."""
        self._store.write_soon(Write(self._spec, key_of(scope, name, below), None))

    def is_waiting(self, scope: Scope, name: str, below: str) -> bool:
        """Whether what was put below `name`, or forgotten, is not in the store yet."""
        return self._store.pending(self._spec, key_of(scope, name, below)) is not None

    async def get_below(self, scope: Scope, name: str, below: str) -> T | None:
        """A value below `name`."""
        entry = await self._get(key_of(scope, name, below), None)
        return None if entry is None else entry.value

    async def names_below(self, scope: Scope, name: str) -> list[str]:
        """The names of the values below `name`, in order."""
        return sorted(map(name_of, await self._keys(key_of(scope, name))))

    async def all_below(self, scope: Scope, name: str, known: Container[str] = ()) -> dict[str, T]:
        """The values below `name` now, but for those that are `known`."""
        keys = sorted(await self._keys(key_of(scope, name)))
        keys = [key for key in keys if name_of(key) not in known]
        entries = await asyncio.gather(*(self._get(key, None) for key in keys))
        return {
            name_of(key): entry.value
            for key, entry in zip(keys, entries, strict=True)
            if entry is not None
        }

    # Bytes

    async def _put(self, key: str, value: T, at: int | None) -> Entry[T] | None:
        raw = self._packed(value)
        async with self._store.turn(self._spec, key):
            stored = await self._store.put(self._spec, key, raw, at)
        return None if stored is None else Entry(value, stored.revision, stored.digest, len(raw))

    async def _get(self, key: str, known: Entry[T] | None) -> Entry[T] | None:
        if len(key) > MAX_KEY:
            return None  # none is stored: such a name is a client's alone
        waiting = self._store.pending(self._spec, key)
        if waiting is not None:
            if waiting.raw is None:
                return None
            return Entry(self._read(waiting.raw), 0, nbytes=len(waiting.raw))
        with self._store.asking("read"):
            stored = await self._buckets.get(self._spec, key)
            return None if stored is None else await self._whole(key, stored, known)

    async def _keys(self, above: str) -> list[str]:
        """The keys right below another, without those of parts."""
        with self._store.asking("read"):
            keys = set(await self._buckets.keys(self._spec, above))
        for write in self._store.pending_below(self._spec, above):
            (keys.discard if write.raw is None else keys.add)(write.key)
        depth = above.count(".") + 1
        return [key for key in keys if key.count(".") == depth]

    async def _whole(self, key: str, stored: Stored, known: Entry[T] | None) -> Entry[T] | None:
        """None: its parts went meanwhile."""
        place = stored.revision, stored.digest
        if known is not None and (known.revision, known.digest) == place:
            return known
        raw = await get_whole(self._buckets, self._spec, key, stored.value)
        return None if raw is None else Entry(self._read(raw), *place, len(raw))

    def _packed(self, value: T) -> bytes:
        return bytes((self._layout.version,)) + self._layout.encode(value)

    def _read(self, raw: bytes) -> T:
        version = self._layout.version
        if raw[:1] != bytes((version,)):
            raise OtherLayout(self._spec.name, raw[0] if raw else -1, version)
        try:
            return self._layout.decode(raw[1:])
        except CodecError as error:
            raise Unreadable(self._spec.name) from error


_WHOLE: Final = b"\x00"
_IN_PARTS: Final = b"\x01"
# Between a key and the names of its parts, which are two: a value below the key has one name more than it.
_PARTS: Final = "p"
_decode_parts: Final = Decoder(tuple[str, int], "the parts of a value")


async def put_whole(
    buckets: Buckets, spec: BucketSpec, key: str, raw: bytes | None, at: int | None = None
) -> Stored | None:
    """Put a value of any length, or delete it (None). Its head, and else as `Buckets.put`."""
    if raw is None:
        await buckets.delete(spec, key)
        return None
    if len(raw) <= PART_NBYTES:
        head = _WHOLE + raw
        revision = await buckets.put(spec, key, head, at)
        return None if revision is None else Stored(head, revision)
    now, num_parts = int(time.time()), -(-len(raw) // PART_NBYTES)
    nonce = f"{now:x}-{secrets.token_hex(8)}"
    for i in range(num_parts):
        part = raw[i * PART_NBYTES : (i + 1) * PART_NBYTES]
        await buckets.put(spec, _part_of(key, nonce, i), part)
    head = _IN_PARTS + encode((nonce, num_parts))
    revision = await buckets.put(spec, key, head, at)
    for old in {each.split(".")[-2] for each in await buckets.keys(spec, f"{key}.{_PARTS}")}:
        # Not at once: they may be read now, or be those of another put whose head follows.
        if (old == nonce and revision is None) or int(old.partition("-")[0], 16) < now - PARTS_S:
            await buckets.delete(spec, f"{key}.{_PARTS}.{old}")
    return None if revision is None else Stored(head, revision)


async def get_whole(buckets: Buckets, spec: BucketSpec, key: str, head: bytes) -> bytes | None:
    """The value whose head was read; None: its parts are gone."""
    if head[:1] == _WHOLE:
        return head[1:]
    try:
        nonce, num_parts = _decode_parts(head.removeprefix(_IN_PARTS))
    except CodecError as error:
        raise Unreadable(spec.name) from error
    names = [_part_of(key, nonce, i) for i in range(num_parts)]
    parts = await asyncio.gather(*(buckets.get(spec, name) for name in names))
    found = [part.value for part in parts if part is not None]
    return b"".join(found) if len(found) == num_parts else None


def _part_of(key: str, nonce: str, number: int) -> str:
    return f"{key}.{_PARTS}.{nonce}.{number}"
