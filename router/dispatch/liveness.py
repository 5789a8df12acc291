"""Progress of workers that have something to do: one that makes none is suspect.

A worker shows progress by updates, and while it has none by the number of its steps, which its host
tells each second. Heartbeats alone prove nothing: they go on while a forward pass hangs.
"""

from typing import Final

from mallee.protocol.ids import WorkerId

CHECK_S: Final = 0.5  # between two looks
_MARGIN: Final = 4.0  # a pause so many times the longest so far is none that comes to an end


class _Watch:
    """One busy worker."""

    __slots__ = ("since", "step")

    def __init__(self, now: float) -> None:
        self.since = now  # of its last progress
        self.step = -1


class Liveness:
    """Watches busy workers. One is stalled after `patience_s`, or four times its longest pause so far."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._watched: dict[WorkerId, _Watch] = {}
        self._longest: dict[WorkerId, float] = {}  # pauses between steps, by life
        self._checked_at = 0.0

    def watch(self, worker: WorkerId, now: float) -> None:
        """`worker` has something to do, from now on if it had nothing."""
        if worker not in self._watched:
            self._watched[worker] = _Watch(now)

    def unwatch(self, worker: WorkerId) -> None:
        """`worker` has nothing to do."""
        self._watched.pop(worker, None)

    def forget(self, worker: WorkerId) -> None:
        """This life of `worker` is over."""
        self.unwatch(worker)
        self._longest.pop(worker, None)

    def heard(self, worker: WorkerId, step: int, now: float) -> None:
        """Take in a sign of `worker`; it is progress if `step` is another one than before."""
        watch = self._watched.get(worker)
        if watch is None or watch.step == step:
            return
        pause = now - watch.since
        if watch.step >= 0 and pause > self._longest.get(worker, 0.0):
            self._longest[worker] = pause
        watch.step, watch.since = step, now

    def stalled(self, now: float) -> list[WorkerId]:
        """The workers that have made no progress for too long."""
        self._checked_at = now
        return [
            worker
            for worker, watch in self._watched.items()
            if now - watch.since > self._limit_s(worker)
        ]

    def next_time(self) -> float | None:
        """The time to ask `stalled` again."""
        return self._checked_at + CHECK_S if self._watched else None

    def _limit_s(self, worker: WorkerId) -> float:
        return max(self._patience_s, _MARGIN * self._longest.get(worker, 0.0))
