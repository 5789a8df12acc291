"""Requests that may have killed a worker: each is tried again alone, and refused if it kills another.

A worker that dies, or hangs, blames each request of which it had said nothing: one of them may be the
cause. The first token clears a request. Workers that die together (their node is lost) convict nobody.
"""

from collections import deque
from collections.abc import Iterable
from math import inf
from typing import Final

from mallee.protocol.ids import WorkerId
from mallee.router.dispatch.shards import Dispatch, RequestState, Shard

MAX_BLAME: Final = 2  # workers that a request may kill before it is refused
# After a death, before a suspect is tried on another worker: of workers that die together none has
# died of a request.
QUIET_S: Final = 0.5


class Quarantine:
    """The blamed dispatches of one gateway, in the order of their trials; `trial` is under way.

    Without `can_convict` a request is tried for ever.
    """

    __slots__ = ("_can_convict", "_quiet_until", "_waiting", "trial")

    def __init__(self, *, can_convict: bool) -> None:
        self.trial: Dispatch | None = None
        self._waiting: deque[Dispatch] = deque()
        self._quiet_until = -inf
        self._can_convict = can_convict

    def waiting(self) -> set[Dispatch]:
        """All that are not on trial yet."""
        return set(self._waiting)

    def blame(self, lost: Iterable[Shard], now: float) -> None:
        """A worker died with these shards on it."""
        self._quiet_until = now + QUIET_S
        for shard in lost:
            if not shard.is_seen:
                shard.state.blame = MAX_BLAME if shard.dispatch is self.trial else 1

    def is_poison(self, state: RequestState) -> bool:
        """Whether a request is not to be tried again."""
        return state.blame >= MAX_BLAME and self._can_convict

    def add(self, dispatch: Dispatch) -> None:
        self._waiting.append(dispatch)

    def next(self, now: float) -> Dispatch | None:
        """The dispatch to be placed next; it is on trial from now on, unless its request was cleared."""
        if self.trial is not None or not self._waiting or now < self._quiet_until:
            return None
        dispatch = self._waiting.popleft()
        if dispatch.state.blame:
            self.trial = dispatch
        return dispatch

    def end(self, dispatch: Dispatch) -> bool:
        """End the trial of `dispatch`. False if it was not on trial."""
        if self.trial is not dispatch:
            return False
        self.trial = None
        return True

    def discard(self, dispatch: Dispatch) -> None:
        """Have `dispatch` wait no more, if it does."""
        if dispatch in self._waiting:
            self._waiting.remove(dispatch)

    def workers(self) -> set[WorkerId]:
        """The workers that a dispatch is tried on."""
        trial = self.trial
        shards = () if trial is None else trial.state.shards.values()
        return {shard.worker for shard in shards if shard.dispatch is trial}

    def next_time(self) -> float | None:
        """The time to ask for the `next` one."""
        return self._quiet_until if self._waiting and self.trial is None else None
