"""Values that a router shows: its workers and its counts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.model import BASE_WEIGHTS, WeightChange
from mallee.router.index.index import IndexStats


class WorkerView(NamedTuple):
    """The router's state of one live worker."""

    worker: WorkerId
    incarnation: Incarnation
    address: str
    num_blocks: int
    active_blocks: int
    rows: int
    prefill_tokens: int
    indexed_blocks: int
    lease_age_s: float
    is_whole: bool  # no event of it is known to be missing
    is_new: bool  # it gets a share of requests beyond those of its price
    lends_at: str = ""
    waiting: int = 0  # branches that wait in the worker, as it said last
    # Or draining, suspect (no progress), silent (its lease ran out), changing (its weights), outdated.
    state: str = "ready"
    weight_version: str = BASE_WEIGHTS.label
    weight_change: WeightChange | None = None  # asked of it
    device: str = ""  # that it computes on, for people
    metrics_at: str = ""  # host and port of its process's metrics, if they are served
    lacks: tuple[str, ...] = ()  # abilities (`protocol.capabilities`) that its engine has not


def away(worker: WorkerId) -> WorkerView:
    """The view of a worker that is to be there, and is not."""
    return WorkerView(
        worker=worker,
        incarnation=Incarnation(0),
        address=worker,
        num_blocks=0,
        active_blocks=0,
        rows=0,
        prefill_tokens=0,
        indexed_blocks=0,
        lease_age_s=0.0,
        is_whole=False,
        is_new=False,
        state="away",
    )


@dataclass(frozen=True, slots=True)
class RouterStats:
    """State now, and counts since birth."""

    num_workers: int
    num_incomplete: int  # workers with events known to be missing
    num_unleased: int  # workers that are heard by their links, and not on the bus
    is_broker_up: bool
    num_orphans: int
    routed: int
    routed_to_capsule: int
    spilled: Mapping[tuple[str, str], int]  # parts of fan-outs that left the owner: how, why
    pulls: dict[str, int]  # placements that name holders of KV to be pulled, by reason
    pulled_nbytes: dict[str, int]  # of those, predicted
    refused: int  # NoWorker and KVMemoryExceeded
    repaired_blocks: int  # stale entries found by `observe_hit`
    ignored_messages: int  # of past lives, or of workers without a lease
    refused_leases: int  # wrong block size, or no table slot left
    gaps: int  # times that events turned out to be missing, over all workers
    backlog_blocks: int  # of snapshots, not taken in yet
    remote_requests: int  # bookings of other gateways
    regret_blocks: int  # best overlap minus chosen overlap, summed over decisions
    index: IndexStats
    booked_requests: int
    booked_rows: int
    expired_bookings: int
    predicted_prompts: int
    num_capsules: int
    events_applied: int
    unknown_rows: int  # that workers told of, beyond those that are booked
