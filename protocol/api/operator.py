"""Bodies of an operator's paths, and of a service's health."""

from typing import Annotated, Any, Final, Literal

from msgspec import Meta

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


class Worker(Body, frozen=True, kw_only=True):
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
    weight_version: str
    weight_change: dict[str, Any] | None
    metrics_at: str
    use: dict[str, int] | None
    tiers: dict[str, Any] | None


class WorkerList(Body, frozen=True, kw_only=True):
    object: Literal["list"]
    data: list[Worker]


class WorkerDraining(Body, frozen=True, kw_only=True):
    worker: str
    object: Literal["worker.draining"] = "worker.draining"


class Decisions(Body, frozen=True, kw_only=True):
    object: Literal["list"]
    data: list[dict[str, Any]]
    life: dict[str, Any] = OMITTED


class MetricsTarget(Body, frozen=True, kw_only=True):
    targets: list[str]
    labels: dict[str, str]


class Health(Body, frozen=True, kw_only=True):
    """Strangers are told the status alone."""

    status: Literal["ok", "degraded", "unavailable"]
    gateway: str = OMITTED
    broker: Literal["up", "down"] = OMITTED
    workers: list[dict[str, Any]] = OMITTED


class Status(Body, frozen=True, kw_only=True):
    status: Literal["live", "ready", "unavailable"]
