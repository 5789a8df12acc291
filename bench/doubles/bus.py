"""A `Bus` without a broker, for tests and benches in one event loop."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

from mallee.protocol.errors import StoreFull
from mallee.runtime.bus.buckets import Buckets, BucketSpec, Stored
from mallee.runtime.bus.bus import Handler, OnMessage, OnState, Signals

ANSWER_S: Final = 2.0  # in which a broker answers, or is taken not to
MAX_LINE: Final = 3800  # bytes of a key, so that a line has less than 4 KiB


class LocalHub:
    """The broker of `LocalBus`es in one event loop. Starts up."""

    def __init__(self) -> None:
        self.is_up = True
        self.buses: list[LocalBus] = []
        self.kept = KeptValues()

    def set_up(self, is_up: bool) -> None:
        """Stop or resume carrying messages."""
        self.is_up = is_up
        for bus in list(self.buses):
            bus.signals.set_up(is_up)
        self.kept.tell()  # those that follow see it


class LocalBus:
    """A `Bus` without a broker: delivers within the event loop, never inside the caller's call."""

    failure = None

    def __init__(self, hub: LocalHub) -> None:
        self.signals = Signals()
        self.buckets: Buckets = LocalBuckets(self, hub.kept)
        self._hub = hub
        self._subscriptions: list[tuple[str, OnMessage]] = []
        self._servers: dict[str, Handler] = {}
        self.num_published = self.num_dropped = 0
        self.is_mute = False
        """Whether all is lost on the way from and to this bus, which does not notice."""

    async def connect(self) -> None:
        self.connect_now()

    def connect_now(self) -> None:
        """As `connect`, outside of an event loop too."""
        self._hub.buses.append(self)
        self.signals.set_up(self._hub.is_up)

    @property
    def is_up(self) -> bool:
        return self.signals.is_up

    def on_state(self, callback: OnState) -> None:
        self.signals.listen(callback)

    def publish(self, subject: str, raw: bytes) -> None:
        if not self.is_up:
            self.num_dropped += 1
            return
        self.num_published += 1
        if self.is_mute:
            return
        asyncio.get_running_loop().call_soon(self._carry, subject, raw)

    def _carry(self, subject: str, raw: bytes) -> None:
        for bus in list(self._hub.buses):
            bus._receive(subject, raw)

    def _receive(self, subject: str, raw: bytes) -> None:
        if self.is_mute:
            return
        for pattern, callback in list(self._subscriptions):
            if _matches(pattern, subject):
                self.signals.deliver(callback, subject, raw)

    async def subscribe(self, subject: str, callback: OnMessage) -> None:
        self._subscriptions.append((subject, callback))

    async def request(self, subject: str, raw: bytes, timeout_s: float) -> bytes:
        if not self.is_up:
            raise ConnectionError("the broker is away")
        for bus in self._hub.buses:
            if (handler := bus._servers.get(subject)) is not None:
                break
        else:
            raise ConnectionError(f"no server of {subject}")
        async with asyncio.timeout(timeout_s):
            answer = None
            if not self.is_mute and not bus.is_mute:
                answer = await bus.signals.answer(handler, subject, raw)
            if answer is None:
                await asyncio.Event().wait()  # as with a broker: a failed server is a silent one
        assert answer is not None
        return answer

    async def serve(self, subject: str, handler: Handler) -> None:
        self._servers[subject] = handler

    async def close(self) -> None:
        if self in self._hub.buses:
            self._hub.buses.remove(self)
        self._subscriptions.clear()
        self._servers.clear()
        self.signals.set_up(False)


def _matches(pattern: str, subject: str) -> bool:
    wanted, got = pattern.split("."), subject.split(".")
    return len(wanted) == len(got) and all(w in ("*", g) for w, g in zip(wanted, got, strict=True))


