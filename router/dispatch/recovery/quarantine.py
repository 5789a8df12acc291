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
    """The blamed dispatches of one gateway. Each worker's are tried one by one, in order.

    Those of several workers are tried side by side, a request in one place at a time. Without
    `can_convict` a request is tried for ever.
    """

    __slots__ = ("_can_convict", "_quiet_until", "lost", "trials")

    def __init__(self, *, can_convict: bool) -> None:
        self.lost: dict[WorkerId | None, deque[Dispatch]] = {}  # that wait, by `lost_with`
        self.trials: dict[Dispatch, None] = {}  # under way; as `lost` not to be changed
        self._quiet_until = -inf
        self._can_convict = can_convict

    def waiting(self) -> set[Dispatch]:
        """All that are not on trial yet."""
        return {dispatch for waiting in self.lost.values() for dispatch in waiting}

    def blame(self, lost: Iterable[Shard], now: float) -> None:
        """A worker died with these shards on it. Of several that were on trial there none is convicted."""
        self._quiet_until = now + QUIET_S
        unseen = [shard for shard in lost if not shard.is_seen]
        tried = {shard.dispatch for shard in unseen if shard.dispatch in self.trials}
        for shard in unseen:
            is_convicted = len(tried) == 1 and shard.dispatch in tried
            shard.state.blame = MAX_BLAME if is_convicted else 1

    def is_poison(self, state: RequestState) -> bool:
        """Whether a request is not to be tried again."""
        return state.blame >= MAX_BLAME and self._can_convict

    def add(self, dispatch: Dispatch) -> None:
        self.lost.setdefault(dispatch.lost_with, deque()).append(dispatch)

    def next(self, now: float) -> Dispatch | None:
        """The dispatch to be placed next; it is on trial from now on, unless its request was cleared."""
        dispatch = self._first()
        if dispatch is None or now < self._quiet_until:
            return None
        self.discard(dispatch)
        if dispatch.state.blame:
            self.trials[dispatch] = None
        return dispatch

    def end(self, dispatch: Dispatch) -> bool:
        """End the trial of `dispatch`. False if it was not on trial."""
        if dispatch not in self.trials:
            return False
        del self.trials[dispatch]
        return True

    def discard(self, dispatch: Dispatch) -> None:
        """Have `dispatch` wait no more, if it does."""
        waiting = self.lost.get(dispatch.lost_with, ())
        if dispatch in waiting:
            self.lost[dispatch.lost_with].remove(dispatch)
            if not waiting:
                del self.lost[dispatch.lost_with]

    def workers(self) -> set[WorkerId]:
        """The workers that dispatches are tried on."""
        shards = (shard for trial in self.trials for shard in trial.state.shards.values())
        return {shard.worker for shard in shards if shard.dispatch in self.trials}

    def next_time(self) -> float | None:
        """The time to ask for the `next` one."""
        return None if self._first() is None else self._quiet_until

    def _first(self) -> Dispatch | None:
        """The first dispatch that need not wait for the end of a trial."""
        if not self.lost:
            return None
        tried = {trial.lost_with for trial in self.trials}
        states = {trial.state for trial in self.trials}
        for worker, waiting in self.lost.items():
            dispatch = waiting[0]
            if worker not in tried and dispatch.state not in states:
                return dispatch
        return None
