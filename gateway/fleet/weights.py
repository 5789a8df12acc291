"""The versions of the fleet's weights: asks workers for new ones, and those that lag behind for the newest.

Workers' leases say what they serve and what they are on their way to, and the router sends requests to the
newest alone. So each gateway learns of a change from the first worker that has made it, and asks the others.
"""

import asyncio
import logging
from typing import Any

from mallee.protocol.errors import InvalidParameter, NoWorker
from mallee.protocol.events import AskWeights, Lease, encode_host_ask
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.model import WeightVersion
from mallee.protocol.subjects import Subjects
from mallee.router.router import Router
from mallee.runtime.bus.bus import Bus
from mallee.runtime.tasks import Tasks

log = logging.getLogger(__name__)

ASK_S = 5.0  # for a host's answer
LAGGARD_DRAIN_S = 30.0  # of a worker that this gateway asks on its own account


class FleetWeights:
    """One gateway's view. Belongs to its event loop."""

    def __init__(self, bus: Bus, router: Router, *, fleet: str) -> None:
        self._bus = bus
        self._router = router
        self._subjects = Subjects.of(fleet)
        self._leases: dict[WorkerId, Lease] = {}  # the last of each, whatever it serves
        self._asked: dict[WorkerId, tuple[Incarnation, WeightVersion]] = {}  # each life once
        self._changed = asyncio.Event()
        self.tasks = Tasks("the versions of weights")

    async def close(self) -> None:
        await self.tasks.close()

    def on_lease(self, lease: Lease) -> None:
        """Take in a lease, after the router did."""
        if lease.is_leaving:
            known = self._leases.get(lease.worker)
            is_over = known is not None and known.incarnation == lease.incarnation
            if is_over and not lease.is_finishing:  # else its next life follows
                del self._leases[lease.worker]
            return
        self._leases[lease.worker] = lease
        self._changed.set()
        newest = self._router.weights
        is_coming = lease.change is not None and lease.change.target.covers(newest)
        key = (lease.incarnation, newest)
        if lease.weights != newest and not is_coming and self._asked.get(lease.worker) != key:
            self._asked[lease.worker] = key
            self.tasks.spawn(self._ask_laggard(lease, newest))

    async def _ask_laggard(self, lease: Lease, newest: WeightVersion) -> None:
        log.info("worker %s has older weights: it is asked for %s", lease.worker, newest.label)
        if not await self._ask(lease, newest, LAGGARD_DRAIN_S):
            self._asked.pop(lease.worker, None)  # with its next lease

    async def _ask(self, lease: Lease, weights: WeightVersion, drain_s: float) -> bool:
        """Whether the worker's host has taken the request; its leases tell the rest."""
        asked = AskWeights(lease.worker, weights, drain_s)
        subject = self._subjects.host(lease.host or lease.worker)
        try:
            return bool(await self._bus.request(subject, encode_host_ask(asked), ASK_S))
        except (ConnectionError, TimeoutError) as error:
            log.warning("worker %s can't be asked for other weights: %s", lease.worker, error)
            return False

    async def change(
        self, label: str, *, path: str | None, drain_s: float, wait_s: float
    ) -> dict[str, Any]:
        """Ask every worker for a new version, and wait up to `wait_s` until all have it or have failed.

        Without a `path` the weights stay, and what they computed counts no more. The label of the newest
        version, with its path, asks for that one again. Returns `body`. Raises NoWorker, InvalidParameter.
        """
        newest = self._router.weights
        if not self._leases:
            raise NoWorker("none is registered")
        if label == newest.label:
            if path not in (None, newest.path):
                remedy = "this version serves, from another path; give another label"
                raise InvalidParameter("version", label, remedy)
            target = newest
        elif path is None:
            target = WeightVersion(newest.number + 1, label, newest.path, newest.digest)
        else:
            target = WeightVersion(newest.number + 1, label, path)
        lagging = [lease for lease in self._leases.values() if not lease.weights.covers(target)]
        await asyncio.gather(*(self._ask(lease, target, drain_s) for lease in lagging))
        if wait_s:
            await self._wait(target, wait_s)
        return self.body(target)

    async def _wait(self, target: WeightVersion, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                while not all(_state(each, target) != "waiting" for each in self._leases.values()):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass

    def body(self, target: WeightVersion | None = None) -> dict[str, Any]:
        """The versions that workers serve, and how far they are on the way to `target` (the newest)."""
        target = target or self._router.weights
        return {
            "object": "weights",
            "version": target.label,
            "number": target.number,
            "serving": self._router.weights.label,
            "workers": [_worker_body(each, target) for _, each in sorted(self._leases.items())],
        }


def _state(lease: Lease, target: WeightVersion) -> str:
    if lease.weights.covers(target):
        return "serving"
    change = lease.change
    if change is None or not change.target.covers(target) or change.state != "failed":
        return "waiting"
    return "failed"


def _worker_body(lease: Lease, target: WeightVersion) -> dict[str, Any]:
    state, change = _state(lease, target), lease.change
    body = {"worker": lease.worker, "version": lease.weights.label, "state": state}
    if state != "serving" and change is not None and change.target.covers(target):
        body["state"] = change.state
        if change.reason:
            body["error"] = change.reason
    return body