class Values(dict[str, Stored]):
    """Those of one bucket by key, the oldest first, and when each was put."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self.times: dict[str, float] = {}


class KeptValues:
    """The values of all buckets of a `LocalHub`, which outlive its buses."""

    def __init__(self) -> None:
        self.buckets: dict[str, Values] = {}
        self.revision = 0
        self.is_full = False
        self.loses_answers = False
        """Whether writes are carried out, and nobody hears of it."""
        self.late_s = 0.0  # by which every answer is
        self.news = asyncio.Event()  # replaced at each put

    def values(self, bucket: BucketSpec, now: float) -> dict[str, Stored]:
        """Those of a bucket that are not too old, or too many."""
        values = self.buckets.setdefault(bucket.name, Values())
        while values:
            key = next(iter(values))
            is_old = values.times[key] <= now - bucket.ttl_s
            if not is_old and values.nbytes <= bucket.max_nbytes:
                break
            self.delete(bucket, key)
        return values

    def delete(self, bucket: BucketSpec, key: str) -> None:
        values = self.buckets[bucket.name]
        if (before := values.pop(key, None)) is not None:
            values.nbytes -= len(before.value)
            del values.times[key]

    def put(self, bucket: BucketSpec, key: str, value: bytes, now: float) -> int:
        self.revision += 1
        self.delete(bucket, key)
        values = self.buckets[bucket.name]
        values[key], values.times[key] = Stored(value, self.revision), now
        values.nbytes += len(value)
        self.tell()
        return self.revision

    def tell(self) -> None:
        """Have those that follow look."""
        news, self.news = self.news, asyncio.Event()
        news.set()


class LocalBuckets:
    """`Buckets` in memory, which are away while their bus is down."""

    def __init__(self, bus: LocalBus, kept: KeptValues) -> None:
        self._bus = bus
        self._kept = kept

    async def get(self, bucket: BucketSpec, key: str) -> Stored | None:
        assert len(key) < MAX_LINE, "a broker leaves a client that sends such a line"
        found = (await self._values(bucket)).get(key)
        await self._answer()
        return found

    async def put(
        self, bucket: BucketSpec, key: str, value: bytes, revision: int | None = None
    ) -> int | None:
        before = (await self._values(bucket)).get(key)
        if self._kept.is_full:
            raise StoreFull("no room is left")
        if revision is not None and revision != (before.revision if before is not None else 0):
            return None
        made = self._kept.put(bucket, key, value, asyncio.get_running_loop().time())
        await self._answer(is_lost=self._kept.loses_answers)
        return made

    async def _answer(self, *, is_lost: bool = False) -> None:
        if self._kept.late_s:
            await asyncio.sleep(min(self._kept.late_s, ANSWER_S))
        if is_lost or self._kept.late_s > ANSWER_S:
            raise TimeoutError("no answer came")

    async def delete(self, bucket: BucketSpec, key: str) -> None:
        values = await self._values(bucket)
        for each in [each for each in values if _is_at(each, key)]:
            self._kept.delete(bucket, each)
        await self._answer(is_lost=self._kept.loses_answers)

    async def keys(self, bucket: BucketSpec, prefix: str) -> list[str]:
        values = await self._values(bucket)
        found = [key for key in values if key != prefix and _is_at(key, prefix)]
        await self._answer()
        return found

    async def follow(
        self, bucket: BucketSpec, prefix: str
    ) -> AsyncGenerator[tuple[str, Stored], None]:
        last = 0
        while True:
            news = self._kept.news
            found = [(key, each) for key, each in (await self._values(bucket)).items()]
            found = [(k, v) for k, v in found if v.revision > last and _is_at(k, prefix)]
            for key, each in sorted(found, key=lambda pair: pair[1].revision):
                last = each.revision
                if key != prefix:
                    yield key, each
            await news.wait()

    async def _values(self, bucket: BucketSpec) -> dict[str, Stored]:
        await asyncio.sleep(0)  # as with a broker, others run meanwhile
        if not self._bus.is_up:
            raise ConnectionError("the broker is away")
        if self._bus.is_mute:
            raise TimeoutError("no answer")
        return self._kept.values(bucket, asyncio.get_running_loop().time())


def _is_at(key: str, prefix: str) -> bool:
    return key == prefix or key.startswith(f"{prefix}.")
