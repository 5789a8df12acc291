"""The values that go into an engine and come out of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from mallee.protocol.errors import ConfigError, CorruptKV
from mallee.protocol.events import EngineUse, EventBatch
from mallee.protocol.messages import Frame
from mallee.worker.forward import Forward
from mallee.worker.kv.capsules import CapsuleStats
from mallee.worker.kv.eviction import EvictionName
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.pool import BlockPool, PoolStats
from mallee.worker.kv.text import Notation
from mallee.worker.kv.tree import BranchTree, TreeStats
from mallee.worker.kv.usage import TreeUsage
from mallee.worker.kv.watch import BlockWatch, KVChecks, WatchStats
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.sched.scheduler import SchedulerStats


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine's settings, a switch for each feature; the scheduler has more of them.

    No switch changes an answer. Two describe what the engine is given: `paged` False, a `Forward` whose
    block holds a whole sequence (contiguous memory: a fork copies everything, nothing else is shared);
    `tree_attention`, one that reads what rows share once.
    """

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    max_answer_capsules: int = 256  # finished answers leave a capsule each, the newest this many
    max_kept_share: float = 0.9  # of the pool, at most, in capsules that were asked for
    paged: bool = True
    prefix_cache: bool = True  # blocks are found by what is in them, and stay while there is room
    eviction: EvictionName = "lru"
    tree_attention: bool = True
    overlap: bool = True  # grammar masks are computed while the model computes
    kv_checks: KVChecks = field(default_factory=KVChecks)

    def validate(self) -> "EngineConfig":
        """Itself. Raises ConfigError naming what is out of range, or two switches that contradict."""
        self.kv_checks.validate()
        if self.max_answer_capsules < 0:
            raise ConfigError(f"max_answer_capsules={self.max_answer_capsules}: give 0 or more")
        if not 0 < self.max_kept_share <= 1:
            raise ConfigError(f"max_kept_share={self.max_kept_share}: give more than 0, at most 1")
        if self.eviction not in ("lru", "lineage"):
            raise ConfigError(f"eviction={self.eviction!r}: give lru or lineage")
        for contradicts, text in (
            (
                self.prefix_cache and not self.paged,
                "prefix_cache=True needs paged=True: prefixes are shared by the block, and without pages"
                " a block is a whole sequence; set prefix_cache=False",
            ),
            (
                self.tree_attention and not self.paged,
                "tree_attention=True needs paged=True: without pages no two rows share a block; set"
                " tree_attention=False",
            ),
            (
                self.eviction != "lru" and not self.prefix_cache,
                f"eviction={self.eviction!r} needs prefix_cache=True: without it nothing is kept that"
                " could be evicted; leave eviction='lru'",
            ),
        ):
            if contradicts:
                raise ConfigError(text)
        return self

    def check_blocks(self, block_size: int, max_model_len: int) -> None:
        """Raises ConfigError if `paged` is False and a block of the memory is not a whole sequence."""
        if not self.paged and block_size < max_model_len:
            raise ConfigError(
                f"paged=False needs blocks of a whole sequence: block_size={block_size} <"
                f" max_model_len={max_model_len}; set block_size to max_model_len, or paged=True"
            )


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
    watch: WatchStats | None  # None: the KV memory is not checked
    jobs: int
    num_steps: int
    num_prefill_tokens: int  # tokens computed that were not just drawn; again after a preemption
    num_cached_tokens: int  # prompt tokens found in the cache or in a capsule
    num_output_tokens: int
    num_forks: int  # branches that began at a node shared with others


def engine_use(stats: EngineStats, usage: TreeUsage) -> EngineUse:
    """The figures of both that a worker publishes."""
    return EngineUse(
        total_blocks=stats.pool.total,
        live_blocks=usage.live_blocks,
        shared_blocks=usage.shared_blocks,
        cached_blocks=stats.tree.cached_blocks,
        readers=usage.readers,
        kept_capsules=stats.capsules.kept,
        num_copied_blocks=stats.tree.num_copies,
        num_evicted_blocks=stats.tree.num_evicted,
        num_preemptions=stats.sched.num_preemptions,
        num_faults=stats.watch.num_faults if stats.watch is not None else 0,
    )


def make_tree(
    config: EngineConfig,
    forward: Forward,
    journal: Journal,
    notation: Notation,
    report_fault: Callable[[CorruptKV], None],
) -> BranchTree:
    """An empty tree over the blocks of `forward`. Raises ConfigError if `config` doesn't fit them."""
    config.validate().check_blocks(forward.block_size, forward.spec.max_model_len)
    checks, num_blocks = config.kv_checks, forward.num_blocks
    watch = None
    if checks.level != "none":
        watch = BlockWatch(checks, forward.memory, num_blocks, report_fault)
    return BranchTree(
        BlockPool(num_blocks, watch),
        forward.block_size,
        journal,
        eviction=config.eviction,
        keeps_cache=config.prefix_cache,
        notation=notation,
    )
