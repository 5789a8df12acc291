"""What goes into a router and comes out of it, as values."""

from dataclasses import dataclass, field
from typing import NamedTuple

from mallee.protocol.hashing import BLOCK_SIZE
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.router.capsules import CapsuleStats
from mallee.router.cost import POLICIES, Cost, CostModel, Policy
from mallee.router.index import IndexStats
from mallee.router.predictions import PredictionStats
from mallee.router.slots import SlotStats
from mallee.router.spill import How, Prices, SpillModel

_COUNTS = ("block_size", "max_workers", "max_capsules", "max_buffered_batches", "decision_log")


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Raises ValueError for a size or time that is not positive, or an unknown policy.

    `policy` and `temperature`: how the cheapest is chosen (0: always it; ties go to the worker chosen
    longest ago). `busy_ratio`: rows booked on a worker, as a share of its batch, beyond which requests
    that may wait do. `max_index_nbytes`: beyond it the blocks used longest ago are forgotten.
    `prediction_s`: how long a prompt counts as held by a worker whose events don't arrive. `booking_s`:
    after so long without a sign of its request a booking is dropped. `warm_up_s`: how long a worker
    that joins a running fleet is new. `kv_events`, `active_blocks`: what may be known of workers'
    caches and of running requests can each be switched off.
    """

    block_size: int = BLOCK_SIZE
    max_workers: int = 1024
    max_capsules: int = 65_536
    max_buffered_batches: int = 256  # per worker, while a snapshot is awaited
    lease_s: float = 3.0
    cost: CostModel = field(default_factory=CostModel)
    spill: SpillModel = field(default_factory=SpillModel)
    policy: Policy = "cost"
    temperature: float = 0.0
    busy_ratio: float = 1.0
    max_index_nbytes: int = 4 << 30
    prediction_s: float = 120.0
    booking_s: float = 600.0
    warm_up_s: float = 60.0
    decision_log: int = 128
    kv_events: bool = True
    active_blocks: bool = True

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        for name in ("lease_s", "busy_ratio", "prediction_s", "booking_s"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name}={getattr(self, name)}: must be above 0")
        for name in ("temperature", "warm_up_s"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)}: must be finite and at least 0")
        if self.policy not in POLICIES:
            raise ValueError(f"policy={self.policy!r}: choose one of {', '.join(POLICIES)}")


class Placement(NamedTuple):
    """Where a request was booked and why."""

    worker: WorkerId
    address: str
    incarnation: Incarnation
    overlap_blocks: int  # leading prompt blocks there, or being computed there
    best_overlap_blocks: int  # on any worker that could have taken it
    cost: Cost
    decision: int  # its number in the decision log
    reason: str  # cost, capsule, pin, warm_up, fan_out, or the policy's name


class Part(NamedTuple):
    """Rows of a fan-out, booked on one worker."""

    placement: Placement
    rows: range  # indices within the fan-out
    how: How
    prices: Prices


class WorkerView(NamedTuple):
    """One live worker as the router sees it."""

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
    is_new: bool  # it gets a share of requests beyond what its price would bring


@dataclass(frozen=True, slots=True)
class RouterStats:
    """State now, and counts since birth."""

    num_workers: int
    num_incomplete: int  # workers with events known to be missing
    is_broker_up: bool
    num_orphans: int
    routed: int
    routed_to_capsule: int
    spilled: dict[str, int]  # parts of fan-outs that left the owner of their prefix, by how
    refused: int  # NoWorker
    repaired_blocks: int  # stale entries found by `observe_hit`
    ignored_messages: int  # of past lives, or of workers without a lease
    refused_leases: int  # wrong block size, or no table slot left
    gaps: int  # times that events turned out to be missing, over all workers
    backlog_blocks: int  # of snapshots, not taken in yet
    remote_requests: int  # bookings of other gateways
    regret_blocks: int  # best overlap minus chosen overlap, summed over decisions
    index: IndexStats
    slots: SlotStats
    predictions: PredictionStats
    capsules: CapsuleStats
