"""Busy workers that make no progress: they get nothing more until they have answered a probe."""

from collections.abc import Collection
from typing import Any

from mallee.protocol.ids import Incarnation, RequestId, WorkerId
from mallee.router.dispatch.recovery.liveness import Liveness


class Suspects:
    """The suspect workers of one gateway and the probes that they owe. `patience_s` None: none hangs."""

    __slots__ = ("_liveness", "_num_probes", "_probes")

    def __init__(self, patience_s: float | None) -> None:
        self._liveness = None if patience_s is None else Liveness(patience_s)
        self._probes: dict[str, WorkerId] = {}  # requests of ours
        self._num_probes = 0

    def __len__(self) -> int:
        """The number of probes under way."""
        return len(self._probes)

    def watch(self, worker: WorkerId, now: float) -> None:
        """`worker` has something to do."""
        if self._liveness is not None:
            self._liveness.watch(worker, now)

    def unwatch(self, worker: WorkerId) -> None:
        """`worker` has nothing to do."""
        if self._liveness is not None:
            self._liveness.unwatch(worker)

    def heard(self, worker: WorkerId, step: int, now: float, *, has_updates: bool) -> None:
        """Take in a frame of `worker`, which has done `step` steps."""
        if self._liveness is not None:
            self._liveness.heard(worker, step, now, has_updates=has_updates)

    def stalled(self, now: float, trying: Collection[WorkerId]) -> list[WorkerId]:
        """The workers that have become suspect; those in `trying` have more time."""
        return [] if self._liveness is None else self._liveness.stalled(now, trying)

    def add(self, worker: WorkerId, incarnation: Incarnation) -> RequestId | None:
        """Suspect `worker`. Returns the name of a probe to be sent, unless one is under way."""
        assert self._liveness is not None, "workers never hang"
        self._liveness.suspect(worker)
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

    def forget(self, worker: WorkerId) -> None:
        """This life of `worker` is over."""
        self._probes = {probe: of for probe, of in self._probes.items() if of != worker}
        if self._liveness is not None:
            self._liveness.forget(worker)

    def next_time(self) -> float | None:
        """The time to ask for `stalled` workers again."""
        return None if self._liveness is None else self._liveness.next_time()
