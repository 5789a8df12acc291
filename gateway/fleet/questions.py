"""A gateway's questions to workers about single capsules."""

import asyncio
from typing import Final

from mallee.gateway.fleet.links import WorkerLinks
from mallee.protocol.errors import MalleeError, Unavailable, WorkerLost, from_wire
from mallee.protocol.ids import WorkerId
from mallee.protocol.messages import CapsuleCommand, CapsuleReply, CapsuleStatus

ANSWER_S: Final = 60.0  # a branch whose capsule is wanted may have to compute its prompt first
MOVE_S: Final = 300.0  # many gigabytes may have to be written; the move goes on after that
MAX_ASKED: Final = 4096  # questions at once


class WorkerQuestions:
    """Commands about capsules that wait for their replies. Belongs to one event loop."""

    def __init__(self, links: WorkerLinks) -> None:
        self._links = links
        self._asked: dict[str, tuple[WorkerId, asyncio.Future[CapsuleStatus]]] = {}
        self._closed_by: MalleeError | None = None

    async def ask(
        self, worker: WorkerId, command: CapsuleCommand, timeout_s: float = ANSWER_S
    ) -> CapsuleStatus:
        """The worker's reply. Raises what it refuses with, WorkerLost, and Unavailable: it is silent."""
        if self._closed_by is not None:
            raise self._closed_by
        if len(self._asked) >= MAX_ASKED:
            raise Unavailable(f"{MAX_ASKED} questions about capsules wait already; retry later")
        answer: asyncio.Future[CapsuleStatus] = asyncio.get_running_loop().create_future()
        self._asked[command.request] = worker, answer
        self._links.send(worker, command)
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise Unavailable(
                f"the capsule's worker has not answered for {timeout_s:g} s; retry later"
            ) from None
        finally:
            self._asked.pop(command.request, None)

    def take(self, reply: CapsuleReply) -> None:
        """Pass a reply on; one that is not waited for any more is dropped."""
        asked = self._asked.get(reply.request)
        if asked is None or asked[1].done():
            return
        if reply.status is not None:
            asked[1].set_result(reply.status)
        else:
            assert reply.error is not None, "a reply says something"
            asked[1].set_exception(from_wire(reply.error))

    def close(self, error: MalleeError) -> None:
        """No worker answers any more: what waits, and what is asked from now on, ends with `error`."""
        self._closed_by = error
        for _, answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error)

    def lost(self, worker: WorkerId, reason: str) -> None:
        """Nothing more comes from `worker`."""
        for asked, answer in self._asked.values():
            if asked == worker and not answer.done():
                answer.set_exception(WorkerLost(worker, reason))
