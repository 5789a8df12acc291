"""Capsules on an engine that keeps no state for them: their texts."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from mallee.protocol.errors import CapsulesFull, InvalidParameter, UnknownCapsule
from mallee.protocol.hashing import Tokens
from mallee.protocol.ids import CapsuleId

ENTRY_NBYTES: Final = 512  # of a capsule, beside its tokens


@dataclass(frozen=True, slots=True)
class CapsuleText:
    """The text of one capsule. `drawn`: tokens at its end that a branch drew; None: it is no branch's."""

    id: CapsuleId
    tokens: Tokens
    salt: str  # the scope, as commands have it
    drawn: int | None = None
    ttl_s: float | None = (
        None  # kept until so long without use (0: no limit); None: while there is room
    )

    @property
    def nbytes(self) -> int:
        return ENTRY_NBYTES + self.tokens.nbytes

    def first(self, at: int, name: CapsuleId, ttl_s: float | None = None) -> "CapsuleText":
        """Its first `at` tokens as a capsule `name`, kept for `ttl_s`. Raises InvalidParameter."""
        if not 1 <= at <= len(self.tokens):
            remedy = f"give 1 to {len(self.tokens)}, the tokens of the capsule"
            raise InvalidParameter("at", at, remedy)
        drawn = self.drawn and max(0, self.drawn - (len(self.tokens) - at))
        return CapsuleText(name, self.tokens[:at], self.salt, drawn, ttl_s)


class TextLimits(NamedTuple):
    """Of the capsules of a worker."""

    max_left: int = 256
    max_kept_nbytes: int = 512 << 20


class CapsuleTexts:
    """The capsules of one worker: the newest `max_left` that answers left, and those that are kept.

    Changes are told to `stored` and `released`, in order.
    """

    def __init__(
        self,
        limits: TextLimits,
        *,
        clock: Callable[[], float],
        stored: Callable[[CapsuleText], None],
        released: Callable[[CapsuleId], None],
    ) -> None:
        self._max_left, self._max_kept_nbytes = limits
        self._clock = clock
        self._stored = stored
        self._released = released
        self._left: OrderedDict[CapsuleId, CapsuleText] = OrderedDict()
        self._kept: dict[CapsuleId, CapsuleText] = {}
        self._used: dict[CapsuleId, float] = {}  # the last use of kept ones
        self._kept_nbytes = 0

    def get(self, capsule: str) -> CapsuleText:
        """`capsule`, which counts as used. Raises UnknownCapsule."""
        found = self.peek(capsule)
        if found is None:
            raise UnknownCapsule(capsule)
        if found.id in self._used:
            self._used[found.id] = self._clock()
        else:
            self._left.move_to_end(found.id)
        return found

    def peek(self, capsule: str) -> CapsuleText | None:
        name = CapsuleId(capsule)
        return self._kept.get(name) or self._left.get(name)

    def put(self, text: CapsuleText) -> bool:
        """Keep or leave `text`, instead of what has its id; False: none is left here.

        Raises CapsulesFull, with nothing changed.
        """
        before = self._kept.get(text.id)
        if text.ttl_s is None:
            if not self._max_left:
                self.drop(text.id)
                return False
        else:
            nbytes = self._kept_nbytes - (before.nbytes if before else 0)
            if nbytes + text.nbytes > self._max_kept_nbytes:
                raise CapsulesFull(text.nbytes, nbytes, self._max_kept_nbytes, unit="bytes")
        self._forget(text.id)
        if text.ttl_s is None:
            self._left[text.id] = text
            while len(self._left) > self._max_left:
                self.drop(next(iter(self._left)))
        else:
            self._kept[text.id] = text
            self._used[text.id] = self._clock()
            self._kept_nbytes += text.nbytes
        self._stored(text)
        return True

    def drop(self, capsule: str) -> None:
        """Forget `capsule`. Ignored if it is not here."""
        if self._forget(CapsuleId(capsule)):
            self._released(CapsuleId(capsule))

    def _forget(self, capsule: CapsuleId) -> bool:
        kept = self._kept.pop(capsule, None)
        if kept is not None:
            self._kept_nbytes -= kept.nbytes
            del self._used[capsule]
        return self._left.pop(capsule, kept) is not None

    def expire(self) -> None:
        """Forget those that nothing used for their time to live."""
        now = self._clock()
        for name, used in list(self._used.items()):
            ttl_s = self._kept[name].ttl_s
            if ttl_s and used + ttl_s <= now:
                self.drop(name)

    def ttl_left(self, text: CapsuleText) -> float | None:
        """Seconds until it expires; None: it does not."""
        if not text.ttl_s:
            return None
        return max(0.0, self._used[text.id] + text.ttl_s - self._clock())

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[CapsuleText]:
        yield from self._kept.values()
        yield from self._left.values()
