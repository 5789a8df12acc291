"""Movers: the threads, or the one thread, in which moves are carried out."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from mallee.worker.transfer.carrier import Carrier
from mallee.worker.transfer.values import (
    DISK,
    HOST,
    PEER,
    TIER_NAMES,
    Move,
    Moved,
    Question,
    Transfer,
)

NUM_LANES: Final = {HOST: 1, DISK: 1, PEER: 4}
"""Threads of each tier: one peer that answers late does not hold up what others lend."""
NUM_ASKING: Final = 4
"""Threads for questions to peers alone. One may wait until another loan is over: pulls go on meanwhile."""


class Mover:
    """Carries out each move before `start` returns: for one thread, and for what must be alike.

    Others do so beside the steps; those of host memory, and of disk, in order.
    """

    is_beside = False
    """Whether evictions take their time beside the steps."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._done: deque[Moved] = deque()
        self._notify: Callable[[], None] = lambda: None

    def start(self, move: Move) -> Moved | None:
        """The outcome of an eviction, if it is there at once: the next needs the room. Else `done` has it."""
        moved = self._carrier.carry_out(move)
        if isinstance(move, Transfer) and move.is_eviction:
            return moved
        self._done.append(moved)
        return None

    def done(self) -> Sequence[Moved]:
        """The moves that ended since the last call."""
        return [self._done.popleft() for _ in range(len(self._done))]

    @property
    def has_done(self) -> bool:
        """Whether `done` would return any."""
        return bool(self._done)

    def notify(self, call: Callable[[], None]) -> None:
        """Have `call` made, from any thread, whenever a move ends that went on beside its starter."""
        self._notify = call

    def close(self) -> None:
        """Give up what has not begun, wait for what has, and end the loans that nobody took."""
        for moved in self._done:
            if moved.loan is not None:
                moved.loan.close()


class ThreadedMover(Mover):
    """A mover with threads for each tier (`NUM_LANES`), and some for questions to peers (`NUM_ASKING`).

    A tier without moves has none.
    """

    is_beside = True

    def __init__(self, carrier: Carrier, name: str) -> None:
        super().__init__(carrier)
        self._lanes = {
            tier: ThreadPoolExecutor(num, thread_name_prefix=f"{TIER_NAMES[tier]} of {name}")
            for tier, num in NUM_LANES.items()
        }
        self._asking = ThreadPoolExecutor(
            NUM_ASKING, thread_name_prefix=f"questions to peers of {name}"
        )
        self._failure: BaseException | None = None

    def start(self, move: Move) -> None:
        lane = self._asking if isinstance(move, Question) else self._lanes[move.tier]
        lane.submit(self._carry_out, move)

    def _carry_out(self, move: Move) -> None:
        try:
            self._done.append(self._carrier.carry_out(move))
        except BaseException as failure:  # our bug: told where the engine takes its results
            self._failure = failure
        self._notify()

    def done(self) -> Sequence[Moved]:
        if self._failure is not None:
            raise self._failure
        return super().done()

    @property
    def has_done(self) -> bool:
        return bool(self._done) or self._failure is not None

    def close(self) -> None:
        for lane in (self._asking, *self._lanes.values()):
            lane.shutdown(wait=True, cancel_futures=True)
        super().close()
