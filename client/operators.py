"""The fleet as operators see it: workers, the router's decisions, the course of requests; no I/O."""

from typing import Any, Final

import msgspec


class TierUse(msgspec.Struct, frozen=True, kw_only=True):
    """KV below a worker's device: blocks that lie there by tier, and were moved so far by kind of move."""

    blocks: dict[str, int]
    moved_blocks: dict[str, int]
    block_nbytes: int = 0
    held_blocks: int = 0
    dropped_blocks: int = 0
    declined_blocks: int = 0
    failed_moves: int = 0


class WorkerUse(msgspec.Struct, frozen=True, kw_only=True):
    """Branches, blocks and capsules of a worker's engine, and its counts so far."""

    running_branches: int
    waiting_branches: int
    live_blocks: int
    cached_blocks: int
    cached_tokens: int
    prefill_tokens: int
    evicted_blocks: int
    preemptions: int
    capsules: int = 0


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker, as a gateway sees it. Without `use` its process did not answer."""

    worker: str
    state: str
    active_blocks: int
    num_blocks: int
    rows: int
    waiting: int
    prefill_tokens: int
    indexed_blocks: int
    lease_age_s: float
    weight_version: str
    incarnation: str = ""
    address: str = ""
    device: str = ""
    is_whole: bool = True
    is_new: bool = False
    lends_at: str = ""
    metrics_at: str = ""
    weight_change: dict[str, Any] | None = None
    use: WorkerUse | None = None
    tiers: TierUse | None = None

    @property
    def used(self) -> float:
        """The share of its KV that branches and capsules have."""
        return self.active_blocks / max(1, self.num_blocks)


class WorkerList(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `GET /v1/router/workers`."""

    data: list[Worker]


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that could have taken a request. Prices are seconds; None: it could not go there."""

    worker: str
    eligible: bool = True
    overlap_blocks: int = 0
    matched_blocks: int = 0
    pulled_blocks: int = 0
    queued_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    fetch_s: float | None = None
    displaced_s: float | None = None
    pull_s: float | None = None
    total: float | None = None


class Spill(msgspec.Struct, frozen=True, kw_only=True):
    """The way of a part of a fan-out, and the prices that it was chosen by."""

    how: str
    wait_s: float | None = None
    migrate_s: float | None = None
    recompute_s: float | None = None


class Pull(msgspec.Struct, frozen=True, kw_only=True):
    """KV that the worker is told to fetch from others."""

    reason: str
    blocks: int
    bytes: int = 0
    holders: list[dict[str, Any]] = msgspec.field(name="from", default_factory=list)


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The choice of a worker."""

    number: int
    request: str
    worker: str
    reason: str
    prompt_tokens: int
    num_candidates: int
    candidates: list[Candidate]
    num_blocks: int = 0
    rows: int = 1
    spill: Spill | None = None
    pull: Pull | None = None

    @property
    def chosen(self) -> Candidate | None:
        return next((each for each in self.candidates if each.worker == self.worker), None)


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The use of the cache by a prompt."""

    served: str
    reason: str | None = None


class State(msgspec.Struct, frozen=True, kw_only=True):
    """A state of a branch, and when it began: seconds since the request came."""

    state: str
    at_s: float


class Stay(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that a branch ran on; None where workers are not named."""

    worker: str | None = None


class BranchCourse(msgspec.Struct, frozen=True, kw_only=True):
    """One branch, as `life` of a decision or a request's own record tells of it."""

    state: str
    prompt: str | None = None
    cached_tokens: int = 0
    prefill_tokens: int = 0
    output_tokens: int = 0
    tokens_per_s: float | None = None
    worker: str | None = None  # these three: of `life`
    first_token_s: float | None = None
    end_s: float | None = None
    workers: list[Stay] = []  # these: of the record
    states: list[State] = []
    capsule: str | None = None

    @property
    def place(self) -> str:
        """Its worker, or all of them in their order."""
        named = [stay.worker for stay in self.workers if stay.worker]
        return self.worker or ", ".join(dict.fromkeys(named))

    def began(self, state: str) -> float | None:
        return next((each.at_s for each in self.states if each.state == state), None)

    @property
    def answers_at(self) -> float | None:
        return self.began("answering") if self.first_token_s is None else self.first_token_s

    @property
    def ends_at(self) -> float | None:
        is_over = self.states and self.states[-1].state not in _RUNNING
        return self.states[-1].at_s if is_over else self.end_s


_RUNNING: Final = ("tokenizing", "waiting", "computing", "answering")


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """The branches of a request, from its arrival to their ends."""

    branches: list[BranchCourse]
    cache: Served | None = None


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `GET /v1/router/explain`. `life`: the course of the request that was asked for."""

    data: list[Decision]
    life: Course | None = None
