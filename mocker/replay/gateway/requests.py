"""A request of a replay as its client sees it."""

from math import nan
from typing import Any, NamedTuple

from mallee.mocker.replay.fleet.workers import Worker
from mallee.protocol.ids import CapsuleId, RequestId
from mallee.router.dispatch.jobs import Job
from mallee.traces.workload import Request


class CapsuleRef(NamedTuple):
    """A capsule that an answer left, and its worker."""

    id: CapsuleId
    num_tokens: int
    worker: Worker


class Asked:
    """One request under way. Times in virtual seconds."""

    __slots__ = (
        *("arrival", "cached", "capsule", "computed", "error", "first", "gateway", "job", "last"),
        *("is_prompted", "name", "num_retries", "output", "prompt_tokens", "raws", "reason"),
        *("request", "routed", "shared", "unseen", "worker"),
    )

    def __init__(self, request: Request, gateway: Any, now: float) -> None:
        self.request = request
        self.gateway = gateway
        self.name = RequestId(f"r{request.number}")
        self.job: Job  # from its begin on
        self.arrival = now
        self.routed = self.first = nan
        self.prompt_tokens = 0
        self.shared = 0  # leading prompt tokens that earlier requests had
        self.output = self.cached = self.computed = 0
        self.is_prompted = False  # its prompt was computed apart, and its tokens counted there
        self.worker = -1  # that of its first shard, counted over all lives
        self.num_retries = 0  # shards that were placed again
        self.unseen: set[RequestId] = set()  # shards that were placed and have said nothing
        self.last: dict[int, float] = {}  # times of branches' last tokens, as far as they were told
        self.error = ""  # code of a failure
        self.reason = ""  # the failure in words
        self.capsule: CapsuleRef | None = None  # of its first branch
        self.raws: list[bytes] = []  # names of texts to be dropped with it
