"""A NATS broker's buckets: streams of JetStream with the last value of each key, as NATS's own key-value has.

A bucket is made when it is first used, and made anew if the broker has lost it. Reads of a stream with
replicas go to their leader, so that what one gateway was told is stored is there for every other.
"""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Final, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.js import JetStreamContext, api
from nats.js.errors import APIError, BadRequestError, NoStreamResponseError, NotFoundError

from mallee.protocol.errors import StoreFull
from mallee.runtime.bus.buckets import BucketSpec, Stored, WritesStopped

T = TypeVar("T")

ANSWER_S: Final = 2.0  # for an answer of the broker
LOOK_S: Final = 1.0  # between looks at whether the broker is there, while nothing comes
_OTHER_REVISION: Final = 10071
_OTHER_CONFIG: Final = 10058  # a stream of that name has another configuration
_NO_STREAM: Final = 10059
_FULL: Final = frozenset({10023, 10047, 10077})  # resources, storage, a bound of the stream
_EXPECTED: Final = "Nats-Expected-Last-Subject-Sequence"


class JetStreamBuckets:
    """`Buckets` of the broker that `client()` is connected to; None: it is away."""

    def __init__(self, client: Callable[[], Client | None]) -> None:
        self._client = client
        self._streams: JetStreamContext | None = None
        self._made: dict[str, BucketSpec] = {}  # by name, as this broker has them

    async def get(self, bucket: BucketSpec, key: str) -> Stored | None:
        subject, stream = _subject(bucket, key), _stream(bucket)
        direct = _is_direct(bucket)

        async def get(streams: JetStreamContext) -> Stored | None:
            try:
                found = await streams.get_last_msg(stream, subject, direct=direct)
            except NotFoundError as error:
                if error.err_code == _NO_STREAM:
                    raise
                return None
            return Stored(found.data or b"", found.seq or 0)

        return await self._call(bucket, get)

    async def put(
        self, bucket: BucketSpec, key: str, value: bytes, revision: int | None = None
    ) -> int | None:
        subject = _subject(bucket, key)
        headers = None if revision is None else {_EXPECTED: str(revision)}

        async def put(streams: JetStreamContext) -> int | None:
            try:
                return (await streams.publish(subject, value, headers=headers)).seq
            except BadRequestError as error:
                if error.err_code == _OTHER_REVISION:
                    return None
                raise

        try:
            return await self._call(bucket, put)
        except TimeoutError as error:
            if bucket.num_replicas > 1:
                raise  # most servers are away: after one whose disk is full another one leads
            # A server that can't write to its disk answers all but what is put. This is not sent then.
            await self._call(bucket, lambda streams: streams.stream_info(_stream(bucket)))
            raise WritesStopped(f"{bucket.name}: the broker's disk takes nothing") from error

    async def delete(self, bucket: BucketSpec, key: str) -> None:
        async def purge(streams: JetStreamContext) -> None:
            for subject in (_subject(bucket, key), _subject(bucket, f"{key}.>")):
                await streams.purge_stream(_stream(bucket), subject=subject)

        await self._call(bucket, purge)

    async def keys(self, bucket: BucketSpec, prefix: str) -> list[str]:
        pattern = _subject(bucket, f"{prefix}.>")

        async def find(streams: JetStreamContext) -> list[str]:
            info = await streams.stream_info(_stream(bucket), subjects_filter=pattern)
            begin = len(_subject(bucket, ""))
            return [subject[begin:] for subject in info.state.subjects or ()]

        return await self._call(bucket, find)

    async def follow(
        self, bucket: BucketSpec, prefix: str
    ) -> AsyncGenerator[tuple[str, Stored], None]:
        pattern, begin = _subject(bucket, f"{prefix}.>"), len(_subject(bucket, ""))

        async def subscribe(streams: JetStreamContext) -> JetStreamContext.PushSubscription:
            return await streams.subscribe(pattern, stream=_stream(bucket), ordered_consumer=True)

        subscription = await self._call(bucket, subscribe)
        try:
            while True:
                try:
                    message = await subscription.next_msg(LOOK_S)
                except nats.errors.TimeoutError:
                    self._there()
                    continue
                except nats.errors.Error as error:
                    raise ConnectionError(f"the broker ended what was followed: {error}") from error
                revision = message.metadata.sequence.stream
                yield message.subject[begin:], Stored(message.data, revision)
        finally:
            with suppress(OSError, nats.errors.Error):  # it may have gone with its connection
                await subscription.unsubscribe()

    async def _call(self, bucket: BucketSpec, use: Callable[[JetStreamContext], Awaitable[T]]) -> T:
        """The result of `use`, with the bucket there."""
        streams = self._there()
        try:
            if self._made.get(bucket.name) != bucket:
                await self._make(streams, bucket)
            try:
                return await use(streams)
            except (NoStreamResponseError, NotFoundError, nats.errors.NoRespondersError):
                await self._make(streams, bucket)  # a broker that was made anew
                return await use(streams)
        except (TimeoutError, nats.errors.TimeoutError) as error:
            raise TimeoutError(f"no answer from the broker in {ANSWER_S:g} s") from error
        except APIError as error:
            if error.err_code in _FULL or "maximum" in str(error.description):
                raise StoreFull(f"{bucket.name}: {error.description}") from error
            raise ConnectionError(f"{bucket.name}: {error.description or error}") from error
        except (OSError, nats.errors.Error) as error:
            raise ConnectionError(f"{bucket.name}: {error}") from error

    def _there(self) -> JetStreamContext:
        client = self._client()
        if client is None:
            raise ConnectionError("the broker is away")
        if self._streams is None or self._streams._nc is not client:
            self._streams = client.jetstream(timeout=ANSWER_S)
            self._made.clear()
        return self._streams

    async def _make(self, streams: JetStreamContext, bucket: BucketSpec) -> None:
        config = api.StreamConfig(
            name=_stream(bucket),
            subjects=[_subject(bucket, ">")],
            max_msgs_per_subject=1,
            max_age=bucket.ttl_s,
            max_bytes=bucket.max_nbytes,
            discard=api.DiscardPolicy.OLD,
            storage=api.StorageType.MEMORY if bucket.is_in_memory else api.StorageType.FILE,
            num_replicas=bucket.num_replicas,
            allow_direct=_is_direct(bucket),
            compression=None if bucket.is_in_memory else api.StoreCompression.S2,
        )
        # Of a stream that was lost and is made anew no revision is one of before.
        first_seq = time.time_ns() // 1_000_000
        try:
            await streams.add_stream(config, first_seq=first_seq)
        except BadRequestError as error:
            if error.err_code != _OTHER_CONFIG:
                raise
            await streams.update_stream(config)  # it is there
        self._made[bucket.name] = bucket


def _stream(bucket: BucketSpec) -> str:
    return f"KV_{bucket.name}"


def _subject(bucket: BucketSpec, key: str) -> str:
    return f"$KV.{bucket.name}.{key}"


def _is_direct(bucket: BucketSpec) -> bool:
    """Whether any server may answer; of several replicas one may lag behind."""
    return bucket.num_replicas == 1
