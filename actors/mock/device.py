"""A device that mocked engines of one process share, at the pace of the wall clock."""

from collections.abc import Callable
from math import inf
from typing import Protocol

from mallee.actors.mock.pacer import Pacer
from mallee.mocker.device import DeviceConfig, SharedDevice


class Tenant(Protocol):
    """An engine that waits for its device."""

    def device_done(self, at: float) -> None:
        """Take the end of the step under way, which came at `at`, now or a moment ago."""
        ...


class LiveDevice:
    """A `Paced` of the engines' own timer. Tenants get the ends of steps in order, each with its time."""

    def __init__(self, config: DeviceConfig, pacer: Pacer, clock: Callable[[], float]) -> None:
        self._device = SharedDevice(config)
        self._pacer = pacer
        self._clock = clock
        self._tenants: dict[int, Tenant] = {}
        self._numbers: dict[Tenant, int] = {}
        self._num_tenants = 0
        self._is_waking = False
        self.due: float | None = None

    def begin(self, tenant: Tenant, at: float, work_s: float) -> None:
        """The tenant's step needs the device from `at` on, for so long."""
        number = self._numbers.get(tenant)
        if number is None:
            number = self._numbers[tenant] = self._num_tenants
            self._tenants[number] = tenant
            self._num_tenants += 1
        self._device.begin(number, at, work_s)
        self._look()

    def leave(self, tenant: Tenant) -> None:
        """Forget a tenant and its work. Nothing happens if there is no such tenant."""
        number = self._numbers.pop(tenant, None)
        if number is not None:
            del self._tenants[number]
            self._device.leave(number, min(self._clock(), self._device.due))
            self._look()

    def wake(self) -> None:
        self.due = None
        self._is_waking = True
        try:
            now = self._clock()
            while (done := self._device.pop(now)) is not None:
                self._tenants[done.tenant].device_done(done.at)
        finally:
            self._is_waking = False
            self._look()

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        self._device.check()
        assert self._device.due == inf or self.due is not None, "work waits, and no timer runs"

    def _look(self) -> None:
        due = self._device.due
        if not self._is_waking and due < inf and (self.due is None or due < self.due):
            self.due = due
            self._pacer.at(due, self)
