"""Broadcast: one small interface, and the callbacks of its users.

Delivery is at most once and never blocks the sender: a message that can't be sent is dropped and
counted. Readers notice by sequence numbers. A bus belongs to one event loop.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias

from mallee.runtime.bus.buckets import Buckets

log = logging.getLogger(__name__)

OnMessage: TypeAlias = Callable[[bytes], None]
OnState: TypeAlias = Callable[[bool], None]
Handler: TypeAlias = Callable[[bytes], Awaitable[bytes]]


class Bus(Protocol):
    """Publish, subscribe, ask and answer. `*` stands for one token of a subscribed subject."""

    buckets: Buckets
    """The values that the broker keeps."""
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
