"""What goes into a router and comes out of it, as values."""

from dataclasses import dataclass, field
from typing import NamedTuple

from mallee.protocol.hashing import BLOCK_SIZE
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.router.capsules import CapsuleStats
from mallee.router.cost import Cost, CostModel
from mallee.router.index import IndexStats
from mallee.router.slots import SlotStats


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Raises ValueError for a size or time that is not positive."""

    block_size: int = BLOCK_SIZE
    max_workers: int = 1024
    max_capsules: int = 65_536
    max_buffered_batches: int = 256  # per worker, while a snapshot is awaited
    lease_s: float = 3.0
    cost: CostModel = field(default_factory=CostModel)

    def __post_init__(self) -> None:
        for name in ("block_size", "max_workers", "max_capsules", "max_buffered_batches"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        if not self.lease_s > 0.0:
            raise ValueError(f"lease_s={self.lease_s}: must be above 0")


class Placement(NamedTuple):
    """Where a request was booked and why."""

    worker: WorkerId
    address: str
    incarnation: Incarnation
    overlap_blocks: int  # leading prompt blocks there, or being computed there
    best_overlap_blocks: int  # on any worker that could have taken it
    cost: Cost


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


@dataclass(frozen=True, slots=True)
class RouterStats:
    """State now, and counts since birth."""

    num_workers: int
    num_incomplete: int  # workers with events known to be missing
    is_broker_up: bool
    num_orphans: int
    routed: int
    routed_to_capsule: int
    refused: int  # NoWorker
    repaired_blocks: int  # stale entries found by `observe_hit`
    ignored_messages: int  # of past lives, or of workers without a lease
    refused_leases: int  # wrong block size, or no table slot left
    index: IndexStats
    slots: SlotStats
    capsules: CapsuleStats
