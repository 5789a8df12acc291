"""Broadcast: one small interface, over a NATS broker or within one process.

Delivery is at most once and never blocks the sender: a message that can't be sent is dropped and
counted. Readers notice by sequence numbers. A bus belongs to one event loop.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias

log = logging.getLogger(__name__)

OnMessage: TypeAlias = Callable[[bytes], None]
OnState: TypeAlias = Callable[[bool], None]
Handler: TypeAlias = Callable[[bytes], Awaitable[bytes]]


class Bus(Protocol):
    """Publish, subscribe, ask and answer. `*` stands for one token of a subscribed subject."""

    num_published: int
    """Messages handed to the broker."""
    num_dropped: int
    """Messages not sent: no connection, queue full, or larger than the broker takes."""

    async def connect(self) -> None:
        """Begin to connect. Returns at once if the broker is away; the bus goes on trying."""
        ...

    @property
    def is_up(self) -> bool:
        """Whether messages are carried now."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended a task of the bus, whose owner should be replaced then."""
        ...

    def on_state(self, callback: OnState) -> None:
        """Call `callback(is_up)` at every change from now on."""
        ...

    def publish(self, subject: str, raw: bytes) -> None:
        """Send, or drop and count while the broker is away. Never blocks; keeps the order."""
        ...

    async def subscribe(self, subject: str, callback: OnMessage) -> None:
        """Call `callback` in order for every message from now on, across reconnects too."""
        ...

    async def request(self, subject: str, raw: bytes, timeout_s: float) -> bytes:
        """The answer. Raises ConnectionError (broker away, no server), TimeoutError."""
        ...

    async def serve(self, subject: str, handler: Handler) -> None:
        """Answer requests. One that makes `handler` raise gets no answer."""
        ...

    async def close(self) -> None:
        """Stop everything; takes a moment at most, broker or not. Idempotent."""
        ...


class Signals:
    """Callbacks of a bus's users. One that raises is logged and counted; the others are still called."""

    def __init__(self) -> None:
        self.is_up = False
        self.num_failed = 0
        self._listeners: list[OnState] = []

    def listen(self, callback: OnState) -> None:
        self._listeners.append(callback)

    def set_up(self, is_up: bool) -> None:
        """Call the listeners if the state changes."""
        if is_up == self.is_up:
            return
        self.is_up = is_up
        for callback in list(self._listeners):
            try:
                callback(is_up)
            except Exception:  # event pump: one listener must not silence the others
                self.num_failed += 1
                log.exception("a listener to the bus's state failed")

    def deliver(self, callback: OnMessage, subject: str, raw: bytes) -> None:
        try:
            callback(raw)
        except Exception:  # event pump: one bad message must not end the subscription
            self.num_failed += 1
            log.exception("a subscriber of %s failed", subject)

    async def answer(self, handler: Handler, subject: str, raw: bytes) -> bytes | None:
        """The handler's answer, or None if it raised."""
        try:
            return await handler(raw)
        except Exception:  # event pump: the asker times out, the server stays
            self.num_failed += 1
            log.exception("the server of %s failed", subject)
            return None


class LocalHub:
    """The broker of `LocalBus`es in one event loop. Starts up."""

    def __init__(self) -> None:
        self.is_up = True
        self.buses: list[LocalBus] = []

    def set_up(self, is_up: bool) -> None:
        """Stop or resume carrying messages."""
        self.is_up = is_up
        for bus in list(self.buses):
            bus.signals.set_up(is_up)


class LocalBus:
    """A `Bus` without a broker: delivers within the event loop, never inside the caller's call."""

    failure = None

    def __init__(self, hub: LocalHub) -> None:
        self.signals = Signals()
        self._hub = hub
        self._subscriptions: list[tuple[str, OnMessage]] = []
        self._servers: dict[str, Handler] = {}
        self.num_published = self.num_dropped = 0

    async def connect(self) -> None:
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
        asyncio.get_running_loop().call_soon(self._carry, subject, raw)

    def _carry(self, subject: str, raw: bytes) -> None:
        for bus in list(self._hub.buses):
            bus._receive(subject, raw)

    def _receive(self, subject: str, raw: bytes) -> None:
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

    async def take(self) -> tuple[str, bytes]:
        """The oldest message; waits for one."""
        while not self._messages:
            self._filled.clear()
            await self._filled.wait()
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


def _matches(pattern: str, subject: str) -> bool:
    wanted, got = pattern.split("."), subject.split(".")
    return len(wanted) == len(got) and all(w in ("*", g) for w, g in zip(wanted, got, strict=True))
