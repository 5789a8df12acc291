"""An engine's KV memory as configured: pool, tree and checks; and who in the engine needs which part."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from mallee.protocol.errors import CorruptKV
from mallee.worker.forward import Forward
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.node import Node
from mallee.worker.kv.pool import BlockPool
from mallee.worker.kv.text import Notation
from mallee.worker.kv.tree import BranchTree
from mallee.worker.kv.usage import TreeUsage, tree_usage
from mallee.worker.kv.watch import BlockWatch
from mallee.worker.records import EngineConfig
from mallee.worker.sched.sequence import Sequence


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


def count_holds(branches: Iterable[Sequence], capsules: Mapping[Node, int]) -> Counter[Node]:
    """How often each node is held, by branches and `capsules`."""
    holds = Counter(capsules)
    for branch in branches:
        holds.update(node for node in (branch.node, branch.origin) if node is not None)
    return holds


def memory_usage(
    tree: BranchTree, branches: Iterable[Sequence], capsules: Mapping[Node, int]
) -> TreeUsage:
    """How well the blocks in use are shared. O(branches and capsules, times their depth)."""
    readers = Counter(capsules)
    ends = (branch.node or branch.origin for branch in branches)
    readers.update(node for node in ends if node is not None)
    return tree_usage(tree, readers)
