"""A `Bus` over a NATS broker that may come late, go away and come back."""

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import nats.errors
from nats.aio.client import PING_PROTO, Client, Srv
from nats.aio.msg import Msg
from nats.aio.transport import TcpTransport

from mallee.protocol.errors import ConfigError
from mallee.protocol.subjects import Subjects
from mallee.runtime.bus.access import BrokerAccess, FindBroker
from mallee.runtime.bus.buckets import Buckets
from mallee.runtime.bus.bus import Handler, OnMessage, OnState, Signals
from mallee.runtime.bus.jetstream import JetStreamBuckets
from mallee.runtime.tasks import Tasks

log = logging.getLogger(__name__)

RETRY_S = 0.2
MOVED_S = 2.0  # a broker that is away for so long may have moved
ASK_S = 10.0  # for its address
CLOSE_TIMEOUT_S = 1.0
GATHER_S = 0.002  # for messages to share a write, or a read: each wakes a loop, 100 us (measured)
PING_S = 2.0  # a broker is silent, and left, when three pings have gone without an answer


class NoTls(nats.errors.Error):
    """A broker whose URL promises TLS doesn't offer it."""


def check_overrides(own: type, *, names: Sequence[str], needs: str) -> None:
    """Raises ConfigError unless the base of `own` has the methods that it overrides, called as it expects.

    Else nothing would call them, silently, or not with what they go by. `needs`: the versions of the base's
    package that do, as pip takes them.
    """
    base = own.__mro__[1]
    wrong = [name for name in names if _parameters(base, name) != _parameters(own, name)]
    if wrong:
        raise ConfigError(
            f"{base.__module__}.{base.__qualname__} of the installed package has no {', '.join(wrong)} as"
            f" {own.__qualname__} overrides it, so that ours would not be called: install '{needs}'"
        )


def _parameters(owner: type, name: str) -> list[str] | None:
    method = getattr(owner, name, None)
    return list(inspect.signature(method).parameters) if callable(method) else None


