"""What goes into an engine and comes out of it, as values."""

from dataclasses import dataclass, field
from typing import NamedTuple

from mallee.protocol.events import EventBatch
from mallee.protocol.messages import Frame
from mallee.worker.capsules import CapsuleStats
from mallee.worker.kv.pool import PoolStats
from mallee.worker.kv.tree import TreeStats
from mallee.worker.sched.scheduler import SchedulerConfig, SchedulerStats


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`max_answer_capsules`: finished answers leave a capsule each, the newest this many (0: none)."""

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    max_answer_capsules: int = 256


class StepResult(NamedTuple):
    """News of one step: a frame per gateway that has any, and the cache events, if any."""

    frames: dict[str, Frame]
    events: EventBatch | None


class EngineStats(NamedTuple):
    """State now (pool, tree, sched, capsules, jobs) and work done so far (the counters)."""

    pool: PoolStats
    tree: TreeStats
    sched: SchedulerStats
    capsules: CapsuleStats
    jobs: int
    num_steps: int
    num_prefill_tokens: int  # tokens computed that were not just drawn; again after a preemption
    num_cached_tokens: int  # prompt tokens found in the cache or in a capsule
    num_output_tokens: int
    num_forks: int  # branches that began at a node shared with others
