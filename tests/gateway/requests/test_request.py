"""A request ends once, however its client and the dispatcher meet."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from mallee.gateway.requests.lives import BranchLife, RequestLife
from mallee.gateway.requests.observers import Observer
from mallee.gateway.requests.request import RunningRequest
from mallee.protocol.errors import MalleeError, NoWorker
from mallee.protocol.hashing import as_tokens
from mallee.protocol.ids import RequestId
from mallee.protocol.messages import Limits
from mallee.router.dispatch.jobs import GenerateJob
from mallee.router.dispatch.verdicts import Asked, Comparison


class Log(Observer):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def gave_up(self, branch: BranchLife) -> None:
        self.seen.append(f"{branch.index} given up")

    def ended(self, branches: Sequence[BranchLife], error: MalleeError | None) -> None:
        ends = ", ".join(str(branch.end) for branch in branches)
        self.seen.append(f"ended: {ends}" if error is None else f"{error.code}: {ends}")


async def test_a_client_that_hangs_up_as_it_is_refused_changes_nothing() -> None:
    owner: Any = SimpleNamespace(cancel=lambda *_: pytest.fail("nothing runs"))
    job, log = GenerateJob(as_tokens([1]), Limits(1)), Log()
    request = RunningRequest(
        RequestId("r"),
        owner=owner,
        life=RequestLife(2, 0.0),
        comparison=Comparison(job, Asked(as_tokens([1]), job.salt), None, block_size=4),
        observers=(log,),
        trace=None,
        clock=lambda: 0.0,
    )
    request.refuse(NoWorker("none is registered"))
    await request.aclose()
    request.end()
    assert log.seen == ["no_worker: refused, refused"]
    with pytest.raises(NoWorker):
        await request.opened()
