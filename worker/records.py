"""The values that go into an engine and come out of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from mallee.protocol.errors import ConfigError, CorruptKV
from mallee.protocol.events import EngineUse, EventBatch, KeptUse, StateUse, TierUse
from mallee.protocol.messages import Frame
from mallee.protocol.model import ModelSpec
from mallee.worker.ahead import AheadStats
from mallee.worker.capsules.registry import CapsuleStats
from mallee.worker.forward import Forward
from mallee.worker.gaps import HostGap
from mallee.worker.kv.eviction import EvictionName
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.pool import BlockPool, PoolStats
from mallee.worker.kv.sides.make import check_sides, make_sides
from mallee.worker.kv.sides.states import StateGroup
from mallee.worker.kv.text import Notation
from mallee.worker.kv.tree import BranchTree, TreeStats
from mallee.worker.kv.usage import TreeUsage
from mallee.worker.kv.watch import BlockWatch, KVChecks, WatchStats
from mallee.worker.retention import Retention
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.sched.scheduler import SchedulerStats
from mallee.worker.speculation.speculator import SpeculationConfig, SpeculationStats
from mallee.worker.transfer.loans import LendingStats
from mallee.worker.transfer.lower import LowerTiers


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine's settings, a switch for each feature, none of which changes an answer.

    The scheduler has more of them.
    """

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    max_answer_capsules: int = 256  # finished answers leave a capsule each, the newest this many
    max_kept_share: float = 0.9  # of the pool, at most, in capsules that were asked for
    max_below_nbytes: int = 512 << 20  # texts and state of those that lie below the device
    prefix_cache: bool = True  # blocks are found by what is in them, and stay while there is room
    eviction: EvictionName = "lru"
    max_retained_share: float = 0.5  # of the pool, at most, in blocks that requests want retained
    overlap: bool = (
        True  # the host works while the model computes: grammar masks, on a GPU whole steps
    )
    kv_checks: KVChecks = field(default_factory=KVChecks)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    @property
    def may_launch_ahead(self) -> bool:
        """Whether nothing stands against passes that are launched ahead (`ahead.py`).

        Checks look at blocks between steps; drafts are made of tokens that are not known then.
        """
        return (
            self.overlap and self.kv_checks.level == "none" and self.speculation.drafters == "off"
        )

    def validate(self) -> "EngineConfig":
        """Itself. Raises ConfigError naming what is out of range, or two switches that contradict."""
        self.kv_checks.validate()
        self.speculation.validate()
        if self.max_answer_capsules < 0:
            raise ConfigError(f"max_answer_capsules={self.max_answer_capsules}: give 0 or more")
        if not 0 <= self.max_kept_share <= 1:
            raise ConfigError(f"max_kept_share={self.max_kept_share}: give 0 to 1")
        if self.max_below_nbytes < 0:
            raise ConfigError(f"max_below_nbytes={self.max_below_nbytes}: give 0 or more")
        if not 0 <= self.max_retained_share <= 1:
            raise ConfigError(f"max_retained_share={self.max_retained_share}: give 0 to 1")
        if self.eviction not in ("lru", "lineage"):
            raise ConfigError(f"eviction={self.eviction!r}: give lru or lineage")
        if self.eviction != "lru" and not self.prefix_cache:
            raise ConfigError(
                f"eviction={self.eviction!r} needs prefix_cache=True: without it nothing is kept that"
                " could be evicted; leave eviction='lru'"
            )
        return self


class StepResult(NamedTuple):
    """The updates of one step, a frame per gateway that has any, and the cache events, if any."""

    frames: dict[str, Frame]
    events: EventBatch | None
    step: int  # of this engine, the first is 1


class EngineStats(NamedTuple):
    """State now (pool, tree, sched, capsules, jobs) and work done so far (the counters)."""

    pool: PoolStats
    tree: TreeStats
    sched: SchedulerStats
    capsules: CapsuleStats
    tiers: TierUse | None  # None: there is nothing below the device
    lending: LendingStats
    watch: WatchStats | None  # None: the KV memory is not checked
    jobs: int
    num_steps: int
    num_prefill_tokens: int  # tokens computed that were not just drawn; again after a preemption
    num_cached_tokens: int  # prompt tokens found in the cache or in a capsule
    num_output_tokens: int
    num_forks: int  # branches that began at a node shared with others
    memory: TreeUsage  # references, and pages of a branch
    constraint_states: int  # of grammars, that branches and capsules hold
    speculation: SpeculationStats
    ahead: AheadStats
    host_gap: HostGap
    states: StateUse | None = None  # None: the model has none