class BusClient(Client):
    """nats-py's client, but that it leaves a silent broker at once, keeps to TLS, and flushes in order.

    Messages of subscriptions among the `takers` go to these, and not through a queue and a task of nats-py's;
    of a busy fleet they are read a few at once.

    It never speaks in the clear to a URL with `tls://`: nats-py asks the broker whether it wants TLS, and
    without sends the password as it is. Once `flush` returns, the broker has all that was sent before:
    nats-py's ping overtakes subscriptions and messages that wait in its buffer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.takers: dict[int, Callable[[str, bytes], None]] = {}  # by the ids of subscriptions

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            self.abort()  # nats-py closes nothing if it was stopped while it closed or connected

    async def _attempt_reconnect(self) -> None:
        self.abort()
        await super()._attempt_reconnect()

    async def _connect_to_server(self, s: Srv) -> None:
        self.abort()
        await super()._connect_to_server(s)

    async def _send_ping(self, future: asyncio.Future[bool] | None = None) -> None:
        self._pongs.append(future or asyncio.get_running_loop().create_future())
        await self._send_command(PING_PROTO)
        await self._flush_pending()

    async def _read_loop(self) -> None:
        transport, loop, last_at = self._transport, asyncio.get_running_loop(), 0.0
        assert transport is not None, "it is connected"
        read = partial(type(transport).read, transport)  # a reconnected one has ours from before

        async def gathered(buffer_size: int) -> bytes:
            nonlocal last_at
            if (early_s := last_at + GATHER_S - loop.time()) > 0:
                await asyncio.sleep(early_s)
            raw = await read(buffer_size)
            is_whole = len(raw) < buffer_size  # else there is more of a large message
            last_at = loop.time() if is_whole else 0.0
            return raw

        transport.read = gathered  # type: ignore[method-assign]
        await super()._read_loop()

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        if (take := self.takers.get(sid)) is not None:
            take(subject.decode(), bytes(data))
        else:
            await super()._process_msg(sid, subject, reply, data, headers)

    def abort(self) -> None:
        """End the last connection: nats-py waits until all is sent there, or forgets it while it is open."""
        if isinstance(self._transport, TcpTransport) and (writer := self._transport._io_writer):
            writer.transport.abort()

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        server = self._current_server
        wants_tls = server is not None and server.uri.scheme == "tls"
        if initial_connection and wants_tls and not info.get("tls_required"):
            raise NoTls("it offers no TLS, which tls:// in nats_url asks for")
        await super()._process_info(info, initial_connection)


check_overrides(
    BusClient,
    names=(
        "close",
        "_attempt_reconnect",
        "_connect_to_server",
        "_send_ping",
        "_read_loop",
        "_process_msg",
        "_process_info",
    ),
    needs="nats-py>=2.10,<2.17",
)


class NatsBus:
    """A `Bus` on nats-py. Reconnects for ever; subscriptions survive it.

    nats-py queues without bound while it reconnects and prints its errors; so messages pass through
    a bounded `SendQueue` that is emptied only while connected, and errors go to the log.
    """

    def __init__(self, broker: FindBroker, *, fleet: str, name: str = "mallee") -> None:
        self._find = None if isinstance(broker, BrokerAccess) else broker
        self._access = broker if isinstance(broker, BrokerAccess) else None
        self._inbox = Subjects.of(fleet).inbox()
        self._name = name
        self._client = BusClient()
        self.signals = Signals()
        self.buckets: Buckets = JetStreamBuckets(lambda: self._client if self.is_up else None)
        self._outbox = SendQueue()
        self._subscriptions: list[tuple[str, OnMessage]] = []
        self._servers: list[tuple[str, Handler]] = []
        self._has_connected = False
        self._errors: set[str] = set()  # logged since the broker was reached last
        self._is_closed = False
        self._tasks = Tasks(f"the bus of {name}")
        self._is_begun = False
        self.num_published = self.num_dropped = 0

    async def connect(self) -> None:
        assert not self._is_begun, "connect is called once"
        self._is_begun = True
        self._tasks.spawn(self._connect())
        self._tasks.spawn(self._send())
        if self._find is not None:
            self._tasks.spawn(self._follow(self._find))

    @property
    def is_up(self) -> bool:
        return self.signals.is_up and self.failure is None

    @property
    def failure(self) -> BaseException | None:
        return self._tasks.failure

    def on_state(self, callback: OnState) -> None:
        self.signals.listen(callback)

    def publish(self, subject: str, raw: bytes) -> None:
        if not self.is_up or not self._outbox.put(subject, raw):
            self.num_dropped += 1

    async def subscribe(self, subject: str, callback: OnMessage) -> None:
        self._subscriptions.append((subject, callback))
        if self._has_connected:
            await self._subscribe(subject, callback)

    async def request(self, subject: str, raw: bytes, timeout_s: float) -> bytes:
        if not self.is_up:
            raise ConnectionError("the broker is away")
        try:
            answer = await self._client.request(subject, raw, timeout=timeout_s)
        except nats.errors.NoRespondersError as error:
            raise ConnectionError(f"no server of {subject}") from error
        except nats.errors.TimeoutError as error:
            raise TimeoutError(f"no answer from {subject} in {timeout_s} s") from error
        except nats.errors.Error as error:
            raise ConnectionError(f"{subject}: {error}") from error
        return answer.data

    async def serve(self, subject: str, handler: Handler) -> None:
        self._servers.append((subject, handler))
        if self._has_connected:
            await self._serve(subject, handler)

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        await self._tasks.close()
        if self.is_up:
            await self._empty_outbox()
        await self._close_client()
        self.signals.set_up(False)

    async def _close_client(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._client.close()
        except (TimeoutError, OSError, nats.errors.Error) as error:
            log.info("the bus was closed while its broker was away: %r", error)

    def check(self) -> None:
        """Raises AssertionError if the outbox is beyond its bounds."""
        self._outbox.check()
        assert len(self._outbox) <= self._outbox.max_messages

    async def _follow(self, find: Callable[[], Awaitable[BrokerAccess]]) -> None:
        """Connect to the broker anew where it is now, whenever it is away for a while."""
        away_s = 0.0
        while True:
            await asyncio.sleep(RETRY_S)
            away_s = 0.0 if self.signals.is_up or not self._has_connected else away_s + RETRY_S
            if away_s < MOVED_S:
                continue
            away_s = 0.0
            access = await self._ask(find)
            if access is not None and access != self._access:
                log.warning("the broker has moved, or has other credentials")
                await self._close_client()
                self._client = BusClient()
                await self._connect()

    async def _ask(self, find: Callable[[], Awaitable[BrokerAccess]]) -> BrokerAccess | None:
        try:
            async with asyncio.timeout(ASK_S):
                return await find()
        except (OSError, TimeoutError, ConfigError) as error:
            log.info("the broker's address is not known: %r", error)
            return None

    async def _connect(self) -> None:
        """Until a connection stands; from then on nats-py reconnects by itself."""
        while True:
            if self._find is not None:
                self._access = await self._ask(self._find) or self._access
            if self._access is None:
                await asyncio.sleep(RETRY_S)
                continue
            try:
                await self._client.connect(
                    **self._access.options(),
                    name=self._name,
                    inbox_prefix=self._inbox,
                    error_cb=self._on_error,
                    disconnected_cb=self._on_down,
                    reconnected_cb=self._on_up,
                    closed_cb=self._on_down,
                    connect_timeout=1,
                    reconnect_time_wait=RETRY_S,  # type: ignore[arg-type] # not an int
                    max_reconnect_attempts=-1,
                    ping_interval=PING_S,  # type: ignore[arg-type] # not an int
                    max_outstanding_pings=2,
                    allow_reconnect=True,
                )
                break
            except (OSError, TimeoutError, ConfigError, nats.errors.Error) as error:
                log.debug("no broker at %s yet: %r", self._access.place, error)
                self._client.abort()
                self._client = BusClient()
                await asyncio.sleep(RETRY_S)
        self._has_connected = True
        for subject, callback in list(self._subscriptions):
            await self._subscribe(subject, callback)
        for subject, handler in list(self._servers):
            await self._serve(subject, handler)
        try:
            await self._client.flush()  # subscriptions are in place before the bus reports "up"
        except (TimeoutError, OSError, nats.errors.Error) as error:
            log.info("the broker went away while it was greeted: %r", error)
            return  # nats-py reconnects, and `_on_up` follows
        await self._on_up()

    async def _send(self) -> None:
        while True:
            await self._outbox.wait()
            await asyncio.sleep(GATHER_S)
            while len(self._outbox):
                await self._publish(*self._outbox.take())

    async def _publish(self, subject: str, raw: bytes) -> None:
        try:
            await self._client.publish(subject, raw)
            self.num_published += 1
        except (OSError, nats.errors.Error) as error:
            self.num_dropped += 1
            log.warning("a message of %d bytes to %s was dropped: %r", len(raw), subject, error)

    async def _empty_outbox(self) -> None:
        """Send what was published just before `close`, if the broker takes it."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while len(self._outbox):
                    await self._publish(*self._outbox.take())
                await self._client.flush()
        except (TimeoutError, nats.errors.Error) as error:
            log.info("last messages may be lost: %r", error)

    async def _subscribe(self, subject: str, callback: OnMessage) -> None:
        sid = self._client._sid + 1  # messages may come before `subscribe` returns
        self._client.takers[sid] = partial(self.signals.deliver, callback)
        subscription = await self._client.subscribe(subject)
        assert subscription._id == sid, "nats-py counts subscriptions"

    async def _serve(self, subject: str, handler: Handler) -> None:
        async def reply(message: Msg) -> None:
            answer = await self.signals.answer(handler, subject, message.data)
            if answer is not None and message.reply:
                self.publish(message.reply, answer)

        async def receive(message: Msg) -> None:
            self._tasks.spawn(reply(message))  # requests are answered side by side

        await self._client.subscribe(subject, cb=receive)

    async def _on_error(self, error: Exception) -> None:
        """Log an error that nats-py retries after: once, until the broker is reached."""
        if repr(error) in self._errors:
            return
        self._errors.add(repr(error))
        said = str(error).lower()
        if "authorization" in said:
            log.error("the broker refuses the credentials of %s: %s", self._name, error)
        elif "permissions violation" in said:
            log.error(
                "the broker's account for %s may do too little: %s; `mallee settings --nats-permissions`"
                " prints what it needs",
                self._name,
                error,
            )
        else:
            log.info("bus: %r", error)

    async def _on_down(self) -> None:
        self.num_dropped += self._outbox.clear()
        self.signals.set_up(False)

    async def _on_up(self) -> None:
        self._errors.clear()
        self.signals.set_up(True)


class SendQueue:
    """Messages on their way out, in order, at most `max_messages` and `max_bytes` of them."""

    def __init__(self, max_messages: int = 8192, max_bytes: int = 64 << 20) -> None:
        self.max_messages = max_messages
        self.max_bytes = max_bytes
        self._messages: deque[tuple[str, bytes]] = deque()
        self._nbytes = 0
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, subject: str, raw: bytes) -> bool:
        """False, and nothing kept, if it is full."""
        if len(self._messages) >= self.max_messages or self._nbytes + len(raw) > self.max_bytes:
            return False
        self._messages.append((subject, raw))
        self._nbytes += len(raw)
        self._filled.set()
        return True

    async def wait(self) -> None:
        """Return when there is a message."""
        while not self._messages:
            self._filled.clear()
            await self._filled.wait()

    def take(self) -> tuple[str, bytes]:
        """The oldest message."""
        subject, raw = self._messages.popleft()
        self._nbytes -= len(raw)
        return subject, raw

    def clear(self) -> int:
        """Forget all; returns their number."""
        n = len(self._messages)
        self._messages.clear()
        self._nbytes = 0
        return n

    def check(self) -> None:
        assert self._nbytes == sum(len(raw) for _, raw in self._messages)
