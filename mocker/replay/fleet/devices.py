"""Devices that the workers of a replay share, on its clock."""

from collections.abc import Callable
from math import inf

from mallee.mocker.device import DeviceConfig, DeviceStats, SharedDevice
from mallee.mocker.replay.clock import Clock
from mallee.protocol.ids import Incarnation


class FleetDevices:
    """Workers 0 to k - 1 share the first device, and so on. `ended` is called at the end of a life's work."""

    def __init__(
        self, clock: Clock, config: DeviceConfig, ended: Callable[[Incarnation], None]
    ) -> None:
        self._clock = clock
        self._config = config
        self._ended = ended
        self._devices: dict[int, SharedDevice] = {}
        self._looks: dict[int, float] = {}  # when a device is looked at next

    def begin(self, worker: int, life: Incarnation, at: float, work_s: float) -> None:
        """The step of a worker needs its device from `at` on, for so long."""
        number = worker // self._config.engines
        device = self._devices.setdefault(number, SharedDevice(self._config))
        device.begin(life, at, work_s)
        self._look(number)

    def leave(self, worker: int, life: Incarnation) -> None:
        """Forget the work of a worker that is gone."""
        number = worker // self._config.engines
        if number in self._devices:
            self._devices[number].leave(life, self._clock.now)
            self._look(number)

    def stats(self) -> DeviceStats:
        """Sums over the devices."""
        each = [device.stats() for device in self._devices.values()]
        return DeviceStats(
            sum(stats.busy_s for stats in each),
            sum(stats.switching_s for stats in each),
            sum(stats.num_switches for stats in each),
        )

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        for device in self._devices.values():
            device.check()

    def _look(self, number: int) -> None:
        due = self._devices[number].due
        if due < self._looks.get(number, inf):
            self._looks[number] = due
            self._clock.at_last(due, self._take, number)

    def _take(self, number: int) -> None:
        if self._looks.get(number) != self._clock.now:
            return  # an earlier look came between
        self._looks[number] = -inf  # `begin` sets none until this is over
        while (done := self._devices[number].pop(self._clock.now)) is not None:
            self._ended(Incarnation(done.tenant))
        del self._looks[number]
        self._look(number)