def engine_use(stats: EngineStats, block_nbytes: int) -> EngineUse:
    """The figures that a worker publishes."""
    usage, kept = stats.memory, stats.capsules
    return EngineUse(
        total_blocks=stats.pool.total,
        live_blocks=usage.live_blocks,
        shared_blocks=usage.shared_blocks,
        cached_blocks=stats.tree.cached_blocks,
        readers=usage.readers,
        kept_capsules=kept.kept,
        num_copied_blocks=stats.tree.num_copies,
        num_evicted_blocks=stats.tree.num_evicted,
        num_preemptions=stats.sched.num_preemptions,
        num_faults=stats.watch.num_faults if stats.watch is not None else 0,
        num_refused_capsules=kept.num_refused,
        kept_below_bytes=kept.nbytes_below,
        num_lent_blocks=stats.lending.num_blocks,
        tiers=stats.tiers,
        references=usage.references,
        constraint_states=stats.constraint_states,
        block_nbytes=block_nbytes,
        kept_by_tier=tuple(map(KeptUse, kept.num_by_tier, kept.blocks_by_tier)),
        num_prefill_tokens=stats.num_prefill_tokens,
        num_cached_tokens=stats.num_cached_tokens,
        num_output_tokens=stats.num_output_tokens,
        num_forks=stats.num_forks,
        max_kept_blocks=kept.max_blocks,
        used_blocks=stats.pool.used,
        num_drafted_tokens=stats.speculation.num_drafted,
        num_accepted_tokens=stats.speculation.num_accepted,
        num_ahead_rows=stats.ahead.num_rows,
        num_ahead_void_rows=stats.ahead.num_void,
        host_gap_s=stats.host_gap.seconds,
        states=stats.states,
    )


def state_use(tree: BranchTree, spec: ModelSpec) -> StateUse | None:
    """The states that `tree` keeps as cache; groups of them have theirs at the same places."""
    first = next((side for side in tree.sides if isinstance(side, StateGroup)), None)
    if first is None:
        return None
    return StateUse({**first.num_by_reason()}, spec.state_nbytes, first.num_evicted)


def make_retention(
    config: EngineConfig, num_blocks: int, *, clock: Callable[[], float]
) -> Retention:
    """Nothing retained yet of `num_blocks` blocks; lineages go whole, so nothing of them can be."""
    can_retain = config.eviction == "lru" and config.prefix_cache
    return Retention(int(config.max_retained_share * num_blocks) if can_retain else 0, clock)


def make_tree(
    config: EngineConfig,
    forward: Forward,
    journal: Journal,
    notation: Notation,
    report_fault: Callable[[CorruptKV], None],
    *,
    retention: Retention,
    lower: LowerTiers | None = None,
) -> BranchTree:
    """An empty tree over the blocks of `forward`. Raises ConfigError if `config` doesn't fit them."""
    config.validate()
    if lower is not None and not lower.is_empty and not config.prefix_cache:
        raise ConfigError(
            "tiers below the device need prefix_cache=True: blocks there are found by what is in them"
        )
    checks, num_blocks = config.kv_checks, forward.num_blocks
    watch = None
    if checks.level != "none":
        watch = BlockWatch(checks, forward.memory, num_blocks, report_fault)
    pool = BlockPool(num_blocks, watch)
    offload = offload_rows = None
    if lower is not None and lower.has_host:
        offload, offload_rows = lower.offload, partial(lower.offload, are_private=True)
    size = forward.block_size
    sides = make_sides(forward.spec.groups, num_blocks, size, journal, offload_rows)
    check_sides(sides, num_blocks, config.scheduler.max_step_tokens, size)
    return BranchTree(
        pool,
        size,
        journal,
        eviction=config.eviction,
        keeps_cache=config.prefix_cache,
        notation=notation,
        sides=sides,
        ranks=retention,
        offload=offload,
        offload_rows=offload_rows,
    )
