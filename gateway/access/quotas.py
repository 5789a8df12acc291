"""The use that each key makes of a gateway, and its limits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from mallee.gateway.access.keys import Key
from mallee.protocol.errors import QuotaExceeded, QuotaTooSmall
from mallee.protocol.ids import CapsuleId

MINUTE_S: Final = 60.0


class Bucket:
    """A rate: it fills with `per_minute` units a minute, up to as many, and may be overdrawn by one use."""

    __slots__ = ("_at", "_level", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def take(self, amount: int, now: float) -> None:
        self._fill(now)
        self._level -= amount

    def wait_s(self, needed: float, now: float) -> float:
        """Seconds until it holds `needed` units; 0 if it does."""
        self._fill(now)
        return max(0.0, (needed - self._level) * MINUTE_S / self.per_minute)

    def _fill(self, now: float) -> None:
        more = (now - self._at) * self.per_minute / MINUTE_S
        self._level = min(float(self.per_minute), self._level + more)
        self._at = now


class Use:
    """The requests and capsules of one key, and its rates. Belongs to one event loop.

    `clock` gives monotonic seconds.
    """

    def __init__(self, key: Key, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._running = self._branches = 0
        # Tokens of the capsules that it asked for, where they are limited, and of those under way.
        self._capsules: dict[CapsuleId, int] = {}
        self._making: list[int] = []
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.limit(key)

    def limit(self, key: Key) -> None:
        """Take the limits of `key`, which may have changed; what was used stays."""
        self.key = key
        self._requests = self._bucket(self._requests, key.requests_per_minute)
        self._tokens = self._bucket(self._tokens, key.tokens_per_minute)

    @property
    def is_idle(self) -> bool:
        return not (self._running or self._capsules)

    def begin(self) -> None:
        """One more request. Raises QuotaExceeded: too many run, or came or used too much in this minute."""
        key, now = self.key, self._clock()
        if key.max_running is not None and self._running >= key.max_running:
            raise QuotaExceeded("requests at once", self._running, key.max_running, 1.0)
        if self._requests is not None and (wait := self._requests.wait_s(1.0, now)) > 0:
            per_minute = self._requests.per_minute
            raise QuotaExceeded("requests per minute", per_minute, per_minute, wait)
        self._check_tokens(now)
        if self._requests is not None:
            self._requests.take(1, now)
        self._running += 1

    def add_branches(self, n: int) -> None:
        """So many branches more, of requests that run. Raises QuotaExceeded, QuotaTooSmall."""
        most = self.key.max_branches
        if most is not None and n > most:
            raise QuotaTooSmall("branches at once", n, most)
        if most is not None and self._branches + n > most:
            raise QuotaExceeded("branches at once", self._branches, most, 1.0)
        self._branches += n

    def stay(self) -> None:
        """A request goes on after its answer."""
        self._running += 1

    def end(self, num_branches: int) -> None:
        """The end of a request that had so many."""
        self._running -= 1
        self._branches -= num_branches

    def charge_prompt(self, tokens: int) -> None:
        """So many tokens more. Raises QuotaExceeded if others used them up since the request began."""
        self._check_tokens(self._clock())
        self.charge(tokens)

    def charge(self, tokens: int) -> None:
        """So many tokens more, of an answer under way; the next request waits for them."""
        if self._tokens is not None:
            self._tokens.take(tokens, self._clock())

    @contextmanager
    def making(
        self, tokens: int, is_kept: Callable[[CapsuleId], bool]
    ) -> Iterator[Callable[[CapsuleId], None]]:
        """A capsule of so many tokens while it is made; the value is called with its id.

        Raises QuotaExceeded, QuotaTooSmall. Capsules count until `is_kept(capsule)` says that they are gone.
        """
        key = self.key
        if key.max_capsules is None and key.max_capsule_tokens is None:
            yield lambda capsule: None
            return
        if key.max_capsules == 0:
            raise QuotaTooSmall("capsules", 1, 0)
        if key.max_capsule_tokens is not None and tokens > key.max_capsule_tokens:
            raise QuotaTooSmall("tokens in capsules", tokens, key.max_capsule_tokens)
        self._capsules = {c: n for c, n in self._capsules.items() if is_kept(c)}
        num = len(self._capsules) + len(self._making)
        if key.max_capsules is not None and num >= key.max_capsules:
            raise QuotaExceeded("capsules", num, key.max_capsules, MINUTE_S)
        kept = sum(self._capsules.values()) + sum(self._making)
        if key.max_capsule_tokens is not None and kept + tokens > key.max_capsule_tokens:
            raise QuotaExceeded("tokens in capsules", kept, key.max_capsule_tokens, MINUTE_S)
        self._making.append(tokens)
        try:
            yield lambda capsule: self._capsules.update({capsule: tokens})
        finally:
            self._making.remove(tokens)

    def unkeep(self, capsule: CapsuleId) -> None:
        """`capsule` is not kept any more, though it may be there: it counts no more."""
        self._capsules.pop(capsule, None)

    def _check_tokens(self, now: float) -> None:
        if self._tokens is not None and (wait := self._tokens.wait_s(1.0, now)) > 0:
            per_minute = self._tokens.per_minute
            raise QuotaExceeded("tokens per minute", per_minute, per_minute, wait)

    def _bucket(self, old: Bucket | None, per_minute: int | None) -> Bucket | None:
        if per_minute is None or (old is not None and old.per_minute == per_minute):
            return None if per_minute is None else old
        return Bucket(per_minute, self._clock())


class Visit:
    """One request, as long as the context lasts; it counts in the use of its key, if it has one."""

    __slots__ = ("_num_branches", "_use")

    def __init__(self, use: Use | None) -> None:
        self._use = use
        self._num_branches = 0

    def __enter__(self) -> None:
        """Raises QuotaExceeded."""
        if self._use is not None:
            self._use.begin()

    def __exit__(self, *_: object) -> None:
        if self._use is not None:
            self._use.end(self._num_branches)

    @contextmanager
    def staying(self) -> Iterator["Visit"]:
        """The part of this request that goes on after its answer, as long as the context lasts."""
        if self._use is None:
            yield self
            return
        self._use.stay()
        more = Visit(self._use)
        try:
            yield more
        finally:
            more.__exit__()

    def another(self) -> "Visit":
        """One more request under the same key, which has not begun."""
        return Visit(self._use)

    def begin(self, branches: int, tokens: int) -> None:
        """Count a prompt of so many tokens, and its branches. Raises QuotaExceeded, QuotaTooSmall."""
        if self._use is not None:
            self._use.add_branches(branches)
            self._num_branches += branches
            self._use.charge_prompt(tokens)

    def charge(self, tokens: int) -> None:
        """So many tokens of its answer."""
        if self._use is not None:
            self._use.charge(tokens)

    def unkeep(self, capsule: CapsuleId) -> None:
        """See `Use.unkeep`."""
        if self._use is not None:
            self._use.unkeep(capsule)

    @contextmanager
    def making(
        self, tokens: int, is_kept: Callable[[CapsuleId], bool]
    ) -> Iterator[Callable[[CapsuleId], None]]:
        """See `Use.making`."""
        if self._use is None:
            yield lambda capsule: None
            return
        with self._use.making(tokens, is_kept) as keep:
            yield keep


UNLIMITED: Final = Visit(None)
