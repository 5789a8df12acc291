"""The order of one engine's KV events: gaps, replays and restarts, by the numbers of its messages."""

from collections.abc import Mapping
from typing import Final, NamedTuple

MAX_WAITING: Final = 4096  # batches, while a replay is on its way


class Arrival(NamedTuple):
    """Work for the caller: forget the engine's blocks, then take in batches."""

    clear: bool = False
    batches: tuple[bytes, ...] = ()


class EventOrder:
    """The order of one engine's batches: gaps, replays, restarts. Pure; numbers start at 0 in each life.

    With replays, live batches wait until a replay has brought those before them: at first, after a gap and in
    a new life (`wants_replay`). `is_whole`: all since the life's start was taken in, so that what is not
    known is not there.
    """

    def __init__(self, *, can_replay: bool) -> None:
        self._can_replay = can_replay
        self._last_live: int | None = None
        self.has_restarted = False  # by its numbers, since `new_life`
        self.num_gaps = 0
        self._reset()

    def _reset(self) -> None:
        self._next: int | None = None  # the number that comes next; None: nothing was taken in
        self._waiting: dict[int, bytes] | None = {} if self._can_replay else None
        self._is_replaying = False
        self.wants_replay = self._can_replay
        self.is_whole = False

    @property
    def has_begun(self) -> bool:
        """Whether anything was taken in."""
        return self._next is not None

    def new_life(self) -> bool:
        """The engine was restarted, by its metrics. False: its numbers have said so before."""
        was_seen, self.has_restarted = self.has_restarted, False
        if not was_seen:
            self._last_live = None
            self._reset()
        return not was_seen

    def on_live(self, seq: int, payload: bytes) -> Arrival:
        """A batch as it was published."""
        is_back = self._last_live is not None and seq <= self._last_live
        is_reborn = is_back or (seq == 0 and bool(self._next))
        self._last_live = seq
        if is_reborn:
            self.has_restarted = True
            self._reset()
        if seq == 0 and self._next is None and not self._is_replaying:
            self._waiting, self.wants_replay = None, False  # nothing came before it
        if self._waiting is None and self._can_replay and seq > (self._next or 0):
            self._waiting, self.wants_replay = {}, True
            self.num_gaps += 1
        if self._waiting is None:
            return Arrival(is_reborn, self._taken({seq: payload}))
        self._waiting[seq] = payload
        if len(self._waiting) > MAX_WAITING:
            del self._waiting[min(self._waiting)]
        return Arrival(is_reborn)

    def begin_replay(self) -> int:
        """The number to replay from."""
        self.wants_replay, self._is_replaying = False, True
        return self._next or 0

    def on_replayed(self, seq: int, payload: bytes) -> Arrival:
        """A batch of the replay that began last; those taken in before are skipped."""
        return Arrival(False, self._taken({seq: payload}) if self._is_replaying else ())

    def end_replay(self, *, is_complete: bool) -> Arrival:
        """No more comes, or none came; the live batches that waited follow."""
        if not self._is_replaying:
            return Arrival()  # another life began meanwhile
        if is_complete and self._next is None:
            self._next, self.is_whole = 0, True  # it has published nothing yet
        waiting, self._waiting, self._is_replaying = self._waiting or {}, None, False
        return Arrival(False, self._taken(waiting))

    def _taken(self, batches: Mapping[int, bytes]) -> tuple[bytes, ...]:
        """Those of `batches` that are new, in order."""
        new = sorted(seq for seq in batches if self._next is None or seq >= self._next)
        for seq in new:
            if self._next is None:
                self.is_whole = seq == 0
            elif seq > self._next:
                self.num_gaps += not self._can_replay
                self.is_whole = False
            self._next = seq + 1
        return tuple(batches[seq] for seq in new)
