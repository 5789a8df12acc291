"""The members of a fleet, for a feed that is looked at alone."""

from mallee.protocol.events import Lease
from mallee.protocol.ids import Incarnation, WorkerId


class Members:
    """Takes every worker, whose name is put into `joined`, and does nothing with it."""

    def __init__(self) -> None:
        self.joined: list[WorkerId] = []

    def join(self, lease: Lease) -> None:
        self.joined.append(lease.worker)

    def on_lease(self, lease: Lease) -> None:
        pass

    def drain(self, worker: WorkerId, incarnation: Incarnation) -> None:
        pass

    def leave(self, worker: WorkerId, incarnation: Incarnation) -> None:
        pass

    def is_heard(self, worker: WorkerId, incarnation: Incarnation) -> bool:
        return False
