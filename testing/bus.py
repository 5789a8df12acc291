"""A `Bus` without a broker, for tests and benches in one event loop."""

import asyncio

from mallee.runtime.bus.bus import Handler, OnMessage, OnState, Signals


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
        self.is_mute = False
        """Whether all is lost on the way from and to this bus, which does not notice."""

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
