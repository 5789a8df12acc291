"""Bodies of an operator's paths, and of a service's health."""

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, field

from mallee.protocol.api.shared import OMITTED, AnyBody, Body

MAX_LABEL: Final = 128
MAX_CHANGE_S: Final = 3600

ChangeSeconds = Annotated[float, Meta(ge=0, le=MAX_CHANGE_S)]


class WeightsRequest(AnyBody, frozen=True, kw_only=True):
    """`POST /v1/models/weights`. Without `path` the weights stay, and their KV counts no more.

    `drain_s`: seconds that running answers have to end. `wait_s`: until every worker serves the version, or
    failed.
    """

    version: Annotated[str, Meta(min_length=1, max_length=MAX_LABEL, description="A label.")]
    path: str | None = None
    drain_s: ChangeSeconds = 30.0
    wait_s: ChangeSeconds = 0.0


# Answers


class Weights(Body, frozen=True, kw_only=True):
    object: Literal["weights"]
    version: str
    number: int
    serving: str
    workers: list[dict[str, Any]]


class WorkerUse(Body, frozen=True, kw_only=True):
    """Branches, blocks and capsules of a worker's engine, and its counts so far."""

    running_branches: int
    waiting_branches: int
    live_blocks: int
    cached_blocks: int
    capsules: int
    cached_tokens: int
    prefill_tokens: int
    evicted_blocks: int
    preemptions: int


class TierUse(Body, frozen=True, kw_only=True):
    """KV below a worker's device: blocks that lie there by tier, and were moved so far by kind of move."""

    block_nbytes: int
    blocks: dict[str, int]
    held_blocks: int
    moved_blocks: dict[str, int]
    dropped_blocks: int
    declined_blocks: int
    failed_moves: int


class Worker(Body, frozen=True, kw_only=True):
    """A worker, as a gateway sees it. Without `use` its process did not answer. `lacks`: requests that its
    engine can't take. Before others' engines a router says how well it knows the `cache` of each, and why.
    """

    worker: str
    object: Literal["worker"]
    incarnation: str
    address: str
    state: str
    device: str
    num_blocks: int
    active_blocks: int
    indexed_blocks: int
    rows: int
    waiting: int
    prefill_tokens: int
    lease_age_s: float
    is_whole: bool
    is_new: bool
    lends_at: str
    lacks: list[str]
    weight_version: str
    weight_change: dict[str, Any] | None
    metrics_at: str
    use: WorkerUse | None
    tiers: TierUse | None
    cache: Literal["exact", "predicted", "blind"] = OMITTED
    cache_reason: str = OMITTED


class WorkerList(Body, frozen=True, kw_only=True):
    object: Literal["list"]
    data: list[Worker]


class WorkerDraining(Body, frozen=True, kw_only=True):
    worker: str
    object: Literal["worker.draining"] = "worker.draining"


class Candidate(Body, frozen=True, kw_only=True):
    """A worker that could have taken a request. Prices are seconds; null: it could not go there."""

    worker: str
    eligible: bool
    overlap_blocks: int
    matched_blocks: int
    pulled_blocks: int
    queued_s: float
    prefill_s: float
    decode_s: float
    fetch_s: float
    displaced_s: float
    pull_s: float
    total: float | None


class Prices(Body, frozen=True, kw_only=True):
    """Seconds of each way; null: it is barred."""

    wait_s: float | None
    migrate_s: float | None
    recompute_s: float | None


class Spill(Prices, frozen=True, kw_only=True):
    """The way of a part of a fan-out, and the prices that it was chosen by."""

    how: str


class Pull(Prices, frozen=True, kw_only=True):
    """KV that the worker is told to fetch from others."""

    reason: str
    blocks: int
    bytes: int
    holders: list[dict[str, Any]] = field(name="from")


class Decision(Body, frozen=True, kw_only=True):
    """The choice of a worker."""

    number: int
    object: Literal["route.decision"]
    request: str
    worker: str
    reason: str
    prompt_tokens: int
    num_blocks: int
    rows: int
    num_candidates: int
    candidates: list[Candidate]
    spill: Spill = OMITTED
    pull: Pull = OMITTED


class BranchCourse(Body, frozen=True, kw_only=True):
    """One branch. Times are seconds since its request came."""

    state: str
    worker: str | None
    moves: int
    placed_s: float | None
    first_token_s: float | None
    end_s: float | None
    prompt: str | None
    cached_tokens: int
    prefill_tokens: int
    output_tokens: int
    tokens_per_s: float | None


class Course(Body, frozen=True, kw_only=True):
    """The branches of a request of any client, from its arrival to their ends."""

    object: Literal["request.life"]
    prepare_s: float
    cache: dict[str, Any] | None
    branches: list[BranchCourse]


class Decisions(Body, frozen=True, kw_only=True):
    """`life`: the course of the request that was asked for."""

    object: Literal["list"]
    data: list[Decision]
    life: Course = OMITTED


class MetricsTarget(Body, frozen=True, kw_only=True):
    targets: list[str]
    labels: dict[str, str]


class Health(Body, frozen=True, kw_only=True):
    """Strangers are told the status alone."""

    status: Literal["ok", "degraded", "unavailable"]
    gateway: str = OMITTED
    broker: Literal["up", "down"] = OMITTED
    store: Literal["up", "down", "full"] = OMITTED
    keys: Annotated[str, Meta(description="`ok`, or the fault of the file of keys.")] = OMITTED
    workers: list[dict[str, Any]] = OMITTED


class Status(Body, frozen=True, kw_only=True):
    status: Literal["live", "ready", "unavailable"]
