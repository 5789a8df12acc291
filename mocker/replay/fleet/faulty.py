"""A fleet whose workers crash, leave, join, slow down or lose the broker.

`FaultyFleet` is what `mocker.replay.fleet.faults` plays on.
"""

from functools import partial
from typing import NamedTuple

from mallee.mocker.replay.clock import Clock
from mallee.mocker.replay.fleet.workers import (
    Fleet,
    FleetSettings,
    Listener,
    Role,
    Worker,
    worker_name,
)
from mallee.protocol.errors import ConfigError
from mallee.protocol.ids import WorkerId


class _Start(NamedTuple):
    """A worker that is starting; another one of its name may have taken its place meanwhile."""

    worker: int
    role: Role
    number: int


class FaultyFleet(Fleet):
    """A fleet whose workers come and go."""

    def __init__(self, clock: Clock, listener: Listener, settings: FleetSettings) -> None:
        super().__init__(clock, listener, settings)
        self._starting: dict[WorkerId, _Start] = {}
        self._num_starts = 0
        self.is_broker_up = True

    def crash(self, worker: str) -> None:
        """Kill a worker at once, in the middle of its step or of its start. No change if it is gone."""
        key = _key(worker)
        self._starting.pop(key, None)
        if key in self.workers:
            self._bury(self.workers[key])

    def restart(self, worker: str) -> None:
        """Begin a younger life under the same name, empty, after the start-up time."""
        key = _key(worker)
        known = self.workers.get(key) or self._past(key)
        role = known.role if known is not None else self._settings.join_role
        self.crash(worker)
        self._start(key, role)

    def join(self, worker: str) -> None:
        """Add a worker after the start-up time. Raises ConfigError if there is one already."""
        key = _key(worker)
        if key in self.workers or key in self._starting:
            raise ConfigError(f"worker {worker} is there already; join takes a new name")
        self._start(key, self._settings.join_role)

    def drain(self, worker: str) -> None:
        """Send a worker nothing new; it leaves when all gateways let go of it. No change if it is gone."""
        key = _key(worker)
        self._starting.pop(key, None)
        draining = self.workers.get(key)
        if draining is not None and not draining.is_draining:
            draining.is_draining = True
            self._listener.on_lease(draining, self.lease(draining))
            self.let_go(draining)  # gateways that never heard of it won't

    def slow(self, worker: str, factor: float) -> None:
        """Slow every step of a worker from its next one on by `factor`; 1: as before."""
        key = _key(worker)
        self._slow[key] = factor  # of the machine: also of its next lives
        slowing = self.workers.get(key)
        if slowing is not None:
            if slowing.is_busy:
                self._cut(slowing)
            slowing.engine.slow(factor)

    def broker(self, is_up: bool) -> None:
        """Lose what workers publish until the broker is up again; then each sends a lease."""
        self.is_broker_up = is_up
        self._listener.on_broker(is_up)
        if is_up:
            for worker in list(self.workers.values()):
                self._listener.on_lease(worker, self.lease(worker))

    def _start(self, key: WorkerId, role: Role) -> None:
        self._num_starts += 1
        start = _Start(_index(key), role, self._num_starts)
        self._starting[key] = start
        self._clock.at(
            self._clock.now + self._settings.timing.startup_s, partial(self._started, key), start
        )

    def _started(self, key: WorkerId, start: _Start) -> None:
        if self._starting.get(key) == start:
            del self._starting[key]
            self.open(start.worker, start.role)

    def _past(self, key: WorkerId) -> Worker | None:
        """The last life of that name."""
        return next((each for each in reversed(self.lives.values()) if each.name == key), None)


def _index(name: str) -> int:
    digits = name.removeprefix("w")
    if not digits.isdecimal():
        raise ConfigError(f"worker {name!r}: give a number, or w and a number")
    return int(digits)


def _key(name: str) -> WorkerId:
    """The name of a worker that is given by name or by number."""
    return worker_name(_index(name))
