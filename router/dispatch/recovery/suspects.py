"""Busy workers: one that makes no progress is suspect, and gets nothing more until it has answered a probe.

A worker shows progress by updates, and while it has none by the number of its steps, which its host
tells each second. Heartbeats alone prove nothing: they go on while a forward pass hangs. Without them
its process has stopped, however long its steps are. The length of a step can't be predicted here (a
large model on a CPU takes half a minute for a chunk of a prompt), so a worker's own pauses are the
measure: four times the longest is too long. One that took even longer and then went on was suspected
wrongly; from then on it may take half as long again. A request that was under suspicion on one worker
gets more time on the next: that it is a long one is likelier than that it is poison.
"""

from collections.abc import Collection
from typing import Any, Final

from mallee.protocol.ids import Incarnation, RequestId, WorkerId

CHECK_S: Final = 0.5  # between two looks
SILENCE_S: Final = 3.0  # three heartbeats
LATE_S: Final = (
    1.0  # a look so much later than that proves nothing: what workers said waits to be read
)
_MARGIN: Final = 4.0
_MARGIN_OF_SUSPECTS: Final = 1.5
_FRESH: Final = 10.0  # times the patience, for a worker of which no step is known


class _Watch:
    """One busy worker."""

    __slots__ = ("heard", "is_suspect", "since", "step")

    def __init__(self, now: float) -> None:
        self.since = self.heard = now  # of its last progress, of its last sign of life
        self.step = -1
        self.is_suspect = False


class Suspects:
    """Watches the busy workers of one gateway, and has the probes that suspect ones owe.

    They may make no progress for `patience_s`, or as long as they are known to; None: none ever hangs.
    """

    __slots__ = ("_checked_at", "_limits", "_num_probes", "_patience_s", "_probes", "_watched")

    def __init__(self, patience_s: float | None) -> None:
        self._patience_s = patience_s
        self._watched: dict[WorkerId, _Watch] = {}
        self._limits: dict[WorkerId, float] = {}  # of lives that have done a step, in seconds
        self._checked_at = 0.0
        self._probes: dict[str, WorkerId] = {}  # requests of ours
        self._num_probes = 0

    def __len__(self) -> int:
        """The number of probes under way."""
        return len(self._probes)

    def watch(self, worker: WorkerId, now: float) -> None:
        """`worker` has something to do, from now on if it had nothing."""
        if worker not in self._watched and self._patience_s is not None:
            self._watched[worker] = _Watch(now)

    def unwatch(self, worker: WorkerId) -> None:
        """`worker` has nothing to do."""
        self._watched.pop(worker, None)

    def forget(self, worker: WorkerId) -> None:
        """This life of `worker` is over."""
        self._probes = {probe: of for probe, of in self._probes.items() if of != worker}
        self.unwatch(worker)
        self._limits.pop(worker, None)

    def heard(self, worker: WorkerId, step: int, now: float, *, has_updates: bool) -> None:
        """Take in a sign of `worker`: progress, if it has updates or `step` is another one than before."""
        watch = self._watched.get(worker)
        if watch is None:
            return
        watch.heard = now
        if watch.step == step:
            return
        if watch.step < 0 and not has_updates:
            watch.step = step
            return
        margin = _MARGIN_OF_SUSPECTS if watch.is_suspect else _MARGIN
        assert self._patience_s is not None, "else nothing is watched"
        limit_s = max(self._patience_s, margin * (now - watch.since))
        if limit_s > self._limits.get(worker, 0.0):
            self._limits[worker] = limit_s
        watch.step, watch.since, watch.is_suspect = step, now, False

    def stalled(self, now: float, trying: Collection[WorkerId] = ()) -> list[WorkerId]:
        """The workers that have made no progress for too long, and are not suspect yet.

        Those in `trying` have as much time as if no step of them were known.
        """
        is_late = now > self._checked_at + CHECK_S + LATE_S
        self._checked_at = now
        if is_late:
            return []
        found = []
        for worker, watch in self._watched.items():
            is_stalled = now - watch.since > self._limit_s(worker, is_tried=worker in trying)
            is_silent = watch.step >= 0 and now - watch.heard > SILENCE_S
            if (is_stalled or is_silent) and not watch.is_suspect:
                found.append(worker)
        return found

    def add(self, worker: WorkerId, incarnation: Incarnation) -> RequestId | None:
        """Suspect `worker` until it makes progress.

        Returns the name of a probe to be sent, unless one is under way.
        """
        self._watched[worker].is_suspect = True
        if worker in self._probes.values():
            return None
        self._num_probes += 1
        probe = RequestId(f"probe-{worker}-{incarnation}-{self._num_probes}")
        self._probes[probe] = worker
        return probe

    def answer(self, worker: WorkerId, update: Any) -> bool:
        """Whether `update` is the answer of `worker` to its probe, which is over then."""
        if self._probes.get(update.request) != worker or update.finish is None:
            return False
        del self._probes[update.request]
        return True

    def _limit_s(self, worker: WorkerId, *, is_tried: bool) -> float:
        assert self._patience_s is not None, "else nothing is watched"
        fresh_s = _FRESH * self._patience_s
        known_s = self._limits.get(worker, fresh_s)
        return max(known_s, fresh_s) if is_tried else known_s

    def next_time(self) -> float | None:
        """The time to ask `stalled` again."""
        return self._checked_at + CHECK_S if self._watched else None
