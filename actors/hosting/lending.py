"""The loans of one process of workers: those that it gives to others, and those that it gets."""

from collections.abc import Mapping
from dataclasses import dataclass

from mallee.actors.hosting.worker import Worker
from mallee.actors.lending.borrower import Borrower
from mallee.actors.lending.server import LendingServer
from mallee.protocol.errors import WorkerLost
from mallee.protocol.events import LendingUse
from mallee.protocol.ids import WorkerId
from mallee.worker.transfer.peers import Ask, Loan


class HostLender:
    """A `Lender`: the workers of a host, each by its name and life."""

    def __init__(self, workers: Mapping[WorkerId, Worker]) -> None:
        """`workers` may change meanwhile."""
        self._workers = workers

    def lend(self, ask: Ask) -> Loan:
        holder = ask.holder
        worker = self._workers.get(WorkerId(holder.worker))
        if worker is None or worker.incarnation != holder.incarnation:
            raise WorkerLost(holder.worker, "that life of it is over")
        if worker.failure is not None:
            raise WorkerLost(holder.worker, worker.failure)
        return worker.runner.lend(ask)


@dataclass(frozen=True, slots=True)
class Lending:
    """Both ends of a process: its workers' engines have `borrower` as their peers."""

    server: LendingServer
    borrower: Borrower

    @property
    def use(self) -> LendingUse:
        return LendingUse(borrowed=self.borrower.counts.use, lent=self.server.counts.use)
