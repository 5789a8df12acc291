"""State of requests: whole, to be placed, and on one worker."""

from collections.abc import Iterable, Sequence
from typing import Any

from mallee.protocol.errors import WorkerLost
from mallee.protocol.hashing import Hashes
from mallee.protocol.ids import CapsuleId, Incarnation, RequestId, WorkerId
from mallee.protocol.model import BASE_WEIGHTS, WeightVersion
from mallee.router.dispatch.jobs import ForkJob, Job, PrefillJob
from mallee.router.dispatch.texts import AnswerLog, CapsuleText
from mallee.router.placement.pulls import PullReason


class RequestState:
    """A whole request: the branches that have not ended, and all that runs or waits for them."""

    __slots__ = (
        *(
            "arrival",
            "blame",
            "home",
            "id",
            "is_internal",
            "is_made",
            "job",
            "num_shards",
            "open",
            "priorities",
        ),
        *("prompts", "shards", "waiting"),
    )

    def __init__(
        self, request: RequestId, job: Job, now: float, *, is_internal: bool = False
    ) -> None:
        self.id = request
        self.job = job
        self.arrival = now
        self.is_internal = is_internal  # the gateway's own: no client is told of it
        self.is_made = False  # whether the capsule that it promised is there
        self.open = set(range(job.num_branches))
        self.home: WorkerId | None = None  # worker of the first shard, once it is placed
        self.num_shards = 0  # so far; each has a name of its own
        self.blame = 0  # workers that died before they said anything of it
        self.shards: dict[RequestId, Shard] = {}
        self.waiting: list[Dispatch] = []
        self.priorities: dict[
            int, float
        ] = {}  # of branches, that were changed since it was submitted
        self.prompts: dict[int, tuple[int, int]] = {}  # tokens cached and computed, by branch

    def name(self, k: int) -> RequestId:
        """The name of its `k`-th shard from now on."""
        k += self.num_shards
        return RequestId(f"{self.id}-{k}") if k else self.id


class Dispatch:
    """Branches of a request that are to be placed together: all of them, or what a worker left undone.

    `job` is of those branches alone. With `text`, its capsule is gone and is to be computed again.
    """

    __slots__ = (
        *("branches", "hashes", "is_moved", "job", "lane", "lost_with", "num_moves", "queued_at"),
        *("state", "text", "weights"),
    )

    def __init__(
        self,
        state: RequestState,
        job: Job,
        branches: range,
        hashes: Hashes,
        *,
        num_moves: int,
        weights: WeightVersion = BASE_WEIGHTS,
        lost_with: WorkerId | None = None,
    ) -> None:
        self.state = state
        self.job = job
        self.weights = weights  # of its hashes, and of what its branch drew
        self.branches = branches
        self.hashes = hashes
        self.num_moves = num_moves  # workers that its branches were lost with
        self.is_moved = num_moves > 0
        self.lost_with = lost_with  # the last of them
        self.text: CapsuleText | None = None
        self.lane: WorkerId | None = None  # where it waits: for this worker alone
        self.queued_at: float | None = None  # since when it waited, if it did

    @property
    def is_wanted(self) -> bool:
        """Whether a branch of it is open."""
        return not self.state.open.isdisjoint(self.branches)

    @property
    def is_under_way(self) -> bool:
        """Whether it waits or has a shard."""
        state = self.state
        return self in state.waiting or any(
            shard.dispatch is self for shard in state.shards.values()
        )

    @property
    def capsule(self) -> CapsuleId | None:
        """The capsule that binds it to a worker."""
        return self.job.capsule if self.text is None else None

    @property
    def source(self) -> tuple[CapsuleId | None, PullReason]:
        """The capsule that it makes again, which may still be on a worker that drains; why it pulls."""
        if isinstance(self.job, PrefillJob) and self.job.rebuilt is not None:
            return self.job.rebuilt, "drain"
        if self.text is None:
            return None, "prefix"
        assert isinstance(self.job, ForkJob), "no other job has a capsule"
        return (self.job.capsule if self.job.at is None else None), "rebuild"


class Recompute:
    """A capsule that a shard's worker computes first, to be forked there."""

    __slots__ = ("capsule", "job", "lost", "request")

    def __init__(self, request: RequestId, capsule: CapsuleId, job: ForkJob, *, lost: bool) -> None:
        self.request = request  # the prefill's
        self.capsule = capsule  # its name there
        self.job = job  # forks it
        self.lost = lost  # it replaces one that was lost, and stays


class Shard:
    """Branches of a request that are booked and run on one worker, as a request of its own there."""

    __slots__ = (
        *(
            "branches",
            "counts",
            "dispatch",
            "hashes",
            "how",
            "incarnation",
            "is_seen",
            "job",
            "log",
        ),
        *("name", "open", "prompt", "recompute", "state", "touched", "weights", "worker"),
    )

    def __init__(
        self,
        dispatch: Dispatch,
        name: RequestId,
        rows: range,
        worker: WorkerId,
        incarnation: Incarnation,
        how: str,
    ) -> None:
        first = dispatch.branches.start
        self.dispatch = dispatch
        self.state = dispatch.state
        self.name = name
        self.branches = range(first + rows.start, first + rows.stop)
        self.job = dispatch.job.part(rows)
        self.weights = dispatch.weights
        self.worker = worker
        self.incarnation = incarnation
        self.how = how  # stay | recompute | migrate, as the router priced it
        self.open = set(range(len(rows)))
        self.counts = [0] * len(rows)  # tokens drawn, by row
        self.log: AnswerLog | None = None
        self.recompute: Recompute | None = None  # under way
        self.prompt: tuple[int, int] | None = None  # cached and computed, by a recompute
        self.is_seen = False  # whether the worker has said anything of it
        self.touched = dispatch.state.arrival  # last renewal of its booking

    def branch_of(self, row: int) -> int:
        return self.branches.start + row

    def rest(self, rows: range) -> Dispatch:
        """The dispatch of neighbouring rows that have drawn nothing here, and are to move."""
        dispatch = self.dispatch
        before = self.branches.start - dispatch.branches.start  # rows of the dispatch
        job = dispatch.job.part(range(before + rows.start, before + rows.stop))
        branches = range(self.branch_of(rows.start), self.branch_of(rows.stop))
        num_moves = dispatch.num_moves + 1
        return Dispatch(
            self.state,
            job,
            branches,
            dispatch.hashes,
            num_moves=num_moves,
            weights=dispatch.weights,
            lost_with=self.worker,
        )

    def hole(self, update: Any) -> WorkerLost | None:
        """The error of a branch at whose end tokens are missing: they were lost on their way."""
        job, drawn = self.job, self.job.drawn
        seen = drawn + self.counts[update.branch]
        if update.finish == "length" and (
            most := job.max_tokens
        ):  # else its limits are its capsule's
            expected = most
        elif update.finish in ("length", "stop") and update.boundary:
            begun = job.prompt_tokens or update.cached_tokens + update.prefill_tokens
            expected = update.boundary - (begun - drawn)
        else:
            return None
        if seen == expected:
            return None
        return WorkerLost(self.worker, f"{seen} of {expected} tokens arrived")


def runs(rows: Sequence[int]) -> Iterable[range]:
    """The runs of neighbours in rising `rows`."""
    start = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i] != rows[i - 1] + 1:
            yield range(rows[start], rows[i - 1] + 1)
            start = i
